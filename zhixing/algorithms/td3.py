"""TD3 (Fujimoto et al., 2018).   y = r + γ^k (1 - terminated) · min_i Q'_i(s', π'(s') + ε),   ε ~ clip(N(0, σ), -c, c)

DDPG (Lillicrap et al., 2016) has one critic, no target noise, no delay, and Ornstein-Uhlenbeck noise for exploration.
TD3+BC (Fujimoto & Gu, 2021) is TD3 for offline data. Its actor minimizes (π(s) - a)² - λ Q(s, π(s)) with
λ = α / mean |Q(s, π(s))|, so it stays close to recorded actions; observations are normalized.
Differs from the papers: Adam without weight decay and equal learning rates by default; target networks are updated in
every update, not only every `policy_delay` updates.
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
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.optimizer import TargetUpdater
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.critics import Critics, DeterministicActor, check_box
from zhixing.nets.policies import DeterministicPolicy
from zhixing.nets.torso import NetFactory
from zhixing.ops.losses import weighted_mean
from zhixing.ops.returns import td_target


class TD3Config(OffPolicyActorCriticConfig):
    algorithm: str = "td3"
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
    algorithm: str = "ddpg"
    noise_kind: Literal["gaussian", "ou"] = "ou"
    exploration_noise: NonNegative = 0.2
    critics: Positive = 1
    target_policy_noise: NonNegative = 0.0
    policy_delay: Positive = 1


class TD3BCConfig(TD3Config):
    algorithm: str = "td3bc"
    alpha: PositiveFloat = 2.5
    """Weight of the Q-value relative to the behavior cloning loss."""
    normalize_obs: bool = True


Objective = Callable[[TD3Config, Tensor, Tensor, Batch], Tensor]


def actor_objective(cfg: TD3Config, q: Tensor, action: Tensor, batch: Batch) -> Tensor:
    """Return the actor's loss, given the values `q [B]` of its actions `[B,n]`."""
    return -q.mean()


def td3bc_objective(cfg: TD3Config, q: Tensor, action: Tensor, batch: Batch) -> Tensor:
    """Return the actor's loss with a term that keeps its actions close to those of the batch."""
    assert isinstance(cfg, TD3BCConfig)
    scale = cfg.alpha / q.detach().abs().mean().clamp(min=1e-8)  # independent of the scale of rewards
    return (action - batch.action).square().mean() - scale * q.mean()


@register("td3", "deterministic policy gradient with twin critics, delayed updates and target smoothing")
@register("ddpg", "deterministic policy gradient with replay and target networks", settings=DDPGConfig)
@register("td3bc", "TD3 with a behavior cloning term", settings=TD3BCConfig, objective=td3bc_objective)
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
        objective: Objective = actor_objective,
    ) -> None:
        check_box(spaces, cfg.algorithm)
        super().__init__(cfg, spaces, device)
        self.cfg, self.objective = cfg, objective
        with self.seeded_init():
            self.actor = DeterministicActor(spaces, cfg, net).to(self.device)
            self.critics = Critics(spaces, cfg, net, cfg.critics).to(self.device)
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.actor_lr or cfg.lr)
        self.critic_optimizer = self.make_optimizer(self.critics.parameters(), cfg.lr)
        self.target_actor, self.target_critics = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.target_updater = TargetUpdater((self.target_actor, self.actor), (self.target_critics, self.critics))
        ou_theta = cfg.ou_theta if cfg.noise_kind == "ou" else None
        self.policy = DeterministicPolicy(spaces, self.actor, cfg.exploration_noise, ou_theta)
        self.last_actor_loss = torch.zeros((), device=self.device)  # reported with policy_delay

    @torch.no_grad()
    def target_value(self, batch: Batch) -> Tensor:
        action = self.target_actor(batch.next_obs)
        if self.cfg.target_policy_noise > 0:
            noise = torch.empty_like(action).normal_(generator=self.rng) * self.cfg.target_policy_noise
            action = (action + noise.clamp(-self.cfg.target_noise_clip, self.cfg.target_noise_clip)).clamp(-1.0, 1.0)
        q = self.target_critics(batch.next_obs, action).amin(0)  # min of two critics: one alone overestimates
        return td_target(batch, q)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the absolute TD errors `[B]` and the mean value."""
        q = self.critics(batch.obs, batch.action)  # [K,B]
        td_error = q - self.target_value(batch)
        loss = weighted_mean(td_error.square().sum(0), batch)
        return loss, td_error.detach().abs().mean(0), q.detach().mean()

    def actor_loss(self, batch: Batch) -> Tensor:
        action = self.actor(batch.obs)
        return self.objective(self.cfg, self.critics.q1(batch.obs, action), action, batch)

    @train_step
    def update(self, batch: Batch) -> Update:
        critic_loss, td_error, q_mean = self.critic_loss(batch)
        grad_norm = self.critic_optimizer.step(critic_loss)
        if self.updates % self.cfg.policy_delay == 0:
            actor_loss = self.actor_loss(batch)  # uses the critics just updated
            self.actor_optimizer.step(actor_loss)
            self.last_actor_loss = actor_loss.detach()
        self.target_updater.polyak_update(self.cfg.tau)
        metrics = {"critic_loss": critic_loss, "actor_loss": self.last_actor_loss, "q_mean": q_mean}
        return Update({**metrics, "grad_norm": grad_norm}, td_error)

    def value(self, obs: Tree) -> Tensor:
        return self.critics(obs, self.actor(obs)).amin(0)
