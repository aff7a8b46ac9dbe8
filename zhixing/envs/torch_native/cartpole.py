"""CartPole-v1 (Barto, Sutton and Anderson, 1983): push a cart so that the pole on it stays upright."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from zhixing.envs.torch_native.env import Moved, TorchEnv, uniform

GRAVITY, FORCE, SECONDS = 9.8, 10.0, 0.02
POLE_MASS, MASS, HALF_LENGTH = 0.1, 1.1, 0.5  # the second is that of cart and pole
MAX_X, MAX_ANGLE = 2.4, math.radians(12)


class CartPole(TorchEnv):
    limit = 500
    options: ClassVar[frozenset[str]] = frozenset({"sutton_barto_reward"})

    def __init__(self, sutton_barto_reward: bool = False) -> None:
        self.only_falls = sutton_barto_reward  # -1 at a fall and else nothing, rather than 1 per step

    def first(self, num: int, rng: torch.Generator) -> Tensor:
        return uniform(-0.05, 0.05, (4, num), rng)

    def move(self, state: Tensor, action: Tensor) -> Moved:
        _, x_dot, angle, angle_dot = state.unbind()
        cos, sin = angle.cos(), angle.sin()
        push = (action * (2 * FORCE) - FORCE + POLE_MASS * HALF_LENGTH * angle_dot.square() * sin) / MASS
        angle_acc = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS / MASS * cos.square()))
        x_acc = push - POLE_MASS * HALF_LENGTH / MASS * angle_acc * cos
        state = state.add(torch.stack((x_dot, x_acc, angle_dot, angle_acc)), alpha=SECONDS)
        terminated = (state[0].abs() > MAX_X) | (state[2].abs() > MAX_ANGLE)
        reward = -terminated.float() if self.only_falls else torch.ones_like(cos)
        return Moved(state, reward, terminated)

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        return {"obs": state.T}
