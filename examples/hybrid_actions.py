"""Hybrid actions: a Dict of a choice and a number, with a mask of the allowed choices.

Run it with `python hybrid_actions.py`.

Or on the command line, in the folder of this file:

    zhixing check hybrid_actions:Workshop
    zhixing train ppo --env hybrid_actions:Workshop num_envs=8 lr=3e-3 env_steps=40000 --out runs/workshop
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

import zhixing as zx

GOAL = 16.0  # of 20 parts; random actions finish 2.6
TOOLS = 3


class Workshop(gym.Env):
    """Finish parts of different sizes: choose a tool that is free, and turn it by the angle that the size needs.

    The tools have different gears, so the angle depends on the tool, too.
    """

    observation_space = Box(0.0, 1.0, (1 + TOOLS,), np.float32)  # the size of the part, and which tools are free
    action_space = Dict({"angle": Box(-180.0, 180.0, (), np.float32), "tool": Discrete(TOOLS)})
    half_turns = (-0.5, 0.3, 1.0)  # that each tool needs for a part of size 1

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.parts = 0
        return self._next_part()

    def step(self, action: dict) -> tuple[np.ndarray, float, bool, bool, dict]:
        tool = int(action["tool"])
        assert self.free[tool], "the mask forbids this tool"
        error = abs(float(action["angle"]) / 180.0 - self.half_turns[tool] * self.size)
        self.parts += 1
        obs, info = self._next_part()
        return obs, max(0.0, 1.0 - 2.0 * error), False, self.parts == 20, info

    def _next_part(self) -> tuple[np.ndarray, dict]:
        self.size = self.np_random.uniform(0.2, 1.0)
        self.free = np.arange(TOOLS) != self.np_random.integers(TOOLS)
        obs = np.array([self.size, *self.free], np.float32)
        return obs, {"action_mask": self.free}  # of the values of `tool`, the only choice in an action


def main() -> dict:
    result = zx.train(
        "ppo", env="hybrid_actions:Workshop", env_steps=60_000, stop_return=GOAL, num_envs=8, rollout_steps=64,
        minibatch_size=128, lr=3e-3, eval_every=2_000, out="runs/workshop",
    )  # fmt: skip
    agent = zx.load("runs/workshop")
    action = agent.act(np.float32([0.5, 1, 0, 1]), mask=[True, False, True])
    assert Workshop.action_space.contains(action)
    print("a part of size 0.5:", action)
    return result


if __name__ == "__main__":
    print(f"parts finished: {main()['final_return']:.1f} of 20")
