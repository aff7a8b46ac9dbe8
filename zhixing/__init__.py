"""zhixing (知行): deep reinforcement learning on PyTorch.

Names are imported when first used, so that `import zhixing` and the command line start at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if sys.platform == "win32":  # file locks, polling of pipes and syncing of folders need POSIX
    raise ImportError("zhixing supports Linux and macOS, not Windows; on Windows, install it inside WSL2")

if TYPE_CHECKING:
    from zhixing import algorithms, buffers, callbacks, config, datasets, envs, nets, ops, search
    from zhixing.actor import Actor, Episode, Evaluation
    from zhixing.agent import Agent, load
    from zhixing.batch import Batch
    from zhixing.buffers import Buffer
    from zhixing.callbacks import Callback
    from zhixing.errors import UserError
    from zhixing.learner import Gradients, Learner, Update
    from zhixing.policy import Decision, Phase, Policy
    from zhixing.session import Session, evaluate, train
    from zhixing.spaces import Spaces
    from zhixing.trainer import Loop, off_policy, offline, on_policy

_MODULES = ("algorithms", "buffers", "callbacks", "config", "datasets", "envs", "nets", "ops", "plots", "search")
_NAMES = {
    "actor": ("Actor", "Episode", "Evaluation"),
    "agent": ("Agent", "load"),
    "batch": ("Batch",),
    "buffers": ("Buffer",),
    "callbacks": ("Callback",),
    "errors": ("UserError",),
    "learner": ("Gradients", "Learner", "Update"),
    "policy": ("Decision", "Phase", "Policy"),
    "session": ("Session", "evaluate", "train"),
    "spaces": ("Spaces",),
    "trainer": ("Loop", "off_policy", "offline", "on_policy"),
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [
    "Actor",
    "Agent",
    "Batch",
    "Buffer",
    "Callback",
    "Decision",
    "Episode",
    "Evaluation",
    "Gradients",
    "Learner",
    "Loop",
    "Phase",
    "Policy",
    "Session",
    "Spaces",
    "Update",
    "UserError",
    "algorithms",
    "buffers",
    "callbacks",
    "config",
    "datasets",
    "envs",
    "evaluate",
    "load",
    "nets",
    "off_policy",
    "offline",
    "on_policy",
    "ops",
    "search",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"zhixing.{name}")
    if name in _WHERE:
        return getattr(importlib.import_module(f"zhixing.{_WHERE[name]}"), name)
    raise AttributeError(f"zhixing has no {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
