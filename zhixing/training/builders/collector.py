"""Build the collector of a run."""

from __future__ import annotations

from zhixing.collect.actor import Actor
from zhixing.collect.collector import Collector
from zhixing.collect.torch_collector import TorchActor
from zhixing.config import RunConfig
from zhixing.core.learner import Learner, LearnsFromSelfPlay
from zhixing.distributed.collector import make_distributed_collector
from zhixing.envs import VectorEnv
from zhixing.envs.torch_native import TorchVectorEnv
from zhixing.training.resolve import is_distributed
from zhixing.training.run_folder import RunFolder


def build_collector(cfg: RunConfig, learner: Learner, env: VectorEnv, folder: RunFolder) -> Collector:
    """Build the collector for the configuration and the type of environments."""
    if isinstance(learner, LearnsFromSelfPlay):
        return learner.self_play()
    if is_distributed(cfg):
        return make_distributed_collector(cfg, learner, env.spaces, env.logged_info_keys, folder.path)
    if isinstance(env, TorchVectorEnv) and cfg.scheme == "on_policy":  # replay buffers store NumPy arrays
        return TorchActor(learner.policy, env, learner.extra_fields, seed=cfg.seed)
    return Actor(learner.policy, env, learner.extra_fields, seed=cfg.seed, device=cfg.device)
