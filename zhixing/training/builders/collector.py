"""Build the collector of a run."""

from __future__ import annotations

from collections.abc import Callable

from zhixing.collectors.actor import Actor
from zhixing.collectors.collector import Collector
from zhixing.collectors.torch_collector import TorchActor
from zhixing.config import RunConfig
from zhixing.core.learner import Learner, LearnsFromSelfPlay
from zhixing.distributed.collector import make_distributed_collector
from zhixing.envs import VectorEnv
from zhixing.envs.torch_native import TorchVectorEnv
from zhixing.errors import UserError
from zhixing.training.resolve import is_distributed
from zhixing.training.run_folder import RunFolder
from zhixing.utils.importing import import_object


def build_collector(cfg: RunConfig, learner: Learner, env: VectorEnv, folder: RunFolder) -> Collector:
    """Build the custom collector if there is one, else that for the configuration and the type of environments."""
    if isinstance(cfg.collector, str):
        return _custom_collector(cfg.collector, cfg, learner, env)
    if isinstance(learner, LearnsFromSelfPlay):
        return learner.self_play()
    if is_distributed(cfg):
        keys = (*env.logged_info_keys, *learner.policy.logged_info_keys)
        return make_distributed_collector(cfg, learner, env.spaces, keys, folder.path)
    if isinstance(env, TorchVectorEnv) and cfg.scheme == "on_policy":  # replay buffers store NumPy arrays
        return TorchActor(learner.policy, env, learner.extra_fields, seed=cfg.seed)
    return Actor(learner.policy, env, learner.extra_fields, seed=cfg.seed, device=cfg.device)


def _custom_collector(name: str, cfg: RunConfig, learner: Learner, env: VectorEnv) -> Collector:
    if isinstance(learner, LearnsFromSelfPlay) or is_distributed(cfg):
        source = "self-play" if isinstance(learner, LearnsFromSelfPlay) else "workers (distributed.workers, actors)"
        raise UserError(f"collector={name!r} can't be used with {cfg.algorithm} here, whose steps come from {source}")
    collector = import_object(name)
    if not (isinstance(collector, type) and Collector in collector.__mro__):
        raise UserError(f"collector={name!r} must be a class that derives from zhixing.Collector or zhixing.Actor")
    make: Callable[..., Collector] = collector
    return make(cfg, learner, env)
