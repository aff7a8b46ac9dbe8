"""Networks of action values, and how learners read them: for transitions `[B]`, or sequences `[B,T]` with memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn

from zhixing.config import NetConfig, QLearningConfig
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_map
from zhixing.errors import UserError
from zhixing.nets.torso import NetFactory, get_encoder, is_recurrent, make_torso, num_features, unroll
from zhixing.ops.distributions import MASKED_LOGIT
from zhixing.ops.schedules import linear_schedule

QHeadFactory = Callable[[int, int], nn.Module]  # (features, actions) to a module from features to [B, actions, ...]


class QNet(nn.Module):
    """`net(obs, hidden) -> (what the head makes of it [B,n,...], hidden)`; `hidden` is None without memory."""

    def __init__(
        self,
        spaces: Spaces,
        cfg: NetConfig,
        make_net: NetFactory | None,
        head: QHeadFactory,
        *,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        self.torso = make_torso(spaces.obs, cfg, make_net, normalize=normalize)
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
    """A network of distributions `[B,n,atoms]` as one of values `[B,n]`, for policies; `mean` makes these of those."""

    def __init__(self, net: QNet, mean: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.mean = net, mean

    def forward(self, obs: Tree, hidden: Tree = None) -> tuple[Tensor, Tree]:
        out, hidden = self.net(obs, hidden)
        return self.mean(out), hidden


def forward_obs(net: QNet, batch: Batch, burn_in: int) -> Tensor:
    """What the network says of the observations, a row per step that is learned from."""
    if not net.recurrent:
        return net(batch.obs)[0]
    features, _ = _replay(net, batch)
    return net.head(features[burn_in:].flatten(0, 1))


def forward_next_obs(net: QNet, batch: Batch, burn_in: int) -> Tensor:
    """What it says of the next observations, also of the true last ones of episodes."""
    if not net.recurrent:
        return net(batch.next_obs)[0]
    hidden = tree_map(lambda leaf: leaf[burn_in:].flatten(0, 1), _replay(net, batch)[1])
    return net(_by_time(batch.next_obs, burn_in), hidden)[0]


def flatten_sequences(batch: Batch, cfg: QLearningConfig) -> Batch:
    """What belongs to the rows of `read`: steps of sequences after the burn-in, time first, as one dimension."""
    burn_in = cfg.replay.burn_in
    names = [name for name in ("action", "reward", "terminated", "mask", "next_mask") if name in batch]
    fields = {name: _by_time(getattr(batch, name), burn_in) for name in names}
    fields["discount"] = torch.full_like(fields["reward"], cfg.gamma)
    if "weight" in batch:  # one per sequence
        fields["weight"] = batch.weight.repeat(batch.reward.shape[1] - burn_in)
    return Batch(**fields)


def gather_action(out: Tensor, action: Tensor) -> Tensor:
    """The part of `out [B,n,atoms]` that belongs to one action per row `[B]`."""
    return out.take_along_dim(action.view(-1, 1, 1), 1).squeeze(1)


def greedy_next_action(q: Tensor, steps: Batch) -> Tensor:
    """The action `[B]` of highest value `q [B,n]` that the next state allows: no target may count on another."""
    return (q.masked_fill(~steps.next_mask, MASKED_LOGIT) if "next_mask" in steps else q).argmax(-1)


def compute_priority(errors: Tensor, batch: Batch) -> Tensor:
    """Of transitions their error; of sequences mostly the largest, somewhat the mean (Kapturowski et al., 2019)."""
    num = len(batch.index)
    if len(errors) == num:
        return errors
    by_time = errors.view(-1, num)  # [T,B]
    return 0.9 * by_time.amax(0) + 0.1 * by_time.mean(0)


def check_discrete(cfg: QLearningConfig, spaces: Spaces) -> None:
    if not isinstance(spaces.action, Discrete):
        raise UserError(
            f"{cfg.algorithm} needs Discrete actions, this task has {spaces.action} "
            f"(for those there is {'mappo' if spaces.agents else 'ppo'})"
        )


def check_sequences(cfg: QLearningConfig, net: QNet) -> None:
    if net.recurrent and cfg.replay.n_step > 1:
        raise UserError(f"{cfg.algorithm} with a recurrent network learns from sequences: set replay.n_step=1")


def epsilon_at(cfg: QLearningConfig, env_steps: int) -> float:
    share = env_steps / max(1.0, cfg.epsilon_fraction * cfg.env_steps)
    return linear_schedule(cfg.epsilon_start, cfg.epsilon_end, share)


def _replay(net: QNet, batch: Batch) -> tuple[Tensor, Tree]:
    """Features and memory `[T,B,...]` over sequences `[B,T]`, from the memory stored with their first step."""
    obs = tree_map(lambda leaf: leaf.transpose(0, 1), batch.obs)
    start = tree_map(lambda leaf: leaf[:, 0], batch.hidden)
    return unroll(net.torso, obs, start, batch.is_first.transpose(0, 1))


def _by_time(tree: Tree, burn_in: int) -> Tree:
    return tree_map(lambda leaf: leaf[:, burn_in:].transpose(0, 1).flatten(0, 1), tree)
