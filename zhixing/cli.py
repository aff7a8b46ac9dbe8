"""The command line. Modules that import torch are imported inside the commands, so that `--help` answers at once."""

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


def _trust(asked: bool) -> bool:
    if asked:
        os.environ["ZHIXING_TRUST"] = "1"
    return asked


Algorithm = Annotated[str | None, typer.Argument(metavar="ALGO", help="What learns, such as ppo.")]
Words = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Settings, such as lr=3e-4 or --lr 3e-4.")
]
Env = Annotated[str | None, typer.Option("--env", help="The task, such as CartPole-v1.")]
Imports = Annotated[
    list[str] | None, typer.Option("--import", metavar="PACKAGE", help="Import it first: it registers environments.")
]
Data = Annotated[str | None, typer.Option("--dataset", help="Learn from recorded experience, not in an environment.")]
Files = Annotated[list[Path] | None, typer.Option("--config", help="YAML settings; later files win.")]
Folder = Annotated[Path, typer.Option("--out", help="The folder of the runs; what has ended in it isn't done again.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Runs at once; without, half the CPUs.")]
On = Annotated[str, typer.Option("--on", help="local: processes here; ray; or a Ray cluster's address.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or an agent that `zhixing zoo` lists.")]
Episodes = Annotated[int, typer.Option("--episodes", min=1, help="Fresh episodes to play.")]
Shown = Annotated[int | None, typer.Option("--episodes", min=1, help="Episodes; without, until the window is closed.")]
MaxSteps = Annotated[
    int | None, typer.Option("--max-steps", min=1, help="Cut episodes after so many steps; without, as eval_max_steps.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Fixes the episodes.")]
Which = Annotated[str, typer.Option("--checkpoint", help="last: weights at the end; best: by evaluation.")]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Import the code that it names; ZHIXING_TRUST=1 does so always.", callback=_trust),
]


def _version(asked: bool) -> None:
    if asked:
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
    settings: Words = None,
    env: Env = None,
    imports: Imports = None,
    dataset: Data = None,
    config_files: Files = None,
    init_from: Annotated[
        str | None, typer.Option("--init-from", metavar="RUN", help="Start from this run's weights.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Fixes every random number.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder.")] = None,
) -> None:
    """Train an agent. `zhixing show ALGO` lists the settings."""
    from zhixing import config
    from zhixing.experiments import auto
    from zhixing.training.session import Session

    layers, words = _asked(
        algorithm, settings, config_files, env=env, imports=imports, dataset=dataset, init_from=init_from, seed=seed
    )
    _run(Session(auto.build(layers, config.parse_overrides(words)), out))


def _asked(
    algorithm: str | None, settings: list[str] | None, config_files: list[Path] | None, **named: Any
) -> tuple[list[dict[str, Any]], list[str]]:
    """Layers of settings, and the words that go on top of them."""
    from zhixing import config

    words = [word for word in (algorithm, *(settings or [])) if word is not None]
    # a configuration file may name the algorithm instead, and options may stand before it
    first = next((i for i, word in enumerate(words) if "=" not in word and not word.startswith("-")), None)
    named = {"algorithm": None if first is None else words.pop(first), **named}
    layers = [config.read_yaml(file) for file in config_files or []]
    layers.append({name: value for name, value in named.items() if value is not None})
    algorithm = next((layer["algorithm"] for layer in reversed(layers) if "algorithm" in layer), None)
    return layers, translate_options(words, algorithm if isinstance(algorithm, str) else None)


@app.command(cls=SettingsCommand)
def resume(
    run: Run,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Such as a longer budget.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Go on with a run from its last checkpoint. Settings may change budgets, evaluations, logs and checkpoints."""
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
        reached = f"{session.loop.steps:,} {session.loop.unit}"
        write_stderr(f"stopped at {reached}; go on with: zhixing resume {folder}")
        raise
    loop, target = session.loop, result["stop_return"]
    rows = {"run": str(folder)}
    rows["trained"] = f"{loop.steps:,} {loop.unit} in {result['seconds']:.1f} s ({result['steps_per_second']:,.0f}/s)"
    if loop.recent_episodes:
        rows["training return"] = (
            f"{loop.recent_mean('episode_return'):.6g} (last {len(loop.recent_episodes)} episodes)"
        )
    if result["final_return"] is not None:
        asked = "" if target is None else f" (asked: {target:g})"
        rows["evaluation return"] = f"{result['final_return']:.6g}{asked}"
    for name, value in rows.items():
        print(f"{name:18} {value}")
    if result["stop_return"] is not None and not result["reached"]:
        write_stderr("the asked return was not reached within the budget")


@app.command("eval")
def evaluate(
    run: Run,
    episodes: Episodes = 100,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    checkpoint: Which = "last",
    against: Annotated[
        str | None, typer.Option("--against", help="Games: random, perfect, mcts, mcts:SIMULATIONS or another run.")
    ] = None,
    max_steps: MaxSteps = None,
    trust: Trust = False,
) -> None:
    """Play fresh episodes with a run's agent; games also against an opponent, half of them as the first player."""
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
    out: Annotated[str, typer.Option("-o", "--out", metavar="DATASET", help="A new folder, or minari:NAME-v0.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to record, over all episodes.")] = 10_000,
    noise: Annotated[
        float, typer.Option("--noise", min=0.0, help="Spread of noise on actions; of discrete ones the chance of any.")
    ] = 0.0,
    explore: Annotated[bool, typer.Option("--explore", help="Act as in training, not at its best.")] = False,
    replay: Annotated[bool, typer.Option("--replay", help="All that the run's replay holds, not new steps.")] = False,
    seed: Seed = 0,
    checkpoint: Which = "last",
    max_steps: MaxSteps = None,
    trust: Trust = False,
) -> None:
    """Record what a run's agent does, as data to learn from."""
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
        print(f"{(~complete).sum():,} episodes were cut by the end of the recording and don't count in a mean return")


@app.command()
def video(
    run: Run,
    out: Annotated[Path, typer.Option("-o", "--out", help="The video: .mp4 or .gif.")],
    episodes: Episodes = 1,
    seed: Seed = 0,
    checkpoint: Which = "last",
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
    out: Annotated[Path, typer.Option("-o", "--out", help="A new folder, such as zoo/NAME.")],
    episodes: Episodes = 100,
    seed: Seed = 0,
    checkpoint: Which = "last",
    trust: Trust = False,
) -> None:
    """Keep only what a run's agent needs to act, with its measured return; other commands take it as a run."""
    from zhixing.training.zoo import export

    folder = out.absolute()  # an environment may change the current folder
    card = export(run, folder, episodes, seed, checkpoint)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{out}: {size / 1e3:,.0f} kB, mean return {card['mean_return']:.6g} of {episodes} episodes")


@app.command()
def zoo(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help="A folder of exported agents; without, those of zhixing."),
    ] = None,
) -> None:
    """List trained agents with their returns and the commands that trained them; other commands take their names."""
    from zhixing.training.zoo import agents
    from zhixing.utils import tables

    found = agents(folder)
    columns = {"env": "task", "algorithm": "algorithm", "steps": "steps", "mean_return": "return", "episodes": "over"}
    tables.print_table(
        [
            {"agent": name, **{title: card.get(key, "") for key, title in columns.items()}}
            for name, card in found.items()
        ]
    )
    for name, card in found.items():
        print(f"{name}: {card.get('trained_by', '')}")


@app.command()
def watch(run: Run, episodes: Shown = None, seed: Seed = 0, checkpoint: Which = "last", trust: Trust = False) -> None:
    """A run's agent in a window; escape ends it."""
    from zhixing.report.viewer import watch

    watch(run, episodes, seed, checkpoint)


@app.command(cls=SettingsCommand)
def play(
    env: Annotated[str, typer.Argument(metavar="ENV", help="The task, such as CartPole-v1, or a run: its task.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[env.NAME=VALUE]...", help="Its options, such as env.skip=1.")
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Let chance play.")] = False,
    episodes: Shown = None,
    seed: Seed = 0,
    imports: Imports = None,
    trust: Trust = False,
) -> None:
    """Play a task in a window with the keyboard, or let chance play; escape ends it."""
    from zhixing.report.viewer import play

    options = _task_options("play", settings)
    if Path(env, "config.yaml").is_file():
        from zhixing.training.run_folder import RunFolder

        folder = RunFolder.open(env)
        task = folder.read_config().env
        with folder.restricted():
            play(task.name, {**task.options, **options}, random=random, seed=seed, episodes=episodes)
        return
    _import(imports)
    play(env, options, random=random, seed=seed, episodes=episodes)


@app.command(cls=SettingsCommand)
def check(
    env: Annotated[str, typer.Argument(metavar="ENV", help="The task, such as my.module:MyEnv.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[env.NAME=VALUE]...", help="Its options; env.render_mode=rgb_array also looks at it."),
    ] = None,
    imports: Imports = None,
) -> None:
    """Tell what is wrong with a task, before anything is trained in it."""
    from zhixing import envs

    _import(imports)
    findings = envs.check_env(env, **_task_options("check", settings))
    for finding in findings:
        first, *rest = finding.message.rstrip().splitlines()
        print(f"{finding.status:6} {finding.check:13} {first}")
        for line in rest:
            print(f"{'':20} {line}")
    wrong = sum(finding.status == "wrong" for finding in findings)
    print(f"{env}: {f'{wrong} wrong' if wrong else 'nothing wrong'}")
    if wrong:
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


def _task_options(command: str, settings: list[str] | None) -> dict[str, Any]:
    from zhixing import config

    given = config.parse_overrides(translate_options(settings or [], None))
    options = given.pop("env", {})
    if not isinstance(options, dict):
        raise UserError(
            f"env={options!r}: `zhixing {command}` takes options of the environment, written env.NAME=VALUE"
        )
    return {**given, **options}  # only the environment has settings here, so `actions=complex` is plain, too


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs, or folders of runs.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The picture: .png, .svg or .pdf.")],
    y: Annotated[str, typer.Option("--y", help="return, or a column of metrics.csv, such as x_pos.")] = "return",
    x: Annotated[str, typer.Option("--x", help="steps, seconds, or both: a panel each.")] = "both",
    smooth: Annotated[int | None, typer.Option("--smooth", min=1, help="Average over so many rows.")] = None,
    title: Annotated[str | None, typer.Option("--title", help="Instead of the environment's name.")] = None,
) -> None:
    """Draw return against steps and seconds; runs that differ only in their seed are one curve."""
    from zhixing.report.plots import plot

    plot(runs, out, y, x=x, smooth=smooth, title=title)
    print(out)


@app.command(cls=SettingsCommand)
def sweep(
    out: Folder,
    algorithm: Algorithm = None,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE,...]...", help="Settings; commas part several values.")
    ] = None,
    env: Env = None,
    imports: Imports = None,
    dataset: Data = None,
    config_files: Files = None,
    grid: Annotated[Path | None, typer.Option("--grid", help="YAML in which each setting is a list of values.")] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="Such as 0-4 or 0,3,7.")] = "0-2",
    workers: Workers = None,
    on: On = "local",
) -> None:
    """Train with every combination of values and every seed: lr=1e-3,3e-4 gamma=0.98,0.99. Stopped, it goes on."""
    from zhixing.experiments import sweep
    from zhixing.utils import tables

    layers, words = _asked(algorithm, settings, config_files, env=env, imports=imports, dataset=dataset)
    values = {**(sweep.read_grid(grid) if grid else {}), **sweep.parse_values(words)}
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
    out: Folder,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Trials in all, with those that are there.")],
    algorithm: Algorithm = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=RANGE]...", help="Settings, ranges (1e-4..1e-2:log) and values (4,8,16)."),
    ] = None,
    env: Env = None,
    imports: Imports = None,
    dataset: Data = None,
    config_files: Files = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Fixes what is tried; each trial adds its number.")] = None,
    workers: Workers = None,
    on: On = "local",
) -> None:
    """Search for the settings that learn best: lr=1e-4..1e-2:log gamma=0.9..0.999 num_envs=4,8. Needs Optuna."""
    from zhixing.experiments import tune
    from zhixing.utils import tables

    layers, words = _asked(algorithm, settings, config_files, env=env, imports=imports, dataset=dataset, seed=seed)
    try:
        results, spaces = tune.tune(layers, words, trials, out, workers, on)
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
    print(f"{out / 'best.yaml'}: train with it by --config")


@app.command(cls=SettingsCommand)
def profile(
    algorithm: Algorithm = None,
    settings: Words = None,
    env: Env = None,
    imports: Imports = None,
    dataset: Data = None,
    config_files: Files = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="To measure in; a try takes 0.4 of it.")] = 5.0,
) -> None:
    """Where the time of training goes, and which settings would be faster. Writes nothing."""
    from zhixing import config
    from zhixing.experiments import profiler
    from zhixing.utils import tables

    layers, words = _asked(algorithm, settings, config_files, env=env, imports=imports, dataset=dataset)
    cfg = config.build(layers, config.parse_overrides(words))
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
    what: Annotated[str, typer.Argument(help="algorithms, envs or presets.")] = "algorithms",
    imports: Imports = None,
) -> None:
    """List the algorithms, the environments or the presets there are."""
    from zhixing import algorithms, config
    from zhixing.errors import unknown

    if what == "algorithms":
        for name in algorithms.names():
            print(f"{name:16} {algorithms.get(name).summary}")
    elif what == "envs":
        _import(imports)
        _list_envs()
    elif what == "presets":
        for name in algorithms.names():
            for task in config.presets(name):
                print(f"{name:16} {task}")
    else:
        raise unknown("list", what, ["algorithms", "envs", "presets"])


def _list_envs() -> None:
    import shutil
    import textwrap

    from zhixing.envs.catalog import families

    width = min(120, shutil.get_terminal_size((120, 24)).columns)
    for family in families():
        print(f"{family.title} - {family.missing or 'installed'}")
        names = textwrap.fill("  ".join(family.names), width - 2, break_on_hyphens=False, break_long_words=False)
        print(textwrap.indent(names or "none", "  "))
    print("Your own: my.module:MyEnv or my_env.py:MyEnv; a package's Gymnasium ids: package:Id-v0, or --import PACKAGE")


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
    """Run the command line. Errors that people can mend are one message and exit code 2; an interrupt is 130."""
    _escape_unprintable()
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False) or 0  # an interrupt comes back as 130
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk behind it is noticed now
    except UserError as error:
        code = _fail(str(error), 2)
    except EnvCrashError as error:
        code = _fail(str(error), 1)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of our output, such as head, has gone
        code = 1
    except OSError as error:
        if error.errno not in SYSTEM_ERRORS and error.filename is None:
            raise
        code = _fail(_system_error(error), 1 if error.filename is None else 2)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        code = _fail(error.format_message(), 2)  # wrong use of the command line
    _leave_broken_streams()
    if code:
        sys.exit(code)


# errors of the system that people can mend, and how
SYSTEM_ERRORS = {
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room in your quota",
    errno.EIO: "check the disk or the terminal",
    errno.EMFILE: "raise the limit, for example with `ulimit -n 65536`, or use fewer worker processes",
    errno.ENFILE: "close other programs, or raise the system's limit",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose a folder that can be written",
    errno.ENOMEM: "use fewer environments or worker processes, or close other programs",
    errno.EAGAIN: "use fewer worker processes, or raise the limit `ulimit -u`",
}


def _system_error(error: OSError) -> str:
    unnamed = "the output" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else "the system"
    name = unnamed if error.filename is None else os.fsdecode(error.filename)
    name = name if len(name) <= 100 else f"{name[:60]}...{name[-30:]}"
    advice = SYSTEM_ERRORS.get(error.errno or 0)
    return f"{name}: {error.strerror}; {advice}" if advice else f"{name} can't be used: {error.strerror}"


def _escape_unprintable() -> None:
    """Print letters that the terminal can't show (an ASCII one, or broken file names) as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _leave_broken_streams() -> None:
    """Point streams that can't be written at nothing, so the interpreter's own last flush doesn't complain."""
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
