"""MountainCar-v0 (Moore, 1990) and its continuous variant: rock a car out of a valley too steep to drive up."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from zhixing.envs.torch_native.env import TorchEnv, Transition, uniform

MIN_POSITION, MAX_POSITION, MAX_VELOCITY, GRAVITY = -1.2, 0.6, 0.07, 0.0025


class _MountainCarBase(TorchEnv):
    options: ClassVar[frozenset[str]] = frozenset({"goal_velocity"})

    def __init__(self, goal_velocity: float = 0.0) -> None:
        self.goal_velocity = goal_velocity

    def initial_state(self, num_envs: int, rng: torch.Generator) -> Tensor:
        position = uniform(-0.6, -0.4, (num_envs,), rng)
        return torch.stack((position, torch.zeros_like(position)))

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        return {"obs": state.T}


class MountainCar(_MountainCarBase):
    max_episode_steps = 200

    def transition(self, state: Tensor, action: Tensor) -> Transition:
        state = _drive(state, (action - 1) * 0.001)
        terminated = (state[0] >= 0.5) & (state[1] >= self.goal_velocity)
        return Transition(state, torch.full_like(state[0], -1.0), terminated)


class MountainCarContinuous(_MountainCarBase):
    max_episode_steps = 999

    def transition(self, state: Tensor, action: Tensor) -> Transition:
        force = action[:, 0]
        state = _drive(state, force.clamp(-1.0, 1.0) * 0.0015)
        terminated = (state[0] >= 0.45) & (state[1] >= self.goal_velocity)
        return Transition(state, 100.0 * terminated - 0.1 * force.square(), terminated)


def _drive(state: Tensor, force: Tensor) -> Tensor:
    position, velocity = state.unbind()
    velocity = (velocity + force - GRAVITY * (3 * position).cos()).clamp(-MAX_VELOCITY, MAX_VELOCITY)
    position = (position + velocity).clamp(MIN_POSITION, MAX_POSITION)
    velocity = torch.where(position <= MIN_POSITION, velocity.clamp_min(0.0), velocity)  # the wall stops the car
    return torch.stack((position, velocity))
