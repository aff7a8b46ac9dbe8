"""SAC (Haarnoja et al., 2018).   y = r + γ^k (1 - terminated) (min_i Q'_i(s', a') - α log π(a'|s')),   a' ~ π(s')

REDQ (Chen et al., 2021) is SAC with an ensemble of critics, where each target is the minimum of a few chosen at random,
and many updates per step. DroQ (Hiraoka et al., 2022) has dropout and layer normalization in two critics instead; every
evaluation of a critic or target critic in a loss samples new units to drop, and the actor maximizes the mean of both.
discrete_sac.py has the losses of discrete actions; cql.py adds a penalty to the critic loss.
Differs from the paper: the temperature α is learned by default, as in the authors' second paper, but its loss is linear
in log α, not in α. DroQ's layer normalization has no learned weights.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import torch
from gymnasium.spaces import Discrete
from pydantic import Field
from torch import Tensor, nn

from zhixing.algorithms import register
from zhixing.algorithms.common.penalty import CriticPenalty
from zhixing.config import Finite, Group, OffPolicyActorCriticConfig, Positive, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.optimizer import TargetUpdater
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.errors import UserError
from zhixing.nets.critics import Critics, StochasticActor, check_box
from zhixing.nets.policies import StochasticPolicy
from zhixing.nets.torso import NetFactory
from zhixing.ops.losses import weighted_mean
from zhixing.ops.returns import td_target


class SACConfig(OffPolicyActorCriticConfig):
    algorithm: str = "sac"
    critics: Annotated[Positive, Group.NETWORK] = 2
    """Number of critics in the ensemble."""
    target_critics: Positive = 2
    """Number of randomly chosen critics whose minimum is the target value."""
    alpha: PositiveFloat | None = None
    """Entropy coefficient; none learns it."""
    target_entropy: Finite | None = None
    """Target entropy of a learned alpha; none is -n for n continuous and 0.5 log(n) for n allowed discrete actions."""
    policy_delay: Positive = 1
    """Critic updates per actor update."""
    critic_dropout: Annotated[float, Field(ge=0, lt=1), Group.NETWORK] = 0.0
    """Probability that a unit of the critics is set to zero in updates."""
    entropy_in_targets: bool = True
    """Include the entropy bonus in the targets of the critics, not only in the actor's loss."""


class REDQConfig(SACConfig):
    algorithm: str = "redq"
    critics: Positive = 10
    updates_per_step: PositiveFloat = 20.0
    policy_delay: Positive = 20


class DroQConfig(SACConfig):
    algorithm: str = "droq"
    updates_per_step: PositiveFloat = 20.0
    policy_delay: Positive = 20
    critic_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.01
    critic_norm: bool = True


class SoftActorCritic(Learner):
    """Networks, optimizers and update of SAC. Subclasses implement the losses of continuous and discrete actions."""

    settings = SACConfig
    metrics: ClassVar[tuple[str, ...]] = ("critic_loss", "actor_loss", "q_mean", "alpha", "entropy", "grad_norm")

    def __init__(
        self,
        cfg: SACConfig,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        net: NetFactory | None = None,
        *,
        penalty: Callable[[SACConfig], CriticPenalty] | None = None,
    ) -> None:
        if cfg.target_critics > cfg.critics:
            raise UserError(f"target_critics={cfg.target_critics} must be at most critics={cfg.critics}")
        if not isinstance(spaces.action, Discrete):
            check_box(spaces, cfg.algorithm)
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():
            self.actor = StochasticActor(spaces, cfg, net).to(self.device)
            self.critics = Critics(spaces, cfg, net, cfg.critics, dropout=cfg.critic_dropout).to(self.device)
        self.log_alpha = nn.ParameterList([torch.tensor(math.log(cfg.alpha or 1.0), device=self.device)])
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.actor_lr or cfg.lr)
        self.critic_optimizer = self.make_optimizer(self.critics.parameters(), cfg.lr)
        self.alpha_optimizer = self.make_optimizer(self.log_alpha.parameters(), cfg.lr, weight_decay=0.0)
        self.target_critics = copy.deepcopy(self.critics)
        self.target_updater = TargetUpdater((self.target_critics, self.critics))
        self.policy = StochasticPolicy(spaces, self.actor)
        self.penalty = None if penalty is None else penalty(cfg).to(self.device)
        if self.penalty is not None:
            self.penalty_optimizer = self.make_optimizer(self.penalty.parameters(), cfg.lr)
            self.metrics = (*self.metrics, "penalty", "penalty_weight")  # type: ignore[misc]
        self.last_actor_loss = self.last_entropy = torch.zeros((), device=self.device)  # reported with policy_delay

    @property
    def alpha(self) -> Tensor:
        return self.log_alpha[0].exp()

    @property
    def target_alpha(self) -> Tensor:
        """Weight of the entropy in target values: zero with `entropy_in_targets=false`."""
        return self.alpha if self.cfg.entropy_in_targets else torch.zeros_like(self.log_alpha[0])

    def min_q(self, q: Tensor) -> Tensor:
        """Return the minimum of all estimates `[K,B,...]`, or of a random subset."""
        if self.cfg.target_critics < self.cfg.critics:
            subset = torch.randperm(self.cfg.critics, generator=self.rng, device=self.device)
            q = q[subset[: self.cfg.target_critics]]
        return q.amin(0)

    def actor_q(self, q: Tensor) -> Tensor:
        """Return the value that the actor maximizes, given `[K,B,...]`: the minimum, or for REDQ and DroQ the mean."""
        use_mean = self.cfg.target_critics < self.cfg.critics or self.cfg.critic_dropout > 0
        return q.mean(0) if use_mean else q.amin(0)

    @abstractmethod
    def target_value(self, batch: Batch) -> Tensor: ...

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the absolute TD errors `[B]` and the values of the batch's actions `[K,B]`."""
        q = self.critics.q_of_actions(batch.obs, batch.action, self.rng)
        td_error = q - self.target_value(batch)
        loss = weighted_mean(0.5 * td_error.square().sum(0), batch)
        return loss, td_error.detach().abs().mean(0), q

    @abstractmethod
    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss and the mean entropy of the policy."""

    @abstractmethod
    def target_entropy(self, batch: Batch) -> Tensor | float: ...

    def alpha_loss(self, entropy: Tensor, batch: Batch) -> Tensor:
        return self.log_alpha[0] * (entropy - self.target_entropy(batch))

    def penalty_loss(self, batch: Batch, q: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted penalty and its metrics. Also updates the weight, for the next update."""
        assert self.penalty is not None
        penalty, weight = self.penalty(self.critics, self.actor, batch, q, self.rng), self.penalty.weight.detach()
        weight_loss = self.penalty.weight_loss(penalty.detach())
        if weight_loss is not None:
            self.penalty_optimizer.step(weight_loss)
        return weight * penalty.sum(), {"penalty": penalty.mean(), "penalty_weight": weight}

    @train_step
    def update(self, batch: Batch) -> Update:
        critic_loss, td_error, q = self.critic_loss(batch)
        metrics: dict[str, Tensor] = {}
        if self.penalty is not None:
            penalty_loss, metrics = self.penalty_loss(batch, q)
            critic_loss = critic_loss + penalty_loss
        grad_norm = self.critic_optimizer.step(critic_loss)
        if self.updates % self.cfg.policy_delay == 0:
            actor_loss, entropy = self.actor_loss(batch)  # uses the critics just updated
            self.actor_optimizer.step(actor_loss)
            if self.cfg.alpha is None:
                self.alpha_optimizer.step(self.alpha_loss(entropy, batch))
            self.last_actor_loss, self.last_entropy = actor_loss.detach(), entropy
        self.target_updater.polyak_update(self.cfg.tau)
        metrics |= {"critic_loss": critic_loss, "actor_loss": self.last_actor_loss, "q_mean": q.detach().mean()}
        metrics |= {"alpha": self.alpha, "entropy": self.last_entropy, "grad_norm": grad_norm}
        return Update(metrics, td_error)

    @torch.no_grad()
    def priority(self, batch: Batch) -> Tensor:
        return self.critic_loss(batch)[1]


class SAC(SoftActorCritic):
    """SAC for continuous actions: expectations are estimated with one sample of the policy."""

    @torch.no_grad()
    def target_value(self, batch: Batch) -> Tensor:
        action, logp = self.actor(batch.next_obs).sample_with_logp(self.rng)
        q = self.min_q(self.target_critics(batch.next_obs, action, self.rng))
        return td_target(batch, q - self.target_alpha * logp)

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        action, logp = self.actor(batch.obs).sample_with_logp(self.rng)
        q = self.actor_q(self.critics(batch.obs, action, self.rng))
        return (self.alpha.detach() * logp - q).mean(), -logp.detach().mean()

    def target_entropy(self, batch: Batch) -> float:
        return -float(self.spaces.num_actions) if self.cfg.target_entropy is None else self.cfg.target_entropy

    def value(self, obs: Tree) -> Tensor:
        return self.critics(obs, self.actor(obs).mode()).amin(0)


@register("sac", "maximum-entropy actor-critic with twin critics and a learned temperature", SACConfig)
@register("redq", "SAC with an ensemble of critics and many updates per step", REDQConfig)
@register("droq", "SAC with dropout and layer normalization in the critics and many updates per step", DroQConfig)
def make_sac(
    cfg: SACConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None, **parts: Any
) -> SoftActorCritic:
    """Return the learner for the action space: `DiscreteSAC` for Discrete actions, else `SAC`."""
    from zhixing.algorithms.discrete_sac import DiscreteSAC  # imports this file

    learner = DiscreteSAC if isinstance(spaces.action, Discrete) else SAC
    return learner(cfg, spaces, device, net, **parts)
