"""Your own environment: any `gymnasium.Env`, named `module:Class`. Its arguments are options of the task.

Run it with `python own_environment.py`, or from its folder by the command line:

    zhixing train ppo --env own_environment:Room env.target=23 num_envs=8 lr=1e-3 env_steps=20000 --out runs/room
    zhixing video runs/room -o room.mp4 --trust
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

import zhixing as zx

GOAL = 80.0  # of 100 steps comfortable, though the room starts up to 8 degrees off


class Room(gym.Env):
    """Keep a room within one degree of a target; it leaks towards the weather. Actions: cool, wait, heat."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012  (declared so by gym.Env)
    observation_space = Box(-5.0, 5.0, (2,), np.float32)  # how far the room and the weather are off, in 8 degrees
    action_space = Discrete(3)

    def __init__(self, target: float = 21.0, render_mode: str | None = None) -> None:
        self.target, self.render_mode = target, render_mode

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)  # makes self.np_random, the only source of chance: the same seed, the same episodes
        self.inside = self.target + self.np_random.uniform(-8, 8)
        self.outside = self.target + self.np_random.uniform(-20, 20)
        self.minutes = 0
        return self._seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.inside += 0.04 * (self.outside - self.inside) + 1.5 * (action - 1)
        self.minutes += 1
        comfortable = abs(self.inside - self.target) <= 1.0
        # nothing here ends for good: the clock cuts the episode, which is truncation, not termination
        return self._seen(), float(comfortable), False, self.minutes == 100, {"degrees_off": self.inside - self.target}

    def _seen(self) -> np.ndarray:
        off = np.array([self.inside, self.outside], np.float32) - self.target
        return np.clip(off / 8, -5, 5)

    def render(self) -> np.ndarray:
        """A thermometer; green is comfortable."""
        picture = np.full((64, 32, 3), 40, np.uint8)
        height = int(np.clip(32 + 2 * (self.inside - self.target), 1, 63))
        picture[64 - height :, 8:24] = (60, 180, 90) if abs(self.inside - self.target) <= 1.0 else (220, 80, 60)
        return picture


def main() -> dict:
    return zx.train(
        "ppo", env="own_environment:Room", env_steps=40_000, stop_return=GOAL, num_envs=8, rollout_steps=64,
        minibatch_size=128, lr=1e-3, eval_every_steps=2_000,
    )  # fmt: skip


if __name__ == "__main__":
    result = main()
    print(f"comfortable in {result['final_return']:.1f} of 100 minutes")
