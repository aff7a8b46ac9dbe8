"""CQL(H) (Kumar et al., 2020).   L = w E_{s,a ~ data}[log Σ_a' exp Q(s, a') - Q(s, a)] + ½ E[(Q(s, a) - y)²]

SAC for recorded experience: its critics are held down where nothing was recorded, else the actor would seek what they
overestimate there. y is SAC's, by default without entropy. Of continuous actions the sum is an integral, estimated by
the mean of exp Q(s, a) / p(a) over actions drawn with density p: evenly, by π(s) and, as the authors' program does, by
π(s'). With discrete actions it is exact.
Differs from the paper: the actor doesn't clone before it climbs, and discrete actions have SAC's actor too. The error
is halved as in the paper; programs that don't halve it take twice the weight for the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zhixing.algorithms import register
from zhixing.algorithms.sac import SAC, Penalty, SACConfig
from zhixing.config import Finite, Positive, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.nets.critics import Critics, StochasticActor
from zhixing.ops.distributions import MASKED_LOGIT, SquashedGaussian
from zhixing.ops.losses import weighted_mean


class CQLConfig(SACConfig):
    penalty: PositiveFloat = 5.0
    """Weight of the penalty on Q-values above those of recorded actions."""
    penalty_target: Finite | None = None
    """Target of the penalty, which is reached by learning its weight (CQL-Lagrange)."""
    penalty_samples: Positive = 10
    """Continuous actions sampled from each of the penalty's three distributions."""
    entropy_in_targets: bool = False


class Conservative(Penalty):
    def __init__(self, cfg: SACConfig) -> None:
        super().__init__()
        assert isinstance(cfg, CQLConfig)
        self.target, self.samples = cfg.penalty_target, cfg.penalty_samples
        self.log_weight = nn.Parameter(torch.tensor(math.log(cfg.penalty)))

    @property
    def weight(self) -> Tensor:
        return self.log_weight.exp().clamp(max=1e6)

    def forward(
        self, critics: Critics, actor: StochasticActor, batch: Batch, q: Tensor, rng: torch.Generator
    ) -> Tensor:
        if critics.discrete:
            every = critics(batch.obs)  # [K,B,n]
            allowed = every.masked_fill(~batch.mask, MASKED_LOGIT) if "mask" in batch else every
            return weighted_mean(allowed.logsumexp(-1) - q, batch)
        actions, logp = self.draw(actor, batch, rng)
        drawn = critics.q_of_many(batch.obs, actions)  # [K,S,B]
        everywhere = (drawn - logp).logsumexp(1) - math.log(len(actions))  # [K,B]
        return weighted_mean(everywhere - q, batch)

    @torch.no_grad()
    def draw(self, actor: StochasticActor, batch: Batch, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Actions `[S,B,n]` and the logarithms of the densities they were drawn with `[S,B]`."""
        shape = (self.samples, *batch.action.shape)
        even = torch.rand(shape, generator=rng, device=rng.device) * 2 - 1
        kinds = [(even, torch.full(shape[:2], -math.log(2.0) * shape[2], device=rng.device))]
        for obs in (batch.obs, batch.next_obs):
            policy = actor(obs)
            assert isinstance(policy, SquashedGaussian)
            mean, log_std = (part.expand(shape) for part in (policy.normal.mean, policy.normal.log_std))
            kinds.append(SquashedGaussian(mean, log_std).sample_with_logp(rng))
        actions, logps = zip(*kinds, strict=True)
        return torch.cat(actions), torch.cat(logps)

    def weight_loss(self, penalty: Tensor) -> Tensor | None:
        return None if self.target is None else self.weight * (self.target - penalty.mean())


register("cql", "SAC whose critics are held down where nothing was recorded", CQLConfig, penalty=Conservative)(SAC)
