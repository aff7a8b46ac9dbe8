"""What memory and hindsight are for: tasks that can't be learned without them, learned with them and tried without.

    python benchmarks/memory_and_goals.py                  all rows, over five seeds, that have no result yet
    python benchmarks/memory_and_goals.py --seeds 2        the first two seeds only
    python benchmarks/memory_and_goals.py recall           rows whose name contains a word
    python benchmarks/memory_and_goals.py --again recall   once more, from the start

Each row is a preset, or the preset without the part in question, with the same budget; a run ends early when it does
better than asked. Its figure is the mean of 100 other fresh episodes that its last weights play: the share of successes
on bit-flip, the return elsewhere. Results are kept in benchmarks/results/memory_and_goals.json after every run, so an
interrupted study goes on where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import HERE, read_results, write_results

import zhixing as zx

RESULTS = HERE / "results" / "memory_and_goals.json"
EPISODES = 100
GOALS, RECALL, CARTPOLE = "toy/bit-flip-15", "toy/recall", "toy/cartpole-no-velocity"
STOP = {GOALS: -6.9, RECALL: 0.99, CARTPOLE: 400.0}  # return over 100 episodes at which training ends


class Row(NamedTuple):
    algorithm: str
    env: str
    way: str  # what is in or left out
    settings: dict[str, Any]  # on top of the preset
    least: float | None = None  # the median over seeds must reach this
    most: float | None = None  # or stay below this
    beats: str | None = None  # the way that it must do 1.5 times as well as

    @property
    def key(self) -> str:
        return f"{self.algorithm} {self.env} {self.way}"


FORWARD = {"net__recurrent": "none"}
CHANCE = 0.25 + 0.13  # of recall; three standard errors over 100 episodes above it
ROWS = [
    Row("dqn", GOALS, "hindsight", {}, least=0.9),
    Row("dqn", GOALS, "plain", {"replay__her": False}, most=0.1),
    Row("ppo", RECALL, "recurrent", {}, least=0.95),
    Row("ppo", RECALL, "feed-forward", FORWARD, most=CHANCE),
    Row("dqn", RECALL, "recurrent", {}, least=0.95),
    Row("dqn", RECALL, "feed-forward", FORWARD, most=CHANCE),
    Row("ppo", CARTPOLE, "recurrent", {}, least=300, beats="feed-forward"),
    Row("ppo", CARTPOLE, "feed-forward", FORWARD),
    Row("dqn", CARTPOLE, "recurrent", {}, least=300, beats="feed-forward"),
    Row("dqn", CARTPOLE, "feed-forward", FORWARD),
]


def study(row: Row, seeds: range, results: dict[str, Any]) -> None:
    done = results.setdefault(row.key, {})
    for seed in seeds:
        if str(seed) in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            settings = {"stop_return": STOP[row.env], "tensorboard": False, **row.settings}
            result = zx.train(row.algorithm, env=row.env, seed=seed, out=out, quiet=True, **settings)
            played = zx.evaluate(out, EPISODES, seed).summary()
        done[str(seed)] = {
            "figure": played.get("is_success", played["mean_return"]),
            "mean_return": played["mean_return"],
            **{name: result[name] for name in ("env_steps", "updates", "seconds")},
        }
        print(f"{row.key:48} seed {seed}  {done[str(seed)]}", flush=True)
        write_results(RESULTS, results)


def median(row: Row, results: dict[str, Any]) -> float | None:
    runs = results.get(row.key, {}).values()
    return statistics.median(run["figure"] for run in runs) if runs else None


def asked(row: Row, results: dict[str, Any]) -> tuple[str, bool | None]:
    """What the row must show, in words, and whether it does; None where runs are missing."""
    figure, words, good = median(row, results), [], []
    if row.least is not None:
        words.append(f"at least {row.least:g}")
        good.append(figure is not None and figure >= row.least)
    if row.most is not None:
        words.append(f"at most {row.most:g}")
        good.append(figure is not None and figure <= row.most)
    if row.beats is not None:
        other = next(r for r in ROWS if (r.algorithm, r.env, r.way) == (row.algorithm, row.env, row.beats))
        theirs = median(other, results)
        words.append(f"1.5 x {row.beats}")
        if theirs is None:
            figure = None
        else:
            good.append(figure is not None and figure >= 1.5 * theirs)
    return " and ".join(words) or "-", None if figure is None else all(good)


def table(results: dict[str, Any]) -> str:
    """Median, least and most over the seeds."""
    lines = ["| algorithm | task | way | seeds | median | range | asked | met |", "|---|---|---|---|---|---|---|---|"]
    for row in ROWS:
        figures = [run["figure"] for run in results.get(row.key, {}).values()]
        words, met = asked(row, results)
        shown = f"{statistics.median(figures):.3g} | {min(figures):.3g} to {max(figures):.3g}" if figures else "- | -"
        verdict = "not run" if met is None else "yes" if met else "no"
        lines.append(f"| `{row.algorithm}` | {row.env} | {row.way} | {len(figures)} | {shown} | {words} | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only rows whose name contains one of these")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--again", action="store_true", help="forget their earlier results")
    given = parser.parse_args()
    results = read_results(RESULTS)
    rows = [row for row in ROWS if not given.words or any(word in row.key for word in given.words)]
    if given.again:
        for row in rows:
            results.pop(row.key, None)
    for row in rows:
        study(row, range(given.seeds), results)
    print(table(results))
    short = [row.key for row in rows if asked(row, results)[1] is False]
    if short:
        raise SystemExit(f"not as asked: {', '.join(short)}")


if __name__ == "__main__":
    main()
