"""CartPole-v1 (Barto, Sutton and Anderson, 1983): push a cart to keep the pole on it upright."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from zhixing.envs.torch_native.env import TorchEnv, Transition, uniform

GRAVITY, FORCE, DT = 9.8, 10.0, 0.02
POLE_MASS, TOTAL_MASS, HALF_LENGTH = 0.1, 1.1, 0.5
MAX_X, MAX_ANGLE = 2.4, math.radians(12)


class CartPole(TorchEnv):
    max_episode_steps = 500
    options: ClassVar[frozenset[str]] = frozenset({"sutton_barto_reward"})

    def __init__(self, sutton_barto_reward: bool = False) -> None:
        self.sutton_barto_reward = sutton_barto_reward  # -1 when the pole falls and else 0, instead of 1 per step

    def initial_state(self, num_envs: int, rng: torch.Generator) -> Tensor:
        return uniform(-0.05, 0.05, (4, num_envs), rng)

    def transition(self, state: Tensor, action: Tensor) -> Transition:
        _, x_dot, angle, angle_dot = state.unbind()
        cos, sin = angle.cos(), angle.sin()
        push = (action * (2 * FORCE) - FORCE + POLE_MASS * HALF_LENGTH * angle_dot.square() * sin) / TOTAL_MASS
        angle_acc = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS / TOTAL_MASS * cos.square()))
        x_acc = push - POLE_MASS * HALF_LENGTH / TOTAL_MASS * angle_acc * cos
        state = state.add(torch.stack((x_dot, x_acc, angle_dot, angle_acc)), alpha=DT)
        terminated = (state[0].abs() > MAX_X) | (state[2].abs() > MAX_ANGLE)
        reward = -terminated.float() if self.sutton_barto_reward else torch.ones_like(cos)
        return Transition(state, reward, terminated)

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        return {"obs": state.T}
