"""TD3 (Fujimoto et al., 2018).   y = r + γ^k (1 - terminated) · min_i Q'_i(s', π'(s') + ε),   ε ~ clip(N(0, σ), -c, c)

DDPG (Lillicrap et al., 2016) is the same with one critic, no smoothing, no delay and Ornstein-Uhlenbeck noise.
TD3+BC (Fujimoto & Gu, 2021) is TD3 for recorded experience, whose actor stays near what was done there: it descends
(π(s) - a)² - λ Q(s, π(s)) with λ = α / mean |Q(s, π(s))|, on normalised observations.
Differs from the papers: Adam without weight decay and equal learning rates by default; all targets move every update;
gradients of actor and critic are taken at the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor

from zhixing.algorithms import register
from zhixing.config import Group, NonNegative, OffPolicyActorCriticConfig, Positive, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.core.learner import Gradients, Learner
from zhixing.core.optimizer import Average
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.critics import Critics, DeterministicActor, check_box
from zhixing.nets.policies import DeterministicPolicy
from zhixing.nets.torso import NetFactory
from zhixing.ops.returns import td_target


class TD3Config(OffPolicyActorCriticConfig):
    exploration_noise: Annotated[NonNegative, Group.COLLECTION] = 0.1
    """Standard deviation of exploration noise, relative to half the action range."""
    noise_kind: Annotated[Literal["gaussian", "ou"], Group.COLLECTION] = "gaussian"
    """Exploration noise: gaussian is independent per step, ou is an Ornstein-Uhlenbeck process."""
    ou_theta: Annotated[PositiveFloat, Group.COLLECTION] = 0.15
    """Mean reversion rate of the Ornstein-Uhlenbeck noise."""
    critics: Annotated[Positive, Group.NETWORK] = 2
    """Number of critics; targets use the smallest estimate."""
    target_policy_noise: NonNegative = 0.2
    """Standard deviation of the noise on target actions."""
    target_noise_clip: NonNegative = 0.5
    """Maximum absolute noise on target actions."""
    policy_delay: Positive = 2
    """Critic updates per actor update."""


class DDPGConfig(TD3Config):
    noise_kind: Literal["gaussian", "ou"] = "ou"
    exploration_noise: NonNegative = 0.2
    critics: Positive = 1
    target_policy_noise: NonNegative = 0.0
    policy_delay: Positive = 1


class TD3BCConfig(TD3Config):
    alpha: PositiveFloat = 2.5
    """Weight of the Q-value relative to the behavior cloning loss."""
    normalize_obs: bool = True


Objective = Callable[[TD3Config, Tensor, Tensor, Batch], Tensor]


def climb(cfg: TD3Config, q: Tensor, action: Tensor, batch: Batch) -> Tensor:
    """What the actor descends, when its actions `[B,n]` are worth `q [B]`."""
    return -q.mean()


def td3bc_objective(cfg: TD3Config, q: Tensor, action: Tensor, batch: Batch) -> Tensor:
    assert isinstance(cfg, TD3BCConfig)
    scale = cfg.alpha / q.detach().abs().mean().clamp(min=1e-8)  # so that alpha fits rewards of any size
    return (action - batch.action).square().mean() - scale * q.mean()


@register("td3", "deterministic policy gradient with twin critics, delay and smoothed targets")
@register("ddpg", "deterministic policy gradient with replay and target networks", settings=DDPGConfig)
@register("td3bc", "TD3 that stays near recorded actions", settings=TD3BCConfig, objective=td3bc_objective)
class TD3(Learner):
    settings = TD3Config
    metrics = ("critic_loss", "actor_loss", "q_mean", "grad_norm")

    def __init__(
        self,
        cfg: TD3Config,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        net: NetFactory | None = None,
        *,
        objective: Objective = climb,
    ) -> None:
        check_box(spaces, cfg.algorithm)
        super().__init__(cfg, spaces, device)
        self.cfg, self.objective = cfg, objective
        with self.building():
            self.actor = DeterministicActor(spaces, cfg, net).to(self.device)
            self.critics = Critics(spaces, cfg, net, cfg.critics).to(self.device)
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.actor_lr or cfg.lr)
        self.critic_optimizer = self.make_optimizer(self.critics.parameters(), cfg.lr)
        self.target_actor, self.target_critics = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.follow = [Average(self.target_actor, self.actor), Average(self.target_critics, self.critics)]
        ou_theta = cfg.ou_theta if cfg.noise_kind == "ou" else None
        self.policy = DeterministicPolicy(spaces, self.actor, cfg.exploration_noise, ou_theta)
        self.last_actor_loss = torch.zeros((), device=self.device)  # told again between delayed updates

    @torch.no_grad()
    def target_value(self, batch: Batch) -> Tensor:
        action = self.target_actor(batch.next_obs)
        if self.cfg.target_policy_noise > 0:
            noise = torch.empty_like(action).normal_(generator=self.rng) * self.cfg.target_policy_noise
            action = (action + noise.clamp(-self.cfg.target_noise_clip, self.cfg.target_noise_clip)).clamp(-1.0, 1.0)
        least = self.target_critics(batch.next_obs, action).amin(0)  # one critic alone overestimates
        return td_target(batch, least)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Also returns the errors, for priorities, and the mean value."""
        q = self.critics(batch.obs, batch.action)  # [K,B]
        error = q - self.target_value(batch)
        losses = error.square().sum(0)
        weighted = losses * batch.weight if "weight" in batch else losses
        return weighted.mean(), error.detach().abs().mean(0), q.detach().mean()

    def actor_loss(self, batch: Batch) -> Tensor:
        action = self.actor(batch.obs)
        return self.objective(self.cfg, self.critics.q1(batch.obs, action), action, batch)

    def gradients(self, batch: Batch) -> Gradients:
        critic_loss, error, q_mean = self.critic_loss(batch)
        found = {"critic_optimizer": self.critic_optimizer.gradient(critic_loss)}
        if self.updates % self.cfg.policy_delay == 0:
            actor_loss = self.actor_loss(batch)
            found["actor_optimizer"] = self.actor_optimizer.gradient(actor_loss)
            self.last_actor_loss = actor_loss.detach()
        metrics = {"critic_loss": critic_loss.detach(), "actor_loss": self.last_actor_loss, "q_mean": q_mean}
        return Gradients(found, metrics, error)

    def after_step(self) -> None:
        for average in self.follow:
            average.move(self.cfg.tau)

    def value(self, obs: Tree) -> Tensor:
        return self.critics(obs, self.actor(obs)).amin(0)
