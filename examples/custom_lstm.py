"""A custom recurrent network, in an environment that requires memory.

A module whose `forward` has a parameter `hidden` is recurrent: `net(obs, hidden) -> (features, hidden)`. zhixing keeps
one hidden state per environment, resets it at the start of each episode and backpropagates through time.

Run it with `python custom_lstm.py`.
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

import zhixing as zx

GOAL = 0.9  # mean return; the best is 1, without memory 1/4


class Recall(gym.Env):
    """The first observation shows one of four cues. After three blank steps, the agent must name it."""

    observation_space = Box(0.0, 1.0, (5,), np.float32)  # the cue, one-hot, and a flag that asks for it
    action_space = Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.cue, self.steps = int(self.np_random.integers(4)), 0
        return np.eye(5, dtype=np.float32)[self.cue], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        terminated = self.steps == 5
        reward = float(terminated and action == self.cue)
        obs = np.eye(5, dtype=np.float32)[4] if self.steps == 4 else np.zeros(5, np.float32)
        return obs, reward, terminated, False, {}


class LSTM(nn.Module):
    def __init__(self, space: Box) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(space.shape[0], 32)

    def forward(self, obs: Tensor, hidden: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden = self.cell(obs, hidden)  # None is the initial state: zeros
        return hidden[0], hidden


def main() -> dict:
    return zx.train(
        "ppo", env="custom_lstm:Recall", net__kind="custom_lstm:LSTM", env_steps=60_000, stop_return=GOAL,
        num_envs=32, vector__backend="serial", rollout_steps=15, minibatch_size=480, lr=5e-3,
        eval_every=2_000,
    )  # fmt: skip


if __name__ == "__main__":
    result = main()
    print(f"{result['final_return']:.0%} of the cues recalled")
