"""QMIX (Rashid et al., 2018).   y = r + γ (1 - terminated) Q'_tot(s', argmax_a Q_i(h'_i, a)),   L = E[(y - Q_tot)²]

Each agent values its actions by what it has seen; a mixer, monotone in these values, makes the team's value of them, so
that agents who each do their best do the team's best. VDN (Sunehag et al., 2018) adds them up; independent DQN (Tampuu
et al., 2017) has no team value: each agent learns from its own reward.
The team's reward is the mean of its agents', who must not be opposed. An agent that has left counts as zero in the
mixers. In `idqn` it goes on to learn from a reward that the team shares, as in PyMARL; rewards per agent end for it
when it leaves.
Differs from the papers: the network chooses the next action and its target values it (double Q-learning); targets may
look further ahead (`td_lambda`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from zhixing.algorithms import register
from zhixing.algorithms.common.checks import check_plain_replay
from zhixing.algorithms.common.team_policy import TeamGreedyPolicy
from zhixing.config import Fraction, Group, MultiAgentConfig, NetConfig, Positive, PositiveFloat, QLearningConfig
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.optimizer import TargetUpdater
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_leaves, tree_map
from zhixing.nets.mixers import MonotonicMixer, SumMixer
from zhixing.nets.multi_agent import MultiAgentNet, global_state, global_state_size
from zhixing.nets.qnet import check_discrete, epsilon_at
from zhixing.nets.torso import NetFactory
from zhixing.ops.distributions import MASKED_LOGIT
from zhixing.ops.returns import gae
from zhixing.ops.team_reward import TeamRewardChecker


class MultiAgentQConfig(QLearningConfig, MultiAgentConfig):
    batch_size: Positive = 32
    """Episodes per update."""
    lr: PositiveFloat = 5e-4
    updates_per_step: PositiveFloat = 0.04
    last_action: bool = True
    td_lambda: Fraction = 0.0
    """Lambda of the TD(lambda) targets; 0 is one-step."""
    net: NetConfig = NetConfig(hidden_sizes=[64], activation="relu", recurrent="gru", recurrent_size=64)


class QMIXConfig(MultiAgentQConfig):
    mixer_size: Annotated[Positive, Group.NETWORK] = 32
    """Units of the mixing network."""
    hyper_size: Annotated[Positive, Group.NETWORK] = 64
    """Units of the hypernetworks that produce the mixing network's weights."""


class Team(nn.Module):
    """All that is learned, so that one target follows it."""

    def __init__(self, agents: MultiAgentNet, mixer: nn.Module | None) -> None:
        super().__init__()
        self.agents, self.mixer = agents, mixer


MakeMixer = Callable[[MultiAgentQConfig, Spaces], nn.Module | None]


def monotonic(cfg: MultiAgentQConfig, spaces: Spaces) -> nn.Module:
    assert isinstance(cfg, QMIXConfig)
    return MonotonicMixer(spaces.num_agents, global_state_size(spaces, cfg.algorithm), cfg.mixer_size, cfg.hyper_size)


def summed(cfg: MultiAgentQConfig, spaces: Spaces) -> nn.Module:
    return SumMixer()


def independent(cfg: MultiAgentQConfig, spaces: Spaces) -> None:
    return None


@register("qmix", "multi-agent Q-learning with a monotonic mixing network", settings=QMIXConfig, mixer=monotonic)
@register("vdn", "multi-agent Q-learning with the sum of the agents' values as team value", mixer=summed)
@register("idqn", "independent Q-learning of each agent on whole episodes", mixer=independent)
class QMIX(Learner):
    settings = MultiAgentQConfig
    metrics = ("loss", "q_mean", "grad_norm")
    multi_agent = True

    def __init__(
        self,
        cfg: MultiAgentQConfig,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        net: NetFactory | None = None,
        *,
        mixer: MakeMixer,
    ) -> None:
        check_discrete(cfg, spaces)
        check_plain_replay(cfg, "learns from whole episodes")
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        self.team_reward = None if mixer is independent else TeamRewardChecker(cfg.algorithm, spaces)
        with self.seeded_init():
            agents = MultiAgentNet(
                spaces,
                cfg.net,
                net,
                lambda features: nn.Linear(features, spaces.num_actions),
                shared=cfg.share_weights,
                last_action=cfg.last_action,
                normalize=cfg.normalize_obs,
            )
            self.net = Team(agents, mixer(cfg, spaces)).to(self.device)
        self.optimizer = self.make_optimizer(
            self.net.parameters(), cfg.lr, kind=cfg.optimizer, max_grad_norm=cfg.max_grad_norm
        )
        self.target_net = copy.deepcopy(self.net)
        self.target_updater = TargetUpdater((self.target_net, self.net))
        self.policy = TeamGreedyPolicy(spaces, self.net.agents, partial(epsilon_at, cfg), cfg.eval_epsilon)

    @property
    def sample_type(self) -> Literal["episodes"]:
        return "episodes"

    def values(self, net: Team, batch: Batch) -> Tensor:
        """Each agent's values of its actions before every step of whole episodes and after the last: `[T+1,B,A,n]`."""
        obs = _with_last(batch.obs, batch.next_obs)
        last_action = None
        if self.cfg.last_action:
            done = net.agents.encode_action(_by_time(batch.action))
            last_action = torch.cat([torch.zeros_like(done[:1]), done])
        is_first = torch.zeros(len(tree_leaves(obs)[0]), len(batch), dtype=torch.bool, device=self.device)
        memory = net.agents.initial_rnn_state(len(batch))
        return net.agents.unroll(net.agents.build_inputs(obs, last_action), memory, is_first)

    @torch.no_grad()
    def target_value(self, batch: Batch, q: Tensor, state: Tensor) -> Tensor:
        """What the values `[T,B]`, or of independent agents `[T,B,A]`, should have been."""
        next_q = self.values(self.target_net, batch)
        if "mask" in batch:
            q = q.masked_fill(~_with_last(batch.mask, batch.next_mask), MASKED_LOGIT)
        best = self.mix(self.target_net, next_q.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1), state, batch)
        reward, terminated, truncated = (_by_time(part) for part in (batch.reward, batch.terminated, batch.truncated))
        if self.net.mixer is None:
            terminated, truncated = terminated.unsqueeze(-1), truncated.unsqueeze(-1)
            if self.spaces.individual_termination:
                terminated = terminated | ~_by_time(batch.next_alive)
        else:
            reward = reward.mean(-1)
        return best[:-1] + gae(reward, best[:-1], best[1:], terminated, truncated, self.cfg.gamma, self.cfg.td_lambda)

    def mix(self, net: Team, q: Tensor, state: Tensor, batch: Batch) -> Tensor:
        """The team's value of each time step, out of its agents' `[T,B,A]`; who has left counts as zero."""
        if net.mixer is None:
            return q
        if "alive" in batch:
            q = q * _with_last(batch.alive, batch.next_alive)[: len(q)]
        return net.mixer(q, state[: len(q)])

    @train_step
    def gradient_step(self, batch: Batch) -> Update:
        state = _with_last(global_state(batch, self.spaces), global_state(batch, self.spaces, use_next=True))
        q_all = self.values(self.net, batch)
        q_agents = q_all[:-1].gather(-1, _by_time(batch.action).unsqueeze(-1)).squeeze(-1)  # [T,B,A]
        q = self.mix(self.net, q_agents, state, batch)
        td_error = q - self.target_value(batch, q_all.detach(), state)
        mask = _by_time(batch.valid).float()  # 0 for the padding of shorter episodes
        if self.net.mixer is None:
            mask = mask.unsqueeze(-1).expand_as(td_error)
            if self.spaces.individual_termination:
                mask = mask * _by_time(batch.alive)
        loss = (td_error.square() * mask).sum() / mask.sum()
        grad_norm = self.optimizer.step(loss)
        if self.updates % self.cfg.target_update_interval == 0:
            self.target_updater.polyak_update(self.cfg.tau)
        return Update({"loss": loss, "q_mean": (q.detach() * mask).sum() / mask.sum(), "grad_norm": grad_norm})

    def update(self, batch: Batch) -> Update:
        if self.team_reward is not None:
            self.team_reward.check(batch.reward[batch.valid])
        return self.gradient_step(batch)

    def value(self, obs: Tree) -> Tensor | None:
        """Of first observations `[B,A,...]`: memory is that of an episode's start."""
        if self.net.mixer is not None and self.spaces.state is not None:
            return None  # of the state, which observations don't tell
        num = len(tree_leaves(obs)[0])
        memory, last_action = self.net.agents.split_hidden(self.net.agents.initial_hidden(num))
        q = self.net.agents(self.net.agents.build_inputs(obs, last_action), memory)[0].amax(-1)
        return q if self.net.mixer is None else self.net.mixer(q, global_state(Batch(obs=obs), self.spaces))

    def update_normalizers(self, batch: Batch) -> None:
        for net in (self.net, self.target_net):
            net.agents.update_norm(batch.obs)


def _by_time(tree: Tree) -> Tree:
    """`[B,T,...]` to `[T,B,...]`."""
    return tree_map(lambda leaf: leaf.transpose(0, 1), tree)


def _with_last(tree: Tree, following: Tree) -> Tree:
    """What episodes `[B,T,...]` showed before each step and after the last: `[T+1,B,...]`."""
    return tree_map(lambda a, b: torch.cat([a[:, :1], b], 1).transpose(0, 1), tree, following)
