"""Resolve `num_threads=auto` and `num_envs=auto` by measuring training speed before a run starts.

Only an explicit `auto` is measured. Otherwise a fixed rule sets the threads (`training.resolve`), so the same command
gives the same run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zhixing import config
from zhixing.config import OnPolicyConfig, RunConfig
from zhixing.errors import UserError, note
from zhixing.experiments.profiler import MIN_SPEEDUP, profile
from zhixing.utils.cpus import cpu_count

SECONDS = 1.0  # per measured value
MIN_ROLLOUT_STEPS = 8  # per env: advantages bootstrap along a rollout
MAX_ENVS_ON_POLICY = 256
MAX_ENVS_OFF_POLICY = 16  # a step of all envs is followed by all its updates: with more envs, the policy goes stale


def build(layers: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any]) -> RunConfig:
    """Build a config for training. Use `config.build` to read one without measuring."""
    settings: dict[str, Any] = {}
    for layer in (*layers, overrides):
        settings = config.merge(settings, layer)
    auto_num_envs = settings.get("num_envs") == "auto"
    if auto_num_envs:
        del settings["num_envs"]
    cfg = config.build([settings], {})
    if settings.get("num_threads") == "auto":
        cfg = choose_num_threads(cfg)
    return choose_num_envs(cfg) if auto_num_envs else cfg


def choose_num_threads(cfg: RunConfig) -> RunConfig:
    """Use all CPUs if that is clearly faster than one. Numbers in between rarely help and aren't tried."""
    speeds = {
        threads: profile(cfg.model_copy(update={"num_threads": threads}), SECONDS).speed
        for threads in sorted({1, cpu_count()})
    }
    most = max(speeds)
    best = most if speeds[most] >= MIN_SPEEDUP * speeds[1] else 1
    measured = ", ".join(f"{threads}: {speed:,.0f}" for threads, speed in speeds.items())
    note(f"num_threads=auto is {best} (steps per second by number of threads: {measured})")
    return cfg.model_copy(update={"num_threads": best})


def choose_num_envs(cfg: RunConfig) -> RunConfig:
    """Double the preset's number of environments as long as training gets clearly faster."""
    best, best_speed = cfg, profile(cfg, SECONDS).speed
    measured = [f"{cfg.num_envs}: {best_speed:,.0f}"]
    while (doubled := double_num_envs(best)) is not None:
        speed = profile(doubled, SECONDS).speed
        measured.append(f"{doubled.num_envs}: {speed:,.0f}")
        if speed < MIN_SPEEDUP * best_speed:
            break
        best, best_speed = doubled, speed
    note(f"num_envs=auto is {best.num_envs} (steps per second by number of environments: {', '.join(measured)})")
    return best


def double_num_envs(cfg: RunConfig) -> RunConfig | None:
    """Return the config with twice the environments, or None if that isn't allowed.

    An on-policy rollout keeps its total size, so learning per step stays the same.
    """
    num_envs = 2 * cfg.num_envs
    changes: dict[str, Any] = {"num_envs": num_envs}
    if isinstance(cfg, OnPolicyConfig):
        if cfg.rollout_steps % 2 or cfg.rollout_steps < 2 * MIN_ROLLOUT_STEPS:
            return None
        changes["rollout_steps"] = cfg.rollout_steps // 2
    if num_envs > (MAX_ENVS_ON_POLICY if isinstance(cfg, OnPolicyConfig) else MAX_ENVS_OFF_POLICY):
        return None
    try:
        return config.build([cfg.model_dump(mode="json")], changes)
    except UserError:  # another setting doesn't allow this many
        return None
