"""Commands that use trained agents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from zhixing.cli.completion import complete_format
from zhixing.cli.options import Checkpoint, Episodes, MaxSteps, Run, Seed, Trust, WindowEpisodes


def evaluate(
    run: Run,
    episodes: Episodes = 100,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    checkpoint: Checkpoint = "last",
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="OPPONENT",
            help="Opponent in board games: random, perfect, mcts, mcts:SIMULATIONS or a run.",
        ),
    ] = None,
    stochastic: Annotated[
        bool | None,
        typer.Option(
            "--stochastic/--greedy",
            help="Act with the exploration of the end of training, or without any.",
            show_default="as in the run's evaluations",
        ),
    ] = None,
    num_envs: Annotated[
        int | None,
        typer.Option(
            "--num-envs",
            metavar="N",
            min=1,
            help="Number of parallel environments.",
            show_default="the run's eval_num_envs",
        ),
    ] = None,
    max_steps: MaxSteps = None,
    trust: Trust = False,
) -> None:
    """Evaluate a run's agent on new episodes.

    In games against an opponent, the agent moves first in half of the episodes.
    """
    from zhixing.training.run import evaluate

    evaluation = evaluate(
        run, episodes, seed, checkpoint, against, stochastic=stochastic, num_envs=num_envs, max_steps=max_steps
    )
    summary = evaluation.summary()
    if as_json:
        print(json.dumps(summary))
        return
    for name, value in summary.items():
        print(f"{name.replace('_', ' '):12} {value:.6g}")


def collect(
    run: Run,
    out: Annotated[str, typer.Option("-o", "--out", metavar="DATASET", help="New folder, or minari:NAME-v0.")],
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Steps to record, summed over all episodes.")
    ] = 10_000,
    noise: Annotated[
        float,
        typer.Option(
            "--noise",
            metavar="STD",
            min=0.0,
            help="Standard deviation of action noise; for discrete actions, the probability of a random action.",
        ),
    ] = 0.0,
    explore: Annotated[bool, typer.Option("--explore", help="Explore as at the end of training.")] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="Export the run's replay buffer instead of new steps.")
    ] = False,
    seed: Seed = 0,
    checkpoint: Checkpoint = "last",
    max_steps: MaxSteps = None,
    trust: Trust = False,
) -> None:
    """Record a dataset with a run's agent."""
    from zhixing.training.collect_data import collect

    data = collect(
        run,
        out,
        steps,
        noise=noise,
        explore=explore,
        replay=replay,
        seed=seed,
        checkpoint=checkpoint,
        max_steps=max_steps,
    )
    complete = data.complete()
    print(f"{out}: {len(data):,} steps in {data.num_episodes:,} episodes")
    if complete.any():
        print(f"mean return {data.returns()[complete].mean():.6g} of {complete.sum():,} complete episodes")
    if not complete.all():
        print(f"{(~complete).sum():,} episodes are incomplete and not part of the mean return")


def video(
    run: Run,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Video file: .mp4 or .gif.")],
    episodes: Episodes = 1,
    seed: Seed = 0,
    checkpoint: Checkpoint = "last",
    max_steps: MaxSteps = None,
    trust: Trust = False,
) -> None:
    """Record a video of a run's agent. Needs no screen."""
    from zhixing.reports.video import video

    returns = video(run, out, episodes, seed, checkpoint, max_steps).returns
    print(f"{out}: {'return' if len(returns) == 1 else 'returns'} {', '.join(f'{value:.6g}' for value in returns)}")


def export(
    run: Run,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="New folder, such as zoo/NAME.")],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="folder, onnx or torch.",
            autocompletion=complete_format,
        ),
    ] = "folder",
    episodes: Episodes = 100,
    seed: Seed = 0,
    checkpoint: Checkpoint = "last",
    trust: Trust = False,
) -> None:
    """Export a run's agent, without training state.

    The format folder evaluates it first; other commands accept the folder as a run. The formats onnx and torch write a
    network that runs without zhixing.
    """
    from zhixing.training.zoo import export

    folder = out.absolute()  # an environment may change the working directory
    about = export(run, folder, format, episodes, seed, checkpoint)  # type: ignore[arg-type]
    size = sum(file.stat().st_size for file in folder.iterdir())
    result = f", mean return {about['mean_return']:.6g} of {episodes} episodes" if "mean_return" in about else ""
    print(f"{out}: {size / 1e3:,.0f} kB{result}")


Repo = Annotated[str, typer.Argument(metavar="REPO", help="Repository at the Hugging Face Hub, as USER/NAME.")]


def push(
    run: Run,
    repo: Repo,
    episodes: Episodes = 100,
    seed: Seed = 0,
    checkpoint: Checkpoint = "last",
    clip: Annotated[
        Path | None,
        typer.Option(
            "--video", metavar="FILE", help="An .mp4 file for the model card.", show_default="the run's newest video"
        ),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    trust: Trust = False,
) -> None:
    """Upload a run's agent to the Hugging Face Hub, with a model card.

    It is evaluated first.
    """
    from zhixing.reports.hub import push

    print(push(run, repo, episodes=episodes, seed=seed, checkpoint=checkpoint, video=clip, private=private))


def pull(
    repo: Repo,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="New folder.", show_default="the repository's name"),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="REVISION", help="Branch, tag or commit.")
    ] = None,
) -> None:
    """Download an agent from the Hugging Face Hub.

    Other commands accept the folder as a run. Nothing in it is executed.
    """
    from zhixing.reports.hub import pull

    print(pull(repo, out, revision=revision))


def zoo(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Folder of exported agents.", show_default="agents that come with zhixing"),
    ] = None,
) -> None:
    """List trained agents with their returns and training commands.

    Other commands accept their names as runs.
    """
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


def watch(
    run: Run, episodes: WindowEpisodes = None, seed: Seed = 0, checkpoint: Checkpoint = "last", trust: Trust = False
) -> None:
    """Watch a run's agent in a window. Escape closes it."""
    from zhixing.reports.viewer import watch

    watch(run, episodes, seed, checkpoint)
