"""PPG (Cobbe et al., 2021).   policy phases: PPO;   auxiliary phase: L = ½ E[(V_aux - R)²] + β E[KL(π_old, π)]

Actor and critic have bodies of their own, so that neither loss disturbs the other. Every `policy_iterations` rollouts
an auxiliary phase goes over all states since the last one and teaches the actor's features the value through a head
that serves nothing else, while the KL holds the policy where it is; the critic learns further from the same returns.

Differs from the paper: actor and critic make equal numbers of passes in a policy phase (E_π = E_V = `epochs`), and
defaults suit short runs (the paper: `policy_iterations` 32, `epochs` 1, entropy 0.01, rewards normalised). Each phase
has moments of Adam of its own, as in the authors' code. Truncated episodes bootstrap.
"""

from __future__ import annotations

import copy
from typing import Annotated, Any

import torch
from torch import Tensor

from zhixing.algorithms import register
from zhixing.config import Finite, Fraction, Group, NonNegative, OnPolicyConfig, Positive, PositiveFloat
from zhixing.core.batch import Batch
from zhixing.core.learner import Gradients, Learner, Update
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.nets.actor_critic import ActorCritic, rollout_fields
from zhixing.nets.heads import ValueHead
from zhixing.nets.policies import ActorCriticPolicy
from zhixing.nets.rollouts import add_advantages, forward_actor, forward_critic
from zhixing.nets.torso import NetFactory, num_features
from zhixing.ops.normalize import RewardScaler, normalize
from zhixing.ops.policy_gradient import approx_kl, clip_fraction, explained_variance, minibatches, ppo_clip_loss


class PPGConfig(OnPolicyConfig):
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
    clip_range: PositiveFloat = 0.2
    """Clip range of the probability ratio."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
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


@register("ppg", "PPO with phases that teach the value to the actor's features")
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
        "auxiliary_loss",
        "clone_kl",
    )

    def __init__(
        self, cfg: PPGConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        with self.building():
            # separate bodies: a phase moves the actor on its own
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
        self.other_moments = self.actor_optimizer.state_dict()  # of the phase that isn't on
        self.reward_scale = RewardScaler(cfg.gamma, cfg.num_envs).to(self.device) if cfg.normalize_reward else None
        self.rollouts: list[Batch] = []  # since the last auxiliary phase
        self.auxiliary_loss = torch.zeros((), device=self.device)  # of the last auxiliary phase, told until the next
        self.clone_kl = torch.zeros((), device=self.device)

    @property
    def fields(self) -> dict[str, Tree]:
        return rollout_fields(self.policy)

    def value(self, obs: Tree) -> Tensor:
        return self.net(obs).value

    # --- losses; batches are minibatches of `prepare`'s data: [B], or [T,n] for recurrent networks ---

    def value_loss(self, batch: Batch) -> Tensor:
        return 0.5 * (forward_critic(self.net, batch) - batch.returns).square().mean()

    def gradients(self, batch: Batch) -> Gradients:
        """Of the policy phase."""
        policy, _ = forward_actor(self.net, batch)
        log_ratio = policy.log_prob(batch.action) - batch.logp
        entropy = policy.entropy().mean()
        policy_loss = ppo_clip_loss(log_ratio, batch.advantage, self.cfg.clip_range)
        value_loss = self.value_loss(batch)
        found = {
            "actor_optimizer": self.actor_optimizer.gradient(policy_loss - self.cfg.entropy_coef * entropy),
            "critic_optimizer": self.critic_optimizer.gradient(value_loss),
        }
        log_ratio = log_ratio.detach()
        metrics = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "kl": approx_kl(log_ratio),
            "clip_fraction": clip_fraction(log_ratio, self.cfg.clip_range),
        }
        return Gradients(found, metrics)

    def auxiliary_gradients(self, batch: Batch, old: ActorCritic) -> Gradients:
        """Of the auxiliary phase, which began with the network `old`."""
        with torch.no_grad():
            old_policy, _ = forward_actor(old, batch)
        policy, features = forward_actor(self.net, batch)
        auxiliary_loss = 0.5 * (self.auxiliary_head(features) - batch.returns).square().mean()
        clone_kl = old_policy.kl(policy).mean()
        found = {
            "actor_optimizer": self.actor_optimizer.gradient(auxiliary_loss + self.cfg.clone_coef * clone_kl),
            "critic_optimizer": self.critic_optimizer.gradient(self.value_loss(batch)),
        }
        return Gradients(found, {"auxiliary_loss": auxiliary_loss.detach(), "clone_kl": clone_kl.detach()})

    # --- the update ---

    def update(self, batch: Batch) -> Update:
        reward = batch.reward
        if self.reward_scale is not None:
            reward = self.reward_scale(reward, batch.terminated | batch.truncated)
        data = add_advantages(self.net, batch, reward, self.cfg.gamma, self.cfg.gae_lambda)
        metrics = self.policy_phase(data.replace(advantage=normalize(data.advantage)))
        metrics["explained_variance"] = explained_variance(data.value, data.returns)
        kept = [name for name in data.fields if name not in ("action", "logp", "value", "advantage")]
        self.rollouts.append(data.select(kept).map(torch.clone))  # the next rollout overwrites this one
        if len(self.rollouts) == self.cfg.policy_iterations:
            self.auxiliary_phase(Batch.cat(self.rollouts, dim=1))  # [T,N] each: side by side they stay sequences
            self.rollouts = []
        self.net.update_norm(batch.obs)  # after learning: the ratio compares policies under equal statistics
        return Update({**metrics, "auxiliary_loss": self.auxiliary_loss, "clone_kl": self.clone_kl})

    def policy_phase(self, data: Batch) -> dict[str, Tensor]:
        told = [
            self.descend(self.gradients, minibatch).metrics
            for _ in range(self.cfg.epochs)
            for minibatch in minibatches(data, self.cfg.minibatch_size, self.rng, self.net.recurrent)
        ]
        return {name: torch.stack([one[name] for one in told]).mean() for name in told[0]}

    def auxiliary_phase(self, data: Batch) -> None:
        old = copy.deepcopy(self.net)
        self.exchange_moments()
        for _ in range(self.cfg.auxiliary_epochs):
            told = [
                self.apply(self.auxiliary_gradients(minibatch, old)).metrics
                for minibatch in minibatches(data, self.cfg.minibatch_size, self.rng, self.net.recurrent)
            ]
        self.exchange_moments()
        self.auxiliary_loss = torch.stack([one["auxiliary_loss"] for one in told]).mean()
        self.clone_kl = torch.stack([one["clone_kl"] for one in told]).mean()

    def exchange_moments(self) -> None:
        """Gradients of values are of another size: in common moments they would slow the policy down for long."""
        present = self.actor_optimizer.state_dict()
        self.actor_optimizer.load_state_dict({**self.other_moments, "skipped": present["skipped"]})
        self.other_moments = present

    # --- what resuming needs besides networks and optimizers ---

    def state_dict(self) -> dict[str, Any]:
        rollouts = [{name: getattr(one, name) for name in one.fields} for one in self.rollouts]
        return {**super().state_dict(), "rollouts": rollouts, "other_moments": self.other_moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.rollouts = [Batch(**one).to(self.device) for one in state["rollouts"]]
        self.other_moments = state["other_moments"]
