"""Frames per second of `mario/1-1`, compared with gym-super-mario-bros behind the same wrappers.

    python benchmarks/mario_speed.py [--pairs 8] [--seconds 3]

Both get the same random actions (mostly right and jump, held for a while) and the same wrappers: grayscale, 84 x 84,
4 frames per action with the maximum of the last two, stacks of 4. Measurements alternate in one process, and ratios are
those of neighboring measurements, so slowdowns of the machine affect both. Rates are per second of wall time and of CPU
time, which other processes disturb less. gym-super-mario-bros is unchanged except that it reads memory as Python
integers, without which it fails on NumPy 2.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from typing import Any

import gymnasium as gym
import numpy as np
from common import HERE, versions, write_results
from comparison import order_of_round

from zhixing import envs
from zhixing.envs.adapters.mario.env import ACTIONS
from zhixing.envs.adapters.mario.nes_core import patch_rom_header
from zhixing.envs.wrappers.pixels import wrap_pixels

RESULTS = HERE / "results" / "mario_speed.json"
SKIP = 4
TARGET = 5.0  # ratio of frames per second


class IntRam(np.ndarray):
    """Memory whose single bytes are Python integers, which don't overflow in the package's arithmetic."""

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(index)
        return int(value) if isinstance(index, int) else np.asarray(value)


class PeerEnv(gym.Env):
    """gym-super-mario-bros with Gymnasium's interface. Its observation is a buffer that the next frame overwrites."""

    def __init__(self) -> None:
        from gym_super_mario_bros import SuperMarioBrosEnv
        from nes_py import nes_env

        patch_rom_header(nes_env)

        class IntRamEnv(SuperMarioBrosEnv):
            def _ram_buffer(self) -> Any:
                return super()._ram_buffer().view(IntRam)

        self.game = IntRamEnv(target=(1, 1))
        self.observation_space = gym.spaces.Box(0, 255, self.game.screen.shape, np.uint8)
        self.action_space = gym.spaces.Discrete(len(ACTIONS["simple"]))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.game.reset(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        screen, reward, done, info = self.game.step(ACTIONS["simple"][action])
        return screen, reward, done, False, info


class Player:
    """Steps an environment with a fixed list of actions."""

    def __init__(self, env: gym.Env[Any, Any], actions: Any) -> None:
        self.env, self.actions, self.steps = env, actions, 0
        env.reset(seed=0)

    def frames_per_second(self, seconds: float) -> dict[str, float]:
        frames, start, cpu_start = 0, time.perf_counter(), time.process_time()
        while (spent := time.perf_counter() - start) < seconds:
            *_, terminated, truncated, _ = self.env.step(int(self.actions[self.steps % len(self.actions)]))
            self.steps, frames = self.steps + 1, frames + SKIP
            if terminated or truncated:
                self.env.reset()
        return {"wall": frames / spent, "process": frames / (time.process_time() - cpu_start)}


def summarize(rates: dict[str, list[dict[str, float]]], clock: str) -> dict[str, Any]:
    ours, peer = ([measured[clock] for measured in values] for values in rates.values())
    ratios = sorted(a / b for a, b in zip(ours, peer, strict=True))
    return {
        "frames_per_second": {
            name: round(statistics.median(values), 1) for name, values in zip(rates, (ours, peer), strict=True)
        },
        "ratio": round(statistics.median(ratios), 2),
        "ratio_least": round(ratios[0], 2),
        "ratio_most": round(ratios[-1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8, help="measurements of each")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    args = parser.parse_args()
    actions = np.repeat(np.random.default_rng(0).choice(7, 2000, p=[0.05, 0.15, 0.25, 0.15, 0.3, 0.05, 0.05]), 4)
    options: dict[str, Any] = {"action_repeat": SKIP, "pool": "max", "grayscale": True, "size": 84, "stack": 4}
    players = {
        "zhixing": Player(envs.make("mario/1-1", **options), actions),
        "gym-super-mario-bros": Player(wrap_pixels(PeerEnv(), **options), actions),
    }
    for player in players.values():
        player.frames_per_second(0.5)
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in players}
    for pair in range(args.pairs):
        for name in order_of_round(players, pair):
            rates[name].append(players[name].frames_per_second(args.seconds))
        last = {name: {clock: round(rate) for clock, rate in values[-1].items()} for name, values in rates.items()}
        print(last, flush=True)
    results: dict[str, Any] = {
        **{clock: summarize(rates, clock) for clock in ("wall", "process")},
        "wanted": TARGET,
        "pairs": args.pairs,
        "seconds_each": args.seconds,
        "wrappers": options,
        "versions": versions("gym-super-mario-bros", "nes-py", "stable-retro", "numpy"),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    write_results(RESULTS, results)
    print(json.dumps(results, indent=1))
    if results["wall"]["ratio"] < TARGET:
        raise SystemExit(f"target not met: the ratio is {results['wall']['ratio']}, the target is {TARGET}")


if __name__ == "__main__":
    main()
