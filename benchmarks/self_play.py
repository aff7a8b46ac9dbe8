"""AlphaZero on tic-tac-toe and connect four: results of games against other players, and Elo ratings during training.

    python benchmarks/self_play.py              both games; an interrupted study continues
    python benchmarks/self_play.py connect_four

Tic-tac-toe: seeds 0 to 2, 1,000 games each against random and against perfect play. Connect four: one run in
runs/self-play that saves its weights at every evaluation. Afterwards, each snapshot plays its predecessor and plain
Monte-Carlo tree search with the same and with more simulations; ratings are fitted to all games. Results are in
benchmarks/results/self_play.json, the tables and the plot in docs/search.md.
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
from common import HERE, ROOT, read_results, table, write_page, write_results

import zhixing as zx
from zhixing.collectors.evaluation import Evaluation
from zhixing.search import MatchResult, Player, elo, make_game, mcts_player, play_match
from zhixing.training.agent import Agent
from zhixing.training.matches import as_player

RESULTS = HERE / "results" / "self_play.json"
RUNS = ROOT / "runs" / "self-play"
PLOT = ROOT / "docs" / "pictures" / "self-play.png"
PAGE = ROOT / "docs" / "search.md"
SEARCH_FACTORS = (1, 4, 16)  # simulations of plain search, relative to the agent's
GAMES = 100  # per pair of players
OPENING_MOVES = 2  # random; deterministic players would otherwise repeat the same two games
NUM_SNAPSHOTS = 6  # to rate, in addition to the last


class SaveWeights(zx.Callback):
    """Saves the weights at every evaluation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def evaluation_end(self, loop: zx.TrainingLoop, evaluation: Evaluation) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(loop.learner.policy.state_dict(), self.folder / f"{loop.env_steps:09}.pt")


def study_tictactoe() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for seed in range(3):
        run = RUNS / f"tictactoe-{seed}"
        result = train("pettingzoo/tictactoe", run, seed)
        games = {}
        for opponent in ("random", "perfect"):
            summary = zx.evaluate(run, 1_000, against=opponent).summary()
            games[opponent] = {name: summary[name] for name in ("win_rate", "drawn", "lost")}
        results[str(seed)] = {"seconds": result["seconds"], "env_steps": result["env_steps"], **games}
        print(f"tictactoe seed {seed}: {results[str(seed)]}", flush=True)
    return results


def train(env: str, run: Path, seed: int = 0) -> Mapping[str, Any]:
    """Train, or resume an interrupted run."""
    callback = SaveWeights(run / "kept")
    if (run / "checkpoints").is_dir():
        return zx.Session.resume(run, [callback]).run()
    return zx.Session(zx.config.load(algorithm="alphazero", env=env, seed=seed), run, [callback]).run()


def study_connect_four() -> dict[str, Any]:
    run = RUNS / "connect_four"
    result = train("pettingzoo/connect_four", run)
    game = make_game("pettingzoo/connect_four")
    agent = zx.load(run)
    simulations: int = agent.cfg.simulations  # type: ignore[attr-defined]
    searches = {f"mcts {factor * simulations}": mcts_player(game, factor * simulations) for factor in SEARCH_FACTORS}
    results: dict[tuple[str, str], MatchResult] = {}
    names = list(searches)
    for weaker, stronger in itertools.pairwise(names):
        results[stronger, weaker] = play(game, searches[stronger], searches[weaker])
    files = sorted((run / "kept").glob("*.pt"))
    snapshots = {file.stem: file for file in files[:: max(1, len(files) // NUM_SNAPSHOTS)] + files[-1:]}
    previous = ""
    for steps, file in snapshots.items():
        player = make_player(agent, file)
        # only the last snapshot plays the slowest search
        opponents = searches if file == files[-1] else dict(list(searches.items())[:-1])
        for name, opponent in opponents.items():
            results[steps, name] = play(game, player, opponent)
        if previous:
            results[steps, previous] = play(game, player, make_player(zx.load(run), snapshots[previous]))
        previous = steps
        print(steps, {name: results[steps, name].score for name in opponents}, flush=True)
    ratings = elo(results, anchor=names[0])
    plot_ratings({int(steps): ratings[steps] for steps in snapshots}, {name: ratings[name] for name in searches})
    return {
        "seconds": result["seconds"],
        "env_steps": result["env_steps"],
        "simulations": simulations,
        "last": {name: count_games(results[previous, name]) for name in searches},
        "ratings": {name: round(value, 1) for name, value in ratings.items()},
    }


def make_player(agent: Agent, weights: Path) -> Player:
    agent.policy.load_state_dict(torch.load(weights, weights_only=True))
    return as_player(make_game("pettingzoo/connect_four"), agent.policy)


def play(game: Any, first: Player, second: Player) -> MatchResult:
    return play_match(game, first, second, GAMES, np.random.default_rng(0), opening_moves=OPENING_MOVES)


def count_games(result: MatchResult) -> dict[str, Any]:
    return {
        "score": result.score,
        "wins draws losses": [result.wins, result.draws, result.losses],
        "as first": list(result.as_first),
        "as second": list(result.as_second),
    }


def plot_ratings(ratings: Mapping[int, float], searches: Mapping[str, float]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(ratings), list(ratings.values()), marker="o")
    for name, value in searches.items():
        axes.axhline(value, linestyle="--", color="0.5", linewidth=1)
        axes.annotate(name, (max(ratings), value), ha="right", va="bottom", color="0.3")
    axes.set(xlabel="self-play moves", ylabel="Elo", title="alphazero on pettingzoo/connect_four")
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=100)


def make_tables(results: Mapping[str, Any]) -> str:
    parts = []
    if "tictactoe" in results:
        rows = []
        for seed, run in results["tictactoe"].items():
            games = [
                f"{fractions['win_rate']:.1%} won, {fractions['drawn']:.1%} drawn, {fractions['lost']:.1%} lost"
                for fractions in (run["random"], run["perfect"])
            ]
            rows.append([f"seed {seed}", *games, f"{run['env_steps']:,}", f"{run['seconds']:.0f}"])
        head = ["tic-tac-toe", "against random play", "against perfect play", "self-play moves", "seconds"]
        parts.append(table(head, rows, 3))
    if "connect_four" in results:
        run = results["connect_four"]
        parts.append(
            f"Connect four: one seed, {run['env_steps']:,} self-play moves in {run['seconds'] / 60:.0f} minutes on one "
            f"core. The trained agent uses {run['simulations']} simulations per move against Monte-Carlo tree search:"
        )
        rows = []
        for name, games in run["last"].items():
            counts = [", ".join(map(str, games[key])) for key in ("wins draws losses", "as first", "as second")]
            rows.append([name, *counts, f"{games['score']:.2f}", f"{run['ratings'][name]:.0f}"])
        last = max((name for name in run["ratings"] if name.isdigit()), key=int)
        rows.append([f"alphazero {run['simulations']}", "", "", "", "", f"{run['ratings'][last]:.0f}"])
        head = ["player", "won, drawn, lost", "as first player", "as second player", "points per game", "Elo"]
        parts.append(table(head, rows, 4))
        parts.append("![Elo rating of the agent during training](pictures/self-play.png)")
    return "\n\n".join(parts)


def main() -> None:
    studies = {"tictactoe": study_tictactoe, "connect_four": study_connect_four}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="*", help=f"only these of {', '.join(studies)}")
    args = parser.parse_args()
    results = read_results(RESULTS)
    for name, study in studies.items():
        if not args.games or name in args.games:
            results[name] = study()
            write_results(RESULTS, results)
            print(json.dumps(results[name], indent=1))
    write_page(PAGE, "self-play", make_tables(results))


if __name__ == "__main__":
    main()
