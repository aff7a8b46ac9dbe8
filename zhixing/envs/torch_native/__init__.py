"""Environments written in torch. Thousands run on the learner's device, and rollouts never leave it."""

from __future__ import annotations

from zhixing.envs.torch_native.env import TorchEnv, Transition, uniform
from zhixing.envs.torch_native.vector import TORCH_ENVS, TorchStep, TorchVectorEnv

__all__ = ["TORCH_ENVS", "TorchEnv", "TorchStep", "TorchVectorEnv", "Transition", "uniform"]
