"""Acrobot-v1 (Sutton, 1996): swing the free end of two hanging links above the bar, with a motor at their joint."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zhixing.envs.torch_native.env import TorchEnv, Transition, uniform

GRAVITY, DT = 9.8, 0.2
MAX_SPEEDS = 4 * math.pi, 9 * math.pi  # masses, lengths and moments of inertia are 1; centers of mass are in the middle


class Acrobot(TorchEnv):
    max_episode_steps = 500

    def initial_state(self, num_envs: int, rng: torch.Generator) -> Tensor:
        return uniform(-0.1, 0.1, (4, num_envs), rng)

    def transition(self, state: Tensor, action: Tensor) -> Transition:
        torque = action.to(state.dtype) - 1.0
        # one step of the fourth-order Runge-Kutta method
        k1 = _derivative(state, torque)
        k2 = _derivative(state + DT / 2 * k1, torque)
        k3 = _derivative(state + DT / 2 * k2, torque)
        k4 = _derivative(state + DT * k3, torque)
        state = state + DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        angles = torch.remainder(state[:2] + math.pi, 2 * math.pi) - math.pi
        speeds = [speed.clamp(-limit, limit) for speed, limit in zip(state[2:].unbind(), MAX_SPEEDS, strict=True)]
        state = torch.cat((angles, torch.stack(speeds)))
        terminated = -angles[0].cos() - (angles[1] + angles[0]).cos() > 1.0
        return Transition(state, terminated.float() - 1.0, terminated)

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        angles, speeds = state[:2], state[2:]
        cos, sin = angles.cos(), angles.sin()
        return {"obs": torch.stack((cos[0], sin[0], cos[1], sin[1], speeds[0], speeds[1]), 1)}


def _derivative(state: Tensor, torque: Tensor) -> Tensor:
    """Return the time derivative of the state, following Sutton and Barto's book."""
    angle1, angle2, speed1, speed2 = state.unbind()
    cos, sin = angle2.cos(), angle2.sin()
    d1 = 3.5 + cos
    d2 = 1.25 + 0.5 * cos
    phi2 = 0.5 * GRAVITY * (angle1 + angle2).sin()
    phi1 = -0.5 * speed2.square() * sin - speed2 * speed1 * sin + 1.5 * GRAVITY * angle1.sin() + phi2
    acc2 = (torque + d2 / d1 * phi1 - 0.5 * speed1.square() * sin - phi2) / (1.25 - d2.square() / d1)
    acc1 = -(d2 * acc2 + phi1) / d1
    return torch.stack((speed1, speed2, acc1, acc2))
