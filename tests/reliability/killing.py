"""Train a run again and again in processes that get a signal at random moments.

    python killing.py FOLDER KILLS SEED COMBINATION

A combination is an algorithm, an environment, a back end and a signal, as in `COMBINATIONS`. Each attempt is a fork of
this process, which has imported everything: signals come every few hundredths of a second. Half of them come at any
moment, half while a file is being written. Prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import zhixing as zx
from zhixing.training.run_folder import read_checkpoint

torch.set_num_threads(1)
# the first two are tried in every test run, all of them in `make soak`
COMBINATIONS = """
ppo CartPole-v1 serial SIGKILL
dqn CartPole-v1 serial SIGKILL
ppo CartPole-v1 process SIGKILL
ppo CartPole-v1 native SIGTERM
ppo Pendulum-v1 mixed SIGHUP
ppo toy/recall serial SIGKILL
a2c Acrobot-v1 process SIGTERM
a2c toy/match serial SIGHUP
a3c CartPole-v1 serial SIGKILL
pg CartPole-v1 process SIGINT
trpo Pendulum-v1 serial SIGKILL
ppg CartPole-v1 native SIGKILL
impala CartPole-v1 serial SIGTERM
dqn MountainCar-v0 process SIGKILL
dqn CartPole-v1 native SIGHUP
double_dqn toy/match mixed SIGKILL
dueling_dqn CartPole-v1 process SIGINT
rainbow CartPole-v1 serial SIGKILL
c51 Acrobot-v1 process SIGTERM
qrdqn CartPole-v1 serial SIGHUP
munchausen_dqn CartPole-v1 native SIGKILL
ddpg Pendulum-v1 process SIGKILL
td3 Pendulum-v1 serial SIGTERM
td3 toy/reach mixed SIGKILL
sac Pendulum-v1 process SIGINT
sac CartPole-v1 serial SIGKILL
redq Pendulum-v1 serial SIGHUP
mappo toy/team-match process SIGKILL
qmix toy/team-match serial SIGTERM
maddpg toy/team-reach serial SIGKILL
alphazero pettingzoo/tictactoe serial SIGKILL
""".strip().splitlines()
BY_SCHEME: dict[str, dict[str, Any]] = {
    "on_policy": {"rollout_steps": 16, "minibatch_size": 32, "epochs": 2},
    "asynchronous": {"rollout_steps": 8},
    "off_policy": {"learning_starts": 100, "batch_size": 16, "updates_per_step": 0.5, "replay__capacity": 500},
    "self_play": {"simulations": 4, "batch_size": 16, "net__blocks": 1, "net__channels": 8, "capacity": 500},
}
STOPPED = 3  # exit code of an attempt that a signal ended with a checkpoint, or before there was anything to save


def settings(name: str, kills: int, backend: str) -> dict[str, Any]:
    """So long that all kills find it still at work."""
    model = zx.algorithms.get(name).settings
    rows = {"log_every_steps": 50, "checkpoint_every_steps": 100, "eval_every_steps": 400, "eval_episodes": 1}
    small = {"num_envs": 2, "vector__backend": backend, "tensorboard": False, "seed": 4}
    short = {"net__hidden_sizes": [8], "env_steps": 500 + 100 * kills, **rows, **small, **BY_SCHEME[model.scheme]}
    return {key: value for key, value in short.items() if fits(model, key)}


def fits(model: type[zx.config.RunConfig], key: str) -> bool:
    """Whether an algorithm has a setting."""
    first, _, rest = key.partition("__")
    field = model.model_fields.get(first)
    return field is not None and (not rest or rest in field.annotation.model_fields)  # type: ignore[union-attr]


def attempt(run: Path, combination: str, kills: int) -> int:
    """Train, or go on, in a process of its own."""
    process = os.fork()
    if process:
        return process
    try:
        name, env, backend, _ = combination.split()
        if (run / "config.yaml").exists():
            zx.Session.resume(run, quiet=True).run()
        else:
            zx.train(name, env, out=run, quiet=True, **settings(name, kills, backend))
        os._exit(0)
    except KeyboardInterrupt:
        os._exit(STOPPED)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(1)


def unfinished(run: Path) -> set[tuple[Path, int]]:
    """Files that are being written, or that an earlier kill left, with the times of their last change."""
    found = set()
    for path in run.rglob(".*.tmp"):
        with suppress(FileNotFoundError):  # it is whole now
            found.add((path, path.stat().st_mtime_ns))
    return found


def main(folder: Path, kills: int, seed: int, combination: str) -> dict[str, Any]:
    rng = random.Random(seed)
    name, env, _, sent = combination.split()
    number = signal.Signals[sent]
    short = {"env_steps": 200, "eval_every_steps": 0}  # what torch does when it is first asked needn't be done in each
    zx.train(name, env, out=folder / "warm", quiet=True, **settings(name, kills, "serial") | short)
    began = time.monotonic()
    assert os.waitpid(attempt(folder / "whole", combination, kills), 0)[1] == 0
    lasts = time.monotonic() - began
    run = folder / "killed"
    done = unreadable = 0
    in_writing = 0
    while True:
        left = unfinished(run)
        process = attempt(run, combination, kills)
        if done < kills:
            until = time.monotonic() + rng.uniform(0.0, lasts / kills)
            while time.monotonic() < until:
                time.sleep(0.001)
            aimed = done % 2 == 1
            while aimed and unfinished(run) <= left and os.waitpid(process, os.WNOHANG) == (0, 0):
                pass
            in_writing += not unfinished(run) <= left
            try:
                os.kill(process, number)
            except ProcessLookupError:  # it has ended while we aimed
                break
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code == 0:
            break
        if code not in (-number, STOPPED):
            return {"kills": done, "while_writing": in_writing, "unreadable": unreadable, "exit_code": code}
        done += 1
        for file in (run / "checkpoints").glob("*.safetensors"):
            try:
                read_checkpoint(file)
            except zx.UserError:
                unreadable += 1
    # what an attempt that ended in its own way has left, or a kill in its last moment
    code = os.waitstatus_to_exitcode(os.waitpid(attempt(run, combination, kills), 0)[1])
    return {"kills": done, "while_writing": in_writing, "unreadable": unreadable, "exit_code": code}


if __name__ == "__main__":
    where, asked, chance, which = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    print(json.dumps(main(where, asked, chance, which)))
