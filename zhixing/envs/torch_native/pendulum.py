"""Pendulum-v1: swing a pendulum up and hold it there, with a motor too weak to lift it directly."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from zhixing.envs.torch_native.env import TorchEnv, Transition, uniform

DT, MAX_SPEED, MAX_TORQUE = 0.05, 8.0, 2.0  # mass and length are 1


class Pendulum(TorchEnv):
    max_episode_steps = 200
    options: ClassVar[frozenset[str]] = frozenset({"g"})

    def __init__(self, g: float = 10.0) -> None:
        self.gravity = g

    def initial_state(self, num_envs: int, rng: torch.Generator) -> Tensor:
        return torch.stack((uniform(-math.pi, math.pi, (num_envs,), rng), uniform(-1.0, 1.0, (num_envs,), rng)))

    def transition(self, state: Tensor, action: Tensor) -> Transition:
        angle, speed = state.unbind()
        torque = action[:, 0].clamp(-MAX_TORQUE, MAX_TORQUE)
        deviation = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi  # from upright, in [-pi, pi)
        cost = deviation.square() + 0.1 * speed.square() + 0.001 * torque.square()
        speed = speed + (1.5 * self.gravity * angle.sin() + 3.0 * torque) * DT
        speed = speed.clamp(-MAX_SPEED, MAX_SPEED)
        terminated = torch.zeros_like(cost, dtype=torch.bool)
        return Transition(torch.stack((angle + speed * DT, speed)), -cost, terminated)

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        angle, speed = state.unbind()
        return {"obs": torch.stack((angle.cos(), angle.sin(), speed), 1)}
