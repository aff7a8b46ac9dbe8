"""A2C, the synchronous form of A3C (Mnih et al., 2016).   ∇ = E[∇ log π(a|s) A] - c_v ∇(R - V)² + c_e ∇H

A is the n-step advantage over the rollout (`gae_lambda` below 1 weighs shorter ones more). The one-step actor-critic
`ac` (Sutton et al., 1999) is the same with A = r + γ V(s') - V(s) and an update after every step. In `a3c` itself
workers take the gradients of their own rollouts, by weights that are some updates old when these are applied.
Differs from the paper: in a2c there is one RMSProp, for there is one learner. In a3c it is shared, as in the paper, and
gradients are applied one after the other, not over each other.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn import functional as F

from zhixing.algorithms import register
from zhixing.config import (
    AsynchronousConfig,
    Finite,
    Fraction,
    Group,
    NonNegative,
    OnPolicyConfig,
    Positive,
    PositiveFloat,
)
from zhixing.core.batch import Batch
from zhixing.core.learner import Gradients, Learner, Update
from zhixing.core.optimizer import OptimizerKind
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.actor_critic import ActorCritic, evaluate_actions, rollout_fields
from zhixing.nets.policies import ActorCriticPolicy
from zhixing.nets.rollouts import add_advantages
from zhixing.nets.torso import NetFactory
from zhixing.ops.normalize import RewardScaler, normalize


class A2CConfig(OnPolicyConfig):
    num_envs: Positive = 8
    rollout_steps: Positive = 5
    lr: PositiveFloat = 7e-4
    anneal_lr: bool = False
    """Anneal the learning rate linearly to zero over the budget."""
    optimizer: OptimizerKind = "rmsprop"
    """Optimizer of the networks."""
    optimizer_eps: PositiveFloat = 1e-5
    gae_lambda: Fraction = 1.0
    """Lambda of generalized advantage estimation."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    normalize_advantage: bool = False
    """Normalize advantages to zero mean and unit standard deviation per rollout."""
    normalize_obs: bool = False
    """Normalize observations by their running mean and standard deviation."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of returns."""
    shared_network: Annotated[bool, Group.NETWORK] = False
    """Share one torso between actor and critic."""
    log_std_init: Annotated[Finite, Group.NETWORK] = 0.0
    """Initial log standard deviation of continuous actions."""


class ACConfig(A2CConfig):
    rollout_steps: Positive = 1
    gae_lambda: Fraction = 0.0
    optimizer: OptimizerKind = "adam"


class A3CConfig(A2CConfig, AsynchronousConfig):
    scheme: ClassVar[str] = "asynchronous"

    @model_validator(mode="after")
    def _gradients_only(self) -> A3CConfig:
        if self.normalize_obs or self.normalize_reward:
            raise ValueError("a3c takes no normalize_obs or normalize_reward: its workers would have statistics each")
        if self.compile or self.precision != "fp32":
            raise ValueError("a3c takes no compile=true and no precision but fp32: its workers take gradients apart")
        return self


@register("a3c", "a2c whose workers take gradients by themselves, asynchronously", settings=A3CConfig, apart=True)
@register("a2c", "advantage actor-critic over short rollouts of many environments")
@register("ac", "one-step actor-critic", settings=ACConfig)
class A2C(Learner):
    settings = A2CConfig
    metrics = ("policy_loss", "value_loss", "entropy", "grad_norm")
    shard_dim = 1  # rollouts are short, often of a single step

    def __init__(
        self,
        cfg: A2CConfig,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        net: NetFactory | None = None,
        *,
        apart: bool = False,
    ) -> None:
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        self.gradients_on_workers = apart
        with self.building():
            self.net = ActorCritic(
                spaces,
                cfg.net,
                net,
                shared=cfg.shared_network,
                normalize=cfg.normalize_obs,
                log_std=cfg.log_std_init,
            ).to(self.device)
        self.policy = ActorCriticPolicy(spaces, self.net)
        self.optimizer = self.make_optimizer(
            self.net.parameters(), cfg.lr, kind=cfg.optimizer, max_grad_norm=cfg.max_grad_norm
        )
        self.reward_scale = RewardScaler(cfg.gamma, cfg.num_envs).to(self.device) if cfg.normalize_reward else None

    @property
    def fields(self) -> dict[str, Tree]:
        return rollout_fields(self.policy)

    def set_progress(self, fraction: float) -> None:
        if self.cfg.anneal_lr:
            self.optimizer.lr = self.cfg.lr * (1.0 - fraction)

    def value(self, obs: Tree) -> Tensor:
        return self.net(obs).value

    def gradients(self, batch: Batch) -> Gradients:
        """`batch` is a rollout `[T,N]` from `prepare`."""
        rows = batch if self.net.recurrent else batch.flatten()
        logp, value, entropies = evaluate_actions(self.net, rows)
        advantage = normalize(rows.advantage) if self.cfg.normalize_advantage else rows.advantage
        policy_loss = -(logp * advantage).mean()
        value_loss = F.mse_loss(value, rows.returns)
        entropy = entropies.mean()
        loss = policy_loss + self.cfg.value_coef * value_loss - self.cfg.entropy_coef * entropy
        metrics = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
        }
        return Gradients({"optimizer": self.optimizer.gradient(loss)}, metrics)

    def prepare(self, batch: Batch) -> Batch:
        """Advantages and returns of a rollout `[T,N]`."""
        reward = batch.reward
        if self.reward_scale is not None:
            reward = self.reward_scale(reward, batch.terminated | batch.truncated)
        return add_advantages(self.net, batch, reward, self.cfg.gamma, self.cfg.gae_lambda)

    def rollout_gradients(self, batch: Batch) -> Gradients:
        return self.gradients(self.prepare(batch))

    def update(self, batch: Batch) -> Update:
        update = self.descend(self.gradients, self.prepare(batch))
        self.net.update_norm(batch.obs)
        return update
