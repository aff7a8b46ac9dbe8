"""Training speed: zhixing and another library do the same amount of work; results are ratios of steps per second.

    python benchmarks/fixed_work.py [--repeats 5] [--rows ppo-cartpole,dqn-cartpole] [--peers sb3] [--quick]

Offline rows, which read data from `make datasets`, count updates instead and report the mean return after training.
`ROWS` defines the work; `peers/NAME.py` does it with one library, in its own virtual environment, which is created when
it is missing. To add a row or a peer, add an entry or a file.
"""

from __future__ import annotations

import datetime
import importlib
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from common import HERE, ROOT, cpu, find_python, peer_python, read_results, run_alone, table, write_results
from comparison import (
    compute_ratios,
    describe_pair,
    order_of_round,
    parse_args,
    publish,
    ratio_cells,
    results_file,
    rounded_median,
)

OFFLINE: dict[str, Any] = {
    "env": "Pendulum-v1",
    "data": "Pendulum-v1/medium-replay",
    "warmup_steps": 500,
    "measured_steps": 9_500,
    "hidden_sizes": [128, 128],
    "activation": "relu",
    "lr": 1e-3,
    "gamma": 0.98,
    "tau": 0.005,
    "batch_size": 256,
    "action_low": [-2.0],
    "action_high": [2.0],
    "episodes": 100,  # of the final evaluation
}

PENDULUM: dict[str, Any] = {
    "env": "Pendulum-v1",
    "num_envs": 1,
    "warmup_steps": 1_200,
    "measured_steps": 1_600,
    "hidden_sizes": [256, 256],
    "activation": "relu",
    "lr": 1e-3,
    "adam_epsilon": 1e-8,
    "gamma": 0.99,
    "random_steps": 1_000,  # at the start of the warm-up, before the first update
    "batch_size": 256,
    "replay_capacity": 50_000,
    "tau": 0.005,
}

# The first `warmup_steps` environment steps aren't measured. They and `measured_steps` are multiples of the steps of an
# iteration, so both libraries stop at the same update.
ROWS: dict[str, dict[str, Any]] = {
    "ppo-cartpole": {
        "title": "PPO, CartPole-v1: 8 environments x 32 steps, 20 epochs, minibatches of 256, two 64x64 tanh networks",
        "algorithm": "ppo",
        "env": "CartPole-v1",
        "num_envs": 8,
        "warmup_steps": 2_048,
        "measured_steps": 20_480,
        "hidden_sizes": [64, 64],
        "activation": "tanh",
        "lr": 1e-3,
        "adam_epsilon": 1e-5,
        "max_grad_norm": 0.5,
        "gamma": 0.98,
        "rollout_steps": 32,
        "minibatch_size": 256,
        "epochs": 20,
        "gae_lambda": 0.8,
        "clip_range": 0.2,
        "value_coef": 0.5,
        "entropy_coef": 0.0,
    },
    "dqn-cartpole": {
        "title": "DQN, CartPole-v1: 1 environment, one update of 64 transitions per step, 128x128 relu",
        "algorithm": "dqn",
        "env": "CartPole-v1",
        "num_envs": 1,
        "warmup_steps": 2_000,
        "measured_steps": 4_000,
        "hidden_sizes": [128, 128],
        "activation": "relu",
        "lr": 1e-3,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 10.0,
        "gamma": 0.99,
        "random_steps": 1_000,  # at the start of the warm-up, before the first update
        "batch_size": 64,
        "replay_capacity": 50_000,
        "target_update_interval": 500,
        # constant, because libraries that skip the network for random actions would do less work with a larger one
        "epsilon": 0.05,
    },
    # filling of the replay buffer, target updates and loss as in MindRL's code; episodes of CartPole-v0 have 200 steps
    "dqn-mindrl": {
        "title": "DQN with the settings of MindRL's example, CartPole-v0: 1 environment, one update of 64 transitions "
        "per step, 100 relu; MindRL in graph mode, zhixing with compile=true; one core each",
        "algorithm": "dqn",
        "example_of": "mindrl",
        "env": "CartPole-v0",
        "num_envs": 1,
        "warmup_steps": 2_000,
        "measured_steps": 8_000,
        "hidden_sizes": [100],
        "activation": "relu",
        "lr": 1e-3,
        "adam_epsilon": 1e-8,
        "max_grad_norm": None,
        "gamma": 0.99,
        "random_steps": 1_000,
        "batch_size": 64,
        "replay_capacity": 100_000,
        "target_update_interval": 5,
        "tau": 0.05,
        "loss": "mse",
        "epsilon": 0.1,
        "compile": True,
        "one_core": True,
    },
    "sac-pendulum": {
        "title": "SAC, Pendulum-v1: 1 environment, one update of 256 transitions per step, 256x256 relu",
        "algorithm": "sac",
        **PENDULUM,
    },
    "td3-pendulum": {
        "title": "TD3, Pendulum-v1: 1 environment, one update of 256 transitions per step, 256x256 relu",
        "algorithm": "td3",
        **PENDULUM,
        "policy_delay": 2,
        "exploration_noise": 0.1,
        "target_policy_noise": 0.2,
        "target_noise_clip": 0.5,
    },
    "qmix-spread": {
        "title": "QMIX, MPE simple_spread, 3 agents: 8 environments, one update of 800 transitions per 25 steps, "
        "64x64 relu, mixer of 32",
        "algorithm": "qmix",
        "env": "mpe/simple_spread",
        "num_envs": 8,
        "num_agents": 3,
        "episode_steps": 25,
        "warmup_steps": 2_000,
        "measured_steps": 10_000,
        "hidden_sizes": [64, 64],
        "activation": "relu",
        "lr": 5e-4,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 10.0,
        "gamma": 0.99,
        "rollout_steps": 25,
        "updates_per_iteration": 8,
        "batch_episodes": 32,  # libraries that sample transitions sample 32 x `episode_steps`
        "replay_capacity": 100_000,
        "target_update_interval": 100,
        "epsilon": 0.05,
        "mixer_size": 32,
        # BenchMARL's hypernetworks have one layer, and its agents don't observe their index; zhixing's have two layers,
        # and agents three more inputs. With this width the numbers of parameters are closest: 16,238 and 16,294.
        "hyper_size": 28,
        "parameters_within": 0.01,
    },
    "iql-pendulum": {
        "title": "IQL, Pendulum-v1 medium-replay: updates of 256 transitions, 128x128 relu",
        "algorithm": "iql",
        **OFFLINE,
        "expectile": 0.7,
        "beta": 3.0,
        "max_weight": 100.0,
        "parameters_within": 0.01,
    },
    "cql-pendulum": {
        "title": "CQL, Pendulum-v1 medium-replay: updates of 256 transitions, 128x128 relu, 3 x 4 sampled actions",
        "algorithm": "cql",
        **OFFLINE,
        "temperature": 1.0,
        "penalty": 1.0,
        "penalty_samples": 4,
        "parameters_within": 0.01,
    },
}

# the same work with compiled updates in zhixing; compilation belongs to the warm-up
for _name in ("ppo-cartpole", "dqn-cartpole", "sac-pendulum", "td3-pendulum", "cql-pendulum"):
    ROWS[f"{_name}-graph"] = {
        **ROWS[_name],
        "title": f"{ROWS[_name]['title']}; zhixing with compile=true",
        "compile": True,
    }
ROWS["cql-pendulum-graph"]["measured_steps"] = 2_000  # the other row reports the return of full training

# two threads of MindSpore pass work to each other: less wall time, twice the CPU time
ROWS["dqn-mindrl-threads"] = {
    **ROWS["dqn-mindrl"],
    "title": ROWS["dqn-mindrl"]["title"].replace("one core each", "MindRL with its own number of threads"),
    "one_core": False,
}

QUICK_ROWS = ("ppo-cartpole", "dqn-cartpole")  # need no data and no compilation
NOT_PEERS = ("measurement", "ours", "rejax_ppo", "sb3_study", "sb3_threshold", "sb3_worlds")  # other files in peers/
Run = dict[str, Any]
Pair = tuple[Run, Run]  # ours, the peer's


def main() -> None:
    known = sorted(file.stem for file in (HERE / "peers").glob("*.py") if file.stem not in NOT_PEERS)
    options = parse_args(__doc__, list(ROWS), repeats=5, quick_rows=QUICK_ROWS, peers=known)
    rows = {name: dict(ROWS[name]) for name in options.rows}
    if options.quick:
        for row in rows.values():
            row["measured_steps"] //= 10
            if "random_steps" in row:  # also do a tenth of the updates of the warm-up
                row["warmup_steps"] -= (row["warmup_steps"] - row["random_steps"]) * 9 // 10
    # install only peers that support one of the rows
    peers = {name: load_peer(name) for name in options.peers}
    peers = {name: peer for name, peer in peers.items() if any(supports(name, peer, row) for row in rows.values())}
    bases = {name: base_python(peer) for name, peer in peers.items()}
    pythons = {
        name: peer_python(name, peer.REQUIREMENTS, getattr(peer, "CONSTRAINED", True), base)
        for name, peer in peers.items()
        if (base := bases[name])
    }
    # rows and peers that aren't measured now keep their last results
    results = {} if options.quick else read_results(results_file("fixed_work", quick=False))
    results = {"titles": {}, "rows": {}, "skipped": {}} | results
    for name, row in rows.items():
        supporting = [peer for peer in peers if supports(peer, peers[peer], row)]
        for peer in supporting:
            if peer not in pythons:
                reason = f"{peers[peer].TITLE} (needs Python {peers[peer].PYTHON}, which was not found)"
                results["skipped"][name] = reason
                print(f"skipped: {name} by {reason}", flush=True)
        if available := {peer: pythons[peer] for peer in supporting if peer in pythons}:
            measured = measure(name, row, available, options.repeats)
            last = results["rows"].get(name, {"peers": {}})
            results["rows"][name] = {**measured, "peers": {**last["peers"], **measured["peers"]}}
            results["titles"] |= {peer: peers[peer].TITLE for peer in available}
            write_results(results_file("fixed_work", options.quick), results)  # an interruption loses only this row
    results["skipped"] = {name: why for name, why in results["skipped"].items() if name not in results["rows"]}
    publish("fixed_work", results, make_table(results), options.quick)


# --- measuring -------------------------------------------------------------------------------------------------------


def load_peer(name: str) -> ModuleType:
    return importlib.import_module(f"peers.{name}")


def supports(name: str, peer: ModuleType, row: Mapping[str, Any]) -> bool:
    """Return whether a peer can do a row. A row that is one peer's example is only for that peer."""
    return row["example_of"] == name if "example_of" in row else row["algorithm"] in peer.ALGORITHMS


def base_python(peer: ModuleType) -> Path | None:
    """Return the interpreter for the peer's virtual environment, or None if the version it needs is missing."""
    return find_python(peer.PYTHON) if hasattr(peer, "PYTHON") else Path(sys.executable)


def measure(name: str, row: dict[str, Any], pythons: Mapping[str, Path], repeats: int) -> dict[str, Any]:
    """Run zhixing and each peer in pairs, directly after one another. The order flips with every round."""
    pairs: dict[str, list[Pair]] = {peer: [] for peer in pythons}
    for number in range(repeats):
        work = {**row, "seed": number}
        if "data" in row:
            work |= {"data": str(ROOT / "datasets" / row["data"]), "arrays": export_arrays(row["data"])}
        for peer, python in pythons.items():
            interpreters = {"ours": Path(sys.executable), peer: python}
            argument = json.dumps({"one_core": getattr(load_peer(peer), "ONE_CORE", False), **work})
            runs = {
                side: run_alone(interpreters[side], HERE / "peers" / f"{side}.py", argument)
                for side in order_of_round(interpreters, number)
            }
            check_same_work(name, peer, row, runs["ours"], runs[peer])
            pairs[peer].append((runs["ours"], runs[peer]))
            print(f"{name} {number + 1}/{repeats}: {describe_pair(runs, peer, 'env_steps')}", flush=True)
    return {
        "title": row["title"],
        "settings": {key: value for key, value in row.items() if key != "title"},
        "peers": {peer: summarize(paired) for peer, paired in pairs.items()},
    }


def export_arrays(name: str) -> str:
    """Export a dataset as plain arrays, for libraries that can't read ours. Return the file."""
    import numpy as np

    from zhixing import offline

    file = ROOT / "datasets" / f"{name}.npz"
    if not file.exists():
        steps = offline.open(str(ROOT / "datasets" / name)).arrays
        names = {"obs": "observations", "action": "actions", "reward": "rewards"}
        ends = {"terminated": "terminals", "truncated": "timeouts"}
        np.savez(file, **{theirs: np.asarray(steps[ours], np.float32) for ours, theirs in (names | ends).items()})
    return str(file)


def check_same_work(name: str, peer: str, row: Mapping[str, Any], ours: Run, theirs: Run) -> None:
    """Fail unless both runs did the same work, within the tolerances of the row and the peer."""
    tolerance = {"parameters": row.get("parameters_within", 0.0)} | getattr(load_peer(peer), "TOLERANCE", {})
    for count in ("env_steps", "optimizer_steps", "parameters", "threads"):
        same = abs(ours[count] - theirs[count]) <= tolerance.get(count, 0.0) * theirs[count]
        assert same, f"{name}: {count} {ours[count]} in zhixing, {theirs[count]} in {peer}"
    assert ours["env_steps"] == row["measured_steps"], f"{name}: {ours['env_steps']} steps, not {row['measured_steps']}"
    if "data" in row:
        returns = f"{ours['mean_return']:.1f} in zhixing, {theirs['mean_return']:.1f} in {peer}"
        print(f"{name}: mean return {returns}", flush=True)
    torch_versions = {run["versions"]["torch"] for run in (ours, theirs) if "torch" in run["versions"]}
    assert len(torch_versions) == 1, f"{name}: two versions of torch, {torch_versions}"


def summarize(pairs: Sequence[Pair]) -> dict[str, Any]:
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    rates, peer_rates = ([run["env_steps"] / run["seconds"] for run in runs] for runs in (ours, theirs))
    cpu_per_step, peer_cpu_per_step = (
        statistics.median(run["cpu_seconds"] / run["env_steps"] for run in runs) for runs in (ours, theirs)
    )
    first, peer_first = pairs[0]
    summary = {
        "ours_steps_per_second": rounded_median(rates),
        "peer_steps_per_second": rounded_median(peer_rates),
        **compute_ratios(rates, peer_rates),
        "ours_seconds": [round(run["seconds"], 3) for run in ours],
        "peer_seconds": [round(run["seconds"], 3) for run in theirs],
        # on a busy machine, a difference from `ratio` shows how reliable that is
        "cpu_ratio": round(peer_cpu_per_step / cpu_per_step, 3),
        "env_steps": first["env_steps"],
        "optimizer_steps": first["optimizer_steps"],
        "parameters": first["parameters"],
        "peer_parameters": peer_first["parameters"],
        "threads": first["threads"],
        "versions": {**peer_first["versions"], **first["versions"]},
    }
    if "compile_seconds" in first:
        summary["compile_seconds"] = [round(run["compile_seconds"], 1) for run in ours]
    if "mean_return" in first:
        summary["returns"] = [[run["mean_return"] for run in pair] for pair in pairs]
    return {**summary, "cpu": cpu(), "date": datetime.date.today().isoformat()}


# --- table -----------------------------------------------------------------------------------------------------------


def make_table(results: Mapping[str, Any]) -> str:
    """Format one line per row and peer in the order of `ROWS`, the machines, and what wasn't measured."""
    rows, titles = results["rows"], results["titles"]
    lines, notes, unmeasured = [], {}, []
    for name in [name for name in ROWS if name in rows]:
        for peer, measured in rows[name]["peers"].items():
            title, versions = titles[peer], measured["versions"]
            lines.append(
                [
                    ROWS[name]["title"] + remarks(measured),
                    f"{title} {versions[title]}",
                    f"{measured['ours_steps_per_second']:,.0f}",
                    f"{measured['peer_steps_per_second']:,.0f}",
                    *ratio_cells(measured),
                ]
            )
            machine = f"{measured['cpu']}, one thread, torch {versions['torch']}, Python {versions['python']}"
            notes[f"Pairs of runs: {len(measured['ours_seconds'])}. {machine}, {measured['date']}."] = None
        missing = [title for peer, title in titles.items() if peer not in rows[name]["peers"]]
        if missing and "example_of" not in ROWS[name]:
            unmeasured.append(f"{name} by {', '.join(missing)}")
    unmeasured += [f"{name} by {reason}" for name, reason in results["skipped"].items()]
    if unmeasured:
        notes[f"Not supported or not measured: {'; '.join(unmeasured)}."] = None
    head = ["workload", "peer", "zhixing, steps or updates/s", "peer, steps or updates/s", "ratio", "range over pairs"]
    return "\n".join([table(head, lines, 2), "", *notes])


def remarks(measured: Mapping[str, Any]) -> str:
    """Describe differences in parameters, compilation times and returns."""
    text, parameters = "", measured["parameters"]
    peer_parameters = measured.get("peer_parameters", parameters)
    if parameters != peer_parameters:
        text += f" ({parameters:,} parameters, peer {peer_parameters:,})"
    if "compile_seconds" in measured:
        seconds = max(measured["compile_seconds"])
        text += f" (compiled in up to {seconds:.0f} s)" if seconds >= 1 else " (compiled graph from the cache)"
    if "returns" in measured:
        ours, theirs = (", ".join(f"{value:.0f}" for value in side) for side in zip(*measured["returns"], strict=True))
        text += f"; mean return {ours}, peer {theirs}"
    return text


if __name__ == "__main__":
    main()
