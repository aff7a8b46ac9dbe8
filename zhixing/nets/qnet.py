"""Q-networks, and their forward passes over transitions `[B]` or, if recurrent, sequences `[B,T]`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn

from zhixing.config import EpsilonGreedyConfig, LearnerConfig, NetConfig, QLearningConfig
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_map
from zhixing.errors import UserError
from zhixing.nets.torso import NetFactory, get_encoder, is_recurrent, make_torso, num_features, unroll
from zhixing.ops.distributions import gather_actions, mask_logits
from zhixing.ops.schedules import linear_schedule

QHeadFactory = Callable[[int, int], nn.Module]  # (num_features, num_actions) -> head with outputs [B, num_actions, ...]


class QNet(nn.Module):
    """`net(obs, hidden) -> (head outputs [B,n,...], hidden)`; `hidden` is None if the network is not recurrent."""

    def __init__(
        self,
        spaces: Spaces,
        cfg: NetConfig,
        make_net: NetFactory | None,
        head: QHeadFactory,
        *,
        normalize: bool = False,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.torso = make_torso(spaces.obs, cfg, make_net, normalize=normalize, layer_norm=layer_norm)
        self.recurrent = is_recurrent(self.torso)
        self.head = head(num_features(self.torso, spaces.obs), spaces.num_actions)

    def forward(self, obs: Tree, hidden: Tree = None) -> tuple[Tensor, Tree]:
        if not self.recurrent:
            return self.head(self.torso(obs)), None
        features, hidden = self.torso(obs, hidden)
        return self.head(features), hidden

    def update_norm(self, obs: Tree) -> None:
        encoder = get_encoder(self.torso)
        if encoder is not None:
            encoder.update_norm(obs)


class ExpectedValue(nn.Module):
    """Wraps a distributional Q-network for policies: `mean` maps its outputs `[B,n,atoms]` to Q-values `[B,n]`."""

    def __init__(self, net: QNet, mean: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.mean = net, mean

    def forward(self, obs: Tree, hidden: Tree = None) -> tuple[Tensor, Tree]:
        out, hidden = self.net(obs, hidden)
        return self.mean(out), hidden


def forward_obs(net: QNet, batch: Batch, burn_in: int) -> Tensor:
    """Return the outputs for `batch.obs`, one row per step after the burn-in."""
    if not net.recurrent:
        return net(batch.obs)[0]
    features, _ = _unroll_sequences(net, batch)
    return net.head(features[burn_in:].flatten(0, 1))


def forward_next_obs(net: QNet, batch: Batch, burn_in: int) -> Tensor:
    """Return the outputs for `batch.next_obs`, one row per step after the burn-in.

    At the end of an episode this is its final observation, not the first one of the next episode.
    """
    if not net.recurrent:
        return net(batch.next_obs)[0]
    hidden = tree_map(lambda leaf: leaf[burn_in:].flatten(0, 1), _unroll_sequences(net, batch)[1])
    return net(_flatten_steps(batch.next_obs, burn_in), hidden)[0]


def flatten_sequences(batch: Batch, cfg: QLearningConfig) -> Batch:
    """Return the steps of sequences `[B,T]` after the burn-in, in the row order of `forward_obs`."""
    burn_in = cfg.replay.burn_in
    names = [name for name in ("action", "reward", "terminated", "mask", "next_mask") if name in batch]
    fields = {name: _flatten_steps(getattr(batch, name), burn_in) for name in names}
    fields["discount"] = torch.full_like(fields["reward"], cfg.gamma)
    if "weight" in batch:  # [B], one per sequence
        fields["weight"] = batch.weight.repeat(batch.reward.shape[1] - burn_in)
    return Batch(**fields)


def gather_atoms(out: Tensor, action: Tensor) -> Tensor:
    """Return the atoms of one action `[B]` per row: `out [B,n,atoms]` to `[B,atoms]`."""
    return out.take_along_dim(action.view(-1, 1, 1), 1).squeeze(1)


def greedy_next_action(q: Tensor, steps: Batch) -> Tensor:
    """Return the action `[B]` with the highest `q [B,n]` among those that are valid in the next state."""
    return mask_logits(q, steps.get("next_mask")).argmax(-1)


def next_state_value(q: Tensor, steps: Batch, choice_q: Tensor | None = None) -> Tensor:
    """Return `q [B,n]` of the greedy next action, which `choice_q` chooses in double Q-learning, else `q` itself."""
    if choice_q is None and "next_mask" not in steps:
        return q.amax(-1)  # equals the general case, in half the time
    return gather_actions(q, greedy_next_action(q if choice_q is None else choice_q, steps))


def compute_priority(errors: Tensor, batch: Batch) -> Tensor:
    """Return the replay priority `[B]`: the error of a transition, or 0.9 max + 0.1 mean over the errors of a sequence.

    The mixture is R2D2's (Kapturowski et al., 2019).
    """
    num = len(batch.index)
    if len(errors) == num:
        return errors
    errors = errors.view(-1, num)  # [T,B]
    return 0.9 * errors.amax(0) + 0.1 * errors.mean(0)


def check_discrete(cfg: LearnerConfig, spaces: Spaces) -> None:
    if not isinstance(spaces.action, Discrete):
        raise UserError(
            f"{cfg.algorithm} needs Discrete actions, but this env has {spaces.action}; "
            f"use {'mappo' if spaces.agents else 'ppo'} instead"
        )


def check_sequences(cfg: QLearningConfig, net: QNet) -> None:
    if net.recurrent and cfg.replay.n_step > 1:
        raise UserError(
            f"{cfg.algorithm} with a recurrent network learns from sequences and does not support "
            f"replay.n_step={cfg.replay.n_step}; set replay.n_step=1"
        )


def epsilon_at(cfg: EpsilonGreedyConfig, env_steps: int) -> float:
    """Return the exploration rate after `env_steps`."""
    fraction = env_steps / max(1.0, cfg.epsilon_fraction * cfg.env_steps)
    return linear_schedule(cfg.epsilon_start, cfg.epsilon_end, fraction)


def _unroll_sequences(net: QNet, batch: Batch) -> tuple[Tensor, Tree]:
    """Return features and hidden states `[T,B,...]` of sequences `[B,T]`, starting from their stored hidden state."""
    obs = tree_map(lambda leaf: leaf.transpose(0, 1), batch.obs)
    start = tree_map(lambda leaf: leaf[:, 0], batch.hidden)
    return unroll(net.torso, obs, start, batch.is_first.transpose(0, 1))


def _flatten_steps(tree: Tree, burn_in: int) -> Tree:
    """Drop the burn-in of `[B,T,...]` and flatten the rest to `[T*B,...]`."""
    return tree_map(lambda leaf: leaf[:, burn_in:].transpose(0, 1).flatten(0, 1), tree)
