"""A2C, the synchronous form of A3C (Mnih et al., 2016).   ∇ = E[∇ log π(a|s) A] - c_v ∇(R - V)² + c_e ∇H

A is the n-step advantage up to the end of the rollout; a `gae_lambda` below 1 gives shorter returns more weight. The
one-step actor-critic `ac` (Sutton et al., 1999) has A = r + γ V(s') - V(s) and an update after every step. In `a3c`
workers compute the gradients of their rollouts, with weights that are some updates old when the gradients are applied.
All workers share the statistics of RMSProp, as in the paper.
Differs from the paper: in `a3c` gradients are applied one after the other, never concurrently.
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
    EntropyBonusConfig,
    Finite,
    Fraction,
    Group,
    NonNegative,
    OnPolicyConfig,
    OptimizerName,
    Positive,
    PositiveFloat,
)
from zhixing.core.batch import Batch
from zhixing.core.learner import Gradients, Learner, LearnsOnWorkers, Update, train_step
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.actor_critic import ActorCritic, evaluate_actions, rollout_fields
from zhixing.nets.policies import ActorCriticPolicy
from zhixing.nets.rollouts import add_advantages
from zhixing.nets.torso import NetFactory
from zhixing.ops.normalize import RewardScaler, normalize


class A2CConfig(OnPolicyConfig, EntropyBonusConfig):
    algorithm: str = "a2c"
    num_envs: Positive = 8
    rollout_steps: Positive = 5
    lr: PositiveFloat = 7e-4
    optimizer: OptimizerName = "rmsprop"
    optimizer_eps: PositiveFloat = 1e-5
    gae_lambda: Fraction = 1.0
    """Lambda of generalized advantage estimation."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
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
    algorithm: str = "ac"
    rollout_steps: Positive = 1
    gae_lambda: Fraction = 0.0
    optimizer: OptimizerName = "adam"


class A3CConfig(A2CConfig, AsynchronousConfig):
    algorithm: str = "a3c"
    scheme: ClassVar[str] = "asynchronous"
    gradients_on_workers: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_workers(self) -> A3CConfig:
        if self.normalize_obs or self.normalize_reward:
            raise ValueError(
                "a3c has no running statistics that its workers share: set normalize_obs=false and "
                "normalize_reward=false"
            )
        if self.distributed.workers and self.entropy_coef_schedule != "constant":
            raise ValueError(
                "the workers of a3c have a constant entropy_coef: set entropy_coef_schedule=constant or "
                "distributed.workers=0"
            )
        if self.compile or self.precision != "fp32":
            raise ValueError(
                "a3c computes gradients in its workers, eagerly and in fp32: set compile=false and precision=fp32"
            )
        return self


@register("a3c", "A2C with gradients that workers compute asynchronously", settings=A3CConfig)
@register("a2c", "advantage actor-critic on short rollouts of many environments")
@register("ac", "one-step actor-critic", settings=ACConfig)
class A2C(Learner, LearnsOnWorkers):
    settings = A2CConfig
    metrics = ("policy_loss", "value_loss", "entropy", "grad_norm", "value_mean")
    shard_dim = 1  # environments: rollouts may have a single step

    def __init__(
        self,
        cfg: A2CConfig,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        net: NetFactory | None = None,
    ) -> None:
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():
            self.net = ActorCritic(
                spaces,
                cfg.net,
                net,
                shared=cfg.shared_network,
                normalize=cfg.normalize_obs,
                log_std=cfg.log_std_init,
            ).to(self.device)
        self.policy = ActorCriticPolicy(spaces, self.net)
        self.optimizer = self.make_optimizer(self.net.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)
        self.entropy_coef = self.make_coefficient("entropy_coef", cfg.entropy_coef, cfg.entropy_coef_schedule)
        self.reward_scale = RewardScaler(cfg.gamma, cfg.num_envs).to(self.device) if cfg.normalize_reward else None

    @property
    def extra_fields(self) -> dict[str, Tree]:
        return rollout_fields(self.policy)

    def value(self, obs: Tree) -> Tensor:
        return self.net(obs).value

    def losses(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the total loss of a rollout `[T,N]` with advantages, and metrics."""
        rows = batch if self.net.recurrent else batch.flatten()
        logp, value, entropies = evaluate_actions(self.net, rows)
        advantage = normalize(rows.advantage) if self.cfg.normalize_advantage else rows.advantage
        policy_loss = -(logp * advantage).mean()
        value_loss = F.mse_loss(value, rows.returns)
        entropy = entropies.mean()
        loss = policy_loss + self.cfg.value_coef * value_loss - self.entropy_coef * entropy
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return loss, {**metrics, "value_mean": value.mean()}

    @train_step
    def gradient_step(self, batch: Batch) -> Update:
        """Update from a rollout `[T,N]` with advantages."""
        loss, metrics = self.losses(batch)
        return Update({**metrics, "grad_norm": self.optimizer.step(loss)})

    def update(self, batch: Batch) -> Update:
        update = self.gradient_step(self.add_advantages(batch))
        self.net.update_norm(batch.obs)
        return update

    def add_advantages(self, batch: Batch) -> Batch:
        """Return a rollout `[T,N]` with advantages and returns."""
        reward = batch.reward
        if self.reward_scale is not None:
            reward = self.reward_scale(reward, batch.terminated | batch.truncated)
        return add_advantages(self.net, batch, reward, self.cfg.gamma, self.cfg.gae_lambda)

    # --- a3c: workers compute gradients ---

    def compute_gradients(self, rollout: Batch) -> Gradients:
        loss, metrics = self.losses(self.add_advantages(rollout))
        gradients = [gradient.clone() for gradient in self.optimizer.compute_gradients(loss)]
        return Gradients(gradients, {name: value.detach() for name, value in metrics.items()})

    def apply_gradients(self, gradients: Gradients) -> Update:
        self.updates += 1
        return Update({**gradients.metrics, "grad_norm": self.optimizer.apply(gradients.tensors)})
