"""AlphaZero on tic-tac-toe and connect four: what it loses, whom it beats, and its rating as it learns.

    python benchmarks/self_play.py              both; goes on where it stopped
    python benchmarks/self_play.py connect_four

Tic-tac-toe: seeds 0 to 2, 1,000 games each against random and against perfect play. Connect four: one run in
runs/self-play, of which a copy is kept at every evaluation; at the end each copy plays the one before it and plain
Monte-Carlo tree search, with as many simulations as its own and with more, and all results together give the ratings.
Results are in benchmarks/results/self_play.json, the tables in docs/search.md, the picture in
docs/pictures/self-play.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import HERE, read_results, write_page, write_results

import zhixing as zx
from zhixing.collect.evaluation import Evaluation
from zhixing.search import MatchResult, Player, elo, make_game, mcts_player, play_match
from zhixing.training.agent import Agent
from zhixing.training.matches import as_player

RESULTS = HERE / "results" / "self_play.json"
RUNS = HERE.parent / "runs" / "self-play"
PICTURE = HERE.parent / "docs" / "pictures" / "self-play.png"
PAGE = HERE.parent / "docs" / "search.md"
TIMES = (1, 4, 16)  # simulations of plain search, in those of the agent
GAMES = 100  # of each pair
OPENING = 2  # random moves, without which two copies would play the same two games over and over
COPIES = 6  # that are rated, besides the last


class Keep(zx.Callback):
    """A copy of the weights at every evaluation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def evaluation_end(self, loop: zx.TrainingLoop, evaluation: Evaluation) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(loop.learner.policy.state_dict(), self.folder / f"{loop.env_steps:09}.pt")


def tictactoe() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for seed in range(3):
        out = RUNS / f"tictactoe-{seed}"
        result = trained("pettingzoo/tictactoe", out, seed)
        tallies = {}
        for opponent in ("random", "perfect"):
            summary = zx.evaluate(out, 1_000, against=opponent).summary()
            tallies[opponent] = {name: summary[name] for name in ("win_rate", "drawn", "lost")}
        found[str(seed)] = {"seconds": result["seconds"], "env_steps": result["env_steps"], **tallies}
        print(f"tictactoe seed {seed}: {found[str(seed)]}", flush=True)
    return found


def trained(env: str, out: Path, seed: int = 0) -> Mapping[str, Any]:
    keep = Keep(out / "kept")
    if (out / "checkpoints").is_dir():
        return zx.Session.resume(out, [keep]).run()
    return zx.Session(zx.config.load(algorithm="alphazero", env=env, seed=seed), out, [keep]).run()


def connect_four() -> dict[str, Any]:
    out = RUNS / "connect_four"
    result = trained("pettingzoo/connect_four", out)
    game = make_game("pettingzoo/connect_four")
    agent = zx.load(out)
    simulations: int = agent.cfg.simulations  # type: ignore[attr-defined]
    copies = sorted((out / "kept").glob("*.pt"))
    plain = {f"mcts {times * simulations}": mcts_player(game, times * simulations) for times in TIMES}
    results: dict[tuple[str, str], MatchResult] = {}
    names = list(plain)
    for weaker, stronger in itertools.pairwise(names):
        results[stronger, weaker] = match(game, plain[stronger], plain[weaker])
    before = ""
    kept = {copy.stem: copy for copy in copies[:: max(1, len(copies) // COPIES)] + copies[-1:]}
    for steps, copy in kept.items():
        me = player(agent, copy)
        met = plain if copy == copies[-1] else dict(list(plain.items())[:-1])  # the dearest meets only the last
        for name, other in met.items():
            results[steps, name] = match(game, me, other)
        if before:
            results[steps, before] = match(game, me, player(zx.load(out), kept[before]))
        before = steps
        print(steps, {name: results[steps, name].score for name in met}, flush=True)
    ratings = elo(results, anchor=names[0])
    draw({int(steps): ratings[steps] for steps in kept}, {name: ratings[name] for name in plain})
    last = {name: tally(results[before, name]) for name in plain}
    return {
        "seconds": result["seconds"],
        "env_steps": result["env_steps"],
        "simulations": simulations,
        "last": last,
        "ratings": {name: round(value, 1) for name, value in ratings.items()},
    }


def player(agent: Agent, copy: Path) -> Player:
    agent.policy.load_state_dict(torch.load(copy, weights_only=True))
    return as_player(make_game("pettingzoo/connect_four"), agent.policy)


def match(game: Any, one: Player, other: Player) -> MatchResult:
    return play_match(game, one, other, GAMES, np.random.default_rng(0), opening_moves=OPENING)


def tally(result: MatchResult) -> dict[str, Any]:
    return {
        "score": result.score,
        "wins draws losses": [result.wins, result.draws, result.losses],
        "as first": list(result.as_first),
        "as second": list(result.as_second),
    }


def draw(ratings: Mapping[int, float], plain: Mapping[str, float]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(ratings), list(ratings.values()), marker="o")
    for name, value in plain.items():
        axes.axhline(value, linestyle="--", color="0.5", linewidth=1)
        axes.annotate(name, (max(ratings), value), ha="right", va="bottom", color="0.3")
    axes.set(xlabel="self-play moves", ylabel="Elo", title="alphazero on pettingzoo/connect_four")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=100)


def tables(results: Mapping[str, Any]) -> str:
    lines = []
    if "tictactoe" in results:
        lines += ["| tic-tac-toe | self-play moves | seconds | against random play | against perfect play |"]
        lines += ["|---|---:|---:|---|---|"]
        for seed, run in results["tictactoe"].items():
            ends = [
                f"{run[who]['win_rate']:.1%} won, {run[who]['drawn']:.1%} drawn, {run[who]['lost']:.1%} lost"
                for who in ("random", "perfect")
            ]
            lines.append(f"| seed {seed} | {run['env_steps']:,} | {run['seconds']:.0f} | {ends[0]} | {ends[1]} |")
        lines.append("")
    if "connect_four" in results:
        run = results["connect_four"]
        lines.append(
            f"Connect four: one seed, {run['env_steps']:,} self-play moves in {run['seconds'] / 60:.0f} minutes on one "
            f"core. The trained agent uses {run['simulations']} simulations per move against Monte-Carlo tree search:"
        )
        lines += ["", "| opponent | points per game | won, drawn, lost | as first player | as second player | Elo |"]
        lines += ["|---|---:|---|---|---|---:|"]
        for name, found in run["last"].items():
            told = [", ".join(map(str, found[key])) for key in ("wins draws losses", "as first", "as second")]
            lines.append(f"| {name} | {found['score']:.2f} | {' | '.join(told)} | {run['ratings'][name]:.0f} |")
        best = max((name for name in run["ratings"] if name.isdigit()), key=int)
        lines.append(f"| alphazero {run['simulations']} | | | | | {run['ratings'][best]:.0f} |")
        lines += ["", "![Elo rating of the agent during training](pictures/self-play.png)"]
    return "\n".join(lines)


def main() -> None:
    studies = {"tictactoe": tictactoe, "connect_four": connect_four}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="*", help=f"only these of {', '.join(studies)}")
    asked = parser.parse_args().games
    results = read_results(RESULTS)
    for name, study in studies.items():
        if not asked or name in asked:
            results[name] = study()
            write_results(RESULTS, results)
            print(json.dumps(results[name], indent=1))
    write_page(PAGE, "self-play", tables(results))


if __name__ == "__main__":
    main()
