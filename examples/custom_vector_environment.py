"""A custom vector environment: a `gymnasium.vector.VectorEnv`, one call of which steps all environments with NumPy.

Its autoreset mode may be SAME_STEP, NEXT_STEP or DISABLED. This one is DISABLED, the simplest to write: it resets the
rows of `options["reset_mask"]`. Run it with `python custom_vector_environment.py`.

Or on the command line, in the folder of this file:

    zhixing train ppo --env custom_vector_environment:Rooms env.target=23 num_envs=64 env_steps=100000 --out runs/rooms
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

import zhixing as zx

GOAL = 80.0  # of 100 minutes comfortable; the rooms start up to 8 degrees off


class Rooms(gym.vector.VectorEnv):
    """Keep rooms within one degree of the target while heat leaks through their walls. Actions: cool, wait, heat."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012  (as gym.vector.VectorEnv declares it)

    def __init__(self, num_envs: int, target: float = 21.0) -> None:
        self.num_envs, self.target = num_envs, target
        self.single_observation_space = Box(-5.0, 5.0, (2,), np.float32)
        self.single_action_space = Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.inside, self.outside, self.minutes = np.zeros((3, num_envs))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)  # seeds self.np_random
        rows = np.ones(self.num_envs, bool) if options is None else options["reset_mask"]
        self.inside[rows] = self.target + self.np_random.uniform(-8, 8, rows.sum())
        self.outside[rows] = self.target + self.np_random.uniform(-20, 20, rows.sum())
        self.minutes[rows] = 0
        return self._obs(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        self.inside += 0.04 * (self.outside - self.inside) + 1.5 * (actions - 1)
        self.minutes += 1
        reward = (np.abs(self.inside - self.target) <= 1.0).astype(np.float32)
        truncated = self.minutes == 100  # a time limit truncates; no state of a room terminates its episode
        return self._obs(), reward, np.zeros(self.num_envs, bool), truncated, {}

    def _obs(self) -> np.ndarray:
        difference = np.stack([self.inside, self.outside], 1) - self.target
        return np.clip(difference / 8, -5, 5).astype(np.float32)

    def state_dict(self) -> dict:
        """Optional: with it, interrupted runs resume in the middle of episodes."""
        state = {name: getattr(self, name).copy() for name in ("inside", "outside", "minutes")}
        return {**state, "rng": dict(self.np_random.bit_generator.state)}

    def load_state_dict(self, state: dict) -> None:
        for name in ("inside", "outside", "minutes"):
            setattr(self, name, state[name].copy())
        self.np_random.bit_generator.state = state["rng"]


def main() -> dict:
    return zx.train(
        "ppo", env="custom_vector_environment:Rooms", env_steps=80_000, stop_return=GOAL, num_envs=32,
        rollout_steps=32, minibatch_size=256, lr=1e-3, eval_every=8_000,
    )  # fmt: skip


if __name__ == "__main__":
    result = main()
    print(f"comfortable for {result['final_return']:.1f} of 100 minutes")
