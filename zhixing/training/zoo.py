"""Agents to keep and to give away: a configuration, weights to act with, and the return that they were measured at."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from zhixing import config
from zhixing.config import RunConfig, flat_settings
from zhixing.config.display import WITHOUT_EFFECT, format_value
from zhixing.errors import UserError
from zhixing.training.run import evaluate
from zhixing.training.run_folder import RunFolder, bundled_agents


def export(
    run: str | Path, out: str | Path, episodes: int = 100, seed: int = 0, checkpoint: str = "last"
) -> dict[str, Any]:
    """Write what is needed to act, without optimizers and replay, to a new folder, which commands take as a run.

    Plays `episodes` first; what they came to is its `agent.json`, which is returned.
    """
    source, target = RunFolder.open(run), RunFolder(Path(out))
    target.check_free()
    cfg = source.read_config()
    agent = source.load_agent(checkpoint)
    card = {
        "algorithm": cfg.algorithm,
        "env": cfg.env.name,
        "steps": agent["steps"],
        "trained_by": train_command(cfg),
        "eval_seed": seed,
        **{name: round(value, 4) for name, value in evaluate(run, episodes, seed, checkpoint).summary().items()},
    }
    # where it will act is for others to say
    target.write_agent(cfg.model_copy(update={"device": "auto"}), agent, card)
    return card


def train_command(cfg: RunConfig) -> str:
    """What trains such a run again: the settings in which it differs from those that algorithm and task bring."""
    usual = flat_settings(config.build([{"algorithm": cfg.algorithm, "env": cfg.env.name}], {}).model_dump(mode="json"))
    mine = flat_settings(cfg.model_dump(mode="json"))
    words = [
        f"{name}={_word(value)}"
        for name, value in mine.items()
        # what was auto has only been decided
        if usual.get(name) not in (value, "auto") and name not in {*WITHOUT_EFFECT, "init_from"}
    ]
    named = ["--seed", str(cfg.seed), *(["--init-from", _word(cfg.init_from)] if cfg.init_from else [])]
    return shlex.join(["zhixing", "train", cfg.algorithm, "--env", cfg.env.name, *named, *words])


def _word(value: Any) -> str:
    if isinstance(value, str) and os.path.isabs(value) and Path(value).is_relative_to(Path.cwd()):
        return os.path.relpath(value)
    return "null" if value is None else json.dumps(value) if isinstance(value, (list, dict)) else format_value(value)


def agents(folder: str | Path | None = None) -> dict[str, dict[str, Any]]:
    """Return the `agent.json` of each exported agent in a folder, by name; by default, of those that come along."""
    folder = bundled_agents() if folder is None else Path(folder)
    files = sorted(folder.glob("*/agent.json"))
    if not files:
        raise UserError(f"there are no agents in {folder}; `zhixing export RUN -o {folder}/NAME` puts one there")
    return {file.parent.name: RunFolder(file.parent).read_card() for file in files}
