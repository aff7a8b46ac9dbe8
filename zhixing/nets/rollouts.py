"""Rollouts for actor-critic learners: advantages and returns, and separate forward passes of actor and critic.

Learners that optimize actor and critic separately run only the network whose loss they compute.
"""

from __future__ import annotations

from torch import Tensor

from zhixing.core.batch import Batch
from zhixing.nets.actor_critic import ActorCritic, compute_advantages, episode_starts, torso_features
from zhixing.ops.distributions import Distribution


def add_advantages(net: ActorCritic, batch: Batch, reward: Tensor, gamma: float, lam: float) -> Batch:
    """Return the fields of a rollout `[T,N]` that updates read, plus `advantage` and the λ-return `returns`."""
    advantage = compute_advantages(net, batch, reward, gamma, lam)
    fields = {name: getattr(batch, name) for name in ("obs", "action", "logp", "value", "mask") if name in batch}
    if net.recurrent:
        fields |= {"hidden": batch.hidden, "is_first": episode_starts(batch)}
    return Batch(**fields, advantage=advantage, returns=advantage + batch.value)


def forward_actor(net: ActorCritic, batch: Batch) -> tuple[Distribution, Tensor]:
    """Return the action distribution of `[B]`, or `[T,N]` for recurrent networks, and the actor's features."""
    features = torso_features(net.actor, batch, batch.hidden[0] if net.recurrent else None)
    return net.policy_head(features, batch.get("mask")), features


def forward_critic(net: ActorCritic, batch: Batch) -> Tensor:
    """Return the values of `[B]`, or `[T,N]` for recurrent networks."""
    return net.value_head(torso_features(net.critic, batch, batch.hidden[1] if net.recurrent else None))
