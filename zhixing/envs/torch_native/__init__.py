"""Tasks written in torch: thousands of copies on the learner's device, whose rollouts never leave it."""

from __future__ import annotations

from zhixing.envs.torch_native.vector import TORCH, Step, TorchVectorEnv

__all__ = ["TORCH", "Step", "TorchVectorEnv"]
