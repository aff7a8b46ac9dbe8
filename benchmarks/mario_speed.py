"""Frames per second of `mario/1-1` here and of gym-super-mario-bros, one process each, behind the same wrappers.

    python benchmarks/mario_speed.py [--pairs 8] [--seconds 3]

Both play the same random actions (right and jump mostly, held for a while), behind grey, 84 x 84, skip 4 with the
brighter of the last two frames, stack 4. They take turns, and a ratio is that of neighbours, so that a busy machine
slows both. Rates are told per second on the wall, which is what counts, and per second of the process's own time, which
other work disturbs less. gym-super-mario-bros is as it comes, but for reads of memory as ints, without which it fails
on NumPy 2.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from zhixing import envs
from zhixing.envs.adapters.mario.env import ACTIONS
from zhixing.envs.adapters.mario.nes_core import patch_rom_header
from zhixing.envs.wrappers.pixels import wrap_pixels

RESULTS = Path(__file__).resolve().parent / "results" / "mario_speed.json"
SKIP = 4
WANTED = 5.0


class IntRam(np.ndarray):
    """Gives single bytes as Python's ints, as the package's arithmetic wants them."""

    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        return int(found) if isinstance(where, int) else np.asarray(found)


class Peer(gym.Env):
    """gym-super-mario-bros behind Gymnasium's interface; its screen is a buffer that the next frame overwrites."""

    def __init__(self) -> None:
        from gym_super_mario_bros import SuperMarioBrosEnv
        from nes_py import nes_env

        patch_rom_header(nes_env)

        class Ints(SuperMarioBrosEnv):
            def _ram_buffer(self) -> Any:
                return super()._ram_buffer().view(IntRam)

        self.game = Ints(target=(1, 1))
        self.observation_space = gym.spaces.Box(0, 255, self.game.screen.shape, np.uint8)
        self.action_space = gym.spaces.Discrete(len(ACTIONS["simple"]))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.game.reset(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        screen, reward, done, info = self.game.step(ACTIONS["simple"][action])
        return screen, reward, done, False, info


class Player:
    """Steps an environment by a fixed list of actions."""

    def __init__(self, env: gym.Env[Any, Any], actions: Any) -> None:
        self.env, self.actions, self.at = env, actions, 0
        env.reset(seed=0)

    def rate(self, seconds: float) -> dict[str, float]:
        frames, start, own = 0, time.perf_counter(), time.process_time()
        while (spent := time.perf_counter() - start) < seconds:
            *_, terminated, truncated, _ = self.env.step(int(self.actions[self.at % len(self.actions)]))
            self.at, frames = self.at + 1, frames + SKIP
            if terminated or truncated:
                self.env.reset()
        return {"wall": frames / spent, "process": frames / (time.process_time() - own)}


def compared(rates: dict[str, list[dict[str, float]]], clock: str) -> dict[str, Any]:
    ours, theirs = ([each[clock] for each in found] for found in rates.values())
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    medians = (round(statistics.median(each), 1) for each in (ours, theirs))
    return {
        "frames_per_second": dict(zip(rates, medians, strict=True)),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_least": round(ratios[0], 2),
        "ratio_most": round(ratios[-1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    given = parser.parse_args()
    actions = np.repeat(np.random.default_rng(0).choice(7, 2000, p=[0.05, 0.15, 0.25, 0.15, 0.3, 0.05, 0.05]), 4)
    options: dict[str, Any] = {"skip": SKIP, "pool": "max", "grayscale": True, "size": 84, "stack": 4}
    players = {
        "zhixing": Player(envs.make("mario/1-1", **options), actions),
        "gym-super-mario-bros": Player(wrap_pixels(Peer(), **options), actions),
    }
    for player in players.values():
        player.rate(0.5)
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in players}
    for pair in range(given.pairs):
        order = list(players.items())
        for name, player in order if pair % 2 == 0 else order[::-1]:
            rates[name].append(player.rate(given.seconds))
        newest = {name: {clock: round(rate) for clock, rate in each[-1].items()} for name, each in rates.items()}
        print(newest, flush=True)
    found: dict[str, Any] = {
        **{clock: compared(rates, clock) for clock in ("wall", "process")},
        "wanted": WANTED,
        "pairs": given.pairs,
        "seconds_each": given.seconds,
        "wrappers": options,
        "versions": {name: version(name) for name in ("gym-super-mario-bros", "nes-py", "stable-retro", "numpy")},
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    if found["wall"]["ratio"] < WANTED:
        raise SystemExit(f"not as asked: {found['wall']['ratio']} times as fast, wanted is {WANTED}")


if __name__ == "__main__":
    main()
