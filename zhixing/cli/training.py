"""Commands that train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from zhixing.cli.arguments import read_layers, translate_options
from zhixing.cli.completion import complete_run, complete_setting
from zhixing.cli.options import Algorithm, ConfigFiles, Dataset, Env, Imports, Run, Settings, Trust
from zhixing.errors import note, write_stderr
from zhixing.translation import translate


def train(
    algorithm: Algorithm = None,
    settings: Settings = None,
    env: Env = None,
    imports: Imports = None,
    dataset: Dataset = None,
    config_files: ConfigFiles = None,
    init_from: Annotated[
        str | None,
        typer.Option(
            "--init-from",
            metavar="RUN",
            help="Run whose weights initialize the networks.",
            autocompletion=complete_run,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Seed of all random number generators.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="New run folder.", show_default="runs/ALGO-ENV-SEED-TIME"),
    ] = None,
) -> None:
    """Train an agent. `zhixing show ALGO` lists the settings."""
    from zhixing import config
    from zhixing.experiments import auto
    from zhixing.training.session import Session

    layers, overrides = read_layers(
        algorithm, settings, config_files, env=env, imports=imports, dataset=dataset, init_from=init_from, seed=seed
    )
    _run(Session(auto.build(layers, config.parse_overrides(overrides)), out))


def resume(
    run: Run,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE",
            help="Settings to change, such as env_steps=200000.",
            autocompletion=complete_setting,
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Continue a run from its last checkpoint.

    You can change its budgets and its settings for evaluations, logging and checkpoints.
    """
    from zhixing import config
    from zhixing.training.session import Session

    session = Session.resume(run, **config.parse_overrides(translate_options(settings or [], None)))
    for notice in session.folder.notices:
        note(notice)
    if session.finished:
        print(translate(session.why_finished()))
    _run(session)


def _run(session: Any) -> None:
    folder = session.folder.given
    try:
        result = session.run()
    except KeyboardInterrupt:
        progress = f"{session.loop.steps:,} {session.loop.unit}"
        write_stderr(f"stopped at {progress}; continue with: zhixing resume {folder}")
        raise
    loop, target = session.loop, result["stop_return"]
    rows = {"run": str(folder)}
    rows["trained"] = f"{loop.steps:,} {loop.unit} in {result['seconds']:.1f} s ({result['steps_per_second']:,.0f}/s)"
    if loop.recent_episodes:
        rows["training return"] = (
            f"{loop.recent_mean('episode_return'):.6g} (last {len(loop.recent_episodes)} episodes)"
        )
    if result["final_return"] is not None:
        goal = "" if target is None else f" (stop_return: {target:g})"
        rows["evaluation return"] = f"{result['final_return']:.6g}{goal}"
    for name, value in rows.items():
        print(f"{name:18} {value}")
    if result["stop_return"] is not None and not result["reached"]:
        write_stderr("stop_return was not reached within the budget")
