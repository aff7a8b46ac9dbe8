"""TQC (Kuznetsov et al., 2020).   y_i = r + γ^k (1 - terminated) (z_(i) - α log π(a'|s')),   a' ~ π(s'),   i ≤ K(M - d)

SAC whose K critics predict M quantiles θ of the return each. z_(1) ≤ z_(2) ≤ ... are the quantiles of all target
critics at (s', a'), sorted. The d K largest are dropped, which controls overestimation. Each critic minimizes the mean
quantile Huber loss of θ_m(s, a) at τ_m = (m - ½) / M over all y_i; the actor maximizes the mean of all quantiles.
Differs from the paper: n-step returns and prioritized replay, with the error of the mean as priority, are settings; the
loss of the temperature is linear in log α.
"""

from __future__ import annotations

import copy
import math
from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from zhixing.algorithms import register
from zhixing.config import Count, Finite, Group, OffPolicyActorCriticConfig, Positive, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.optimizer import TargetUpdater
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.critics import Critics, StochasticActor, check_box
from zhixing.nets.policies import StochasticPolicy
from zhixing.nets.torso import NetFactory
from zhixing.ops.losses import quantile_huber_loss, weighted_mean
from zhixing.ops.returns import td_target


class TQCConfig(OffPolicyActorCriticConfig):
    algorithm: str = "tqc"
    lr: PositiveFloat = 3e-4
    critics: Annotated[Positive, Group.NETWORK] = 5
    """Number of critics."""
    quantiles: Annotated[Positive, Group.NETWORK] = 25
    """Number of quantiles of the return that each critic predicts."""
    dropped_quantiles: Count = 2
    """Number of quantiles per critic to drop from the targets, the largest of all critics."""
    critic_hidden_sizes: Annotated[list[Positive] | None, Group.NETWORK] = Field([512, 512, 512])
    alpha: PositiveFloat | None = None
    """Entropy coefficient; none learns it."""
    target_entropy: Finite | None = None
    """Target entropy of a learned alpha; none is -n for n action dimensions."""

    @model_validator(mode="after")
    def _check_dropped_quantiles(self) -> TQCConfig:
        if self.dropped_quantiles >= self.quantiles:
            raise ValueError(
                f"dropped_quantiles={self.dropped_quantiles} must be less than quantiles={self.quantiles}, so a target "
                f"remains: lower it"
            )
        return self


@register("tqc", "SAC with quantile critics, whose largest quantiles are dropped from the targets")
class TQC(Learner):
    settings = TQCConfig
    metrics = ("critic_loss", "actor_loss", "q_mean", "alpha", "entropy", "grad_norm")

    def __init__(
        self, cfg: TQCConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        check_box(spaces, cfg.algorithm)
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():
            self.actor = StochasticActor(spaces, cfg, net).to(self.device)
            self.critics = Critics(spaces, cfg, net, cfg.critics, quantiles=cfg.quantiles).to(self.device)
        self.log_alpha = nn.ParameterList([torch.tensor(math.log(cfg.alpha or 1.0), device=self.device)])
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.actor_lr or cfg.lr)
        self.critic_optimizer = self.make_optimizer(self.critics.parameters(), cfg.lr)
        self.alpha_optimizer = self.make_optimizer(self.log_alpha.parameters(), cfg.lr, weight_decay=0.0)
        self.target_critics = copy.deepcopy(self.critics)
        self.target_updater = TargetUpdater((self.target_critics, self.critics))
        self.policy = StochasticPolicy(spaces, self.actor)

    @property
    def alpha(self) -> Tensor:
        return self.log_alpha[0].exp()

    def truncate(self, z: Tensor) -> Tensor:
        """Return the quantiles `[K,B,M]` of all critics without the largest ones, sorted: `[B,K(M-d)]`."""
        pooled = z.transpose(0, 1).flatten(1).sort(-1).values
        return pooled[:, : self.cfg.critics * (self.cfg.quantiles - self.cfg.dropped_quantiles)]

    @torch.no_grad()
    def target_quantiles(self, batch: Batch) -> Tensor:
        action, logp = self.actor(batch.next_obs).sample_with_logp(self.rng)
        z = self.truncate(self.target_critics(batch.next_obs, action))
        return td_target(batch, z - (self.alpha * logp).unsqueeze(-1))

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the absolute errors of the means `[B]` and the mean value."""
        theta, target = self.critics(batch.obs, batch.action), self.target_quantiles(batch)  # [K,B,M], [B,K(M-d)]
        losses = quantile_huber_loss(theta, target, kappa=1.0) / self.cfg.quantiles  # [K,B]
        q = theta.detach().mean((0, 2))
        return weighted_mean(losses.mean(0), batch), (target.mean(-1) - q).abs(), q.mean()

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss and the mean entropy of the policy."""
        action, logp = self.actor(batch.obs).sample_with_logp(self.rng)
        q = self.critics(batch.obs, action).mean((0, 2))
        return (self.alpha.detach() * logp - q).mean(), -logp.detach().mean()

    def alpha_loss(self, entropy: Tensor) -> Tensor:
        target = -float(self.spaces.num_actions) if self.cfg.target_entropy is None else self.cfg.target_entropy
        return self.log_alpha[0] * (entropy - target)

    @train_step
    def update(self, batch: Batch) -> Update:
        critic_loss, td_error, q_mean = self.critic_loss(batch)
        grad_norm = self.critic_optimizer.step(critic_loss)
        actor_loss, entropy = self.actor_loss(batch)  # uses the critics just updated
        self.actor_optimizer.step(actor_loss)
        if self.cfg.alpha is None:
            self.alpha_optimizer.step(self.alpha_loss(entropy))
        self.target_updater.polyak_update(self.cfg.tau)
        metrics = {"critic_loss": critic_loss, "actor_loss": actor_loss, "q_mean": q_mean}
        return Update({**metrics, "alpha": self.alpha, "entropy": entropy, "grad_norm": grad_norm}, td_error)

    @torch.no_grad()
    def priority(self, batch: Batch) -> Tensor:
        return self.critic_loss(batch)[1]

    def value(self, obs: Tree) -> Tensor:
        return self.critics(obs, self.actor(obs).mode()).mean((0, 2))
