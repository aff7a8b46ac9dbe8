"""Tree search: simulations per second from the initial position of connect four, compared with other libraries.

    python benchmarks/search.py [--repeats 5] [--rows one-playout,many-playout] [--peers open_spiel_cpp] [--quick]

OpenSpiel's bots search one position at a time, zhixing and mctx many at once. All run on one core. A peer that isn't
installed here gets its own virtual environment.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, cpu, peer_python, read_results, run_alone, table, versions
from comparison import describe_pair, order_of_round, parse_args, publish, ratio_cells, results_file
from peers.measurement import use_one_core

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


class Peer(NamedTuple):
    title: str
    package: str  # its version is reported
    module: str  # if this can't be imported, `requirements` are installed into a virtual environment
    requirements: list[str]


OPEN_SPIEL = ("open_spiel", "pyspiel", ["open_spiel==2.0.2", "numpy"])
PEERS = {
    "open_spiel_cpp": Peer("OpenSpiel's C++ bot", *OPEN_SPIEL),
    "open_spiel_python": Peer("OpenSpiel's Python bot", *OPEN_SPIEL),
    "mctx": Peer("mctx", "mctx", "mctx", ["mctx", "jax"]),
}
Run = dict[str, Any]
Pair = tuple[Run, Run]  # ours, the peer's


# --- libraries: each function returns another that searches once and returns the visits of all trees -----------------


def setup_ours(row: dict[str, Any]) -> Callable[[], int]:
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
            for weight in make_weights(row["hidden_sizes"]):
                linear = nn.Linear(*weight.shape, bias=False)
                linear.weight.data = torch.from_numpy(weight.T.copy())
                layers += [linear, nn.ReLU()]
            self.layers = nn.Sequential(*layers[:-1])

        def forward(self, obs: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = self.layers(obs.flatten(1).float())
            return out[:, :7].masked_fill(~mask, -1e8), torch.tanh(out[:, 7])

    with_network = "hidden_sizes" in row
    evaluate = NetworkEvaluator(Net()) if with_network else PlayoutEvaluator(1)

    def search_all() -> int:
        roots, select = game.initial_states(row["trees"]), "puct" if with_network else "uct"
        return int(search(game, roots, row["simulations"], evaluate, rng, select=select, c=row["c"]).visits.sum())

    return search_all


def setup_open_spiel_cpp(row: dict[str, Any]) -> Callable[[], int]:
    import pyspiel

    game = pyspiel.load_game("connect_four")
    evaluator = pyspiel.RandomRolloutEvaluator(1, 0)
    # the last four arguments: memory in megabytes, no solver, seed, not verbose
    bot = pyspiel.MCTSBot(game, evaluator, row["c"], row["simulations"], 1000, False, 0, False)
    state = game.new_initial_state()
    return lambda: sum(bot.mcts_search(state).explore_count for _ in range(row["trees"]))


def setup_open_spiel_python(row: dict[str, Any]) -> Callable[[], int]:
    import numpy as np
    import pyspiel
    from open_spiel.python.algorithms import mcts

    game = pyspiel.load_game("connect_four")
    evaluator = mcts.RandomRolloutEvaluator(1, np.random.RandomState(0))
    random = np.random.RandomState(0)
    bot = mcts.MCTSBot(game, row["c"], row["simulations"], evaluator, solve=False, random_state=random)
    state = game.new_initial_state()
    return lambda: sum(bot.mcts_search(state).explore_count for _ in range(row["trees"]))


def setup_mctx(row: dict[str, Any]) -> Callable[[], int]:
    import jax
    import jax.numpy as jnp
    import mctx

    jax.config.update("jax_enable_x64", True)  # a board takes 49 bits
    bottom = sum(1 << 7 * column for column in range(7))
    tops = jnp.array([1 << 7 * column + 5 for column in range(7)])
    columns = jnp.array([0b111111 << 7 * column for column in range(7)])
    places = jnp.array([7 * column + 5 - height for height in range(6) for column in range(7)])
    layers = [jnp.asarray(weight) for weight in make_weights(row["hidden_sizes"])]

    def network(params: Any, own: Any, taken: Any) -> tuple[Any, Any]:
        planes = jnp.stack([own, own ^ taken], -1)[:, None, :] >> places[:, None] & 1  # [B,42,2]
        out = planes.reshape(len(own), -1).astype(jnp.float32)
        for i, weight in enumerate(params):
            out = (jax.nn.relu(out) if i else out) @ weight
        illegal = taken[:, None] & tops != 0
        return jnp.where(illegal, -1e8, out[:, :7]), jnp.tanh(out[:, 7])

    def has_line(stones: Any) -> Any:
        has_four = jnp.zeros(stones.shape, bool)
        for step in (1, 7, 8, 6):
            pairs = stones & stones >> step
            has_four |= pairs & pairs >> 2 * step != 0
        return has_four

    def play(params: Any, key: Any, action: Any, state: Any) -> tuple[Any, Any]:
        own, taken, done = state
        stone = taken + bottom & columns[action]
        won = has_line(own | stone) & ~done
        own, taken = own ^ taken, taken | stone
        done = done | won | (taken == bottom * 0b111111)
        logits, value = network(params, own, taken)
        output = mctx.RecurrentFnOutput(
            reward=won.astype(jnp.float32),
            discount=jnp.where(done, 0.0, -1.0).astype(jnp.float32),
            prior_logits=logits,
            value=jnp.where(done, 0.0, value),
        )
        return output, (own, taken, done)

    @jax.jit
    def run(params: Any, key: Any) -> Any:
        board = jnp.zeros(row["trees"], jnp.int64)
        logits, value = network(params, board, board)
        state = (board, board, jnp.zeros(row["trees"], bool))
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=state)
        output = mctx.muzero_policy(
            params, key, root, play, row["simulations"], dirichlet_fraction=0.0, pb_c_init=row["c"]
        )
        return output.search_tree.summary().visit_counts

    keys = iter(jax.random.split(jax.random.PRNGKey(0), 1000))
    return lambda: int(run(layers, next(keys)).sum())


def make_weights(hidden_sizes: list[int]) -> list[Any]:
    """Return the weights of a network from two planes of the board to 7 logits and a value, the same for all."""
    import numpy as np

    rng = np.random.default_rng(0)
    sizes = [84, *hidden_sizes, 8]
    return [(rng.standard_normal((n, m)) / n**0.5).astype(np.float32) for n, m in pairwise(sizes)]


SETUPS: dict[str, Callable[[dict[str, Any]], Callable[[], int]]] = {
    "ours": setup_ours,
    "open_spiel_cpp": setup_open_spiel_cpp,
    "open_spiel_python": setup_open_spiel_python,
    "mctx": setup_mctx,
}


def run_once(side: str, row: dict[str, Any]) -> Run:
    use_one_core()
    search = SETUPS[side](row)
    search()  # compiles and allocates
    start, cpu_start = time.perf_counter(), time.process_time()
    simulations = sum(search() for _ in range(row["searches"]))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    package = "zhixing" if side == "ours" else PEERS[side].package
    return {
        "simulations": simulations,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "versions": {**versions(package), "python": platform.python_version()},
    }


# --- comparing -------------------------------------------------------------------------------------------------------


def main() -> None:
    if sys.argv[1:2] == ["--as"]:
        print(json.dumps(run_once(sys.argv[2], json.loads(sys.argv[3]))))
        return
    options = parse_args(__doc__, list(ROWS), repeats=5, peers=list(PEERS))
    # rows and peers that aren't measured now keep their last results
    results = {} if options.quick else read_results(results_file("search", quick=False))
    for name in options.rows:
        row = dict(ROWS[name])
        if options.quick:
            row["simulations"] //= 4
        pythons = {peer: python_with(PEERS[peer]) for peer in row["peers"] if peer in options.peers}
        if pythons:
            last = results.get(name, {"peers": {}})["peers"]
            results[name] = {"peers": {**last, **measure(name, row, pythons, options.repeats)}}
    publish("search", results, make_table(results), options.quick, PAGE)


def python_with(peer: Peer) -> Path:
    """Return this interpreter if it has the peer, otherwise that of a virtual environment."""
    if importlib.util.find_spec(peer.module) is not None:
        return Path(sys.executable)
    return peer_python(peer.package, peer.requirements, constrained=False)


def measure(name: str, row: dict[str, Any], pythons: Mapping[str, Path], repeats: int) -> dict[str, Any]:
    """Run zhixing and each peer in pairs, directly after one another. The order flips with every round."""
    pairs: dict[str, list[Pair]] = {peer: [] for peer in pythons}
    work = row["trees"] * row["simulations"] * row["searches"]
    for number in range(repeats):
        for peer, python in pythons.items():
            interpreters = {"ours": Path(sys.executable), peer: python}
            runs = {
                side: run_alone(interpreters[side], __file__, "--as", side, json.dumps(row))
                for side in order_of_round(interpreters, number)
            }
            for side, run in runs.items():
                assert run["simulations"] == work, f"{name}: {side} made {run['simulations']} simulations, not {work}"
            pairs[peer].append((runs["ours"], runs[peer]))
            print(f"{name} {number + 1}/{repeats}: {describe_pair(runs, peer, 'simulations')}", flush=True)
    return {peer: summarize(paired) for peer, paired in pairs.items()}


def summarize(pairs: Sequence[Pair]) -> dict[str, Any]:
    ours, theirs = ([run["simulations"] / run["seconds"] for run in runs] for runs in zip(*pairs, strict=True))
    ratios = [rate / peer_rate for rate, peer_rate in zip(ours, theirs, strict=True)]
    cpu_ratios = [peer_run["cpu_seconds"] / run["cpu_seconds"] for run, peer_run in pairs]
    return {
        "ours_per_second": round(statistics.median(ours), 1),
        "peer_per_second": round(statistics.median(theirs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "cpu_ratio": round(statistics.median(cpu_ratios), 3),  # more reliable on a busy machine
        "pairs": len(pairs),
        "versions": {**pairs[0][1]["versions"], **pairs[0][0]["versions"]},
        "cpu": cpu(),
        "date": datetime.date.today().isoformat(),
    }


def make_table(results: Mapping[str, Any]) -> str:
    rows, notes = [], {}
    for name in [name for name in ROWS if name in results]:
        for peer, measured in results[name]["peers"].items():
            rows.append(
                [
                    ROWS[name]["title"],
                    f"{PEERS[peer].title} {measured['versions'][PEERS[peer].package]}",
                    f"{measured['ours_per_second']:,.0f}",
                    f"{measured['peer_per_second']:,.0f}",
                    *ratio_cells(measured),
                    f"{measured['cpu_ratio']:.2f}",
                ]
            )
            notes[f"Pairs of runs: {measured['pairs']}. {measured['cpu']}, one core, {measured['date']}."] = None
    head = ["workload", "peer", "zhixing, simulations/s", "peer, simulations/s"]
    head += ["ratio", "range over pairs", "CPU ratio"]
    return "\n".join([table(head, rows, 2), "", *notes])


if __name__ == "__main__":
    main()
