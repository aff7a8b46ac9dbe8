"""The lines printed at the start of training: run, algorithm, environment, device and budget."""

from __future__ import annotations

from pathlib import Path

from zhixing import config
from zhixing.config import DataConfig, RunConfig, SelfPlayConfig


def header(cfg: RunConfig, folder: Path, *, at: str | None = None) -> str:
    """Describe a run with resolved settings. `at` is the step at which it is resumed."""
    preset = config.preset_name(cfg.algorithm, cfg.env.name) if cfg.preset else None
    compiled = "compiled at the first updates" if cfg.compile else "not compiled"
    lines = {
        "run": f"{folder}" + (f" (resumed at {at})" if at else ""),
        "algorithm": f"{cfg.algorithm}, {'no preset' if preset is None else f'preset {preset}'}",
        "env": f"{cfg.env.name}, {_describe_envs(cfg)}",
        "device": f"{cfg.device}, {_count(int(cfg.num_threads), 'thread')}, {compiled}",
        "budget": _describe_budget(cfg),
    }
    return "".join(f"{name:10} {line}\n" for name, line in lines.items())


def _describe_envs(cfg: RunConfig) -> str:
    if learns_offline(cfg):
        return f"offline from {cfg.dataset}"  # type: ignore[attr-defined]
    if isinstance(cfg, SelfPlayConfig):
        return f"{_count(cfg.num_envs, 'game')} of self-play"
    text = f"{_count(cfg.num_envs, 'environment')}, {cfg.vector.backend} back end"
    if cfg.distributed.workers:
        text += f", {_count(cfg.distributed.workers, 'Ray worker')}"
    elif isinstance(cfg.vector.workers, int) and cfg.vector.workers > 1:
        text += f" with {cfg.vector.workers} workers"
    return text


def _describe_budget(cfg: RunConfig) -> str:
    parts = [f"{cfg.env_steps:,} steps"]
    if learns_offline(cfg):
        parts = [f"{cfg.offline_updates:,} updates"]  # type: ignore[attr-defined]
    if cfg.episodes is not None:
        parts.append(f"{cfg.episodes:,} episodes")
    if cfg.duration is not None:
        parts.append(f"{config.parse_duration(cfg.duration):,.0f} s")
    if cfg.stop_return is not None:
        parts.append(f"until the evaluation return is {cfg.stop_return:g}")
    return ", ".join(parts)


def learns_offline(cfg: RunConfig) -> bool:
    return isinstance(cfg, DataConfig) and cfg.dataset is not None


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
