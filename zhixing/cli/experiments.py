"""Commands that compare runs and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zhixing.cli.arguments import read_layers
from zhixing.cli.completion import complete_run, complete_setting
from zhixing.cli.options import Algorithm, ConfigFiles, Dataset, Env, Imports, On, RunsFolder, Settings, Workers
from zhixing.errors import UserError, write_stderr


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Run folders, or folders of runs.",
            autocompletion=complete_run,
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Image file: .png, .svg or .pdf.")],
    y: Annotated[
        str, typer.Option("--y", metavar="METRIC", help="return, or a column of metrics.csv such as entropy.")
    ] = "return",
    x: Annotated[
        str,
        typer.Option("--x", metavar="steps|seconds|both", help="X axis; both draws two panels."),
    ] = "both",
    smooth: Annotated[
        int | None,
        typer.Option(
            "--smooth",
            metavar="N",
            min=1,
            help="Number of rows of metrics.csv to average over.",
            show_default="1 for returns, 1/50 of the rows for other metrics",
        ),
    ] = None,
    title: Annotated[
        str | None, typer.Option("--title", metavar="TEXT", help="Title of the plot.", show_default="the environment")
    ] = None,
) -> None:
    """Plot the return, or another metric, of one or several runs.

    Runs that differ only in their seed are drawn as one curve with a confidence interval.
    """
    from zhixing.reports.plots import plot

    plot(runs, out, y, x=x, smooth=smooth, title=title)
    print(out)


def sweep(
    out: RunsFolder,
    algorithm: Algorithm = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUES",
            help="Settings, each with one or several values, such as lr=1e-3,3e-4.",
            autocompletion=complete_setting,
        ),
    ] = None,
    env: Env = None,
    imports: Imports = None,
    dataset: Dataset = None,
    config_files: ConfigFiles = None,
    grid: Annotated[
        Path | None, typer.Option("--grid", metavar="FILE", help="YAML file with a list of values per setting.")
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", metavar="SEEDS", help="Seeds, such as 0-4 or 0,3,7.")] = "0-2",
    workers: Workers = None,
    on: On = "local",
) -> None:
    """Train with all combinations of settings and seeds.

    For example, lr=1e-3,3e-4 gamma=0.98,0.99 with --seeds 0-2 makes 12 runs.

    Run the same command again to continue a stopped sweep.
    """
    from zhixing.experiments import sweep
    from zhixing.utils import tables

    layers, overrides = read_layers(algorithm, settings, config_files, env=env, imports=imports, dataset=dataset)
    values = {**(sweep.read_grid(grid) if grid else {}), **sweep.parse_values(overrides)}
    try:
        result = sweep.run_sweep(layers, values, sweep.parse_seeds(seeds), out, workers, on)
    except KeyboardInterrupt:
        write_stderr("stopped; run the same command again to continue")
        raise
    files = result.write()
    if files:
        tables.print_table(result.rows())
    for file in files:
        print(file)
    for name, reason in result.failed.items():
        write_stderr(f"failed: {name}: {reason} (see {out / 'output' / name}.txt)")
    if result.failed:
        raise typer.Exit(1)


def tune(
    out: RunsFolder,
    trials: Annotated[
        int, typer.Option("--trials", metavar="N", min=1, help="Total number of trials, including finished ones.")
    ],
    algorithm: Algorithm = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=RANGE",
            help="Settings, ranges (lr=1e-4..1e-2:log) and lists of values (num_envs=4,8).",
            autocompletion=complete_setting,
        ),
    ] = None,
    env: Env = None,
    imports: Imports = None,
    dataset: Dataset = None,
    config_files: ConfigFiles = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="Seed of the search; trial i trains with seed N + i."),
    ] = None,
    workers: Workers = None,
    on: On = "local",
) -> None:
    """Search for the best settings with Optuna.

    For example, lr=1e-4..1e-2:log gamma=0.9..0.999 num_envs=4,8 searches three settings.

    Run the same command again to continue a stopped search.
    """
    from zhixing import config
    from zhixing.experiments import tune
    from zhixing.utils import tables

    layers, overrides = read_layers(
        algorithm, settings, config_files, env=env, imports=imports, dataset=dataset, seed=seed
    )
    spaces, fixed = tune.parse_search_spaces(overrides)
    try:
        result = tune.run_study([*layers, config.parse_overrides(fixed)], spaces, trials, out, workers, on)
    except KeyboardInterrupt:
        write_stderr("stopped; run the same command again to continue")
        raise
    files = result.write()
    tables.print_table(result.rows()[:20])
    if result.best is None:
        raise UserError(f"no trial completed; see {out / 'trials.csv'} and the trials' output in {out / 'output'}")
    for file in files:
        print(file)
    print(f"{out / 'best.yaml'}: train with --config {out / 'best.yaml'}")


def profile(
    algorithm: Algorithm = None,
    settings: Settings = None,
    env: Env = None,
    imports: Imports = None,
    dataset: Dataset = None,
    config_files: ConfigFiles = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            metavar="S",
            min=0.1,
            help="Duration of the measurement; each alternative setting is measured for 0.4 times as long.",
        ),
    ] = 5.0,
) -> None:
    """Measure where training spends its time and which settings are faster.

    Writes no files.
    """
    from zhixing import config
    from zhixing.experiments import profiler
    from zhixing.utils import tables

    layers, overrides = read_layers(algorithm, settings, config_files, env=env, imports=imports, dataset=dataset)
    cfg = config.build(layers, config.parse_overrides(overrides))
    result = profiler.profile(cfg, seconds)
    title = f"{cfg.algorithm} on {cfg.env.name}: {result.speed:,.0f} {result.unit} per second"
    tables.print_table(profiler.part_rows(result), title)
    if result.max_rollout is not None:
        print(f"rollouts were shortened to {getattr(result.cfg, 'rollout_steps')} steps per environment")  # noqa: B009
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in result.group_shares.items())
    print(f"bound by {result.bottleneck} ({shares})\n")
    write_stderr(f"measuring alternative settings for at most {profiler.time_budget(result, seconds):.0f} seconds")
    measured = profiler.measure_alternatives(cfg, result, seconds, lambda name: write_stderr(f"measuring {name}"))
    tables.print_table(profiler.alternative_rows(measured, result.unit))
    faster = profiler.recommend(measured)
    summary = ", ".join(f"{a.setting} ({a.speedup:.2f} times)" for a in faster)
    print(f"faster: {summary}" if faster else "no measured alternative is clearly faster")
    if any(a.setting.startswith("num_envs") for a in faster):
        print("changing num_envs also changes what is learned: compare both with `zhixing sweep`")
