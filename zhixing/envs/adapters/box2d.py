"""Gymnasium's Box2D tasks, made repeatable from the start of any episode."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

HOME = "gymnasium.envs.box2d"


class FreshWorld(gym.Wrapper[Any, Any, Any, Any]):
    """Begin each episode in a new Box2D world.

    BipedalWalker and CarRacing keep one world for all episodes. Its collision tree and its contact order depend on all
    episodes before, so the same seed and actions lead elsewhere. LunarLander makes a new world at each reset itself
    (Gymnasium's issue 728), and can be restored in the middle of an episode for that reason.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        base: Any = self.unwrapped
        base._destroy()
        listener = getattr(base, "contactListener_keepref", None)  # CarRacing sets it once, the others at each reset
        base.world = type(base.world)(gravity=base.world.gravity, contactListener=listener)
        return super().reset(seed=seed, options=options)
