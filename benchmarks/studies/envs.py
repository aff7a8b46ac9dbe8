"""Environments of the studies, made the same way for every library."""

from __future__ import annotations

from typing import Any

import gymnasium as gym


def flat_minigrid(id: str) -> gym.Env[Any, Any]:
    """Return a MiniGrid environment whose observation is one vector: the view, and the mission's letters one-hot."""
    import minigrid
    from minigrid.wrappers import FlatObsWrapper

    assert minigrid  # registers the ids
    return FlatObsWrapper(gym.make(id))


def make(id: str, max_episode_steps: int | None) -> gym.Env[Any, Any]:
    if id.startswith("MiniGrid-"):
        return flat_minigrid(id)
    if id.startswith("MinAtar/") and id not in gym.registry:
        from minatar.gym import register_envs

        register_envs()
    return gym.make(id, max_episode_steps=max_episode_steps)
