"""Write run folders without training: a configuration and rows of metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

HEADER = "env_steps,seconds,return_mean,eval_return_mean,loss"


def write_run(
    path: Path,
    returns: Sequence[float] = (1.0, 2.0, 3.0),
    evals: Sequence[float | str] = (),
    seed: int = 0,
    env: str = "toy/match",
    seconds_per_row: float = 1.0,
    **settings: Any,
) -> Path:
    """Write a run with a row every 100 steps. If `evals` is shorter than `returns`, the remaining cells are blank."""
    path.mkdir(parents=True)
    cfg = {"algorithm": "ppo", "env": {"name": env}, "seed": seed, "lr": 0.001} | settings
    (path / "config.yaml").write_text(yaml.safe_dump(cfg, sort_keys=False))
    lines = [HEADER]
    for i, mean_return in enumerate(returns):
        lines.append(f"{100 * (i + 1)},{seconds_per_row * (i + 1)},{mean_return},{evals[i] if i < len(evals) else ''},")
    (path / "metrics.csv").write_text("\n".join(lines) + "\n")
    return path
