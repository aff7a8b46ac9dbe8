"""PPG (Cobbe et al., 2021).   policy phases: PPO;   auxiliary phase: L = ½ E[(V_aux - R)²] + β E[KL(π_old, π)]

Actor and critic have separate networks, so their losses don't interfere. After every `policy_iterations` rollouts, an
auxiliary phase trains the actor's features to predict the value by an additional head V_aux, on all states since the
last such phase. The KL term keeps the policy unchanged, and the critic is trained on the same returns. Each phase has
separate moments of Adam, as in the authors' code. Truncated episodes bootstrap.
Differs from the paper: the policy phase has as many epochs for the actor as for the critic (E_π = E_V = `epochs`), and
the defaults suit short runs (the paper has `policy_iterations` 32, `epochs` 1, entropy 0.01 and normalized rewards).
"""

from __future__ import annotations

import copy
from typing import Annotated, Any

import torch
from torch import Tensor

from zhixing.algorithms import register
from zhixing.config import (
    ClipRangeConfig,
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
from zhixing.nets.actor_critic import ActorCritic, rollout_fields
from zhixing.nets.heads import ValueHead
from zhixing.nets.policies import ActorCriticPolicy
from zhixing.nets.rollouts import add_advantages, forward_actor, forward_critic
from zhixing.nets.torso import NetFactory, num_features
from zhixing.ops.normalize import RewardScaler, normalize
from zhixing.ops.policy_gradient import approx_kl, clip_fraction, explained_variance, minibatches, ppo_clip_loss


class PPGConfig(OnPolicyConfig, ClipRangeConfig, EntropyBonusConfig):
    algorithm: str = "ppg"
    num_envs: Positive = 8
    lr: PositiveFloat = 5e-4
    optimizer_eps: PositiveFloat = 1e-5
    epochs: Positive = 4
    """Passes over each rollout in a policy phase."""
    policy_iterations: Positive = 4
    """Rollouts between auxiliary phases."""
    auxiliary_epochs: Positive = 6
    """Passes over all rollouts since the last auxiliary phase."""
    clone_coef: NonNegative = 1.0
    """Weight of the KL divergence from the policy before the auxiliary phase."""
    minibatch_size: Positive = 256
    """Maximum steps per minibatch; the rollout is split evenly."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalized advantage estimation."""
    normalize_obs: bool = False
    """Normalize observations by their running mean and standard deviation."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of returns."""
    log_std_init: Annotated[Finite, Group.NETWORK] = 0.0
    """Initial log standard deviation of continuous actions."""
    eval_stochastic: Annotated[bool, Group.EVALUATION] = False
    """Sample actions in evaluations instead of taking the most likely."""


@register("ppg", "PPO with auxiliary phases that train the actor's features to predict the value")
class PPG(Learner):
    settings = PPGConfig
    metrics = (
        "policy_loss",
        "value_loss",
        "entropy",
        "kl",
        "clip_fraction",
        "explained_variance",
        "grad_norm",
        "value_mean",
        "auxiliary_loss",
        "clone_kl",
    )

    def __init__(
        self, cfg: PPGConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.seeded_init():
            # not batched, because actor and critic have separate optimizers
            self.net = ActorCritic(
                spaces, cfg.net, net, batched=False, normalize=cfg.normalize_obs, log_std=cfg.log_std_init
            )
            self.auxiliary_head = ValueHead(num_features(self.net.actor, spaces.obs))
        self.net.to(self.device)
        self.auxiliary_head.to(self.device)
        self.policy = ActorCriticPolicy(spaces, self.net, cfg.eval_stochastic)
        settings = {"max_grad_norm": cfg.max_grad_norm}
        actor = [*self.net.actor_parameters(), *self.auxiliary_head.parameters()]
        self.actor_optimizer = self.make_optimizer(actor, cfg.lr, **settings)
        self.critic_optimizer = self.make_optimizer(self.net.critic_parameters(), cfg.lr, **settings)
        self.clip_range = self.make_coefficient("clip_range", cfg.clip_range, cfg.clip_range_schedule)
        self.entropy_coef = self.make_coefficient("entropy_coef", cfg.entropy_coef, cfg.entropy_coef_schedule)
        self.other_moments = self.actor_optimizer.state_dict()  # of the phase that is not active
        self.reward_scale = RewardScaler(cfg.gamma, cfg.num_envs).to(self.device) if cfg.normalize_reward else None
        self.rollouts: list[Batch] = []  # since the last auxiliary phase
        self.auxiliary_loss = torch.zeros((), device=self.device)  # of the last auxiliary phase
        self.clone_kl = torch.zeros((), device=self.device)

    @property
    def extra_fields(self) -> dict[str, Tree]:
        return rollout_fields(self.policy)

    def value(self, obs: Tree) -> Tensor:
        return self.net(obs).value

    def value_loss(self, batch: Batch) -> Tensor:
        return 0.5 * (forward_critic(self.net, batch) - batch.returns).square().mean()

    @train_step
    def gradient_step(self, batch: Batch) -> Update:
        """Update from a minibatch in the policy phase: `[B]`, or `[T,n]` for recurrent networks."""
        policy, _ = forward_actor(self.net, batch)
        log_ratio = policy.log_prob(batch.action) - batch.logp
        entropy = policy.entropy().mean()
        policy_loss = ppo_clip_loss(log_ratio, batch.advantage, self.clip_range)
        grad_norm = self.actor_optimizer.step(policy_loss - self.entropy_coef * entropy)
        value_loss = self.value_loss(batch)
        self.critic_optimizer.step(value_loss)
        log_ratio = log_ratio.detach()
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "grad_norm": grad_norm}
        metrics |= {"kl": approx_kl(log_ratio), "clip_fraction": clip_fraction(log_ratio, self.clip_range)}
        return Update(metrics)

    def auxiliary_step(self, batch: Batch, old: ActorCritic) -> Update:
        """Update from a minibatch in the auxiliary phase; `old` is the network at its start."""
        with torch.no_grad():
            old_policy, _ = forward_actor(old, batch)
        policy, features = forward_actor(self.net, batch)
        auxiliary_loss = 0.5 * (self.auxiliary_head(features) - batch.returns).square().mean()
        clone_kl = old_policy.kl(policy).mean()
        self.actor_optimizer.step(auxiliary_loss + self.cfg.clone_coef * clone_kl)
        self.critic_optimizer.step(self.value_loss(batch))
        return Update({"auxiliary_loss": auxiliary_loss, "clone_kl": clone_kl})

    def update(self, batch: Batch) -> Update:
        reward = batch.reward
        if self.reward_scale is not None:
            reward = self.reward_scale(reward, batch.terminated | batch.truncated)
        data = add_advantages(self.net, batch, reward, self.cfg.gamma, self.cfg.gae_lambda)
        metrics = self.policy_phase(data.replace(advantage=normalize(data.advantage)))
        metrics["explained_variance"] = explained_variance(data.value, data.returns)
        metrics["value_mean"] = data.value.mean()
        names = [name for name in data.fields if name not in ("action", "logp", "value", "advantage")]
        self.rollouts.append(data.select(names).map(torch.clone))  # copied, because the next rollout overwrites them
        if len(self.rollouts) == self.cfg.policy_iterations:
            self.auxiliary_phase(Batch.cat(self.rollouts, dim=1))  # along N, so columns remain sequences
            self.rollouts = []
        self.net.update_norm(batch.obs)  # after the epochs, so ratios compare policies with equal statistics
        return Update({**metrics, "auxiliary_loss": self.auxiliary_loss, "clone_kl": self.clone_kl})

    def policy_phase(self, data: Batch) -> dict[str, Tensor]:
        updates = [
            self.gradient_step(minibatch)
            for _ in range(self.cfg.epochs)
            for minibatch in minibatches(data, self.cfg.minibatch_size, self.rng, self.net.recurrent)
        ]
        return mean_metrics(updates)

    def auxiliary_phase(self, data: Batch) -> None:
        old = copy.deepcopy(self.net)
        self.swap_moments()
        for _ in range(self.cfg.auxiliary_epochs):
            updates = [
                self.run_step(PPG.auxiliary_step, minibatch, {"old": old})  # not compiled, because `old` changes
                for minibatch in minibatches(data, self.cfg.minibatch_size, self.rng, self.net.recurrent)
            ]
        self.swap_moments()
        metrics = mean_metrics(updates)
        self.auxiliary_loss, self.clone_kl = metrics["auxiliary_loss"], metrics["clone_kl"]

    def swap_moments(self) -> None:
        """Swap the moments of Adam. In shared moments, the scale of value gradients would slow down the policy."""
        current = self.actor_optimizer.state_dict()
        self.actor_optimizer.load_state_dict({**self.other_moments, "skipped": current["skipped"]})
        self.other_moments = current

    def state_dict(self) -> dict[str, Any]:
        rollouts = [{name: getattr(rollout, name) for name in rollout.fields} for rollout in self.rollouts]
        return {**super().state_dict(), "rollouts": rollouts, "other_moments": self.other_moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.rollouts = [Batch(**fields).to(self.device) for fields in state["rollouts"]]
        self.other_moments = state["other_moments"]
