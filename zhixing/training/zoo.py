"""Export trained agents to folders with their configuration, weights and measured returns, and list them."""

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
    run: str | Path, out: str | Path, episodes: int = 100, seed: int = 0, checkpoint: str | int = "last"
) -> dict[str, Any]:
    """Evaluate a run's agent and write its configuration, policy and results to a new folder.

    The folder has no optimizer state and no replay buffer. Commands such as `eval` accept it as a run. Returns the
    content of its `agent.json`: the results of `episodes` episodes and the command that trains such an agent.
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
    # the agent may run on another machine
    target.write_agent(cfg.model_copy(update={"device": "auto"}), agent, card)
    return card


def train_command(cfg: RunConfig) -> str:
    """Return a command that repeats a run, with the settings that differ from the defaults and the preset."""
    base = config.build([{"algorithm": cfg.algorithm, "env": cfg.env.name, "preset": cfg.preset}], {})
    defaults = {**flat_settings(base.model_dump(mode="json")), "preset": True}
    settings = [
        f"{name}={_format(value)}"
        for name, value in flat_settings(cfg.model_dump(mode="json")).items()
        # a setting that is `auto` by default was only resolved
        if defaults.get(name) not in (value, "auto") and name not in {*WITHOUT_EFFECT, "init_from"}
    ]
    options = ["--seed", str(cfg.seed), *(["--init-from", _format(cfg.init_from)] if cfg.init_from else [])]
    return shlex.join(["zhixing", "train", cfg.algorithm, "--env", cfg.env.name, *options, *settings])


def _format(value: Any) -> str:
    """Return a value as on the command line. Absolute paths in the working directory become relative."""
    if isinstance(value, str) and os.path.isabs(value) and Path(value).is_relative_to(Path.cwd()):
        return os.path.relpath(value)
    return "null" if value is None else json.dumps(value) if isinstance(value, (list, dict)) else format_value(value)


def agents(folder: str | Path | None = None) -> dict[str, dict[str, Any]]:
    """Return the `agent.json` of each exported agent in a folder, by name; by default, of the bundled agents."""
    folder = bundled_agents() if folder is None else Path(folder)
    files = sorted(folder.glob("*/agent.json"))
    if not files:
        raise UserError(f"{folder} contains no exported agents; export one with `zhixing export RUN -o {folder}/NAME`")
    return {file.parent.name: RunFolder(file.parent).read_card() for file in files}
