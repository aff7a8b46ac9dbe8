"""Gymnasium's Box2D environments, with episodes that don't depend on earlier episodes."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

MODULE = "gymnasium.envs.box2d"


class FreshWorld(gym.Wrapper[Any, Any, Any, Any]):
    """Start each episode in a new Box2D world.

    BipedalWalker and CarRacing use one world for all episodes. Its collision tree and contact order depend on earlier
    episodes, so the same seed and actions give different results. With a new world per episode, any episode can be
    restored in the middle. LunarLander already makes a new world at each reset (Gymnasium issue 728).
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        base: Any = self.unwrapped
        base._destroy()
        listener = getattr(base, "contactListener_keepref", None)  # CarRacing sets it only once
        base.world = type(base.world)(gravity=base.world.gravity, contactListener=listener)
        return super().reset(seed=seed, options=options)
