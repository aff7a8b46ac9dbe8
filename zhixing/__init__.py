"""zhixing (知行): deep reinforcement learning on PyTorch.

Attributes are imported on first access, so `import zhixing` and the command line start fast.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if sys.platform == "win32":  # file locks, polling of pipes and syncing of folders need POSIX
    raise ImportError("zhixing supports Linux and macOS, not Windows; on Windows, install it inside WSL2")

# Torch's threads sleep when they wait for each other; by default they poll, which takes CPU time from environments in
# worker processes and from other programs. With two threads on two busy CPUs, updates from images took 0.25 of the CPU
# time, and acting 0.05. OpenMP reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from zhixing import algorithms, buffers, config, envs, nets, offline, ops, search
    from zhixing.algorithms.a2c import A2CConfig, A3CConfig, ACConfig
    from zhixing.algorithms.alphazero import AlphaZeroConfig
    from zhixing.algorithms.awac import AWACConfig
    from zhixing.algorithms.bc import BCConfig
    from zhixing.algorithms.c51 import C51Config, RainbowConfig
    from zhixing.algorithms.coma import COMAConfig
    from zhixing.algorithms.cql import CQLConfig
    from zhixing.algorithms.crossq import CrossQConfig
    from zhixing.algorithms.dagger import DAggerConfig
    from zhixing.algorithms.dqn import DoubleDQNConfig, DQNConfig, DuelingDQNConfig
    from zhixing.algorithms.dreamer import DreamerConfig
    from zhixing.algorithms.gail import GAILConfig
    from zhixing.algorithms.impala import IMPALAConfig
    from zhixing.algorithms.iql import IQLConfig
    from zhixing.algorithms.maddpg import MADDPGConfig
    from zhixing.algorithms.mappo import IPPOConfig, MAPPOConfig
    from zhixing.algorithms.mcts import MCTSConfig
    from zhixing.algorithms.munchausen_dqn import MunchausenDQNConfig
    from zhixing.algorithms.pg import PGConfig
    from zhixing.algorithms.ppg import PPGConfig
    from zhixing.algorithms.ppo import PPOConfig
    from zhixing.algorithms.pqn import PQNConfig
    from zhixing.algorithms.qmix import IDQNConfig, QMIXConfig, VDNConfig
    from zhixing.algorithms.qrdqn import QRDQNConfig
    from zhixing.algorithms.sac import DroQConfig, REDQConfig, SACConfig
    from zhixing.algorithms.td3 import DDPGConfig, TD3BCConfig, TD3Config
    from zhixing.algorithms.tqc import TQCConfig
    from zhixing.algorithms.trpo import TRPOConfig
    from zhixing.buffers import Buffer
    from zhixing.collectors.actor import Actor
    from zhixing.collectors.collector import Collector, Experience
    from zhixing.collectors.evaluation import Episode, Evaluation
    from zhixing.config import (
        DistributedConfig,
        EnvConfig,
        MultiPolicyConfig,
        NetConfig,
        ReplayConfig,
        RunConfig,
        VectorConfig,
    )
    from zhixing.core.batch import Batch
    from zhixing.core.learner import Learner, Update, train_step
    from zhixing.core.policy import Decision, Phase, Policy
    from zhixing.core.spaces import Spaces
    from zhixing.errors import UserError
    from zhixing.experiments.sweep import sweep
    from zhixing.experiments.tune import Range, tune
    from zhixing.reports.hub import pull, push
    from zhixing.reports.plots import Chart, plot
    from zhixing.reports.video import Video, video
    from zhixing.training import callbacks, trainers
    from zhixing.training.agent import Agent, load
    from zhixing.training.callbacks import Callback
    from zhixing.training.collect_data import collect
    from zhixing.training.import_agent import import_agent
    from zhixing.training.loop import TrainingLoop
    from zhixing.training.result import RunResult
    from zhixing.training.run import evaluate, resume, train
    from zhixing.training.session import Session
    from zhixing.training.trainers import off_policy, on_policy
    from zhixing.training.zoo import export

_PACKAGES = "algorithms buffers config core envs nets offline ops reports search training"
_MODULES = {name: f"zhixing.{name}" for name in _PACKAGES.split()}
_MODULES |= {name: f"zhixing.training.{name}" for name in ("callbacks", "trainers")}
_NAMES = {
    "collectors.actor": ("Actor",),
    "collectors.collector": ("Collector", "Experience"),
    "collectors.evaluation": ("Episode", "Evaluation"),
    "training.agent": ("Agent", "load"),
    "core.batch": ("Batch",),
    "buffers": ("Buffer",),
    "training.callbacks": ("Callback",),
    "errors": ("UserError",),
    "core.learner": ("Learner", "Update", "train_step"),
    "core.policy": ("Decision", "Phase", "Policy"),
    "reports.hub": ("pull", "push"),
    "training.collect_data": ("collect",),
    "training.result": ("RunResult",),
    "training.run": ("evaluate", "resume", "train"),
    "experiments.sweep": ("sweep",),
    "experiments.tune": ("Range", "tune"),
    "reports.plots": ("Chart", "plot"),
    "reports.video": ("Video", "video"),
    "training.session": ("Session",),
    "core.spaces": ("Spaces",),
    "training.loop": ("TrainingLoop",),
    "training.trainers": ("off_policy", "on_policy"),
    "training.import_agent": ("import_agent",),
    "training.zoo": ("export",),
    "algorithms.a2c": ("A2CConfig", "A3CConfig", "ACConfig"),
    "algorithms.alphazero": ("AlphaZeroConfig",),
    "algorithms.awac": ("AWACConfig",),
    "algorithms.bc": ("BCConfig",),
    "algorithms.c51": ("C51Config", "RainbowConfig"),
    "algorithms.coma": ("COMAConfig",),
    "algorithms.cql": ("CQLConfig",),
    "algorithms.dagger": ("DAggerConfig",),
    "algorithms.dqn": ("DQNConfig", "DoubleDQNConfig", "DuelingDQNConfig"),
    "algorithms.dreamer": ("DreamerConfig",),
    "algorithms.gail": ("GAILConfig",),
    "algorithms.impala": ("IMPALAConfig",),
    "algorithms.iql": ("IQLConfig",),
    "algorithms.maddpg": ("MADDPGConfig",),
    "algorithms.mappo": ("IPPOConfig", "MAPPOConfig"),
    "algorithms.mcts": ("MCTSConfig",),
    "algorithms.munchausen_dqn": ("MunchausenDQNConfig",),
    "algorithms.pg": ("PGConfig",),
    "algorithms.ppg": ("PPGConfig",),
    "algorithms.ppo": ("PPOConfig",),
    "algorithms.qmix": ("IDQNConfig", "QMIXConfig", "VDNConfig"),
    "algorithms.qrdqn": ("QRDQNConfig",),
    "algorithms.sac": ("DroQConfig", "REDQConfig", "SACConfig"),
    "algorithms.crossq": ("CrossQConfig",),
    "algorithms.pqn": ("PQNConfig",),
    "algorithms.tqc": ("TQCConfig",),
    "algorithms.td3": ("DDPGConfig", "TD3BCConfig", "TD3Config"),
    "algorithms.trpo": ("TRPOConfig",),
    "config": (
        "DistributedConfig",
        "EnvConfig",
        "MultiPolicyConfig",
        "NetConfig",
        "ReplayConfig",
        "RunConfig",
        "VectorConfig",
    ),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [
    "A2CConfig",
    "A3CConfig",
    "ACConfig",
    "AWACConfig",
    "Actor",
    "Agent",
    "AlphaZeroConfig",
    "BCConfig",
    "Batch",
    "Buffer",
    "C51Config",
    "COMAConfig",
    "CQLConfig",
    "Callback",
    "Chart",
    "Collector",
    "CrossQConfig",
    "DAggerConfig",
    "DDPGConfig",
    "DQNConfig",
    "Decision",
    "DistributedConfig",
    "DoubleDQNConfig",
    "DreamerConfig",
    "DroQConfig",
    "DuelingDQNConfig",
    "EnvConfig",
    "Episode",
    "Evaluation",
    "Experience",
    "GAILConfig",
    "IDQNConfig",
    "IMPALAConfig",
    "IPPOConfig",
    "IQLConfig",
    "Learner",
    "MADDPGConfig",
    "MAPPOConfig",
    "MCTSConfig",
    "MultiPolicyConfig",
    "MunchausenDQNConfig",
    "NetConfig",
    "PGConfig",
    "PPGConfig",
    "PPOConfig",
    "PQNConfig",
    "Phase",
    "Policy",
    "QMIXConfig",
    "QRDQNConfig",
    "REDQConfig",
    "RainbowConfig",
    "Range",
    "ReplayConfig",
    "RunConfig",
    "RunResult",
    "SACConfig",
    "Session",
    "Spaces",
    "TD3BCConfig",
    "TD3Config",
    "TQCConfig",
    "TRPOConfig",
    "TrainingLoop",
    "Update",
    "UserError",
    "VDNConfig",
    "VectorConfig",
    "Video",
    "algorithms",
    "buffers",
    "callbacks",
    "collect",
    "config",
    "envs",
    "evaluate",
    "export",
    "import_agent",
    "load",
    "nets",
    "off_policy",
    "offline",
    "on_policy",
    "ops",
    "plot",
    "pull",
    "push",
    "resume",
    "search",
    "sweep",
    "train",
    "train_step",
    "trainers",
    "tune",
    "video",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"zhixing.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'zhixing' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
