"""SAC (Haarnoja et al., 2018).   y = r + γ^k (1 - terminated) (min_i Q'_i(s', a') - α log π(a'|s')),   a' ~ π(s')

With discrete actions the expectations over actions are exact sums (Christodoulou, 2019). REDQ (Chen et al., 2021) is
SAC with many critics, of which each target takes the least of a random few, and many updates per step. CQL is SAC with
a penalty on what its critics say, see cql.py.
Differs from the paper: the temperature is learned by default; gradients of actor, critic and temperature are taken at
the same weights.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, ClassVar

import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn

from zhixing.algorithms import register
from zhixing.config import Finite, Group, OffPolicyActorCriticConfig, Positive, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.core.learner import Gradients, Learner
from zhixing.core.optimizer import Average
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.errors import UserError
from zhixing.nets.critics import Critics, StochasticActor, check_box
from zhixing.nets.policies import StochasticPolicy
from zhixing.nets.torso import NetFactory
from zhixing.ops.distributions import Categorical, SquashedGaussian
from zhixing.ops.returns import td_target


class SACConfig(OffPolicyActorCriticConfig):
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
    entropy_in_targets: bool = True
    """Include the entropy bonus in the targets of the critics, not only in the actor's loss."""


class REDQConfig(SACConfig):
    critics: Positive = 10
    updates_per_step: PositiveFloat = 20.0
    policy_delay: Positive = 20


class Penalty(nn.Module, ABC):
    """A part of variants: a term `weight · penalty(...)` of the critics' loss. Its weight may be learned."""

    @property
    @abstractmethod
    def weight(self) -> Tensor: ...

    @abstractmethod
    def forward(
        self, critics: Critics, actor: StochasticActor, batch: Batch, q: Tensor, rng: torch.Generator
    ) -> Tensor:
        """Of each critic `[K]`. `q [K,B]` is what they say of the actions taken."""

    @abstractmethod
    def weight_loss(self, penalty: Tensor) -> Tensor | None:
        """What the weight descends, when the critics' penalty was this `[K]`; None for a fixed one."""


@register("sac", "maximum-entropy actor-critic with twin critics and a learned temperature")
@register("redq", "SAC with an ensemble of critics and many updates per step", settings=REDQConfig)
class SAC(Learner):
    settings = SACConfig
    metrics: ClassVar[tuple[str, ...]] = ("critic_loss", "actor_loss", "q_mean", "alpha", "entropy", "grad_norm")

    def __init__(
        self,
        cfg: SACConfig,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        net: NetFactory | None = None,
        *,
        penalty: Callable[[SACConfig], Penalty] | None = None,
    ) -> None:
        self.discrete = isinstance(spaces.action, Discrete)
        if not self.discrete:
            check_box(spaces, cfg.algorithm)
        if cfg.target_critics > cfg.critics:
            raise UserError(f"target_critics={cfg.target_critics} are more than the critics={cfg.critics}")
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.building():
            self.actor = StochasticActor(spaces, cfg, net).to(self.device)
            self.critics = Critics(spaces, cfg, net, cfg.critics).to(self.device)
        self.log_alpha = nn.ParameterList([torch.tensor(math.log(cfg.alpha or 1.0), device=self.device)])
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.actor_lr or cfg.lr)
        self.critic_optimizer = self.make_optimizer(self.critics.parameters(), cfg.lr)
        self.alpha_optimizer = self.make_optimizer(self.log_alpha.parameters(), cfg.lr)
        self.target = copy.deepcopy(self.critics)
        self.follow = Average(self.target, self.critics)
        self.policy = StochasticPolicy(spaces, self.actor)
        self.penalty = None if penalty is None else penalty(cfg).to(self.device)
        if self.penalty is not None:
            self.penalty_optimizer = self.make_optimizer(self.penalty.parameters(), cfg.lr)
            self.metrics = (*SAC.metrics, "penalty", "penalty_weight")  # type: ignore[misc]  # variants tell more
        # told again between delayed updates
        self.last_actor_loss = self.last_entropy = torch.zeros((), device=self.device)

    @property
    def temperature(self) -> Tensor:
        return self.log_alpha[0].exp()

    @property
    def target_alpha(self) -> Tensor:
        """What values count the entropy with."""
        return self.temperature if self.cfg.entropy_in_targets else torch.zeros_like(self.log_alpha[0])

    @torch.no_grad()
    def target_value(self, batch: Batch) -> Tensor:
        mask = batch.next_mask if "next_mask" in batch else None
        policy, alpha = self.actor(batch.next_obs, mask), self.target_alpha
        if isinstance(policy, Categorical):
            q = self._least(self.target(batch.next_obs))  # [B,n]
            future = (policy.logp.exp() * (q - alpha * policy.logp)).sum(-1)
        else:
            assert isinstance(policy, SquashedGaussian)
            action, logp = policy.sample_with_logp(self.rng)
            future = self._least(self.target(batch.next_obs, action)) - alpha * logp
        return td_target(batch, future)

    def _least(self, q: Tensor) -> Tensor:
        """The least of all estimates `[K,B,...]`, or of a random few."""
        if self.cfg.target_critics < self.cfg.critics:
            chosen = torch.randperm(self.cfg.critics, generator=self.rng, device=self.device)
            q = q[chosen[: self.cfg.target_critics]]
        return q.amin(0)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Also returns the errors, for priorities, and the values `[K,B]`."""
        q = self.critics.q_of_actions(batch.obs, batch.action)  # [K,B]
        error = q - self.target_value(batch)
        losses = 0.5 * error.square().sum(0)
        weighted = losses * batch.weight if "weight" in batch else losses
        return weighted.mean(), error.detach().abs().mean(0), q

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Also returns the entropy of the policy."""
        mask = batch.mask if "mask" in batch else None
        policy, alpha = self.actor(batch.obs, mask), self.temperature.detach()
        if isinstance(policy, Categorical):
            with torch.no_grad():
                q = self._climbed(self.critics(batch.obs))
            return (policy.logp.exp() * (alpha * policy.logp - q)).sum(-1).mean(), policy.entropy().detach().mean()
        assert isinstance(policy, SquashedGaussian)
        action, logp = policy.sample_with_logp(self.rng)
        value = self._climbed(self.critics(batch.obs, action))
        return (alpha * logp - value).mean(), -logp.detach().mean()

    def _climbed(self, q: Tensor) -> Tensor:
        """What the actor climbs, of estimates `[K,B,...]`: the mean of an ensemble, the least of twins."""
        return q.mean(0) if self.cfg.target_critics < self.cfg.critics else q.amin(0)

    def target_entropy(self, batch: Batch) -> Tensor | float:
        """Return the entropy that the temperature is learned for: with a mask, the mean over the states.

        Discrete actions get half of the most that is possible, which in a state is the log of its allowed actions: a
        target above that would let the temperature grow without end.
        """
        if self.cfg.target_entropy is not None:
            return self.cfg.target_entropy
        if not self.discrete:
            return -float(self.spaces.num_actions)
        if "mask" in batch:
            return 0.5 * batch.mask.sum(-1).clamp(min=1).log().mean()
        return 0.5 * math.log(self.spaces.num_actions)

    def alpha_loss(self, entropy: Tensor, batch: Batch) -> Tensor:
        return self.log_alpha[0] * (entropy - self.target_entropy(batch))

    def gradients(self, batch: Batch) -> Gradients:
        critic_loss, error, q = self.critic_loss(batch)
        found, told = {}, {}
        if self.penalty is not None:
            penalty, weight = self.penalty(self.critics, self.actor, batch, q, self.rng), self.penalty.weight.detach()
            critic_loss = critic_loss + weight * penalty.sum()
            weight_loss = self.penalty.weight_loss(penalty.detach())
            if weight_loss is not None:
                found["penalty_optimizer"] = self.penalty_optimizer.gradient(weight_loss)
            told = {"penalty": penalty.detach().mean(), "penalty_weight": weight}
        found["critic_optimizer"] = self.critic_optimizer.gradient(critic_loss)
        if self.updates % self.cfg.policy_delay == 0:
            actor_loss, entropy = self.actor_loss(batch)
            found["actor_optimizer"] = self.actor_optimizer.gradient(actor_loss)
            if self.cfg.alpha is None:
                alpha_loss = self.alpha_loss(entropy, batch)
                found["alpha_optimizer"] = self.alpha_optimizer.gradient(alpha_loss)
            self.last_actor_loss, self.last_entropy = actor_loss.detach(), entropy
        metrics = {"critic_loss": critic_loss.detach(), "actor_loss": self.last_actor_loss, "q_mean": q.detach().mean()}
        metrics |= {"alpha": self.temperature.detach(), "entropy": self.last_entropy}
        return Gradients(found, metrics | told, error)

    @torch.no_grad()
    def priority(self, batch: Batch) -> Tensor:
        return self.critic_loss(batch)[1]

    def after_step(self) -> None:
        self.follow.move(self.cfg.tau)

    def value(self, obs: Tree) -> Tensor:
        policy, alpha = self.actor(obs), self.target_alpha
        if isinstance(policy, Categorical):
            return (policy.logp.exp() * (self.critics(obs).amin(0) - alpha * policy.logp)).sum(-1)
        return self.critics(obs, policy.mode()).amin(0)
