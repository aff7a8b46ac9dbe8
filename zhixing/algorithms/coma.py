"""COMA (Foerster et al., 2018).   A_a = Q(s, u) - Σ_u' π_a(u'|τ_a) Q(s, (u_-a, u')),   ∇ = E[Σ_a ∇ log π_a(u_a) A_a]

Each agent acts on its own observation. One critic returns the values of all actions of an agent, given the state, the
agent's observation and id, and the other agents' actions, so an agent's advantage is the effect of its own action. The
team's reward is the mean of its agents' rewards, which must not be opposed. No loss counts agents that have left.
Differs from the paper: targets bootstrap from V = Σ_u' π_a(u') Q'(s, (u_-a, u')), averaged over the agents, instead of
from the Q' of one action, since all of them estimate the same; after truncated episodes and at the end of the rollout
the other agents' actions are sampled from their policies; the target network is Polyak-averaged; the critic is trained
on random minibatches and doesn't see last actions; the entropy bonus keeps up exploration, not a minimum probability.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Annotated

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor, nn

from zhixing.algorithms import register
from zhixing.algorithms.common.team_policy import TeamSampledPolicy
from zhixing.config import (
    Fraction,
    Group,
    MultiAgentConfig,
    NetConfig,
    NonNegative,
    OnPolicyConfig,
    Positive,
    PositiveFloat,
)
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, mean_metrics, train_step
from zhixing.core.optimizer import TargetUpdater
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_leaves, tree_map
from zhixing.errors import UserError
from zhixing.nets.actor_critic import episode_starts
from zhixing.nets.mlp import init_orthogonal
from zhixing.nets.multi_agent import MultiAgentNet, global_state, global_state_size
from zhixing.nets.torso import NetFactory, hidden_fields
from zhixing.ops.distributions import Categorical
from zhixing.ops.policy_gradient import explained_variance, masked_mean, minibatches
from zhixing.ops.returns import gae, next_values
from zhixing.ops.team_reward import TeamRewardChecker


class COMAConfig(OnPolicyConfig, MultiAgentConfig):
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
    """Weight of the entropy bonus."""
    max_grad_norm: PositiveFloat | None = 10.0
    normalize_obs: bool = False
    """Normalize observations by their running mean and standard deviation."""
    eval_stochastic: Annotated[bool, Group.EVALUATION] = False
    """Sample actions in evaluations instead of taking the most likely."""
    net: NetConfig = NetConfig(hidden_sizes=[64, 64], activation="tanh")


@register("coma", "multi-agent actor-critic with counterfactual advantages")
class COMA(Learner):
    settings = COMAConfig
    metrics = ("policy_loss", "critic_loss", "entropy", "explained_variance", "grad_norm")
    multi_agent = True

    def __init__(
        self, cfg: COMAConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        if not isinstance(spaces.action, Discrete):
            raise UserError(
                f"{cfg.algorithm} needs Discrete actions, but this environment has {spaces.action}: use mappo"
            )
        super().__init__(cfg, spaces, device)
        self.cfg, self.team_reward = cfg, TeamRewardChecker(cfg.algorithm, spaces)
        joint = Box(0.0, 1.0, (spaces.num_agents * spaces.num_actions,), np.float32)
        state = Box(-np.inf, np.inf, (global_state_size(spaces, cfg.algorithm),), np.float32)
        judged = dataclasses.replace(spaces, obs=Dict({"obs": spaces.obs, "others": joint, "state": state}))
        settings = {"shared": cfg.share_weights, "normalize": cfg.normalize_obs, "orthogonal_init": True}
        with self.seeded_init():
            self.actor = MultiAgentNet(spaces, cfg.net, net, self._policy_head, last_action=cfg.last_action, **settings)
            critic_net = cfg.net.model_copy(update={"recurrent": "none", "kind": "auto"})
            self.critic = MultiAgentNet(judged, critic_net, None, self._value_head, **settings)
        self.actor.to(self.device)
        self.critic.to(self.device)
        self.policy = TeamSampledPolicy(spaces, self.actor, Categorical, cfg.eval_stochastic)
        self.actor_optimizer = self.make_optimizer(self.actor.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)
        self.critic_optimizer = self.make_optimizer(
            self.critic.parameters(), cfg.critic_lr or cfg.lr, max_grad_norm=cfg.max_grad_norm
        )
        self.target_critic = copy.deepcopy(self.critic)
        self.target_updater = TargetUpdater((self.target_critic, self.critic))

    def _policy_head(self, features: int) -> nn.Linear:
        linear = nn.Linear(features, self.spaces.num_actions)
        init_orthogonal(linear, 0.01)  # nearly uniform at the start
        return linear

    def _value_head(self, features: int) -> nn.Linear:
        return nn.Linear(features, self.spaces.num_actions)

    @property
    def extra_fields(self) -> dict[str, Tree]:
        hidden = self.policy.initial_hidden(1)
        return {} if hidden is None else {"hidden": hidden_fields(hidden)}

    def policies(self, batch: Batch) -> Categorical:
        """Return the actors' distributions over a rollout `[T,N,A]`, under the current weights."""
        hidden, last_action = self.actor.split_hidden(batch.hidden if "hidden" in batch else None)
        start = None if hidden is None else tree_map(lambda leaf: leaf[0], hidden)
        out = self.actor.unroll(self.actor.build_inputs(batch.obs, last_action), start, episode_starts(batch))
        return Categorical(out, batch.mask if "mask" in batch else None)

    def critic_obs(self, batch: Batch, action: Tensor, use_next: bool = False) -> dict[str, Tree]:
        """Return the critic's inputs for each agent, `[...,A,n]` each: never that agent's own action."""
        actions = self.actor.encode_action(action)
        if "alive" in batch:  # agents that have left do nothing
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
        """Return the team's values `[B]` of the states after the steps `[B]`."""
        hidden, last_action = self.actor.split_hidden(batch.hidden if "hidden" in batch else None)
        _, hidden = self.actor(self.actor.build_inputs(batch.obs, last_action), hidden)
        out, _ = self.actor(self.actor.build_inputs(batch.next_obs, self.actor.encode_action(batch.action)), hidden)
        policy = Categorical(out, batch.next_mask if "mask" in batch else None)
        critic_obs = self.critic_obs(batch, policy.sample(self.rng), use_next=True)
        q = self.q_values(self.target_critic, critic_obs)
        return team_value(q, policy, batch.next_alive if "alive" in batch else None)

    @torch.no_grad()
    def add_returns(self, batch: Batch) -> Batch:
        """Return the critic's inputs and targets for a rollout `[T,N]`."""
        critic_obs = self.critic_obs(batch, batch.action)
        q = self.q_values(self.target_critic, _flatten_time(critic_obs)).unflatten(0, batch.terminated.shape)
        value = team_value(q, self.policies(batch), batch.alive if "alive" in batch else None)  # [T,N]
        boundary = batch.terminated | batch.truncated
        boundary[-1] = True
        next_value = next_values(value, boundary, self.bootstrap_values(batch[boundary]))
        ends = batch.terminated, batch.truncated
        returns = value + gae(batch.reward.mean(-1), value, next_value, *ends, self.cfg.gamma, self.cfg.td_lambda)
        fields = {name: getattr(batch, name) for name in ("action", "alive") if name in batch}
        return Batch(**fields, critic_obs=critic_obs, value=value, returns=returns)

    @train_step
    def critic_step(self, batch: Batch) -> Update:
        """Update the critic from a minibatch `[B]`."""
        q = self.q_values(self.critic, batch.critic_obs).gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)  # [B,A]
        loss = masked_mean((q - batch.returns.unsqueeze(-1)).square(), _alive_mask(batch))
        self.critic_optimizer.step(loss)
        self.target_updater.polyak_update(self.cfg.tau)
        return Update({"critic_loss": loss})

    @train_step
    def actor_step(self, batch: Batch) -> Update:
        """Update the actors from a rollout `[T,N]`."""
        policy, mask = self.policies(batch), _alive_mask(batch)
        with torch.no_grad():
            q = self.q_values(self.critic, _flatten_time(self.critic_obs(batch, batch.action)))
            advantage = counterfactual_advantage(q.unflatten(0, batch.terminated.shape), policy, batch.action)
        policy_loss = -masked_mean(policy.log_prob(batch.action) * advantage, mask)
        entropy = masked_mean(policy.entropy(), mask)
        grad_norm = self.actor_optimizer.step(policy_loss - self.cfg.entropy_coef * entropy)
        return Update({"policy_loss": policy_loss, "entropy": entropy, "grad_norm": grad_norm})

    def update(self, batch: Batch) -> Update:
        self.team_reward.check(batch.reward)
        data = self.add_returns(batch)
        critic_updates = [
            self.critic_step(minibatch)
            for _ in range(self.cfg.critic_epochs)
            for minibatch in minibatches(data, self.cfg.minibatch_size, self.rng)
        ]
        update = self.actor_step(batch)  # sees the critic just updated
        self.actor.update_norm(batch.obs)
        for net in (self.critic, self.target_critic):
            net.update_norm(data.critic_obs)
        metrics = {**mean_metrics(critic_updates), **update.metrics}
        return Update({**metrics, "explained_variance": explained_variance(data.value, data.returns)})

    def value(self, obs: Tree) -> Tensor | None:
        """Return the value of first observations `[B,A,...]` if the other agents take their most likely actions."""
        if self.spaces.state is not None:
            return None  # the critic needs the state
        hidden, last_action = self.actor.split_hidden(self.actor.initial_hidden(len(tree_leaves(obs)[0])))
        policy = Categorical(self.actor(self.actor.build_inputs(obs, last_action), hidden)[0])
        return team_value(self.q_values(self.critic, self.critic_obs(Batch(obs=obs), policy.mode())), policy)


def expected_q(q: Tensor, policy: Categorical) -> Tensor:
    """Return Σ_u' π_a(u') Q(s, (u_-a, u')) `[...,A]`: the baseline of each agent, given the others' actions."""
    return (policy.logp.detach().exp() * q).sum(-1)


def counterfactual_advantage(q: Tensor, policy: Categorical, action: Tensor) -> Tensor:
    """Return the value of each agent's action minus its baseline, `[...,A]`."""
    return q.gather(-1, action.unsqueeze(-1)).squeeze(-1) - expected_q(q, policy)


def team_value(q: Tensor, policy: Categorical, alive: Tensor | None = None) -> Tensor:
    """Return the mean of the agents' estimates, only of those alive if given, `[...]`."""
    value = expected_q(q, policy)
    return value.mean(-1) if alive is None else (value * alive).sum(-1) / alive.sum(-1).clamp_min(1)


def _alive_mask(batch: Batch) -> Tensor | None:
    return batch.alive.float() if "alive" in batch else None


def _flatten_time(tree: Tree) -> Tree:
    return tree_map(lambda leaf: leaf.flatten(0, 1), tree)
