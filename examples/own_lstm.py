"""Your own recurrent network, on a task that can't be solved without memory.

A module whose `forward` takes `hidden` is recurrent: `net(obs, hidden) -> (features, hidden)`. The platform keeps the
hidden state of every environment, clears it where an episode starts and trains through time.

Run it with `python own_lstm.py`.
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

import zhixing as zx

GOAL = 0.9  # of 1; without memory the best is 1/4


class Recall(gym.Env):
    """A cue is shown once, then three blank steps, then the question: which was it?"""

    observation_space = Box(0.0, 1.0, (5,), np.float32)  # four cues, one-hot, and whether this is the question
    action_space = Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.cue, self.steps = int(self.np_random.integers(4)), 0
        return np.eye(5, dtype=np.float32)[self.cue], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        answered = self.steps == 5
        reward = float(answered and action == self.cue)
        obs = np.eye(5, dtype=np.float32)[4] if self.steps == 4 else np.zeros(5, np.float32)
        return obs, reward, answered, False, {}


class Memory(nn.Module):
    def __init__(self, space: Box) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(space.shape[0], 32)

    def forward(self, obs: Tensor, hidden: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden = self.lstm(obs, hidden)  # None, like zeros, is the state at the start of an episode
        return hidden[0], hidden


def main() -> dict:
    return zx.train(
        "ppo", env="own_lstm:Recall", net__kind="own_lstm:Memory", env_steps=60_000, stop_return=GOAL,
        num_envs=32, vector__backend="serial", rollout_steps=15, minibatch_size=480, lr=5e-3,
        eval_every_steps=2_000,
    )  # fmt: skip


if __name__ == "__main__":
    result = main()
    print(f"{100 * result['final_return']:.0f}% remembered")
