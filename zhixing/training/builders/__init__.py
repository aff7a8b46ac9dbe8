"""Builders: functions that make the parts of a run. `Session` calls them; keyword arguments replace them one by one."""

from zhixing.training.builders.buffer import build_buffer
from zhixing.training.builders.callbacks import build_callbacks
from zhixing.training.builders.collector import build_collector
from zhixing.training.builders.env import build_env, build_evaluation_env, build_goal_env
from zhixing.training.builders.evaluator import build_evaluator
from zhixing.training.builders.learner import build_learner

__all__ = [
    "build_buffer",
    "build_callbacks",
    "build_collector",
    "build_env",
    "build_evaluation_env",
    "build_evaluator",
    "build_goal_env",
    "build_learner",
]
