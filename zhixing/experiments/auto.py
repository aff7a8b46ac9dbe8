"""`num_threads=auto` and `num_envs=auto`, asked for by name: what makes training fastest on this machine, measured
before it begins. Where nobody asks, threads follow a rule instead (`session.resolve`), so that the same command gives
the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zhixing import config
from zhixing.config import OnPolicyConfig, RunConfig
from zhixing.errors import UserError, note
from zhixing.experiments.profiler import WORTH, profile
from zhixing.utils.cpus import cpu_count

SECONDS = 1.0  # for each number that is tried
FEWEST_STEPS = 8  # of each copy per rollout: advantages look ahead along them
MOST_ON_POLICY = 256
MOST_WITH_REPLAY = 16  # updates come all at once after a step of all copies: weights shouldn't stand still for long


def build(layers: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any]) -> RunConfig:
    """`config.build` for those who are about to train: what reads a file must not measure anything."""
    asked: dict[str, Any] = {}
    for layer in (*layers, overrides):
        asked = config.merge(asked, layer)
    copies = asked.get("num_envs") == "auto"
    if copies:
        del asked["num_envs"]
    threads = asked.get("num_threads") == "auto"
    cfg = config.build([asked], {})
    if threads:
        cfg = best_threads(cfg)
    return best_copies(cfg) if copies else cfg


def best_threads(cfg: RunConfig) -> RunConfig:
    """All CPUs where that pays clearly over one: between them there is seldom anything to gain."""
    speeds = {
        threads: profile(cfg.model_copy(update={"num_threads": threads}), SECONDS).speed
        for threads in sorted({1, cpu_count()})
    }
    most = max(speeds)
    best = most if speeds[most] >= WORTH * speeds[1] else 1
    told = ", ".join(f"{threads}: {speed:,.0f}" for threads, speed in speeds.items())
    note(f"num_threads=auto is {best} (steps per second by number of threads: {told})")
    return cfg.model_copy(update={"num_threads": best})


def best_copies(cfg: RunConfig) -> RunConfig:
    """Double the copies of the preset as long as that pays clearly."""
    best, speed = cfg, profile(cfg, SECONDS).speed
    tried = [f"{cfg.num_envs}: {speed:,.0f}"]
    while (more := doubled(best)) is not None:
        found = profile(more, SECONDS).speed
        tried.append(f"{more.num_envs}: {found:,.0f}")
        if found < WORTH * speed:
            break
        best, speed = more, found
    note(f"num_envs=auto is {best.num_envs} (steps per second by number of copies: {', '.join(tried)})")
    return best


def doubled(cfg: RunConfig) -> RunConfig | None:
    """With twice the copies and as many steps per iteration in all, so that learning stays what it was."""
    num = 2 * cfg.num_envs
    changes: dict[str, Any] = {"num_envs": num}
    if isinstance(cfg, OnPolicyConfig):
        if cfg.rollout_steps % 2 or cfg.rollout_steps < 2 * FEWEST_STEPS:
            return None
        changes["rollout_steps"] = cfg.rollout_steps // 2
    if num > (MOST_ON_POLICY if isinstance(cfg, OnPolicyConfig) else MOST_WITH_REPLAY):
        return None
    try:
        return config.build([cfg.model_dump(mode="json")], changes)
    except UserError:  # so many don't go together with another setting
        return None
