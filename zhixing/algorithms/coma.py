"""COMA (Foerster et al., 2018).   A_a = Q(s, u) - Σ_u' π_a(u'|τ_a) Q(s, (u_-a, u')),   ∇ = E[Σ_a ∇ log π_a(u_a) A_a]

Each agent acts on its own observation. One critic returns the values of all actions of an agent, given the state, the
agent's observation and index, and the other agents' actions, so an agent's advantage is the effect of its own action.
The team's reward is the mean of its agents' rewards, which must not be opposed. Losses exclude agents that have left.
Differs from the paper: targets bootstrap from V = Σ_u' π_a(u') Q'(s, (u_-a, u')), averaged over the agents, instead of
from the Q' of one action, since all agents estimate the same value; after truncated episodes and at the end of the
rollout the other agents' actions are sampled from their policies; the target network is Polyak-averaged; the critic is
trained on random minibatches, and last actions aren't among its inputs; an entropy bonus maintains exploration, not a
lower bound on probabilities.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Annotated

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor, nn

from zhixing.algorithms import register
from zhixing.config import (
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
from zhixing.core.optimizer import TargetUpdater
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, flatten_time, tree_leaves, tree_map
from zhixing.errors import UserError
from zhixing.nets.actor_critic import episode_starts
from zhixing.nets.heads import policy_linear
from zhixing.nets.multi_agent import MultiAgentNet, global_state, global_state_space, make_critic
from zhixing.nets.multi_agent_policies import MultiAgentStochasticPolicy
from zhixing.nets.torso import NetFactory, hidden_fields
from zhixing.ops.distributions import Categorical, gather_actions
from zhixing.ops.policy_gradient import explained_variance, masked_mean, minibatches
from zhixing.ops.returns import gae, next_values, rollout_boundary
from zhixing.ops.team_reward import TeamRewardChecker


class COMAConfig(OnPolicyConfig, MultiAgentConfig, EntropyBonusConfig):
    algorithm: str = "coma"
    num_envs: Positive = 8
    rollout_steps: Positive = 16
    lr: PositiveFloat = 1e-3
    """Learning rate of the actors, which take one gradient step per rollout."""
    critic_lr: PositiveFloat | None = None
    """Learning rate of the critic; none uses lr."""
    critic_epochs: Positive = 4
    """Critic passes over each rollout before the actors' gradient step."""
    minibatch_size: Positive = 64
    """Time steps per critic minibatch, each with all agents of one environment."""
    tau: Fraction = 0.02
    """Polyak coefficient of the target critic."""
    td_lambda: Fraction = 0.8
    """Lambda of the critic's TD(lambda) targets; 0 is one-step."""
    entropy_coef: NonNegative = 0.01
    max_grad_norm: PositiveFloat | None = 10.0
    normalize_obs: bool = False
    """Normalize observations by their running mean and standard deviation."""
    eval_stochastic: Annotated[bool, Group.EVALUATION] = False
    """Sample actions in evaluations instead of taking the most likely."""


@register("coma", "multi-agent actor-critic with counterfactual advantages")
class COMA(Learner):
    settings = COMAConfig
    metrics = ("policy_loss", "critic_loss", "entropy", "explained_variance", "grad_norm")
    multi_agent = True
    policy: MultiAgentStochasticPolicy

    def __init__(
        self, cfg: COMAConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        if not isinstance(spaces.action, Discrete):
            raise UserError(
                f"{cfg.algorithm} needs Discrete actions, but this environment has {spaces.action}: use mappo"
            )
        super().__init__(cfg, spaces, device)
        self.cfg, self.team_reward = cfg, TeamRewardChecker(cfg.algorithm, spaces)
        state = global_state_space(spaces, cfg.algorithm)
        others = Box(0.0, 1.0, (spaces.num_agents * spaces.num_actions,), np.float32)  # the other agents' actions
        critic_obs = Dict({"obs": spaces.obs, "others": others, "state": state})
        policy_head = partial(policy_linear, outputs=spaces.num_actions)
        q_head = partial(nn.Linear, out_features=spaces.num_actions)
        settings = {"shared": cfg.share_weights, "normalize": cfg.normalize_obs, "orthogonal_init": True}
        with self.seeded_init():
            self.actor = MultiAgentNet(spaces, cfg.net, net, policy_head, last_action=cfg.last_action, **settings)
            self.critic = make_critic(spaces, critic_obs, cfg.net, q_head, **settings)
        self.actor.to(self.device)
        self.critic.to(self.device)
        self.policy = MultiAgentStochasticPolicy(spaces, self.actor, Categorical, cfg.eval_stochastic)
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)
        self.critic_optimizer = self.make_optimizer(
            self.critic.parameters(), cfg.critic_lr or cfg.lr, max_grad_norm=cfg.max_grad_norm
        )
        self.entropy_coef = self.make_coefficient("entropy_coef", cfg.entropy_coef, cfg.entropy_coef_schedule)
        self.target_critic = copy.deepcopy(self.critic)
        self.target_updater = TargetUpdater((self.target_critic, self.critic))

    @property
    def extra_fields(self) -> dict[str, Tree]:
        hidden = self.policy.initial_hidden(1)
        return {} if hidden is None else {"hidden": hidden_fields(hidden)}

    def policies(self, batch: Batch) -> Categorical:
        """Return the actors' distributions over a rollout `[T,N,A]`, under the current weights."""
        rnn_state, last_action = self.actor.split_hidden(batch.get("hidden"))
        start = None if rnn_state is None else tree_map(lambda leaf: leaf[0], rnn_state)
        out = self.actor.unroll(self.actor.build_inputs(batch.obs, last_action), start, episode_starts(batch))
        return Categorical(out, batch.get("mask"))

    def critic_obs(self, batch: Batch, action: Tensor, use_next: bool = False) -> dict[str, Tree]:
        """Return the critic's inputs for each agent, `[...,A,n]` each, without the agent's own action."""
        actions = self.actor.encode_action(action)
        if "alive" in batch:  # zero for agents that have left
            actions = actions * (batch.next_alive if use_next else batch.alive).unsqueeze(-1)
        not_self = (1.0 - self.actor.agent_ids).unsqueeze(-1)
        others = (actions.unsqueeze(-3) * not_self).flatten(-2)
        state = global_state(batch, self.spaces, use_next).unsqueeze(-2)
        obs = batch.next_obs if use_next else batch.obs
        return {"obs": obs, "others": others, "state": state.expand(*others.shape[:-1], -1)}

    def q_values(self, critic: MultiAgentNet, critic_obs: Tree) -> Tensor:
        """Return the values of all actions of each agent, `[B,A,n]`."""
        return critic(critic.build_inputs(critic_obs, None))[0]

    def bootstrap_values(self, batch: Batch) -> Tensor:
        """Return the values of the states after the steps `[B]`."""
        _, rnn_state = self.policy.run_net(batch.obs, batch.get("hidden"))
        out, _ = self.policy.run_net(batch.next_obs, self.policy.next_hidden(rnn_state, batch.action))
        policy = Categorical(out, batch.get("next_mask"))
        critic_obs = self.critic_obs(batch, policy.sample(self.rng), use_next=True)
        q = self.q_values(self.target_critic, critic_obs)
        return team_value(q, policy, batch.get("next_alive"))

    @torch.no_grad()
    def add_returns(self, batch: Batch) -> Batch:
        """Return the critic's inputs and targets for a rollout `[T,N]`."""
        critic_obs = self.critic_obs(batch, batch.action)
        q = self.q_values(self.target_critic, flatten_time(critic_obs)).unflatten(0, batch.terminated.shape)
        value = team_value(q, self.policies(batch), batch.get("alive"))  # [T,N]
        boundary = rollout_boundary(batch)
        next_value = next_values(value, boundary, self.bootstrap_values(batch[boundary]))
        ends = batch.terminated, batch.truncated
        returns = value + gae(batch.reward.mean(-1), value, next_value, *ends, self.cfg.gamma, self.cfg.td_lambda)
        fields = {name: getattr(batch, name) for name in ("action", "alive") if name in batch}
        return Batch(**fields, critic_obs=critic_obs, value=value, returns=returns)

    @train_step
    def critic_step(self, batch: Batch) -> Update:
        """Update the critic from a minibatch `[B]`."""
        q = gather_actions(self.q_values(self.critic, batch.critic_obs), batch.action)  # [B,A]
        loss = masked_mean((q - batch.returns.unsqueeze(-1)).square(), batch.get("alive"))
        self.critic_optimizer.step(loss)
        self.target_updater.polyak_update(self.cfg.tau)
        return Update({"critic_loss": loss})

    @train_step
    def actor_step(self, batch: Batch) -> Update:
        """Update the actors from a rollout `[T,N]`."""
        policy, alive = self.policies(batch), batch.get("alive")
        with torch.no_grad():
            q = self.q_values(self.critic, flatten_time(self.critic_obs(batch, batch.action)))
            advantage = counterfactual_advantage(q.unflatten(0, batch.terminated.shape), policy, batch.action)
        policy_loss = -masked_mean(policy.log_prob(batch.action) * advantage, alive)
        entropy = masked_mean(policy.entropy(), alive)
        grad_norm = self.actor_optimizer.step(policy_loss - self.entropy_coef * entropy)
        return Update({"policy_loss": policy_loss, "entropy": entropy, "grad_norm": grad_norm})

    def update(self, batch: Batch) -> Update:
        self.team_reward.check(batch.reward)
        data = self.add_returns(batch)
        critic_updates = [
            self.critic_step(minibatch)
            for _ in range(self.cfg.critic_epochs)
            for minibatch in minibatches(data, self.cfg.minibatch_size, self.rng)
        ]
        update = self.actor_step(batch)  # uses the critic just updated
        self.actor.update_norm(batch.obs)
        for net in (self.critic, self.target_critic):
            net.update_norm(data.critic_obs)
        metrics = {**mean_metrics(critic_updates), **update.metrics}
        return Update({**metrics, "explained_variance": explained_variance(data.value, data.returns)})

    def value(self, obs: Tree) -> Tensor | None:
        """Return the value of first observations `[B,A,...]` if the other agents take their most likely actions."""
        if self.spaces.state is not None:
            return None  # the critic needs the state
        hidden = self.policy.initial_hidden(len(tree_leaves(obs)[0]))
        policy = Categorical(self.policy.run_net(obs, hidden)[0])
        return team_value(self.q_values(self.critic, self.critic_obs(Batch(obs=obs), policy.mode())), policy)


def expected_q(q: Tensor, policy: Categorical) -> Tensor:
    """Return Σ_u' π_a(u') Q(s, (u_-a, u')) `[...,A]`: the baseline of each agent, given the others' actions."""
    return (policy.logp.detach().exp() * q).sum(-1)


def counterfactual_advantage(q: Tensor, policy: Categorical, action: Tensor) -> Tensor:
    """Return the value of each agent's action minus its baseline, `[...,A]`."""
    return gather_actions(q, action) - expected_q(q, policy)


def team_value(q: Tensor, policy: Categorical, alive: Tensor | None = None) -> Tensor:
    """Return the mean of the agents' estimates, only of those alive if given, `[...]`."""
    value = expected_q(q, policy)
    return value.mean(-1) if alive is None else (value * alive).sum(-1) / alive.sum(-1).clamp_min(1)
