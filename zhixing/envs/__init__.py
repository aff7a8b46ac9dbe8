"""Environments by name, one or many at once. Imports no torch, so worker processes start fast."""

from zhixing.envs.checker.env_checker import CheckResult, check_env
from zhixing.envs.crash.failure_policy import FailurePolicy
from zhixing.envs.registry import RegisteredEnv, make, names
from zhixing.envs.vector.base import VectorEnv
from zhixing.envs.vector.gym_vector import GymVectorEnv
from zhixing.envs.vector.make import make_small_vector, make_vector
from zhixing.envs.vector.native import NativeVectorEnv
from zhixing.envs.vector.process import ProcessVectorEnv
from zhixing.envs.vector.serial import SerialVectorEnv

__all__ = [
    "CheckResult",
    "FailurePolicy",
    "GymVectorEnv",
    "NativeVectorEnv",
    "ProcessVectorEnv",
    "RegisteredEnv",
    "SerialVectorEnv",
    "VectorEnv",
    "check_env",
    "make",
    "make_small_vector",
    "make_vector",
    "names",
]
