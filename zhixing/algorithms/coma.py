"""COMA (Foerster et al., 2018).   A_a = Q(s, u) - Σ_u' π_a(u'|τ_a) Q(s, (u_-a, u')),   ∇ = E[Σ_a ∇ log π_a(u_a) A_a]

Each agent acts by what it sees itself. One critic gives the value of all of an agent's actions at once, of the state,
that agent's observation and number, and the others' actions: an agent's advantage is what its own action changed. The
team's reward is the mean of its agents', who must not be opposed. An agent that has left counts in no loss.
Differs from the paper: targets bootstrap from V = Σ_u' π_a(u') Q'(s, (u_-a, u')), averaged over the agents, in place
of one taken action's Q', for all of them estimate the same; beyond a cut episode or rollout the others' actions are
drawn from their policies; the target network follows slowly; the critic takes random minibatches and isn't shown last
actions; exploration is kept up by the entropy, not by a floor of the chances.
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
from zhixing.core.learner import Gradients, Learner, Update
from zhixing.core.optimizer import Average
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
    """Learning rate of the critic; none is lr."""
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


@register("coma", "actor-critic of a team, each agent judged by what its own action changed")
class COMA(Learner):
    settings = COMAConfig
    metrics = ("policy_loss", "critic_loss", "entropy", "explained_variance", "grad_norm")
    many_agents = True

    def __init__(
        self, cfg: COMAConfig, spaces: Spaces, device: torch.device | str = "cpu", net: NetFactory | None = None
    ) -> None:
        if not isinstance(spaces.action, Discrete):
            raise UserError(f"{cfg.algorithm} needs Discrete actions, this task has {spaces.action} (there is mappo)")
        super().__init__(cfg, spaces, device)
        self.cfg, self.team_reward = cfg, TeamRewardChecker(cfg.algorithm, spaces)
        joint = Box(0.0, 1.0, (spaces.num_agents * spaces.num_actions,), np.float32)
        state = Box(-np.inf, np.inf, (global_state_size(spaces, cfg.algorithm),), np.float32)
        judged = dataclasses.replace(spaces, obs=Dict({"obs": spaces.obs, "others": joint, "state": state}))
        settings = {"shared": cfg.share_weights, "normalize": cfg.normalize_obs, "orthogonal_init": True}
        with self.building():
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
        self.target = copy.deepcopy(self.critic)
        self.follow = Average(self.target, self.critic)

    def _policy_head(self, features: int) -> nn.Linear:
        linear = nn.Linear(features, self.spaces.num_actions)
        init_orthogonal(linear, 0.01)  # nearly equal chances at the start
        return linear

    def _value_head(self, features: int) -> nn.Linear:
        return nn.Linear(features, self.spaces.num_actions)

    @property
    def fields(self) -> dict[str, Tree]:
        hidden = self.policy.initial_hidden(1)
        return {} if hidden is None else {"hidden": hidden_fields(hidden)}

    # --- actors and critic ---

    def decisions(self, batch: Batch) -> Categorical:
        """The actors' chances under the present weights, over a rollout `[T,N,A]`."""
        memory, last_action = self.actor.split_hidden(batch.hidden if "hidden" in batch else None)
        start = None if memory is None else tree_map(lambda leaf: leaf[0], memory)
        out = self.actor.unroll(self.actor.build_inputs(batch.obs, last_action), start, episode_starts(batch))
        return Categorical(out, batch.mask if "mask" in batch else None)

    def seen(self, batch: Batch, action: Tensor, following: bool = False) -> dict[str, Tree]:
        """What the critic sees for each agent, `[...,A,n]` each: never that agent's own action."""
        done = self.actor.encode_action(action)
        if "alive" in batch:  # those who have left do nothing
            done = done * (batch.next_alive if following else batch.alive).unsqueeze(-1)
        others = (done.unsqueeze(-3) * (1.0 - self.actor.agent_ids).unsqueeze(-1)).flatten(
            -2
        )  # all but the agent itself
        state = global_state(batch, self.spaces, following).unsqueeze(-2)
        obs = batch.next_obs if following else batch.obs
        return {"obs": obs, "others": others, "state": state.expand(*others.shape[:-1], -1)}

    def values_after(self, batch: Batch) -> Tensor:
        """The team's values `[B]` of what the steps `[B]` led to."""
        memory, last_action = self.actor.split_hidden(batch.hidden if "hidden" in batch else None)
        _, memory = self.actor(self.actor.build_inputs(batch.obs, last_action), memory)
        out, _ = self.actor(self.actor.build_inputs(batch.next_obs, self.actor.encode_action(batch.action)), memory)
        policy = Categorical(out, batch.next_mask if "mask" in batch else None)
        q = _judge(self.target, self.seen(batch, policy.sample(self.rng), following=True))
        return team_value(q, policy, batch.next_alive if "alive" in batch else None)

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Batch:
        """What the critic sees of a rollout `[T,N]`, and the returns that it should have foretold."""
        seen = self.seen(batch, batch.action)
        q = _judge(self.target, _rows(seen)).unflatten(0, batch.terminated.shape)
        value = team_value(q, self.decisions(batch), batch.alive if "alive" in batch else None)  # [T,N]
        boundary = batch.terminated | batch.truncated
        boundary[-1] = True
        next_value = next_values(value, boundary, self.values_after(batch[boundary]))
        ends = batch.terminated, batch.truncated
        returns = value + gae(batch.reward.mean(-1), value, next_value, *ends, self.cfg.gamma, self.cfg.td_lambda)
        kept = {name: getattr(batch, name) for name in ("action", "alive") if name in batch}
        return Batch(**kept, seen=seen, value=value, returns=returns)

    # --- losses ---

    def critic_gradients(self, batch: Batch) -> Gradients:
        """Of a minibatch `[B]` of `prepare`'s data."""
        q = _judge(self.critic, batch.seen).gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)  # [B,A]
        loss = masked_mean((q - batch.returns.unsqueeze(-1)).square(), _counted(batch))
        return Gradients({"critic_optimizer": self.critic_optimizer.gradient(loss)}, {"critic_loss": loss.detach()})

    def gradients(self, batch: Batch) -> Gradients:
        """Of the actors, of a rollout `[T,N]`."""
        policy, counted = self.decisions(batch), _counted(batch)
        with torch.no_grad():
            q = _judge(self.critic, _rows(self.seen(batch, batch.action))).unflatten(0, batch.terminated.shape)
            advantage = counterfactual(q, policy, batch.action)
        policy_loss = -masked_mean(policy.log_prob(batch.action) * advantage, counted)
        entropy = masked_mean(policy.entropy(), counted)
        gradient = self.actor_optimizer.gradient(policy_loss - self.cfg.entropy_coef * entropy)
        metrics = {"policy_loss": policy_loss.detach(), "entropy": entropy.detach()}
        return Gradients({"actor_optimizer": gradient}, metrics)

    # --- the update ---

    def update(self, batch: Batch) -> Update:
        self.team_reward.check(batch.reward)
        data = self.prepare(batch)
        told = [
            self.descend(self.critic_gradients, part).metrics["critic_loss"]
            for _ in range(self.cfg.critic_epochs)
            for part in minibatches(data, self.cfg.minibatch_size, self.rng)
        ]
        metrics = self.descend(self.gradients, batch).metrics
        self.actor.update_norm(batch.obs)
        for net in (self.critic, self.target):
            net.update_norm(data.seen)
        more = {
            "critic_loss": torch.stack(told).mean(),
            "explained_variance": explained_variance(data.value, data.returns),
        }
        return Update({**metrics, **more})

    def after_step(self) -> None:
        self.follow.move(self.cfg.tau)

    def value(self, obs: Tree) -> Tensor | None:
        """Of first observations `[B,A,...]`, the others doing their likeliest."""
        if self.spaces.state is not None:
            return None  # of the state, which observations don't tell
        memory, last_action = self.actor.split_hidden(self.actor.initial_hidden(len(tree_leaves(obs)[0])))
        policy = Categorical(self.actor(self.actor.build_inputs(obs, last_action), memory)[0])
        return team_value(_judge(self.critic, self.seen(Batch(obs=obs), policy.mode())), policy)


def own_value(q: Tensor, policy: Categorical) -> Tensor:
    """Σ_u' π_a(u') Q(s, (u_-a, u')), `[...,A]`: each agent acting as it usually does, the others as they did."""
    return (policy.logp.detach().exp() * q).sum(-1)


def counterfactual(q: Tensor, policy: Categorical, action: Tensor) -> Tensor:
    """What each agent's action changed, `[...,A]`."""
    return q.gather(-1, action.unsqueeze(-1)).squeeze(-1) - own_value(q, policy)


def team_value(q: Tensor, policy: Categorical, alive: Tensor | None = None) -> Tensor:
    """The mean of the agents' estimates, or of those that are there, `[...]`."""
    value = own_value(q, policy)
    return value.mean(-1) if alive is None else (value * alive).sum(-1) / alive.sum(-1).clamp_min(1)


def _judge(critic: MultiAgentNet, seen: Tree) -> Tensor:
    """The values of all actions of each agent, `[B,A,n]`."""
    return critic(critic.build_inputs(seen, None))[0]


def _counted(batch: Batch) -> Tensor | None:
    return batch.alive.float() if "alive" in batch else None


def _rows(tree: Tree) -> Tree:
    return tree_map(lambda leaf: leaf.flatten(0, 1), tree)
