"""QMIX (Rashid et al., 2018).   y = r + γ (1 - terminated) Q'_tot(s', argmax_a Q_i(h'_i, a)),   L = E[(y - Q_tot)²]

Each agent computes Q-values Q_i of its actions from the history h_i of its observations. A mixer combines them to the
team's value Q_tot, which increases with each of them, so agents that maximize their own Q-values maximize Q_tot. In VDN
(Sunehag et al., 2018) Q_tot is their sum. Independent DQN (Tampuu et al., 2017) has no Q_tot: each agent learns from
its own reward.
The team's reward is the mean of its agents' rewards, which must not be opposed. An agent that has left counts as zero
in the mixer. In `idqn` it is still trained if the reward is shared, as in PyMARL; individual rewards end when the agent
leaves.
Differs from the papers: double Q-learning, where the network chooses the next action and the target network evaluates
it; TD(λ) targets are a setting.
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
from zhixing.config import Fraction, Group, MultiAgentConfig, NetConfig, Positive, PositiveFloat, QLearningConfig
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update, train_step
from zhixing.core.optimizer import TargetUpdater
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, time_major, tree_leaves, tree_map
from zhixing.nets.mixers import MonotonicMixer, SumMixer
from zhixing.nets.multi_agent import MultiAgentNet, global_state, global_state_space
from zhixing.nets.multi_agent_policies import MultiAgentGreedyPolicy
from zhixing.nets.qnet import check_discrete, epsilon_at
from zhixing.nets.torso import NetFactory
from zhixing.ops.distributions import gather_actions, mask_logits
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


class IDQNConfig(MultiAgentQConfig):
    algorithm: str = "idqn"


class VDNConfig(MultiAgentQConfig):
    algorithm: str = "vdn"


class QMIXConfig(MultiAgentQConfig):
    algorithm: str = "qmix"
    mixer_size: Annotated[Positive, Group.NETWORK] = 32
    """Units of the mixing network."""
    hyper_size: Annotated[Positive, Group.NETWORK] = 64
    """Units of the hypernetworks that produce the mixing network's weights."""


class JointQNet(nn.Module):
    """The agents' Q-networks and the mixer, or None for independent agents."""

    def __init__(self, agents: MultiAgentNet, mixer: nn.Module | None) -> None:
        super().__init__()
        self.agents, self.mixer = agents, mixer


MixerFactory = Callable[[MultiAgentQConfig, Spaces], nn.Module | None]


def monotonic_mixer(cfg: MultiAgentQConfig, spaces: Spaces) -> nn.Module:
    assert isinstance(cfg, QMIXConfig)
    (state_size,) = global_state_space(spaces, cfg.algorithm).shape
    return MonotonicMixer(spaces.num_agents, state_size, cfg.mixer_size, cfg.hyper_size)


def sum_mixer(cfg: MultiAgentQConfig, spaces: Spaces) -> nn.Module:
    return SumMixer()


def no_mixer(cfg: MultiAgentQConfig, spaces: Spaces) -> None:
    return None


@register("qmix", "multi-agent Q-learning with a monotonic mixing network", QMIXConfig, mixer=monotonic_mixer)
@register("vdn", "multi-agent Q-learning with the sum of the agents' values as team value", VDNConfig, mixer=sum_mixer)
@register("idqn", "independent Q-learning of each agent on whole episodes", IDQNConfig, mixer=no_mixer)
class QMIX(Learner):
    metrics = ("loss", "q_mean", "grad_norm")
    multi_agent = True
    policy: MultiAgentGreedyPolicy

    def __init__(
        self,
        cfg: MultiAgentQConfig,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        net: NetFactory | None = None,
        *,
        mixer: MixerFactory,
    ) -> None:
        check_discrete(cfg, spaces)
        check_plain_replay(cfg, "learns from whole episodes")
        super().__init__(cfg, spaces, device)
        self.cfg = cfg
        self.team_reward = None if mixer is no_mixer else TeamRewardChecker(cfg.algorithm, spaces)
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
            self.net = JointQNet(agents, mixer(cfg, spaces)).to(self.device)
        self.optimizer = self.make_optimizer(self.net.parameters(), cfg.lr, max_grad_norm=cfg.max_grad_norm)
        self.target_net = copy.deepcopy(self.net)
        self.target_updater = TargetUpdater((self.target_net, self.net))
        self.policy = MultiAgentGreedyPolicy(spaces, self.net.agents, partial(epsilon_at, cfg), cfg.eval_epsilon)

    @property
    def sample_type(self) -> Literal["episodes"]:
        return "episodes"

    def q_values(self, net: JointQNet, batch: Batch) -> Tensor:
        """Return the agents' Q-values in all states of whole episodes, the last one included: `[T+1,B,A,n]`."""
        obs = _all_states(batch.obs, batch.next_obs)
        last_action = None
        if self.cfg.last_action:
            action = net.agents.encode_action(time_major(batch.action))
            last_action = torch.cat([torch.zeros_like(action[:1]), action])
        is_first = torch.zeros(len(tree_leaves(obs)[0]), len(batch), dtype=torch.bool, device=self.device)
        rnn_state = net.agents.initial_rnn_state(len(batch))
        return net.agents.unroll(net.agents.build_inputs(obs, last_action), rnn_state, is_first)

    def mix(self, net: JointQNet, q: Tensor, state: Tensor, batch: Batch) -> Tensor:
        """Return Q_tot `[T,B]` for the agents' `q [T,B,A]`, or `q` itself for independent agents."""
        if net.mixer is None:
            return q
        if "alive" in batch:
            q = q * _all_states(batch.alive, batch.next_alive)[: len(q)]
        return net.mixer(q, state[: len(q)])

    @torch.no_grad()
    def target_value(self, batch: Batch, q: Tensor, state: Tensor) -> Tensor:
        """Return the targets of Q_tot `[T,B]`, or of independent agents `[T,B,A]`.

        `q [T+1,B,A,n]` are the network's Q-values, which choose the actions that the target network evaluates.
        """
        mask = _all_states(batch.mask, batch.next_mask) if "mask" in batch else None
        max_q = gather_actions(self.q_values(self.target_net, batch), mask_logits(q, mask).argmax(-1))
        value = self.mix(self.target_net, max_q, state, batch)
        reward, terminated, truncated = time_major((batch.reward, batch.terminated, batch.truncated))
        if self.net.mixer is None:
            terminated, truncated = terminated.unsqueeze(-1), truncated.unsqueeze(-1)
            if self.spaces.individual_termination:
                terminated = terminated | ~time_major(batch.next_alive)
        else:
            reward = reward.mean(-1)
        ends = terminated, truncated
        return value[:-1] + gae(reward, value[:-1], value[1:], *ends, self.cfg.gamma, self.cfg.td_lambda)

    @train_step
    def gradient_step(self, batch: Batch) -> Update:
        """Update from whole episodes `[B,T]`."""
        state = _all_states(global_state(batch, self.spaces), global_state(batch, self.spaces, use_next=True))
        q_all = self.q_values(self.net, batch)
        q_agents = gather_actions(q_all[:-1], time_major(batch.action))  # [T,B,A]
        q = self.mix(self.net, q_agents, state, batch)
        td_error = q - self.target_value(batch, q_all.detach(), state)
        mask = time_major(batch.valid).float()  # 0 for the padding of shorter episodes
        if self.net.mixer is None:
            mask = mask.unsqueeze(-1).expand_as(td_error)
            if self.spaces.individual_termination:
                mask = mask * time_major(batch.alive)
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
        """Return the value of the first observations of episodes `[B,A,...]`."""
        if self.net.mixer is not None and self.spaces.state is not None:
            return None  # the mixer needs the state
        hidden = self.net.agents.initial_hidden(len(tree_leaves(obs)[0]))
        q = self.policy.run_net(obs, hidden)[0].amax(-1)
        return q if self.net.mixer is None else self.net.mixer(q, global_state(Batch(obs=obs), self.spaces))

    def update_normalizers(self, batch: Batch) -> None:
        for net in (self.net, self.target_net):
            net.agents.update_norm(batch.obs)


def _all_states(before: Tree, after: Tree) -> Tree:
    """Return the values in all states of episodes `[T+1,B,...]`, given those before and after each step `[B,T,...]`."""
    return tree_map(lambda a, b: torch.cat([a[:, :1], b], 1).transpose(0, 1), before, after)
