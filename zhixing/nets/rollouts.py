"""A rollout through an actor-critic: prepared for learning, and read by one body at a time.

Learners that move actor and critic apart read them apart: a loss of one computes nothing of the other.
"""

from __future__ import annotations

from torch import Tensor, nn

from zhixing.core.batch import Batch
from zhixing.core.tree import Tree, tree_map
from zhixing.nets.actor_critic import ActorCritic, compute_advantages, episode_starts
from zhixing.nets.torso import unroll
from zhixing.ops.distributions import Distribution


def add_advantages(net: ActorCritic, batch: Batch, reward: Tensor, gamma: float, lam: float) -> Batch:
    """What learning needs of a rollout `[T,N]`, with its advantages and returns."""
    advantage = compute_advantages(net, batch, reward, gamma, lam)
    kept = {name: getattr(batch, name) for name in ("obs", "action", "logp", "value", "mask") if name in batch}
    if net.recurrent:
        kept |= {"hidden": batch.hidden, "is_first": episode_starts(batch)}
    return Batch(**kept, advantage=advantage, returns=advantage + batch.value)


def forward_actor(net: ActorCritic, batch: Batch) -> tuple[Distribution, Tensor]:
    """The distribution over `[B]`, or `[T,n]` for networks with memory, and the actor's features."""
    features = _read(net.actor, batch, batch.hidden[0] if net.recurrent else None)
    return net.policy_head(features, batch.mask if "mask" in batch else None), features


def forward_critic(net: ActorCritic, batch: Batch) -> Tensor:
    return net.value_head(_read(net.critic, batch, batch.hidden[1] if net.recurrent else None))


def _read(body: nn.Module, batch: Batch, hidden: Tree) -> Tensor:
    if hidden is None:
        return body(batch.obs)
    start = tree_map(lambda leaf: leaf[0], hidden)
    return unroll(body, batch.obs, start, batch.is_first)[0]
