"""Base of wrappers that save their state with the environment's."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from zhixing.core.tree import tree_map

Info = dict[str, Any]


class StatefulWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that saves and restores its `saved_attributes` with the environment, if that can be saved."""

    saved_attributes: tuple[str, ...] = ()

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        # attributes, not methods: `hasattr(wrapper, "state_dict")` must be true only if the environment has it
        if hasattr(env, "state_dict") and hasattr(env, "load_state_dict"):
            self.state_dict, self.load_state_dict = self._state, self._load

    def _state(self) -> Info:
        attributes = {name: copy_arrays(getattr(self, name)) for name in self.saved_attributes}
        return {"wrapper": attributes, "env": self.env.state_dict()}  # type: ignore[attr-defined]

    def _load(self, state: Info) -> None:
        self.env.load_state_dict(state["env"])  # type: ignore[attr-defined]
        for name in self.saved_attributes:
            setattr(self, name, copy_arrays(state["wrapper"][name]))


def copy_arrays(value: Any) -> Any:
    """Return a tree with copies of its arrays."""
    return tree_map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value)
