"""The command line. Commands import modules that need torch when they run, so `--help` is fast."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from zhixing import __version__
from zhixing.arguments import SettingsCommand, translate_options
from zhixing.errors import EnvCrashError, UserError, write_stderr

app = typer.Typer(
    name="zhixing",
    help="Deep reinforcement learning: train, evaluate, resume, plot and record agents.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _trust(enabled: bool) -> bool:
    if enabled:
        os.environ["ZHIXING_TRUST"] = "1"
    return enabled


Algorithm = Annotated[str | None, typer.Argument(metavar="ALGO", help="Algorithm, such as ppo.")]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Settings, such as lr=3e-4 or --lr 3e-4.")
]
Env = Annotated[str | None, typer.Option("--env", help="Environment, such as CartPole-v1.")]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="PACKAGE", help="Package to import first because it registers environments."),
]
Dataset = Annotated[str | None, typer.Option("--dataset", help="Dataset to learn from instead of an environment.")]
ConfigFiles = Annotated[
    list[Path] | None, typer.Option("--config", help="YAML file with settings; later files take precedence.")
]
RunsFolder = Annotated[Path, typer.Option("--out", help="Folder of the runs; finished runs in it are not repeated.")]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Number of parallel runs.", show_default="half the CPUs")
]
On = Annotated[str, typer.Option("--on", help="Where to run: local (processes), ray, or the address of a Ray cluster.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or the name of an agent in `zhixing zoo`.")]
Episodes = Annotated[int, typer.Option("--episodes", min=1, help="Number of episodes.")]
WindowEpisodes = Annotated[
    int | None,
    typer.Option("--episodes", min=1, help="Number of episodes.", show_default="until the window is closed"),
]
MaxSteps = Annotated[
    int | None, typer.Option("--max-steps", min=1, help="Maximum steps per episode.", show_default="eval_max_steps")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the episodes.")]
Checkpoint = Annotated[str, typer.Option("--checkpoint", help="Weights: last, or best by evaluation return.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Allow imports of code that the run names; ZHIXING_TRUST=1 always does.", callback=_trust
    ),
]


def _version(requested: bool) -> None:
    if requested:
        print(f"zhixing {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command(cls=SettingsCommand)
def train(
    algorithm: Algorithm = None,
    settings: Settings = None,
    env: Env = None,
    imports: Imports = None,
    dataset: Dataset = None,
    config_files: ConfigFiles = None,
    init_from: Annotated[
        str | None, typer.Option("--init-from", metavar="RUN", help="Run whose weights initialize the networks.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of all random number generators.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run folder.", show_default="runs/ALGO-ENV-SEED-TIME")
    ] = None,
) -> None:
    """Train an agent. `zhixing show ALGO` lists the settings."""
    from zhixing import config
    from zhixing.experiments import auto
    from zhixing.training.session import Session

    layers, overrides = _layers(
        algorithm, settings, config_files, env=env, imports=imports, dataset=dataset, init_from=init_from, seed=seed
    )
    _run(Session(auto.build(layers, config.parse_overrides(overrides)), out))


def _layers(
    algorithm: str | None, settings: list[str] | None, config_files: list[Path] | None, **options: Any
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the settings of files and options as layers, and the `name=value` arguments that override them."""
    from zhixing import config

    arguments = [argument for argument in (algorithm, *(settings or [])) if argument is not None]
    # settings may precede the algorithm, which a configuration file may name instead
    plain = (i for i, argument in enumerate(arguments) if "=" not in argument and not argument.startswith("-"))
    position = next(plain, None)
    options = {"algorithm": None if position is None else arguments.pop(position), **options}
    layers = [config.read_yaml(file) for file in config_files or []]
    layers.append({name: value for name, value in options.items() if value is not None})
    algorithm = next((layer["algorithm"] for layer in reversed(layers) if "algorithm" in layer), None)
    return layers, translate_options(arguments, algorithm if isinstance(algorithm, str) else None)


@app.command(cls=SettingsCommand)
def resume(
    run: Run,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help="Settings to change, such as env_steps=200000."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Continue a run from its last checkpoint. You can change budgets, evaluations, logging and checkpoints."""
    from zhixing import config
    from zhixing.training.session import Session

    session = Session.resume(run, **config.parse_overrides(translate_options(settings or [], None)))
    for notice in session.folder.notices:
        write_stderr(f"note: {notice}")
    if session.finished:
        print(session.why_finished())
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


@app.command("eval")
def evaluate(
    run: Run,
    episodes: Episodes = 100,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    checkpoint: Checkpoint = "last",
    against: Annotated[
        str | None,
        typer.Option("--against", help="Opponent in games: random, perfect, mcts, mcts:SIMULATIONS or a run."),
    ] = None,
    max_steps: MaxSteps = None,
    trust: Trust = False,
) -> None:
    """Evaluate a run's agent on new episodes. In games, the agent moves first in half of them."""
    from zhixing.training.run import evaluate

    summary = evaluate(run, episodes, seed, checkpoint, against, max_steps=max_steps).summary()
    if as_json:
        print(json.dumps(summary))
        return
    for name, value in summary.items():
        print(f"{name.replace('_', ' '):12} {value:.6g}")


@app.command()
def collect(
    run: Run,
    out: Annotated[str, typer.Option("-o", "--out", metavar="DATASET", help="New folder, or minari:NAME-v0.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to record, summed over all episodes.")] = 10_000,
    noise: Annotated[
        float,
        typer.Option(
            "--noise",
            min=0.0,
            help="Standard deviation of action noise; for discrete actions, the probability of a random action.",
        ),
    ] = 0.0,
    explore: Annotated[bool, typer.Option("--explore", help="Act with the exploration of training.")] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="Export the run's replay buffer instead of new steps.")
    ] = False,
    seed: Seed = 0,
    checkpoint: Checkpoint = "last",
    max_steps: MaxSteps = None,
    trust: Trust = False,
) -> None:
    """Record a dataset with a run's agent."""
    from zhixing.training.collect_data import collect_from_agent, export_replay

    if replay:
        data = export_replay(run, out)
    else:
        data = collect_from_agent(
            run, out, steps, noise=noise, explore=explore, seed=seed, checkpoint=checkpoint, max_steps=max_steps
        )
    complete = data.complete()
    print(f"{out}: {len(data):,} steps in {data.num_episodes:,} episodes")
    if complete.any():
        print(f"mean return {data.returns()[complete].mean():.6g} of {complete.sum():,} complete episodes")
    if not complete.all():
        print(f"{(~complete).sum():,} episodes are incomplete and not part of the mean return")


@app.command()
def video(
    run: Run,
    out: Annotated[Path, typer.Option("-o", "--out", help="Video file: .mp4 or .gif.")],
    episodes: Episodes = 1,
    seed: Seed = 0,
    checkpoint: Checkpoint = "last",
    max_steps: MaxSteps = None,
    trust: Trust = False,
) -> None:
    """Record a video of a run's agent. Needs no screen."""
    from zhixing.report.video import record_video

    returns = record_video(run, out, episodes, seed, checkpoint, max_steps)
    print(f"{out}: {len(returns)} episodes, returns {', '.join(f'{value:.6g}' for value in returns)}")


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Option("-o", "--out", help="New folder, such as zoo/NAME.")],
    episodes: Episodes = 100,
    seed: Seed = 0,
    checkpoint: Checkpoint = "last",
    trust: Trust = False,
) -> None:
    """Export a run's agent with its measured return. Other commands accept the folder as a run."""
    from zhixing.training.zoo import export

    folder = out.absolute()  # an environment may change the working directory
    card = export(run, folder, episodes, seed, checkpoint)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{out}: {size / 1e3:,.0f} kB, mean return {card['mean_return']:.6g} of {episodes} episodes")


@app.command()
def zoo(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help="Folder of exported agents.", show_default="the agents of zhixing"),
    ] = None,
) -> None:
    """List trained agents with their returns and training commands. Other commands accept their names."""
    from zhixing.training.zoo import agents
    from zhixing.utils import tables

    cards = agents(folder)
    columns = {
        "env": "env",
        "algorithm": "algorithm",
        "steps": "steps",
        "mean_return": "return",
        "episodes": "episodes",
    }
    tables.print_table(
        [
            {"agent": name, **{title: card.get(key, "") for key, title in columns.items()}}
            for name, card in cards.items()
        ]
    )
    for name, card in cards.items():
        print(f"{name}: {card.get('trained_by', '')}")


@app.command()
def watch(
    run: Run, episodes: WindowEpisodes = None, seed: Seed = 0, checkpoint: Checkpoint = "last", trust: Trust = False
) -> None:
    """Watch a run's agent in a window. Escape closes it."""
    from zhixing.report.viewer import watch

    watch(run, episodes, seed, checkpoint)


@app.command(cls=SettingsCommand)
def play(
    env: Annotated[
        str, typer.Argument(metavar="ENV", help="Environment, such as CartPole-v1, or a run, for its environment.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[env.NAME=VALUE]...", help="Options of the environment, such as env.skip=1."),
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Play random actions.")] = False,
    episodes: WindowEpisodes = None,
    seed: Seed = 0,
    imports: Imports = None,
    trust: Trust = False,
) -> None:
    """Play an environment in a window with the keyboard. Escape closes it."""
    from zhixing.report.viewer import play

    options = _env_options("play", settings)
    if Path(env, "config.yaml").is_file():
        from zhixing.training.run_folder import RunFolder

        folder = RunFolder.open(env)
        saved = folder.read_config().env
        with folder.restricted():
            play(saved.name, {**saved.options, **options}, random=random, seed=seed, episodes=episodes)
        return
    _import(imports)
    play(env, options, random=random, seed=seed, episodes=episodes)


@app.command(cls=SettingsCommand)
def check(
    env: Annotated[str, typer.Argument(metavar="ENV", help="Environment, such as my.module:MyEnv.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[env.NAME=VALUE]...", help="Options; env.render_mode=rgb_array also checks rendering."),
    ] = None,
    imports: Imports = None,
) -> None:
    """Check that an environment follows the Gymnasium API."""
    from zhixing import envs

    _import(imports)
    results = envs.check_env(env, **_env_options("check", settings))
    for result in results:
        first, *rest = result.message.rstrip().splitlines()
        print(f"{result.status:8} {result.check:13} {first}")
        for line in rest:
            print(f"{'':22} {line}")
    errors = sum(result.status == "error" for result in results)
    print(f"{env}: {errors or 'no'} error{'' if errors == 1 else 's'}")
    if errors:
        raise typer.Exit(2)


@app.command()
def reproduce(
    crash: Annotated[Path, typer.Argument(metavar="CRASH", help="Crash report: a file in a run's folder crash/.")],
    env: Annotated[
        str | None,
        typer.Option("--env", help="Name of your own environment, to confirm that its code may be imported."),
    ] = None,
    imports: Imports = None,
    trust: Trust = False,
) -> None:
    """Reproduce a crash of an environment: repeat the episode with the same seed and actions."""
    from zhixing.envs.crash import crash_report

    _import(imports)
    reproduction = crash_report.reproduce(crash, env)
    if reproduction.traceback:
        print(reproduction.traceback.rstrip())
    print(reproduction.message)
    if not reproduction.same:
        raise typer.Exit(1)


def _import(packages: list[str] | None) -> None:
    from zhixing.envs.adapters.gymnasium_ids import import_packages

    import_packages(packages or [])


def _env_options(command: str, settings: list[str] | None) -> dict[str, Any]:
    from zhixing import config

    values = config.parse_overrides(translate_options(settings or [], None))
    options = values.pop("env", {})
    if not isinstance(options, dict):
        raise UserError(
            f"env={options!r}: `zhixing {command}` accepts only options of the environment, written env.NAME=VALUE"
        )
    return {**values, **options}  # `env.` may be omitted, since there are no other settings


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of runs.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Image file: .png, .svg or .pdf.")],
    y: Annotated[
        str, typer.Option("--y", help="Metric: return, or a column of metrics.csv, such as x_pos.")
    ] = "return",
    x: Annotated[str, typer.Option("--x", help="X axis: steps, seconds, or both (two panels).")] = "both",
    smooth: Annotated[int | None, typer.Option("--smooth", min=1, help="Rows to average over.")] = None,
    title: Annotated[str | None, typer.Option("--title", help="Title.", show_default="the environment")] = None,
) -> None:
    """Plot the return over steps and seconds. Runs that differ only in their seed form one curve."""
    from zhixing.report.plots import plot

    plot(runs, out, y, x=x, smooth=smooth, title=title)
    print(out)


@app.command(cls=SettingsCommand)
def sweep(
    out: RunsFolder,
    algorithm: Algorithm = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE,...]...", help="Settings with one or several values, such as lr=1e-3,3e-4."
        ),
    ] = None,
    env: Env = None,
    imports: Imports = None,
    dataset: Dataset = None,
    config_files: ConfigFiles = None,
    grid: Annotated[Path | None, typer.Option("--grid", help="YAML file with a list of values per setting.")] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="Seeds, such as 0-4 or 0,3,7.")] = "0-2",
    workers: Workers = None,
    on: On = "local",
) -> None:
    """Train with all combinations of values and seeds: lr=1e-3,3e-4 gamma=0.98,0.99.

    Run the same command again to continue a stopped sweep.
    """
    from zhixing.experiments import sweep
    from zhixing.utils import tables

    layers, overrides = _layers(algorithm, settings, config_files, env=env, imports=imports, dataset=dataset)
    values = {**(sweep.read_grid(grid) if grid else {}), **sweep.parse_values(overrides)}
    try:
        variants, failed = sweep.sweep(layers, values, sweep.parse_seeds(seeds), out, workers, on)
    except KeyboardInterrupt:
        write_stderr("stopped; run the same command again to continue")
        raise
    if any(variant.results for variant in variants):
        rows = sweep.table_rows(variants)
        tables.write_table(rows, out / "sweep.csv")
        tables.print_table(rows)
        print(out / "sweep.csv")
        try:
            sweep.plot_best(variants, out / "sweep.png")
            print(out / "sweep.png")
        except UserError as error:  # nothing to plot, for example without evaluations
            write_stderr(f"no plot: {error}")
    for name, reason in failed.items():
        write_stderr(f"failed: {name}: {reason} (see {out / 'output' / name}.txt)")
    if failed:
        raise typer.Exit(1)


@app.command(cls=SettingsCommand)
def tune(
    out: RunsFolder,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Total number of trials, including finished ones.")],
    algorithm: Algorithm = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=RANGE]...", help="Settings, ranges (lr=1e-4..1e-2:log) and lists of values (num_envs=4,8)."
        ),
    ] = None,
    env: Env = None,
    imports: Imports = None,
    dataset: Dataset = None,
    config_files: ConfigFiles = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the search; each trial adds its number.")] = None,
    workers: Workers = None,
    on: On = "local",
) -> None:
    """Search for the best settings with Optuna: lr=1e-4..1e-2:log gamma=0.9..0.999 num_envs=4,8."""
    from zhixing.experiments import tune
    from zhixing.utils import tables

    layers, overrides = _layers(algorithm, settings, config_files, env=env, imports=imports, dataset=dataset, seed=seed)
    try:
        results, spaces = tune.tune(layers, overrides, trials, out, workers, on)
    except KeyboardInterrupt:
        write_stderr("stopped; run the same command again to continue")
        raise
    rows = tune.table_rows(results)
    tables.write_table(rows, out / "trials.csv")
    tables.print_table(rows[:20])
    print(out / "trials.csv")
    if tune.best_trial(results) is None:
        raise UserError(f"no trial completed; see {out / 'trials.csv'} and the trials' output in {out / 'output'}")
    tune.plot_trials(results, spaces, out / "trials.png")
    print(out / "trials.png")
    print(f"{out / 'best.yaml'}: train with --config {out / 'best.yaml'}")


@app.command(cls=SettingsCommand)
def profile(
    algorithm: Algorithm = None,
    settings: Settings = None,
    env: Env = None,
    imports: Imports = None,
    dataset: Dataset = None,
    config_files: ConfigFiles = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="Duration of the measurement; each alternative takes 0.4 of it.")
    ] = 5.0,
) -> None:
    """Measure where training spends its time and which settings are faster. Writes no files."""
    from zhixing import config
    from zhixing.experiments import profiler
    from zhixing.utils import tables

    layers, overrides = _layers(algorithm, settings, config_files, env=env, imports=imports, dataset=dataset)
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


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(metavar="[KIND]", help="algorithms, envs or presets.")] = "algorithms",
    imports: Imports = None,
) -> None:
    """List algorithms, environments or presets."""
    from zhixing import algorithms, config
    from zhixing.errors import unknown

    if kind == "algorithms":
        for name in algorithms.names():
            print(f"{name:16} {algorithms.get(name).summary}")
    elif kind == "envs":
        _import(imports)
        _list_envs()
    elif kind == "presets":
        for name in algorithms.names():
            for env in config.presets(name):
                print(f"{name:16} {env}")
    else:
        raise unknown("list", kind, ["algorithms", "envs", "presets"])


def _list_envs() -> None:
    import shutil
    import textwrap

    from zhixing.envs.catalog import families

    width = min(120, shutil.get_terminal_size((120, 24)).columns)
    for family in families():
        print(f"{family.title} - {family.missing or 'installed'}")
        names = textwrap.fill("  ".join(family.names), width - 2, break_on_hyphens=False, break_long_words=False)
        print(textwrap.indent(names or "none", "  "))
    print(
        "Your own: my.module:MyEnv or my_env.py:MyEnv. Gymnasium ids of a package: package:Id-v0, or --import PACKAGE."
    )


@app.command()
def show(
    algorithm: Annotated[str, typer.Argument(metavar="ALGO", help="Algorithm, such as ppo.")],
    env: Annotated[str | None, typer.Option("--env", help="Add the preset for this environment.")] = None,
    imports: Imports = None,
) -> None:
    """Print the settings of an algorithm with types, defaults and descriptions."""
    from zhixing import algorithms, config
    from zhixing.config.display import print_settings
    from zhixing.envs.registry import check_name

    name, _, _, model, _ = algorithms.get(algorithm)
    _import(imports)
    if env is None:
        print_settings(name, model)
        return
    check_name(env)
    preset = config.preset_name(name, env)
    title = f"{name} on {env}: {'no preset' if preset is None else f'preset {preset}'}"
    print_settings(title, model, config.build([{"algorithm": name, "env": env}], {}))


def main() -> None:
    """Run the command line. Invalid input prints one message and exits with code 2; an interrupt exits with 130."""
    _escape_unprintable()
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False) or 0  # 130 after an interrupt
        if sys.stdout is not None:
            sys.stdout.flush()  # reports a full disk now
    except UserError as error:
        code = _fail(str(error), 2)
    except EnvCrashError as error:
        code = _fail(str(error), 1)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        code = 1
    except OSError as error:
        if error.errno not in SYSTEM_ERRORS and error.filename is None:
            raise
        code = _fail(_system_error(error), 1 if error.filename is None else 2)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        code = _fail(error.format_message(), 2)  # invalid usage
    _discard_broken_streams()
    if code:
        sys.exit(code)


# system errors that the user can fix, with advice
SYSTEM_ERRORS = {
    errno.ENOSPC: "free space on the disk",
    errno.EDQUOT: "free space in your quota",
    errno.EIO: "check the disk or the terminal",
    errno.EMFILE: "raise the limit, for example with `ulimit -n 65536`, or use fewer worker processes",
    errno.ENFILE: "close other programs, or raise the system's limit",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose a writable folder",
    errno.ENOMEM: "use fewer environments or worker processes, or close other programs",
    errno.EAGAIN: "use fewer worker processes, or raise the limit `ulimit -u`",
}


def _system_error(error: OSError) -> str:
    fallback = "the output" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else "the system"
    name = fallback if error.filename is None else os.fsdecode(error.filename)
    name = name if len(name) <= 100 else f"{name[:60]}...{name[-30:]}"
    advice = SYSTEM_ERRORS.get(error.errno or 0)
    return f"{name}: {error.strerror}; {advice}" if advice else f"{name} can't be used: {error.strerror}"


def _escape_unprintable() -> None:
    """Escape characters that the terminal can't print, such as Unicode in an ASCII terminal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_broken_streams() -> None:
    """Redirect broken streams to the null device, so the interpreter's final flush doesn't fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fail(message: str, code: int) -> int:
    write_stderr(f"error: {message}")
    return code


if __name__ == "__main__":
    main()
