"""A custom environment: any `gymnasium.Env`, named `module:Class`. Constructor arguments are settings, as `env.NAME`.

Run it with `python custom_environment.py`.

Or on the command line, in the folder of this file:

    zhixing train ppo --env custom_environment:Room env.target=23 num_envs=8 lr=1e-3 env_steps=20000 --out runs/room
    zhixing video runs/room -o room.mp4 --trust
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

import zhixing as zx

GOAL = 80.0  # of 100 minutes comfortable; the room starts up to 8 degrees off


class Room(gym.Env):
    """Keep a room within one degree of the target while heat leaks through its walls. Actions: cool, wait, heat."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012  (as gym.Env declares it)
    observation_space = Box(-5.0, 5.0, (2,), np.float32)  # (inside - target, outside - target) / 8 degrees
    action_space = Discrete(3)

    def __init__(self, target: float = 21.0, render_mode: str | None = None) -> None:
        self.target, self.render_mode = target, render_mode

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)  # seeds self.np_random; with no other random numbers, episodes are reproducible
        self.inside = self.target + self.np_random.uniform(-8, 8)
        self.outside = self.target + self.np_random.uniform(-20, 20)
        self.minutes = 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.inside += 0.04 * (self.outside - self.inside) + 1.5 * (action - 1)
        self.minutes += 1
        reward = float(self._comfortable())
        truncated = self.minutes == 100  # a time limit truncates; no state of the room terminates the episode
        return self._obs(), reward, False, truncated, {"degrees_off": self.inside - self.target}

    def _obs(self) -> np.ndarray:
        difference = np.array([self.inside, self.outside], np.float32) - self.target
        return np.clip(difference / 8, -5, 5)

    def _comfortable(self) -> bool:
        return abs(self.inside - self.target) <= 1.0

    def render(self) -> np.ndarray:
        """Draw a thermometer, green if the temperature is comfortable."""
        image = np.full((64, 32, 3), 40, np.uint8)
        height = int(np.clip(32 + 2 * (self.inside - self.target), 1, 63))
        image[64 - height :, 8:24] = (60, 180, 90) if self._comfortable() else (220, 80, 60)
        return image


def main() -> dict:
    return zx.train(
        "ppo", env="custom_environment:Room", env_steps=40_000, stop_return=GOAL, num_envs=8, rollout_steps=64,
        minibatch_size=128, lr=1e-3, eval_every=2_000,
    )  # fmt: skip


if __name__ == "__main__":
    result = main()
    print(f"comfortable for {result['final_return']:.1f} of 100 minutes")
