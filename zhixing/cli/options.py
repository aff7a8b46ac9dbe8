"""Options and arguments that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from zhixing.cli.completion import complete_algorithm, complete_checkpoint, complete_env, complete_run, complete_setting


def _set_trust(enabled: bool) -> bool:
    if enabled:
        os.environ["ZHIXING_TRUST"] = "1"
    return enabled


Algorithm = Annotated[
    str | None,
    typer.Argument(
        metavar="ALGO",
        help="Algorithm, such as ppo.",
        autocompletion=complete_algorithm,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME=VALUE",
        help="Settings, such as lr=3e-4 or --lr 3e-4.",
        autocompletion=complete_setting,
    ),
]
Env = Annotated[
    str | None,
    typer.Option(
        "--env",
        metavar="ENV",
        help="Environment, such as CartPole-v1.",
        autocompletion=complete_env,
    ),
]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="PACKAGE", help="Package to import first because it registers environments."),
]
Dataset = Annotated[
    str | None,
    typer.Option("--dataset", metavar="DATASET", help="Dataset to learn from instead of an environment."),
]
ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option("--config", metavar="FILE", help="YAML file with settings; later files take precedence."),
]
RunsFolder = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder for the runs; those already finished are not repeated.")
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, help="Number of parallel runs.", show_default="half the CPUs"),
]
On = Annotated[
    str,
    typer.Option(
        "--on", metavar="WHERE", help="Where to run: local (processes), ray, or the address of a Ray cluster."
    ),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run folder, or the name of a trained agent from `zhixing zoo`.",
        autocompletion=complete_run,
    ),
]
Episodes = Annotated[int, typer.Option("--episodes", metavar="N", min=1, help="Number of episodes.")]
WindowEpisodes = Annotated[
    int | None,
    typer.Option(
        "--episodes", metavar="N", min=1, help="Number of episodes.", show_default="until the window is closed"
    ),
]
MaxSteps = Annotated[
    int | None,
    typer.Option(
        "--max-steps", metavar="N", min=1, help="Maximum steps per episode.", show_default="the run's eval_max_steps"
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the episodes.")]
Checkpoint = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        metavar="last|best|STEP",
        help="Weights at the end of training, those with the best evaluation, or those of a checkpoint that is kept.",
        autocompletion=complete_checkpoint,
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Allow the run to import the code that it names; ZHIXING_TRUST=1 always allows it.",
        callback=_set_trust,
    ),
]
