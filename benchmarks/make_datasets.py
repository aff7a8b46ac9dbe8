"""Create datasets like D4RL's with agents trained here. They are identical on machines of the same kind.

    python benchmarks/make_datasets.py                  all environments except Hopper-v5, which takes hours
    python benchmarks/make_datasets.py Hopper-v5        one environment
    python benchmarks/make_datasets.py --out FOLDER     another folder than datasets/

`expert` and `medium` are collected by a fully and a partly trained agent, `medium-replay` is the replay buffer of the
partly trained one, and `random` has random actions. Existing datasets are kept, and an interrupted training continues.
Every dataset stores the mean returns of the random and the expert policy, which define normalized scores.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT

import zhixing as zx
from zhixing import algorithms, offline
from zhixing.training.collect_data import collect_from_actor, collect_from_agent, export_replay

EVAL_EPISODES = 100  # for the reference returns


class Plan(NamedTuple):
    algorithm: str
    medium: float  # return at which training of the medium agent stops
    expert: float  # return at which training of the expert stops before the end of its budget
    steps: int  # of each dataset except medium-replay
    settings: dict[str, Any]


# settings of the preset when the datasets were created
HOPPER = {"batch_size": 256, "updates_per_step": 1, "critic_norm": False}
PLANS = {
    "Pendulum-v1": Plan("sac", -800, -180, 50_000, {"eval_every": 100, "env_steps": 20_000}),
    "CartPole-v1": Plan("double_dqn", 150, 475, 50_000, {"eval_every": 500, "env_steps": 100_000}),
    "Hopper-v5": Plan("sac", 1_200, 3_000, 200_000, {"eval_every": 5_000, "env_steps": 400_000, **HOPPER}),
}


def train(env: str, kind: str, folder: Path) -> Path:
    """Return the run of the medium or expert agent. Train it first if needed; the expert continues the medium run."""
    plan, run = PLANS[env], folder / f"{env}-{kind}"
    if (run / "result.json").is_file():
        return run
    if kind == "expert" and not run.exists():
        partial = folder / f"{env}-begun"
        shutil.copytree(train(env, "medium", folder), partial, dirs_exist_ok=True)
        (partial / "result.json").unlink()
        partial.rename(run)  # atomic, so an incomplete copy is never taken for the run
    stop_return = {"medium": plan.medium, "expert": plan.expert}[kind]
    if (run / "config.yaml").is_file():
        result = zx.Session.resume(run, stop_return=stop_return).run()
    else:
        settings = {**plan.settings, "stop_return": stop_return, "tensorboard": False, "replay__capacity": 1_000_000}
        result = zx.train(plan.algorithm, env=env, out=run, **settings)
    print(f"{env} {kind}: return {result['final_return']:.1f} after {result['env_steps']:,} steps", flush=True)
    return run


def make_random_actor(env: str) -> zx.Actor:
    vector = zx.envs.make_vector(env, 8, backend="serial")
    name = PLANS[env].algorithm
    policy = algorithms.get(name).make(zx.config.load(algorithm=name, env=env), vector.spaces).policy
    return zx.Actor(policy, vector)


def make_datasets(env: str, out: Path) -> None:
    folder, steps = out / env, PLANS[env].steps
    if all((folder / kind / "manifest.json").is_file() for kind in ("random", "medium", "medium-replay", "expert")):
        print(f"{folder} is complete")
        return
    medium, expert = (train(env, kind, out / "agents") for kind in ("medium", "expert"))
    actor = make_random_actor(env)
    random_episodes = actor.collect(episodes=10 * EVAL_EPISODES, phase=zx.Phase.RANDOM).episodes
    references = {
        "random": sum(episode.episode_return for episode in random_episodes) / len(random_episodes),
        "expert": zx.evaluate(expert, EVAL_EPISODES, seed=1).mean_return,
    }
    writers: dict[str, Callable[[str], offline.Dataset]] = {
        "random": lambda path: collect_from_actor(
            actor, path, steps, env=env, note="random actions", phase=zx.Phase.RANDOM, references=references
        ),
        "medium": lambda path: collect_from_agent(medium, path, steps, explore=True, references=references),
        "medium-replay": lambda path: export_replay(medium, path, references=references),
        "expert": lambda path: collect_from_agent(expert, path, steps, explore=True, references=references),
    }
    for kind, write in writers.items():
        if not (folder / kind / "manifest.json").is_file():
            data = write(str(folder / kind))
            mean = float(data.returns().mean())
            summary = f"{len(data):,} steps, mean return {mean:.1f}, score {data.score(mean):.1f}"
            print(f"{folder / kind}: {summary}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("envs", nargs="*", choices=[[], *PLANS], help="default: all except Hopper-v5")
    parser.add_argument("--out", type=Path, default=ROOT / "datasets")
    args = parser.parse_args()
    for env in args.envs or [env for env in PLANS if env != "Hopper-v5"]:
        make_datasets(env, args.out)


if __name__ == "__main__":
    main()
