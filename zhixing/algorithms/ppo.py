"""PPO (Schulman et al., 2017).   L = E[min(r A, clip(r, 1 - ε, 1 + ε) A)] - c_v L_V + c_e H,   r = π(a|s) / π_old(a|s)

Truncated episodes bootstrap from their final observation.
Differs from the paper: advantages are normalized per minibatch; clipping of the value loss and stopping early at a KL
divergence are settings.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn import functional as F

from zhixing.algorithms import register
from zhixing.config import (
    Auto,
    ClipRangeConfig,
    Count,
    EntropyBonusConfig,
    Finite,
    Fraction,
    Group,
    NonNegative,
    OnPolicyConfig,
    Positive,
    PositiveFloat,
)
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, mean_metrics, train_step
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.actor_critic import ActorCritic, evaluate_actions, rollout_fields
from zhixing.nets.policies import ActorCriticPolicy
from zhixing.nets.rollouts import add_advantages
from zhixing.nets.torso import NetFactory
from zhixing.ops.normalize import RewardScaler, normalize
from zhixing.ops.policy_gradient import approx_kl, clip_fraction, explained_variance, minibatches


class PPOConfig(OnPolicyConfig, ClipRangeConfig, EntropyBonusConfig):
    algorithm: str = "ppo"
    num_envs: Positive = 8
    rollout_steps: Positive = 256
    lr: PositiveFloat = 3e-4
    critic_lr: PositiveFloat | None = None
    """Learning rate of the critic; none uses lr."""
    optimizer_eps: PositiveFloat = 1e-5
    epochs: Positive = 10
    """Passes over each rollout."""
    critic_epochs: Count | None = None
    """Critic passes over each rollout; none uses epochs."""
    minibatch_size: Positive = 128
    """Maximum steps per minibatch; the rollout is split evenly."""
    value_clip_range: PositiveFloat | None = None
    """Clip range of value changes, in units of the return; none disables clipping."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalized advantage estimation."""
    target_kl: PositiveFloat | None = None
    """Approximate KL divergence; epochs stop early when the policy exceeds 1.5 times this value."""
    normalize_advantage: bool = True
    """Normalize advantages to zero mean and unit standard deviation per minibatch."""
    normalize_obs: bool | Auto = "auto"
    """Normalize observations by their running mean and standard deviation; auto does so for built-in networks."""
    normalize_reward: bool = True
    """Divide rewards by the running standard deviation of returns."""
    shared_network: Annotated[bool, Group.NETWORK] = False
    """Share one torso between actor and critic."""
    log_std_init: Annotated[Finite, Group.NETWORK] = 0.0
    """Initial log standard deviation of continuous actions."""
    eval_stochastic: Annotated[bool, Group.EVALUATION] = False
    """Sample actions in evaluations instead of taking the most likely."""

    @property
    def separate_critic(self) -> bool:
        """Whether actor and critic have separate optimizers."""
        return self.critic_lr is not None or self.critic_epochs is not None

    @model_validator(mode="after")
    def _check_shared_network(self) -> PPOConfig:
        if self.shared_network and self.separate_critic:
            raise ValueError(
                "shared_network=true has one optimizer for actor and critic: leave critic_lr and critic_epochs unset"
            )
        return self


@register("ppo", "policy gradient with a clipped objective and several epochs per rollout")
class PPO(Learner):
    settings = PPOConfig
    metrics = (
        "policy_loss",
        "value_loss",
        "entropy",
        "kl",
        "clip_fraction",
        "explained_variance",
        "grad_norm",
        "value_mean",
        "policy_loss_delta",
        "value_loss_delta",
        "stop_epoch",
    )

    def __init__(
        self, cfg: PPOConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():
            self.net = ActorCritic(
                spaces,
                cfg.net,
                net,
                shared=cfg.shared_network,
                batched=not cfg.separate_critic,
                normalize=cfg.normalize_obs,
                log_std=cfg.log_std_init,
            ).to(self.device)
        self.policy = ActorCriticPolicy(spaces, self.net, cfg.eval_stochastic)
        settings = {"max_grad_norm": cfg.max_grad_norm}
        if cfg.separate_critic:
            self.actor_optimizer = self.make_optimizer(self.net.actor_parameters(), cfg.lr, **settings)
            self.critic_optimizer = self.make_optimizer(
                self.net.critic_parameters(), cfg.critic_lr or cfg.lr, **settings
            )
        else:
            self.optimizer = self.make_optimizer(self.net.parameters(), cfg.lr, **settings)
        self.clip_range = self.make_coefficient("clip_range", cfg.clip_range, cfg.clip_range_schedule)
        self.entropy_coef = self.make_coefficient("entropy_coef", cfg.entropy_coef, cfg.entropy_coef_schedule)
        self.reward_scale = RewardScaler(cfg.gamma, cfg.num_envs).to(self.device) if cfg.normalize_reward else None

    @property
    def extra_fields(self) -> dict[str, Tree]:
        return rollout_fields(self.policy)

    def value(self, obs: Tree) -> Tensor:
        return self.net(obs).value

    def policy_loss(self, logp: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the clipped loss and the log of the probability ratio r."""
        advantage = normalize(batch.advantage) if self.cfg.normalize_advantage else batch.advantage
        log_ratio = logp - batch.logp
        ratio, eps = log_ratio.exp(), self.clip_range
        objective = torch.min(ratio * advantage, ratio.clamp(1 - eps, 1 + eps) * advantage)
        return -objective.mean(), log_ratio.detach()

    def value_loss(self, value: Tensor, batch: Batch) -> Tensor:
        if self.cfg.value_clip_range is None:
            return F.mse_loss(value, batch.returns)
        clipped = batch.value + (value - batch.value).clamp(-self.cfg.value_clip_range, self.cfg.value_clip_range)
        return torch.max((value - batch.returns).square(), (clipped - batch.returns).square()).mean()

    @train_step
    def gradient_step(self, batch: Batch, actor: bool = True, critic: bool = True) -> Update:
        """Update from a minibatch: `[B]`, or `[T,n]` for recurrent networks.

        `actor` and `critic` select which of them is updated if they have separate optimizers.
        """
        logp, value, entropies = evaluate_actions(self.net, batch)
        entropy = entropies.mean()
        policy_loss, log_ratio = self.policy_loss(logp, batch)
        value_loss = self.value_loss(value, batch)
        actor_loss = policy_loss - self.entropy_coef * entropy if self.cfg.entropy_coef else policy_loss
        if not self.cfg.separate_critic:
            grad_norm = self.optimizer.step(torch.add(actor_loss, value_loss, alpha=self.cfg.value_coef))
        else:
            grad_norm = torch.zeros_like(value_loss)
            if critic:
                grad_norm = self.critic_optimizer.step(self.cfg.value_coef * value_loss)
            if actor:
                grad_norm = self.actor_optimizer.step(actor_loss)
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "grad_norm": grad_norm}
        metrics |= {"kl": approx_kl(log_ratio), "clip_fraction": clip_fraction(log_ratio, self.clip_range)}
        return Update(metrics)

    def update(self, batch: Batch) -> Update:
        data = self.add_advantages(batch)
        epochs: list[list[Update]] = []
        actor_epochs = self.cfg.epochs
        critic_epochs = actor_epochs if self.cfg.critic_epochs is None else self.cfg.critic_epochs
        for epoch in range(max(actor_epochs, critic_epochs)):
            parts = {"actor": epoch < actor_epochs, "critic": epoch < critic_epochs}
            updates = [
                self.gradient_step(minibatch, **parts)
                for minibatch in minibatches(data, self.cfg.minibatch_size, self.rng, self.net.recurrent)
            ]
            epochs.append(updates)
            if self.cfg.target_kl is not None and float(updates[-1].metrics["kl"]) > 1.5 * self.cfg.target_kl:
                if epoch + 1 >= critic_epochs or not self.cfg.separate_critic:
                    break
                actor_epochs = 0  # the critic continues alone
        self.net.update_norm(batch.obs)  # after the epochs, so ratios compare policies with equal statistics
        metrics = mean_metrics([update for updates in epochs for update in updates])
        metrics["explained_variance"] = explained_variance(data.value, data.returns)
        metrics |= {"value_mean": data.value.mean(), "stop_epoch": data.value.new_tensor(len(epochs))}
        first, last = mean_metrics(epochs[0]), mean_metrics(epochs[-1])
        metrics |= {f"{name}_delta": last[name] - first[name] for name in ("policy_loss", "value_loss")}
        return Update(metrics)

    def add_advantages(self, batch: Batch) -> Batch:
        """Return a rollout `[T,N]` with advantages and returns."""
        reward = batch.reward
        if self.reward_scale is not None:
            reward = self.reward_scale(reward, batch.terminated | batch.truncated)
        return add_advantages(self.net, batch, reward, self.cfg.gamma, self.cfg.gae_lambda)
