"""Build the environments of a run: for training, for evaluations, and for the rewards of relabeled goals."""

from __future__ import annotations

from zhixing import envs
from zhixing.config import OffPolicyConfig, RunConfig, SelfPlayConfig
from zhixing.envs.vector.constructors import has_fixed_num_envs
from zhixing.errors import UserError
from zhixing.training.resolve import is_distributed, resolve_device
from zhixing.training.run_folder import RunFolder

FewEnvs = envs.SerialVectorEnv | envs.ProcessVectorEnv


def build_env(cfg: RunConfig, folder: RunFolder) -> envs.VectorEnv:
    """Build the training environments.

    Self-play and distributed workers make their environments themselves. For them, this returns a single environment
    that only provides the spaces.
    """
    if isinstance(cfg, SelfPlayConfig) or is_distributed(cfg):
        return _make_single_env(cfg, folder)
    return envs.make_vector(
        cfg.env.name,
        cfg.num_envs,
        backend=cfg.vector.backend,
        workers=None if cfg.vector.workers == "auto" else cfg.vector.workers,
        options=cfg.env.options,
        failure_policy=envs.FailurePolicy.from_settings(cfg.vector, folder.crashes),
        address=cfg.distributed.address,
        device=resolve_device(cfg).device,
        idle=not (isinstance(cfg, OffPolicyConfig) and cfg.async_collect),
    )


def build_evaluation_env(cfg: RunConfig, folder: RunFolder | None) -> envs.VectorEnv:
    """Build the evaluation environments, with the options of `eval_env`."""
    if cfg.eval_num_envs != "auto":
        num = cfg.eval_num_envs
    else:
        num = cfg.num_envs if has_fixed_num_envs(cfg.env.name) else min(cfg.eval_episodes, max(10, cfg.num_envs))
    options = {**cfg.env.options, **cfg.eval_env}
    failure_policy = envs.FailurePolicy.from_settings(cfg.vector, None if folder is None else folder.crashes)
    backend = "serial" if cfg.vector.backend == "ray" else cfg.vector.backend  # Ray is slower for few episodes
    return envs.make_vector(cfg.env.name, num, backend=backend, options=options, failure_policy=failure_policy)


def build_goal_env(cfg: RunConfig, folder: RunFolder) -> FewEnvs | None:
    """Build the environment that computes rewards of relabeled goals, or return None without HER."""
    relabels = isinstance(cfg, OffPolicyConfig) and cfg.replay.her and cfg.replay.her_ratio > 0.0
    if not relabels:
        return None
    env = _make_single_env(cfg, folder)
    if not isinstance(env, FewEnvs):
        env.close()
        raise UserError(
            f"replay.her=true needs the method compute_reward of a single environment, but those of {cfg.env.name} "
            f"step together; set replay.her=false, or use a gymnasium.Env"
        )
    return env


def _make_single_env(cfg: RunConfig, folder: RunFolder) -> envs.VectorEnv:
    return envs.make_small_vector(envs.RegisteredEnv(cfg.env.name, cfg.env.options), 1, cfg.vector, folder.crashes)
