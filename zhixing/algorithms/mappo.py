"""MAPPO (Yu et al., 2022).   L = E[min(r A, clip(r, 1 - ε, 1 + ε) A)] per agent,   A by GAE with V(s, agent)

PPO for teams: each agent acts by what it sees itself, the critic sees the global state. IPPO (de Witt et al., 2020)
has a critic that sees what its agent sees. An agent that has left counts in no loss. A reward that the team shares
counts in its return until the episode ends, as in the authors' code; rewards per agent end when it leaves.
Differs from the papers: the critic has no memory, also where actors have one; values are normalised by the running mean
and spread of all returns; where the team shares its reward, the value of an agent that has left is the others' mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import torch
from gymnasium.spaces import Box
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
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field, Tree, tree_map
from zhixing.nets.actor_critic import episode_starts
from zhixing.nets.heads import ActionDistribution, ValueHead
from zhixing.nets.mlp import init_orthogonal
from zhixing.nets.multi_agent import MultiAgentNet, global_state, global_state_size
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
from zhixing.ops.returns import gae, next_values


class MAPPOConfig(OnPolicyConfig, MultiAgentConfig):
    lr: PositiveFloat = 5e-4
    critic_lr: PositiveFloat | None = None
    """Learning rate of the critic; none is lr."""
    optimizer_eps: PositiveFloat = 1e-5
    epochs: Positive = 10
    """Passes over each rollout."""
    minibatch_size: Positive = 1024
    """Time steps per minibatch, each with all agents of one environment."""
    clip_range: PositiveFloat = 0.2
    """Clip range of the probability ratio."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalized advantage estimation."""
    entropy_coef: NonNegative = 0.01
    """Weight of the entropy bonus."""
    normalize_value: bool = True
    """Normalize value targets by the running mean and standard deviation of returns."""
    normalize_advantage: bool = True
    """Normalize advantages to zero mean and unit standard deviation per minibatch."""
    normalize_obs: bool = False
    """Normalize observations by their running mean and standard deviation."""
    eval_stochastic: Annotated[bool, Group.EVALUATION] = False
    """Sample actions in evaluations instead of taking the most likely."""
    net: NetConfig = NetConfig(hidden_sizes=[64, 64], activation="tanh")


@register("mappo", "PPO of a team, with a critic that sees the global state")
@register("ippo", "PPO of each agent, with a critic that sees what its agent sees", central=False)
class MAPPO(Learner):
    settings = MAPPOConfig
    metrics = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "explained_variance", "grad_norm")
    many_agents = True

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
        judged = spaces
        if central:
            state = Box(-np.inf, np.inf, (global_state_size(spaces, cfg.algorithm),), np.float32)
            judged = dataclasses.replace(spaces, obs=state)
        settings = {"shared": cfg.share_weights, "normalize": cfg.normalize_obs, "orthogonal_init": True}
        with self.building():
            self.chances = ActionDistribution(spaces, batch_shape=spaces.agents if not cfg.share_weights else ())
            self.actor = MultiAgentNet(spaces, cfg.net, net, self._policy_head, last_action=cfg.last_action, **settings)
            critic_net = cfg.net.model_copy(update={"recurrent": "none", "kind": "auto"})
            self.critic = MultiAgentNet(judged, critic_net, None, ValueHead, **settings)
        for part in (self.chances, self.actor, self.critic):
            part.to(self.device)
        self.policy = TeamSampledPolicy(spaces, self.actor, self.chances, cfg.eval_stochastic)
        acting = [*self.actor.parameters(), *self.chances.parameters()]
        clip = cfg.max_grad_norm
        self.actor_optimizer = self.make_optimizer(acting, cfg.lr, max_grad_norm=clip)
        self.critic_optimizer = self.make_optimizer(
            self.critic.parameters(), cfg.critic_lr or cfg.lr, max_grad_norm=clip
        )
        self.value_norm = RunningNorm(()).to(self.device) if cfg.normalize_value else None

    def _policy_head(self, features: int) -> nn.Linear:
        linear = nn.Linear(features, self.chances.outputs)
        init_orthogonal(linear, 0.01)  # nearly equal chances at the start
        return linear

    @property
    def fields(self) -> dict[str, Tree]:
        hidden = self.policy.initial_hidden(1)
        kept: dict[str, Tree] = {"logp": Field(self.spaces.agents, np.dtype(np.float32))}
        return kept if hidden is None else kept | {"hidden": hidden_fields(hidden)}

    # --- the critic ---

    def judged(self, batch: Batch, following: bool = False) -> Tensor:
        """What the critic sees, `[...,A,n]`: the state for each agent, or its observation."""
        if not self.central:
            return batch.next_obs if following else batch.obs
        state = global_state(batch, self.spaces, following)
        return state.unsqueeze(-2).expand(*state.shape[:-1], self.spaces.num_agents, -1)

    def values(self, seen: Tree) -> Tensor:
        raw = self.critic(self.critic.build_inputs(seen, None))[0]
        return raw if self.value_norm is None else self.value_norm.inverse(raw)

    def _of_the_living(self, value: Tensor, alive: Tensor) -> Tensor:
        """Values `[...,A]`, with those of agents that have left replaced, which no loss teaches: by the others' mean
        where the team shares its reward, else by zero."""
        if self.spaces.individual_termination:
            return value * alive
        others = (value * alive).sum(-1, keepdim=True) / alive.sum(-1, keepdim=True).clamp_min(1)
        return torch.where(alive, value, others)

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Batch:
        """Advantages and returns of a rollout `[T,N]`, of each agent."""
        seen = self.judged(batch)
        value = self.values(tree_map(lambda leaf: leaf.flatten(0, 1), seen)).unflatten(0, batch.terminated.shape)
        boundary = batch.terminated | batch.truncated
        boundary[-1] = True
        after = self.values(tree_map(lambda leaf: leaf[boundary], self.judged(batch, following=True)))
        reward = batch.reward
        if "alive" in batch:
            value, after = (
                self._of_the_living(value, batch.alive),
                self._of_the_living(after, batch.next_alive[boundary]),
            )
            reward = reward * batch.alive if self.spaces.individual_termination else reward
        next_value = next_values(value, boundary.unsqueeze(-1).expand_as(value), after)
        ends = batch.terminated.unsqueeze(-1), batch.truncated.unsqueeze(-1)
        advantage = gae(reward, value, next_value, *ends, self.cfg.gamma, self.cfg.gae_lambda)
        kept = {n: getattr(batch, n) for n in ("obs", "action", "logp", "mask", "alive", "hidden") if n in batch}
        if self.actor.recurrent:
            kept["is_first"] = episode_starts(batch)
        return Batch(**kept, seen=seen, advantage=advantage, value=value, returns=advantage + value)

    def value(self, obs: Tree) -> Tensor | None:
        if self.central and self.spaces.state is not None:
            return None  # of the state, which observations don't tell
        return self.values(self.judged(Batch(obs=obs)))

    # --- losses, of minibatches [B,A], or [T,n,A] for actors with memory ---

    def decisions(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probability of the actions taken, and entropy, under the present weights."""
        memory, last_action = self.actor.split_hidden(batch.hidden) if "hidden" in batch else (None, None)
        inputs = self.actor.build_inputs(batch.obs, last_action)
        if self.actor.recurrent:
            out = self.actor.unroll(inputs, tree_map(lambda leaf: leaf[0], memory), batch.is_first)
        else:
            out = self.actor(inputs)[0]
        chances = self.chances(out, batch.mask if "mask" in batch else None)
        return chances.log_prob(batch.action), chances.entropy()

    def value_loss(self, batch: Batch, counted: Tensor | None) -> Tensor:
        inputs = self.critic.build_inputs(batch.seen, None)
        raw = self.critic.unroll(inputs, None, batch.is_first) if "is_first" in batch else self.critic(inputs)[0]
        target = batch.returns if self.value_norm is None else self.value_norm(batch.returns)
        return masked_mean((raw - target).square(), counted)

    def gradients(self, batch: Batch) -> Gradients:
        counted = batch.alive.float() if "alive" in batch else None
        logp, entropies = self.decisions(batch)
        advantage = normalize(batch.advantage, counted) if self.cfg.normalize_advantage else batch.advantage
        log_ratio = logp - batch.logp
        policy_loss = ppo_clip_loss(log_ratio, advantage, self.cfg.clip_range, counted)
        entropy, value_loss = masked_mean(entropies, counted), self.value_loss(batch, counted)
        found = {
            "actor_optimizer": self.actor_optimizer.gradient(policy_loss - self.cfg.entropy_coef * entropy),
            "critic_optimizer": self.critic_optimizer.gradient(value_loss),
        }
        metrics = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "kl": approx_kl(log_ratio.detach(), counted),
            "clip_fraction": clip_fraction(log_ratio.detach(), self.cfg.clip_range, counted),
        }
        return Gradients(found, metrics)

    # --- the update ---

    def minibatches(self, data: Batch) -> Iterator[Batch]:
        return minibatches(data, self.cfg.minibatch_size, self.rng, self.actor.recurrent)

    def update(self, batch: Batch) -> Update:
        data = self.prepare(batch)
        present = batch.alive if "alive" in batch else torch.ones_like(data.returns, dtype=torch.bool)
        if self.value_norm is not None:
            self.value_norm.update(data.returns[present])
        told = [
            self.descend(self.gradients, part).metrics
            for _ in range(self.cfg.epochs)
            for part in self.minibatches(data)
        ]
        # after learning: the ratio compares policies under equal statistics
        self.actor.update_norm(tree_map(lambda leaf: leaf[present], batch.obs))
        self.critic.update_norm(tree_map(lambda leaf: leaf[present], data.seen))
        metrics = {name: torch.stack([one[name] for one in told]).mean() for name in told[0]}
        metrics["explained_variance"] = explained_variance(data.value[present], data.returns[present])
        return Update(metrics)
