"""CQL(H) (Kumar et al., 2020).   L = w E_{s,a ~ data}[log Σ_a' exp Q(s, a') - Q(s, a)] + ½ E[(Q(s, a) - y)²]

SAC for offline data. A penalty of weight w lowers the Q-values of actions that aren't in the data, because the actor
would exploit overestimates there. y is the target of SAC, by default without entropy. With continuous actions the sum
is an integral, estimated by the mean of exp Q(s, a) / p(a) over actions sampled with density p: uniformly, from π(s)
and, as in the authors' code, from π(s'). With discrete actions the sum is exact.
Differs from the paper: the actor isn't pretrained by behavior cloning, and discrete actions use the actor of SAC too.
The squared error is halved as in the paper; implementations that don't halve it need twice the weight.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zhixing.algorithms import register
from zhixing.algorithms.common.penalty import CriticPenalty
from zhixing.algorithms.sac import SACConfig, make_sac
from zhixing.config import Finite, Positive, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.nets.critics import Critics, StochasticActor
from zhixing.ops.distributions import SquashedGaussian, mask_logits
from zhixing.ops.losses import weighted_mean


class CQLConfig(SACConfig):
    algorithm: str = "cql"
    penalty: PositiveFloat = 5.0
    """Weight of the penalty on Q-values above those of recorded actions."""
    penalty_target: Finite | None = None
    """Target of the penalty, with a learned weight (CQL-Lagrange); none keeps the weight fixed."""
    penalty_samples: Positive = 10
    """Continuous actions sampled from each of the penalty's three distributions."""
    entropy_in_targets: bool = False


class ConservativePenalty(CriticPenalty):
    """The penalty of CQL: the soft maximum of Q over actions minus the Q-value of the recorded action."""

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
            q_all = mask_logits(critics(batch.obs, rng=rng), batch.get("mask"))  # [K,B,n]
            return weighted_mean(q_all.logsumexp(-1) - q, batch)
        actions, logp = self.sample_actions(actor, batch, rng)
        q_sampled = critics.q_of_many(batch.obs, actions, rng)  # [K,S,B]
        logsumexp = (q_sampled - logp).logsumexp(1) - math.log(len(actions))  # [K,B]
        return weighted_mean(logsumexp - q, batch)

    @torch.no_grad()
    def sample_actions(self, actor: StochasticActor, batch: Batch, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return actions `[S,B,n]` and their log-densities `[S,B]`."""
        shape = (self.samples, *batch.action.shape)
        uniform = torch.rand(shape, generator=rng, device=rng.device) * 2 - 1
        samples = [(uniform, torch.full(shape[:2], -math.log(2.0) * shape[2], device=rng.device))]
        for obs in (batch.obs, batch.next_obs):
            policy = actor(obs)
            assert isinstance(policy, SquashedGaussian)
            mean, log_std = (part.expand(shape) for part in (policy.normal.mean, policy.normal.log_std))
            samples.append(SquashedGaussian(mean, log_std).sample_with_logp(rng))
        actions, logps = zip(*samples, strict=True)
        return torch.cat(actions), torch.cat(logps)

    def weight_loss(self, penalty: Tensor) -> Tensor | None:
        return None if self.target is None else self.weight * (self.target - penalty.mean())


register(
    "cql",
    "offline SAC with a penalty on Q-values of actions outside the dataset",
    CQLConfig,
    penalty=ConservativePenalty,
)(make_sac)
