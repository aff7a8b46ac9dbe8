"""MAPPO (Yu et al., 2022).   L = E[min(r A, clip(r, 1 - ε, 1 + ε) A)] per agent,   A by GAE with V(s, agent)

Multi-agent PPO: each agent acts on its own observation, and the input of the critic is the global state. In IPPO (de
Witt et al., 2020) it is the agent's observation. Losses exclude agents that have left. A shared reward counts in an
agent's return until the episode ends, as in the authors' code; individual rewards end when the agent leaves.
Differs from the papers: the critic isn't recurrent, even if actors are; value targets are normalized by the running
mean and standard deviation of all returns; the value loss is the squared error, neither clipped nor Huber; with a
shared reward, the value of an agent that has left is the mean of the others' values.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from zhixing.algorithms import register
from zhixing.config import (
    ClipRangeConfig,
    EntropyBonusConfig,
    Fraction,
    Group,
    MultiAgentConfig,
    NonNegative,
    OnPolicyConfig,
    Positive,
    PositiveFloat,
)
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, mean_metrics, train_step
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field, Tree, flatten_time, tree_map
from zhixing.nets.actor_critic import episode_starts
from zhixing.nets.heads import ActionDistribution, ValueHead, policy_linear
from zhixing.nets.multi_agent import MultiAgentNet, global_state, global_state_space, make_critic
from zhixing.nets.multi_agent_policies import MultiAgentStochasticPolicy
from zhixing.nets.torso import NetFactory, hidden_fields
from zhixing.ops.normalize import RunningNorm, normalize
from zhixing.ops.policy_gradient import (
    approx_kl,
    clip_fraction,
    explained_variance,
    masked_mean,
    minibatches,
    ppo_clip_loss,
)
from zhixing.ops.returns import gae, next_values, rollout_boundary


class MAPPOConfig(OnPolicyConfig, MultiAgentConfig, ClipRangeConfig, EntropyBonusConfig):
    algorithm: str = "mappo"
    lr: PositiveFloat = 5e-4
    critic_lr: PositiveFloat | None = None
    """Learning rate of the critic; none uses lr."""
    optimizer_eps: PositiveFloat = 1e-5
    epochs: Positive = 10
    """Passes over each rollout."""
    minibatch_size: Positive = 1024
    """Time steps per minibatch, each with all agents of one environment."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalized advantage estimation."""
    entropy_coef: NonNegative = 0.01
    normalize_value: bool = True
    """Normalize value targets by the running mean and standard deviation of returns."""
    normalize_advantage: bool = True
    """Normalize advantages to zero mean and unit standard deviation per minibatch."""
    normalize_obs: bool = False
    """Normalize observations by their running mean and standard deviation."""
    eval_stochastic: Annotated[bool, Group.EVALUATION] = False
    """Sample actions in evaluations instead of taking the most likely."""


class IPPOConfig(MAPPOConfig):
    algorithm: str = "ippo"


@register("mappo", "multi-agent PPO with a centralized critic on the global state")
@register("ippo", "independent PPO: each agent has a critic on its own observation", IPPOConfig, central=False)
class MAPPO(Learner):
    settings = MAPPOConfig
    metrics = (
        *("policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "explained_variance"),
        *("grad_norm", "value_mean"),
    )
    multi_agent = True

    def __init__(
        self,
        cfg: MAPPOConfig,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        net: NetFactory | None = None,
        *,
        central: bool = True,
    ) -> None:
        super().__init__(cfg, spaces, device)
        self.cfg, self.central = cfg, central
        critic_obs = global_state_space(spaces, cfg.algorithm) if central else spaces.obs
        settings = {"shared": cfg.share_weights, "normalize": cfg.normalize_obs, "orthogonal_init": True}
        with self.seeded_init():
            self.distribution = ActionDistribution(spaces, batch_shape=spaces.agents if not cfg.share_weights else ())
            policy_head = partial(policy_linear, outputs=self.distribution.outputs)
            self.actor = MultiAgentNet(spaces, cfg.net, net, policy_head, last_action=cfg.last_action, **settings)
            self.critic = make_critic(spaces, critic_obs, cfg.net, ValueHead, **settings)
        nn.ModuleList([self.distribution, self.actor, self.critic]).to(self.device)
        self.policy = MultiAgentStochasticPolicy(spaces, self.actor, self.distribution, cfg.eval_stochastic)
        clip = {"max_grad_norm": cfg.max_grad_norm}
        actor_parameters = [*self.actor.parameters(), *self.distribution.parameters()]
        self.actor_optimizer = self.make_optimizer(actor_parameters, cfg.lr, **clip)
        self.critic_optimizer = self.make_optimizer(self.critic.parameters(), cfg.critic_lr or cfg.lr, **clip)
        self.clip_range = self.make_coefficient("clip_range", cfg.clip_range, cfg.clip_range_schedule)
        self.entropy_coef = self.make_coefficient("entropy_coef", cfg.entropy_coef, cfg.entropy_coef_schedule)
        self.value_norm = RunningNorm(()).to(self.device) if cfg.normalize_value else None

    @property
    def extra_fields(self) -> dict[str, Tree]:
        hidden = self.policy.initial_hidden(1)
        logp: dict[str, Tree] = {"logp": Field(self.spaces.agents, np.dtype(np.float32))}
        return logp if hidden is None else logp | {"hidden": hidden_fields(hidden)}

    def critic_obs(self, batch: Batch, use_next: bool = False) -> Tensor:
        """Return the critic's inputs `[...,A,n]`: the state for each agent, or the agents' observations."""
        if not self.central:
            return batch.next_obs if use_next else batch.obs
        state = global_state(batch, self.spaces, use_next)
        return state.unsqueeze(-2).expand(*state.shape[:-1], self.spaces.num_agents, -1)

    def values(self, critic_obs: Tree) -> Tensor:
        """Return the value of each agent, `[B,A]`."""
        value = self.critic(self.critic.build_inputs(critic_obs, None))[0]
        return value if self.value_norm is None else self.value_norm.inverse(value)

    def _replace_dead(self, value: Tensor, alive: Tensor) -> Tensor:
        """Replace the untrained values `[...,A]` of agents that have left.

        They become the mean of the others' values if the reward is shared, else zero.
        """
        if self.spaces.individual_termination:
            return value * alive
        mean = (value * alive).sum(-1, keepdim=True) / alive.sum(-1, keepdim=True).clamp_min(1)
        return torch.where(alive, value, mean)

    @torch.no_grad()
    def add_advantages(self, batch: Batch) -> Batch:
        """Return a rollout `[T,N]` with each agent's advantages and returns."""
        critic_obs, boundary, reward = self.critic_obs(batch), rollout_boundary(batch), batch.reward
        value = self.values(flatten_time(critic_obs)).unflatten(0, batch.terminated.shape)  # [T,N,A]
        boundary_value = self.values(tree_map(lambda leaf: leaf[boundary], self.critic_obs(batch, use_next=True)))
        if "alive" in batch:
            value = self._replace_dead(value, batch.alive)
            boundary_value = self._replace_dead(boundary_value, batch.next_alive[boundary])
            reward = reward * batch.alive if self.spaces.individual_termination else reward
        next_value = next_values(value, boundary.unsqueeze(-1).expand_as(value), boundary_value)
        ends = batch.terminated.unsqueeze(-1), batch.truncated.unsqueeze(-1)
        advantage = gae(reward, value, next_value, *ends, self.cfg.gamma, self.cfg.gae_lambda)
        fields = {n: getattr(batch, n) for n in ("obs", "action", "logp", "mask", "alive", "hidden") if n in batch}
        if self.actor.recurrent:
            fields["is_first"] = episode_starts(batch)
        return Batch(**fields, critic_obs=critic_obs, advantage=advantage, value=value, returns=advantage + value)

    def value(self, obs: Tree) -> Tensor | None:
        if self.central and self.spaces.state is not None:
            return None  # the critic needs the state
        return self.values(self.critic_obs(Batch(obs=obs)))

    def evaluate_actions(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the batch's actions and the entropies: `[B,A]`, or `[T,n,A]` if recurrent."""
        rnn_state, last_action = self.actor.split_hidden(batch.get("hidden"))
        inputs = self.actor.build_inputs(batch.obs, last_action)
        if self.actor.recurrent:
            out = self.actor.unroll(inputs, tree_map(lambda leaf: leaf[0], rnn_state), batch.is_first)
        else:
            out = self.actor(inputs)[0]
        policy = self.distribution(out, batch.get("mask"))
        return policy.log_prob(batch.action), policy.entropy()

    def value_loss(self, batch: Batch, mask: Tensor | None) -> Tensor:
        inputs = self.critic.build_inputs(batch.critic_obs, None)
        value = self.critic.unroll(inputs, None, batch.is_first) if "is_first" in batch else self.critic(inputs)[0]
        target = batch.returns if self.value_norm is None else self.value_norm(batch.returns)
        return masked_mean((value - target).square(), mask)

    @train_step
    def gradient_step(self, batch: Batch) -> Update:
        """Update from a minibatch: `[B]`, or `[T,n]` for recurrent networks."""
        mask = batch.get("alive")
        logp, entropies = self.evaluate_actions(batch)
        advantage = normalize(batch.advantage, mask) if self.cfg.normalize_advantage else batch.advantage
        log_ratio = logp - batch.logp
        policy_loss = ppo_clip_loss(log_ratio, advantage, self.clip_range, mask)
        entropy = masked_mean(entropies, mask)
        grad_norm = self.actor_optimizer.step(policy_loss - self.entropy_coef * entropy)
        value_loss = self.value_loss(batch, mask)
        self.critic_optimizer.step(value_loss)
        log_ratio, clip_range = log_ratio.detach(), self.clip_range
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "grad_norm": grad_norm}
        metrics |= {"kl": approx_kl(log_ratio, mask), "clip_fraction": clip_fraction(log_ratio, clip_range, mask)}
        return Update(metrics)

    def update(self, batch: Batch) -> Update:
        data = self.add_advantages(batch)
        alive = batch.alive if "alive" in batch else torch.ones_like(data.returns, dtype=torch.bool)
        if self.value_norm is not None:
            self.value_norm.update(data.returns[alive])
        updates = [
            self.gradient_step(minibatch)
            for _ in range(self.cfg.epochs)
            for minibatch in minibatches(data, self.cfg.minibatch_size, self.rng, self.actor.recurrent)
        ]
        # after the epochs, so ratios compare policies with equal statistics
        self.actor.update_norm(tree_map(lambda leaf: leaf[alive], batch.obs))
        self.critic.update_norm(tree_map(lambda leaf: leaf[alive], data.critic_obs))
        metrics = mean_metrics(updates)
        metrics["explained_variance"] = explained_variance(data.value[alive], data.returns[alive])
        metrics["value_mean"] = data.value[alive].mean()
        return Update(metrics)
