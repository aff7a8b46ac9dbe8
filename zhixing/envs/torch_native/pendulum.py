"""Pendulum-v1: swing a pendulum up and hold it there, with a motor too weak to lift it."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from zhixing.envs.torch_native.env import Moved, TorchEnv, uniform

SECONDS, MAX_SPEED, MAX_TORQUE = 0.05, 8.0, 2.0  # mass and length are 1


class Pendulum(TorchEnv):
    limit = 200
    options: ClassVar[frozenset[str]] = frozenset({"g"})

    def __init__(self, g: float = 10.0) -> None:
        self.gravity = g

    def first(self, num: int, rng: torch.Generator) -> Tensor:
        return torch.stack((uniform(-math.pi, math.pi, (num,), rng), uniform(-1.0, 1.0, (num,), rng)))

    def move(self, state: Tensor, action: Tensor) -> Moved:
        angle, speed = state.unbind()
        torque = action[:, 0].clamp(-MAX_TORQUE, MAX_TORQUE)
        off = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi  # from upright, whatever turns it has made
        cost = off.square() + 0.1 * speed.square() + 0.001 * torque.square()
        speed = speed + (1.5 * self.gravity * angle.sin() + 3.0 * torque) * SECONDS
        speed = speed.clamp(-MAX_SPEED, MAX_SPEED)
        never = torch.zeros_like(cost, dtype=torch.bool)
        return Moved(torch.stack((angle + speed * SECONDS, speed)), -cost, never)

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        angle, speed = state.unbind()
        return {"obs": torch.stack((angle.cos(), angle.sin(), speed), 1)}
