"""Tree search here and elsewhere on the same work: simulations per second from the first position of connect four.

    python benchmarks/search.py [--repeats 5] [--rows one-playout,many-playout] [--peers open_spiel] [--quick]

open_spiel's bots search one position after the other, ours and mctx many at once. Where a peer isn't installed beside
us, it gets a virtual environment of its own. `python search.py --as WHO ROW` is one run, the row as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import HERE, ROOT, cpu, peer_python, read_results, run_alone, write_page, write_results

RESULTS = HERE / "results" / "search.json"
PAGE = ROOT / "docs" / "search.md"

ROWS: dict[str, dict[str, Any]] = {
    "one-playout": {
        "title": "1 tree of 1,000 simulations, UCT, one random playout per simulation",
        "trees": 1,
        "simulations": 1000,
        "searches": 4,
        "c": 2.0,
        "peers": ["open_spiel_cpp", "open_spiel_python"],
    },
    "many-playout": {
        "title": "64 trees of 400 simulations, UCT, one random playout per simulation",
        "trees": 64,
        "simulations": 400,
        "searches": 1,
        "c": 2.0,
        "peers": ["open_spiel_cpp", "open_spiel_python"],
    },
    "one-network": {
        "title": "1 tree of 400 simulations, PUCT, a network with layers of 84, 64, 64 and 8 units",
        "trees": 1,
        "simulations": 400,
        "searches": 4,
        "c": 1.25,
        "hidden_sizes": [64, 64],
        "peers": ["mctx"],
    },
    "many-network": {
        "title": "64 trees of 400 simulations, PUCT, a network with layers of 84, 64, 64 and 8 units",
        "trees": 64,
        "simulations": 400,
        "searches": 2,
        "c": 1.25,
        "hidden_sizes": [64, 64],
        "peers": ["mctx"],
    },
}
# title, package whose version is told, module that must be there, requirements of an environment of its own
PEERS: dict[str, tuple[str, str, str, list[str]]] = {
    "open_spiel_cpp": ("OpenSpiel's C++ bot", "open_spiel", "pyspiel", ["open_spiel==2.0.2", "numpy"]),
    "open_spiel_python": ("OpenSpiel's Python bot", "open_spiel", "pyspiel", ["open_spiel==2.0.2", "numpy"]),
    "mctx": ("mctx", "mctx", "mctx", ["mctx", "jax"]),
}


# --- one run: everybody returns a function that searches once and gives the visits of all trees ---------------------


def ours(row: dict[str, Any]) -> Callable[[], int]:
    import numpy as np
    import torch
    from torch import nn

    from zhixing.search import NetworkEvaluator, PlayoutEvaluator, make_game, search

    torch.set_num_threads(1)
    game, rng = make_game("pettingzoo/connect_four"), np.random.default_rng(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers: list[nn.Module] = []
            for weight in weights(row["hidden_sizes"]):
                linear = nn.Linear(*weight.shape, bias=False)
                linear.weight.data = torch.from_numpy(weight.T.copy())
                layers += [linear, nn.ReLU()]
            self.layers = nn.Sequential(*layers[:-1])

        def forward(self, obs: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = self.layers(obs.flatten(1).float())
            return out[:, :7].masked_fill(~mask, -1e8), torch.tanh(out[:, 7])

    by_network = "hidden_sizes" in row
    evaluate = NetworkEvaluator(Net()) if by_network else PlayoutEvaluator(1)

    def once() -> int:
        roots, select = game.initial_states(row["trees"]), "puct" if by_network else "uct"
        return int(search(game, roots, row["simulations"], evaluate, rng, select=select, c=row["c"]).visits.sum())

    return once


def open_spiel_cpp(row: dict[str, Any]) -> Callable[[], int]:
    import pyspiel

    game = pyspiel.load_game("connect_four")
    evaluator = pyspiel.RandomRolloutEvaluator(1, 0)
    # memory in megabytes, no proving of wins, seed, quiet
    bot = pyspiel.MCTSBot(game, evaluator, row["c"], row["simulations"], 1000, False, 0, False)
    state = game.new_initial_state()
    return lambda: sum(bot.mcts_search(state).explore_count for _ in range(row["trees"]))


def open_spiel_python(row: dict[str, Any]) -> Callable[[], int]:
    import numpy as np
    import pyspiel
    from open_spiel.python.algorithms import mcts

    game = pyspiel.load_game("connect_four")
    evaluator = mcts.RandomRolloutEvaluator(1, np.random.RandomState(0))
    random = np.random.RandomState(0)
    bot = mcts.MCTSBot(game, row["c"], row["simulations"], evaluator, solve=False, random_state=random)
    state = game.new_initial_state()
    return lambda: sum(bot.mcts_search(state).explore_count for _ in range(row["trees"]))


def mctx(row: dict[str, Any]) -> Callable[[], int]:
    import jax
    import jax.numpy as jnp
    import mctx

    jax.config.update("jax_enable_x64", True)  # boards are 49 bits, as ours are
    bottom = sum(1 << 7 * column for column in range(7))
    tops = jnp.array([1 << 7 * column + 5 for column in range(7)])
    columns = jnp.array([0b111111 << 7 * column for column in range(7)])
    places = jnp.array([7 * column + 5 - height for height in range(6) for column in range(7)])
    layers = [jnp.asarray(weight) for weight in weights(row["hidden_sizes"])]

    def network(params: Any, own: Any, taken: Any) -> tuple[Any, Any]:
        planes = jnp.stack([own, own ^ taken], -1)[:, None, :] >> places[:, None] & 1  # [B,42,2]
        out = planes.reshape(len(own), -1).astype(jnp.float32)
        for i, weight in enumerate(params):
            out = (jax.nn.relu(out) if i else out) @ weight
        illegal = taken[:, None] & tops != 0
        return jnp.where(illegal, -1e8, out[:, :7]), jnp.tanh(out[:, 7])

    def has_line(stones: Any) -> Any:
        found = jnp.zeros(stones.shape, bool)
        for step in (1, 7, 8, 6):
            pairs = stones & stones >> step
            found |= pairs & pairs >> 2 * step != 0
        return found

    def play(params: Any, key: Any, action: Any, state: Any) -> tuple[Any, Any]:
        own, taken, over = state
        stone = taken + bottom & columns[action]
        won = has_line(own | stone) & ~over
        own, taken = own ^ taken, taken | stone
        over = over | won | (taken == bottom * 0b111111)
        logits, value = network(params, own, taken)
        output = mctx.RecurrentFnOutput(
            reward=won.astype(jnp.float32),
            discount=jnp.where(over, 0.0, -1.0).astype(jnp.float32),
            prior_logits=logits,
            value=jnp.where(over, 0.0, value),
        )
        return output, (own, taken, over)

    @jax.jit
    def run(params: Any, key: Any) -> Any:
        board = jnp.zeros(row["trees"], jnp.int64)
        logits, value = network(params, board, board)
        state = (board, board, jnp.zeros(row["trees"], bool))
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=state)
        found = mctx.muzero_policy(
            params, key, root, play, row["simulations"], dirichlet_fraction=0.0, pb_c_init=row["c"]
        )
        return found.search_tree.summary().visit_counts

    keys = iter(jax.random.split(jax.random.PRNGKey(0), 1000))
    return lambda: int(run(layers, next(keys)).sum())


def weights(hidden_sizes: list[int]) -> list[Any]:
    """Of a network from both planes to 7 logits and a value: the same on both sides."""
    import numpy as np

    rng = np.random.default_rng(0)
    sizes = [84, *hidden_sizes, 8]
    return [(rng.standard_normal((n, m)) / n**0.5).astype(np.float32) for n, m in pairwise(sizes)]


WHO: dict[str, Callable[[dict[str, Any]], Callable[[], int]]] = {
    "ours": ours,
    "open_spiel_cpp": open_spiel_cpp,
    "open_spiel_python": open_spiel_python,
    "mctx": mctx,
}


def one_run(who: str, row: dict[str, Any]) -> dict[str, Any]:
    if hasattr(os, "sched_setaffinity"):  # one core, whatever threads a library likes to have
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    search = WHO[who](row)
    search()  # compiles, allocates
    begin, cpu_begin = time.perf_counter(), time.process_time()
    simulations = sum(search() for _ in range(row["searches"]))
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    package = "zhixing" if who == "ours" else PEERS[who][1]
    return {
        "simulations": simulations,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "versions": {package: version(package), "python": platform.python_version()},
    }


# --- all runs ------------------------------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    if options.run_as:
        print(json.dumps(one_run(options.run_as, json.loads(options.row))))
        return
    measured: dict[str, Any] = {}
    for name in options.rows:
        row = dict(ROWS[name])
        if options.quick:
            row["simulations"] //= 4
        peers = [peer for peer in row["peers"] if peer in options.peers]
        if peers:
            measured[name] = _measure(name, row, {peer: _python(peer) for peer in peers}, options.repeats)
    print("\n" + _table(measured))
    if options.quick:
        print("\n--quick is for trying things out: nothing was written")
        return
    kept = read_results(RESULTS)
    for name, row in measured.items():  # what wasn't measured now keeps its last figures
        kept[name] = {**row, "peers": {**kept.get(name, {"peers": {}})["peers"], **row["peers"]}}
    write_results(RESULTS, kept)
    write_page(PAGE, "search", _table(kept))
    print(f"\nwritten: {RESULTS.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs per row (5)")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"which of {','.join(ROWS)} (all)")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"which of {','.join(PEERS)} (all)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the work, and nothing written")
    parser.add_argument("--as", dest="run_as", choices=sorted(WHO), help="one run by one of them, of the ROW given")
    parser.add_argument("row", nargs="?", help="with --as: the row as JSON")
    options = parser.parse_args()
    options.rows, options.peers = options.rows.split(","), options.peers.split(",")
    for given, known in ((options.rows, ROWS), (options.peers, PEERS)):
        wrong = [name for name in given if name not in known]
        if wrong:
            parser.error(f"unknown: {', '.join(wrong)}; there are {', '.join(known)}")
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    return options


def _python(peer: str) -> Path:
    """The interpreter that has the peer: ours, or that of an environment made for it when it is missing."""
    _, package, module, requirements = PEERS[peer]
    if importlib.util.find_spec(module) is not None:
        return Path(sys.executable)
    return peer_python(package, requirements, constrained=False)


def _measure(name: str, row: dict[str, Any], pythons: dict[str, Path], repeats: int) -> dict[str, Any]:
    """Pairs of runs, ours and a peer's right after one another; who begins changes from pair to pair."""
    pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {peer: [] for peer in pythons}
    work = row["trees"] * row["simulations"] * row["searches"]
    for repeat in range(repeats):
        for peer, python in pythons.items():
            order = {"ours": Path(sys.executable), peer: python}
            runs = {who: _run(who, order[who], row) for who in sorted(order, reverse=repeat % 2 == 1)}
            for who, run in runs.items():
                assert run["simulations"] == work, f"{name}: {who} made {run['simulations']} simulations, not {work}"
            pairs[peer].append((runs["ours"], runs[peer]))
            rates = {who: run["simulations"] / run["seconds"] for who, run in runs.items()}
            told = ", ".join(f"{who} {rate:,.0f}/s" for who, rate in rates.items())
            cpu_ratio = runs[peer]["cpu_seconds"] / runs["ours"]["cpu_seconds"]
            ratio = rates["ours"] / rates[peer]
            print(f"{name} {repeat + 1}/{repeats}: {told}, ratio {ratio:.2f} (of CPU time {cpu_ratio:.2f})", flush=True)
    return {"title": row["title"], "peers": {peer: _summary(results) for peer, results in pairs.items()}}


def _run(who: str, python: Path, row: dict[str, Any]) -> dict[str, Any]:
    return run_alone(python, HERE / "search.py", "--as", who, json.dumps(row))


def _summary(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    ours, theirs = ([run["simulations"] / run["seconds"] for run in runs] for runs in zip(*pairs, strict=True))
    ratios = [mine / their for mine, their in zip(ours, theirs, strict=True)]
    cpu_ratios = [their["cpu_seconds"] / mine["cpu_seconds"] for mine, their in pairs]
    return {
        "ours_per_second": round(statistics.median(ours), 1),
        "peer_per_second": round(statistics.median(theirs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "cpu_ratio": round(statistics.median(cpu_ratios), 3),  # on a busy machine the one to trust
        "pairs": len(pairs),
        "versions": {**pairs[0][1]["versions"], **pairs[0][0]["versions"]},
        "cpu": cpu(),
        "date": datetime.date.today().isoformat(),
    }


def _table(rows: dict[str, Any]) -> str:
    lines = [
        "| workload | peer | zhixing, simulations/s | peer, simulations/s | ratio | range over pairs | CPU ratio |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    notes = {}
    for name in [name for name in ROWS if name in rows]:
        for peer, found in rows[name]["peers"].items():
            title, package, _, _ = PEERS[peer]
            lines.append(
                f"| {rows[name]['title']} | {title} {found['versions'][package]} | {found['ours_per_second']:,.0f} "
                f"| {found['peer_per_second']:,.0f} | **{found['ratio']:.2f}** "
                f"| {found['ratio_min']:.2f} .. {found['ratio_max']:.2f} | {found['cpu_ratio']:.2f} |"
            )
            notes[f"Pairs of runs: {found['pairs']}. {found['cpu']}, one core, {found['date']}."] = None
    return "\n".join([*lines, "", *notes])


if __name__ == "__main__":
    main()
