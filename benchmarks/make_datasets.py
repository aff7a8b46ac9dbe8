"""Data to learn from, made with our own agents: sets like D4RL's for a few tasks, the same on every machine of a kind.

    python benchmarks/make_datasets.py                  all tasks but Hopper-v5, whose agents take hours
    python benchmarks/make_datasets.py Hopper-v5        one task
    python benchmarks/make_datasets.py --out FOLDER     elsewhere than in datasets/

`expert` is what an agent does that was trained to the end, `medium` one stopped on the way, `medium-replay` all that
the latter saw until then, and `random` takes any action. What is there already is left alone, and an interrupted
training goes on. Every set tells the mean returns of the random and the expert policy, from which scores are made.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import zhixing as zx
from zhixing import algorithms, offline
from zhixing.collect.actor import Actor
from zhixing.core.policy import Phase
from zhixing.training.collect_data import collect_from_actor, collect_from_agent, export_replay

ROOT = Path(__file__).resolve().parent.parent
EVALUATION = 100  # episodes behind each reference


class Task(NamedTuple):
    algorithm: str
    medium: float  # return at which the medium agent is stopped
    expert: float  # and the expert, if not at the end of the budget
    steps: int  # of each set but medium-replay
    settings: dict[str, Any]


# as the preset was when the sets were made
PLAIN = {"batch_size": 256, "updates_per_step": 1, "critic_norm": False}
TASKS = {
    "Pendulum-v1": Task("sac", -800, -180, 50_000, {"eval_every_steps": 100, "env_steps": 20_000}),
    "CartPole-v1": Task("double_dqn", 150, 475, 50_000, {"eval_every_steps": 500, "env_steps": 100_000}),
    "Hopper-v5": Task("sac", 1_200, 3_000, 200_000, {"eval_every_steps": 5_000, "env_steps": 400_000, **PLAIN}),
}


def trained(task: str, kind: str, work: Path) -> Path:
    """The run of an agent, trained now, or further, or long ago. The expert goes on where the medium agent stopped."""
    plan, run = TASKS[task], work / f"{task}-{kind}"
    if (run / "result.json").is_file():
        return run
    if kind == "expert" and not run.exists():
        begun = work / f"{task}-begun"
        shutil.copytree(trained(task, "medium", work), begun, dirs_exist_ok=True)
        (begun / "result.json").unlink()
        begun.rename(run)  # at once, so that a half made copy is never taken for the run
    stop = {"medium": plan.medium, "expert": plan.expert}[kind]
    if (run / "config.yaml").is_file():
        result = zx.Session.resume(run, stop_return=stop).run()
    else:
        settings = {**plan.settings, "stop_return": stop, "tensorboard": False, "replay__capacity": 1_000_000}
        result = zx.train(plan.algorithm, env=task, out=run, **settings)
    print(f"{task} {kind}: return {result['final_return']:.1f} after {result['env_steps']:,} steps", flush=True)
    return run


def random_actor(task: str) -> Actor:
    env = zx.envs.make_vector(task, 8, backend="serial")
    plan = TASKS[task]
    policy = algorithms.get(plan.algorithm).make(zx.config.load(algorithm=plan.algorithm, env=task), env.spaces).policy
    return Actor(policy, env)


def make(task: str, out: Path) -> None:
    plan, work = TASKS[task], out / "agents"
    folder = out / task
    if all((folder / kind / "manifest.json").is_file() for kind in ("random", "medium", "medium-replay", "expert")):
        print(f"{folder} is complete")
        return
    medium, expert = trained(task, "medium", work), trained(task, "expert", work)
    actor = random_actor(task)
    played = [
        episode.episode_return for episode in actor.collect(episodes=10 * EVALUATION, phase=Phase.RANDOM).episodes
    ]
    references = {
        "random": sum(played) / len(played),
        "expert": zx.evaluate(expert, EVALUATION, seed=1).mean_return,
    }
    wanted = {
        "random": lambda to: collect_from_actor(
            actor, to, plan.steps, env=task, note="random actions", phase=Phase.RANDOM, references=references
        ),
        "medium": lambda to: collect_from_agent(medium, to, plan.steps, explore=True, references=references),
        "medium-replay": lambda to: export_replay(medium, to, references=references),
        "expert": lambda to: collect_from_agent(expert, to, plan.steps, explore=True, references=references),
    }
    for kind, write in wanted.items():
        if not (folder / kind / "manifest.json").is_file():
            data: offline.Dataset = write(str(folder / kind))
            mean = float(data.returns().mean())
            told = f"{len(data):,} steps, mean return {mean:.1f}, score {data.score(mean):.1f}"
            print(f"{folder / kind}: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", choices=[[], *TASKS], help="all but Hopper-v5 by default")
    parser.add_argument("--out", type=Path, default=ROOT / "datasets")
    asked = parser.parse_args()
    for task in asked.tasks or [task for task in TASKS if task != "Hopper-v5"]:
        make(task, asked.out)


if __name__ == "__main__":
    main()
