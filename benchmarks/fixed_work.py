"""The same amount of work here and in another library, side by side: environment steps per second, as a ratio.

Rows that learn from data (`make datasets`) count updates instead, and tell the mean return of what was learned.

    python benchmarks/fixed_work.py [--repeats 5] [--rows ppo-cartpole,dqn-cartpole] [--peers sb3] [--quick]

A row of `ROWS` says what is done; `peers/<name>.py` says how one library does it, in a virtual environment of its own
that is made here when it is missing. A further row or a further peer is one more entry or one more file.
"""

from __future__ import annotations

import datetime
import importlib
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from common import (
    HERE,
    ROOT,
    asked,
    compared,
    cpu,
    file_of,
    find_python,
    peer_python,
    publish,
    read_results,
    run_alone,
    spread,
    table,
    write_results,
)

FROM_DATA: dict[str, Any] = {
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
    "episodes": 100,  # played in the end
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
    "random_steps": 1_000,  # of the warm-up: before the first update
    "batch_size": 256,
    "replay_capacity": 50_000,
    "tau": 0.005,
}

# What is done, in words that belong to no library. The first `warmup_steps` environment steps aren't timed; they and
# `measured_steps` are multiples of what one iteration takes, so that both sides stop at the same update.
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
        "random_steps": 1_000,  # of the warm-up: before the first update
        "batch_size": 64,
        "replay_capacity": 50_000,
        "target_update_interval": 500,
        # constant: a library that asks no network for a random action would do less work while it falls
        "epsilon": 0.05,
    },
    # CartPole-v0 is that of 200 steps. The replay is filled, the target moved and the loss taken as its code has it.
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
        "batch_episodes": 32,  # x `episode_steps`: as many single transitions where no episodes are drawn
        "replay_capacity": 100_000,
        "target_update_interval": 100,
        "epsilon": 0.05,
        "mixer_size": 32,
        # BenchMARL makes the mixer's weights in one layer and tells agents no numbers; ours needs two layers and three
        # more inputs. This width of the first brings the parameters as near as they come, 16,238 to 16,294.
        "hyper_size": 28,
        "parameters_within": 0.01,
    },
    "iql-pendulum": {
        "title": "IQL, Pendulum-v1 medium-replay: updates of 256 transitions, 128x128 relu",
        "algorithm": "iql",
        **FROM_DATA,
        "expectile": 0.7,
        "beta": 3.0,
        "max_weight": 100.0,
        "parameters_within": 0.01,
    },
    "cql-pendulum": {
        "title": "CQL, Pendulum-v1 medium-replay: updates of 256 transitions, 128x128 relu, 3 x 4 sampled actions",
        "algorithm": "cql",
        **FROM_DATA,
        "temperature": 1.0,
        "penalty": 1.0,
        "penalty_samples": 4,
        "parameters_within": 0.01,
    },
}

# the same work, here with compiled updates; compiling belongs to the warm-up
for _name in ("ppo-cartpole", "dqn-cartpole", "sac-pendulum", "td3-pendulum", "cql-pendulum"):
    ROWS[f"{_name}-graph"] = {
        **ROWS[_name],
        "title": f"{ROWS[_name]['title']}; zhixing with compile=true",
        "compile": True,
    }
ROWS["cql-pendulum-graph"]["measured_steps"] = 2_000  # what is learned in the end is in the other row

# two threads of MindSpore hand each other the work: less time of the clock, twice that of the CPU
ROWS["dqn-mindrl-threads"] = {
    **ROWS["dqn-mindrl"],
    "title": ROWS["dqn-mindrl"]["title"].replace("one core each", "MindRL with its own number of threads"),
    "one_core": False,
}

# what --quick takes without being asked: nothing is compiled, nothing needs data
QUICK = ("ppo-cartpole", "dqn-cartpole")
# not ours, and not for these rows
OTHERS = ("ours", "rejax_ppo", "sb3_study", "sb3_threshold", "sb3_worlds", "telling")


def main() -> None:
    known = sorted(file.stem for file in (HERE / "peers").glob("*.py") if file.stem not in OTHERS)
    options = asked(__doc__, list(ROWS), 5, quick_rows=QUICK, peers=known)
    rows = {name: dict(ROWS[name]) for name in options.rows}
    if options.quick:
        for row in rows.values():
            row["measured_steps"] //= 10
            if "random_steps" in row:  # of the updates before the clock starts, too
                row["warmup_steps"] -= (row["warmup_steps"] - row["random_steps"]) * 9 // 10
    peers = {name: _peer(name) for name in options.peers}
    # nothing is installed for rows that aren't asked for
    peers = {name: peer for name, peer in peers.items() if any(_does(name, peer, row) for row in rows.values())}
    bases = {name: _base(peer) for name, peer in peers.items()}
    pythons = {
        name: peer_python(name, peer.REQUIREMENTS, getattr(peer, "CONSTRAINED", True), base)
        for name, peer in peers.items()
        if (base := bases[name])
    }
    # rows and peers that aren't measured now keep their last figures
    kept = {} if options.quick else read_results(file_of("fixed_work", quick=False))
    kept = {"titles": {}, "rows": {}, "skipped": {}} | kept
    for name, row in rows.items():
        able = [peer for peer in peers if _does(peer, peers[peer], row)]
        for peer in able:
            if peer not in pythons:
                why = f"{peers[peer].TITLE} (needs Python {peers[peer].PYTHON}, which was not found)"
                kept["skipped"][name] = why
                print(f"skipped: {name} by {why}", flush=True)
        if fitting := {peer: pythons[peer] for peer in able if peer in pythons}:
            found = _measure(name, row, fitting, options.repeats)
            before = kept["rows"].get(name, {"peers": {}})
            kept["rows"][name] = {**found, "peers": {**before["peers"], **found["peers"]}}
            kept["titles"] |= {peer: peers[peer].TITLE for peer in fitting}
            write_results(file_of("fixed_work", options.quick), kept)  # whoever interrupts keeps what is done
    kept["skipped"] = {name: why for name, why in kept["skipped"].items() if name not in kept["rows"]}
    publish("fixed_work", kept, _table(kept["rows"], kept["titles"], kept["skipped"]), options.quick)


# --- measuring ---------------------------------------------------------------------------------------------------


def _peer(name: str) -> ModuleType:
    return importlib.import_module(f"peers.{name}")


def _does(name: str, peer: ModuleType, row: dict[str, Any]) -> bool:
    """A row that is the example of one peer is for nobody else."""
    return row["example_of"] == name if "example_of" in row else row["algorithm"] in peer.ALGORITHMS


def _base(peer: ModuleType) -> Path | None:
    """The Python that its environment is made from: ours unless it needs another, which may be missing."""
    return find_python(peer.PYTHON) if hasattr(peer, "PYTHON") else Path(sys.executable)


def _measure(name: str, row: dict[str, Any], pythons: dict[str, Path], repeats: int) -> dict[str, Any]:
    """Pairs of runs, ours and a peer's right after one another; who begins changes from pair to pair."""
    pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {peer: [] for peer in pythons}
    for repeat in range(repeats):
        task = {**row, "seed": repeat}
        if "data" in row:
            task |= {"data": str(ROOT / "datasets" / row["data"]), "arrays": _arrays(row["data"])}
        for peer, python in pythons.items():
            order = {"ours": Path(sys.executable), peer: python}
            pair = {"one_core": getattr(_peer(peer), "ONE_CORE", False), **task}
            runs = {who: _run(who, order[who], pair) for who in sorted(order, reverse=repeat % 2 == 1)}
            check_same_work(name, peer, row, runs["ours"], runs[peer])
            pairs[peer].append((runs["ours"], runs[peer]))
            rates = {who: run["env_steps"] / run["seconds"] for who, run in runs.items()}
            told = f"ours {rates['ours']:,.0f} steps/s, {peer} {rates[peer]:,.0f} steps/s"
            cpu_rates = {who: run["env_steps"] / run["cpu_seconds"] for who, run in runs.items()}
            cpu_ratio = cpu_rates["ours"] / cpu_rates[peer]
            told += f", ratio {rates['ours'] / rates[peer]:.2f} (of CPU time {cpu_ratio:.2f})"
            print(f"{name} {repeat + 1}/{repeats}: {told}", flush=True)
    return {
        "title": row["title"],
        "settings": {key: value for key, value in row.items() if key != "title"},
        "peers": {peer: _summary(results) for peer, results in pairs.items()},
    }


def _arrays(name: str) -> str:
    """Recorded steps as plain arrays, for those that don't read ours."""
    import numpy as np

    from zhixing import offline

    file = ROOT / "datasets" / f"{name}.npz"
    if not file.exists():
        steps = offline.open(str(ROOT / "datasets" / name)).arrays
        names = {"obs": "observations", "action": "actions", "reward": "rewards"}
        ends = {"terminated": "terminals", "truncated": "timeouts"}
        np.savez(file, **{theirs: np.asarray(steps[ours], np.float32) for ours, theirs in (names | ends).items()})
    return str(file)


def _run(who: str, python: Path, task: dict[str, Any]) -> dict[str, Any]:
    return run_alone(python, HERE / "peers" / f"{who}.py", json.dumps(task))


def check_same_work(name: str, peer: str, row: dict[str, Any], ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    # relative to the peer's
    allowed = {"parameters": row.get("parameters_within", 0.0)} | getattr(_peer(peer), "WITHIN", {})
    for what in ("env_steps", "optimizer_steps", "parameters", "threads"):
        same = abs(ours[what] - theirs[what]) <= allowed.get(what, 0.0) * theirs[what]
        assert same, f"{name}: {what} {ours[what]} here, {theirs[what]} in {peer}"
    assert ours["env_steps"] == row["measured_steps"], f"{name}: {ours['env_steps']} steps, not {row['measured_steps']}"
    if "data" in row:
        print(f"{name}: mean return {ours['mean_return']:.1f} here, {theirs['mean_return']:.1f} in {peer}", flush=True)
    torch_versions = {run["versions"]["torch"] for run in (ours, theirs) if "torch" in run["versions"]}
    assert len(torch_versions) == 1, f"{name}: two versions of torch, {torch_versions}"


def _summary(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    ours = [mine["env_steps"] / mine["seconds"] for mine, _ in pairs]
    theirs = [their["env_steps"] / their["seconds"] for _, their in pairs]
    first, last = pairs[0]
    return {
        "ours_steps_per_second": round(statistics.median(ours), 1),
        "peer_steps_per_second": round(statistics.median(theirs), 1),
        **compared(ours, theirs),
        "ours_seconds": [round(mine["seconds"], 3) for mine, _ in pairs],
        "peer_seconds": [round(their["seconds"], 3) for _, their in pairs],
        # says little on a quiet machine; on a busy one it shows how far to trust the rest
        "cpu_ratio": round(
            statistics.median(their["cpu_seconds"] / their["env_steps"] for _, their in pairs)
            / statistics.median(mine["cpu_seconds"] / mine["env_steps"] for mine, _ in pairs),
            3,
        ),
        "env_steps": first["env_steps"],
        "optimizer_steps": first["optimizer_steps"],
        "parameters": first["parameters"],
        "peer_parameters": last["parameters"],
        "threads": first["threads"],
        "versions": {**last["versions"], **first["versions"]},
        **(
            {"compile_seconds": [round(mine["compile_seconds"], 1) for mine, _ in pairs]}
            if "compile_seconds" in first
            else {}
        ),
        **({"returns": [[run["mean_return"] for run in pair] for pair in pairs]} if "mean_return" in first else {}),
        "cpu": cpu(),
        "date": datetime.date.today().isoformat(),
    }


# --- telling -----------------------------------------------------------------------------------------------------


def _table(rows: dict[str, dict[str, Any]], titles: dict[str, str], skipped: dict[str, str]) -> str:
    """One line per row and peer, in the order of `ROWS`, who can't do a row, and under what they were measured."""
    lines, notes, unmeasured = [], {}, []
    for name in [name for name in ROWS if name in rows]:
        work = rows[name]["title"]
        for peer, found in rows[name]["peers"].items():
            lines.append(
                [
                    work + _remarks(found),
                    f"{titles[peer]} {found['versions'][titles[peer]]}",
                    f"{found['ours_steps_per_second']:,.0f}",
                    f"{found['peer_steps_per_second']:,.0f}",
                    *spread(found),
                ]
            )
            versions = f"torch {found['versions']['torch']}, Python {found['versions']['python']}"
            note = (
                f"Pairs of runs: {len(found['ours_seconds'])}. {found['cpu']}, one thread, {versions}, {found['date']}."
            )
            notes[note] = None
        missing = [title for peer, title in titles.items() if peer not in rows[name]["peers"]]
        if missing and "example_of" not in ROWS[name]:
            unmeasured.append(f"{name} by {', '.join(missing)}")
    unmeasured += [f"{name} by {why}" for name, why in skipped.items()]
    head = ["workload", "peer", "zhixing, steps or updates/s", "peer, steps or updates/s", "ratio", "range over pairs"]
    told = [f"Not supported or not measured: {'; '.join(unmeasured)}."] if unmeasured else []
    return "\n".join([table(head, lines, 2), "", *notes, *told])


def _remarks(found: dict[str, Any]) -> str:
    told, mine = "", found["parameters"]
    theirs = found.get("peer_parameters", mine)
    if mine != theirs:
        told += f" ({mine:,} parameters, peer {theirs:,})"
    if "compile_seconds" in found:
        seconds = max(found["compile_seconds"])
        told += f" (compiled in up to {seconds:.0f} s)" if seconds >= 1 else " (compiled graph from the cache)"
    if "returns" in found:
        ends = ((f"{value:.0f}" for value in side) for side in zip(*found["returns"], strict=True))
        told += "; mean return {}, peer {}".format(*(", ".join(side) for side in ends))
    return told


if __name__ == "__main__":
    main()
