"""Train a run again and again in processes that are killed at random moments: `python killing.py FOLDER KILLS SEED`.

Each attempt is a fork of this process, which has imported everything: kills come every few hundredths of a second. Half
of them come at any moment, half while a file is being written. Prints what it found of each algorithm as JSON.
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
from zhixing.checkpoint import read_checkpoint

torch.set_num_threads(1)
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"steps_per_iteration": 16, "minibatch_size": 32, "epochs": 2},
    "dqn": {"warmup_steps": 100, "batch_size": 16, "updates_per_step": 0.5, "replay__capacity": 500},
}


def settings(name: str, kills: int) -> dict[str, Any]:
    """So long that all kills find it still at work."""
    rows = {"log_every_steps": 50, "checkpoint_every_steps": 100, "eval_every_steps": 400, "eval_episodes": 1}
    small = {"vector__num": 2, "vector__backend": "serial", "net__hidden_sizes": [8], "tensorboard": False, "seed": 4}
    return {"env_steps": 500 + 100 * kills, **rows, **small, **SETTINGS[name]}


def attempt(run: Path, name: str, kills: int) -> int:
    """Train, or go on, in a process of its own."""
    process = os.fork()
    if process:
        return process
    try:
        if (run / "config.yaml").exists():
            zx.Session.resume(run, quiet=True).run()
        else:
            zx.train(name, "CartPole-v1", out=run, quiet=True, **settings(name, kills))
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(1)


def unfinished(run: Path) -> set[tuple[Path, int]]:
    """Files that are being written, or that an earlier kill left, with the times of their last change."""
    found = set()
    for path in (*run.rglob(".*.tmp"), *run.rglob("*.part")):
        with suppress(FileNotFoundError):  # it is whole now
            found.add((path, path.stat().st_mtime_ns))
    return found


def main(folder: Path, kills: int, seed: int, name: str) -> dict[str, Any]:
    rng = random.Random(seed)
    short = {"env_steps": 200, "eval_every_steps": 0}  # what torch does when it is first asked needn't be done in each
    zx.train(name, "CartPole-v1", out=folder / "warm", quiet=True, **settings(name, kills) | short)
    began = time.monotonic()
    os.waitpid(attempt(folder / "whole", name, kills), 0)
    lasts = time.monotonic() - began
    run = folder / "killed"
    done = unreadable = 0
    in_writing = 0
    while True:
        left = unfinished(run)
        process = attempt(run, name, kills)
        if done < kills:
            until = time.monotonic() + rng.uniform(0.0, lasts / kills)
            while time.monotonic() < until:
                time.sleep(0.001)
            aimed = done % 2 == 1
            while aimed and unfinished(run) <= left and os.waitpid(process, os.WNOHANG) == (0, 0):
                pass
            in_writing += not unfinished(run) <= left
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:  # it has ended while we aimed
                break
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code != -signal.SIGKILL:
            break
        done += 1
        for file in (run / "checkpoints").glob("*.safetensors"):
            try:
                read_checkpoint(file)
            except zx.UserError:
                unreadable += 1
    # what an attempt that ended in its own way has left, or a kill in its last moment
    code = os.waitstatus_to_exitcode(os.waitpid(attempt(run, name, kills), 0)[1])
    return {"kills": done, "while_writing": in_writing, "unreadable": unreadable, "exit_code": code}


if __name__ == "__main__":
    where, asked, chance = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps({name: main(where / name, asked, chance, name) for name in SETTINGS}))
