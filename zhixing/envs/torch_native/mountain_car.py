"""MountainCar-v0 (Moore, 1990) and its continuous sister: rock a car out of a valley that is too steep for it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from zhixing.envs.torch_native.env import Moved, TorchEnv, uniform

LEFT, RIGHT, MAX_SPEED, GRAVITY = -1.2, 0.6, 0.07, 0.0025


class _Valley(TorchEnv):
    options: ClassVar[frozenset[str]] = frozenset({"goal_velocity"})

    def __init__(self, goal_velocity: float = 0.0) -> None:
        self.goal_speed = goal_velocity

    def first(self, num: int, rng: torch.Generator) -> Tensor:
        place = uniform(-0.6, -0.4, (num,), rng)
        return torch.stack((place, torch.zeros_like(place)))

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        return {"obs": state.T}


class MountainCar(_Valley):
    limit = 200

    def move(self, state: Tensor, action: Tensor) -> Moved:
        state = _roll(state, (action - 1) * 0.001)
        terminated = (state[0] >= 0.5) & (state[1] >= self.goal_speed)
        return Moved(state, torch.full_like(state[0], -1.0), terminated)


class MountainCarContinuous(_Valley):
    limit = 999

    def move(self, state: Tensor, action: Tensor) -> Moved:
        push = action[:, 0]
        state = _roll(state, push.clamp(-1.0, 1.0) * 0.0015)
        terminated = (state[0] >= 0.45) & (state[1] >= self.goal_speed)
        return Moved(state, 100.0 * terminated - 0.1 * push.square(), terminated)


def _roll(state: Tensor, push: Tensor) -> Tensor:
    place, speed = state.unbind()
    speed = (speed + push - GRAVITY * (3 * place).cos()).clamp(-MAX_SPEED, MAX_SPEED)
    place = (place + speed).clamp(LEFT, RIGHT)
    speed = torch.where(place <= LEFT, speed.clamp_min(0.0), speed)  # the wall stops it
    return torch.stack((place, speed))
