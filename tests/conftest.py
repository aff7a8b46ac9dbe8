"""What tests share: every registered algorithm, and short configurations of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zhixing as zx
from zhixing.checkpoint import RunFolder
from zhixing.config import RunConfig
from zhixing.errors import UserError

torch.set_num_threads(1)  # small networks; several tests may share the machine


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `algorithm` runs for everything in the registry."""
    if "algorithm" in metafunc.fixturenames:
        metafunc.parametrize("algorithm", zx.algorithms.names())


def many_agents(algorithm: str) -> bool:
    return zx.algorithms.get(algorithm).many_agents


def toy_task(algorithm: str, discrete: bool = True) -> str:
    """A small task for one agent or many."""
    names = ("toy/team-match", "toy/team-reach") if many_agents(algorithm) else ("toy/match", "toy/reach")
    return names[not discrete]


def takes_discrete(algorithm: str) -> bool:
    """Whether an algorithm takes discrete actions; the others take continuous ones."""
    task = toy_task(algorithm)
    env = zx.envs.make_vector(task, 1, backend="serial")
    try:
        zx.algorithms.get(algorithm).make(zx.config.load(algorithm=algorithm, env=task), env.spaces)
    except UserError:
        return False
    finally:
        env.close()
    return True


@pytest.fixture
def small(request: pytest.FixtureRequest) -> Callable[..., RunConfig]:
    """A short run of an algorithm; half as long in the contracts, where every algorithm runs it."""
    scale = 1 if "contract" in request.path.parts else 2

    def make(algorithm: str, env: str | None = None, **settings: Any) -> RunConfig:
        if env is None:
            discrete = takes_discrete(algorithm)
            if many_agents(algorithm):
                env = toy_task(algorithm, discrete)
            else:
                env = "CartPole-v1" if discrete else "Pendulum-v1"
        scheme = zx.algorithms.get(algorithm).settings.scheme
        short: dict[str, Any] = {
            "env_steps": 600 * scale,
            "log_every_steps": 100,
            "eval_every_steps": 250 * scale,
            "eval_episodes": 2,
            "vector__num": 2,
            "tensorboard": False,
            "net__hidden_sizes": [16, 16],
        }
        if scheme == "off_policy":
            short |= {"warmup_steps": 100 * scale, "batch_size": 16, "steps_per_iteration": 2, "updates_per_step": 0.5}
        else:
            short |= {"steps_per_iteration": 32}
        if "minibatch_size" in zx.algorithms.get(algorithm).settings.model_fields:
            short["minibatch_size"] = 32
        return zx.config.load(algorithm=algorithm, env=env, **(short | settings))

    return make


def learned(run: str | Path) -> dict[str, torch.Tensor]:
    """All weights, moments and counters of the last checkpoint of a run."""
    flat: dict[str, torch.Tensor] = {}

    def walk(tree: Any, path: str) -> None:
        if isinstance(tree, dict):
            for key, value in tree.items():
                walk(value, f"{path}.{key}")
        elif isinstance(tree, (list, tuple)):
            for i, value in enumerate(tree):
                walk(value, f"{path}.{i}")
        elif isinstance(tree, torch.Tensor):
            flat[path] = tree

    walk(RunFolder.open(run).load()["loop"]["learner"], "")
    return flat


def differing(run: str | Path, other: str | Path) -> list[str]:
    """The names of what two runs learned differently, bit by bit."""
    mine, theirs = learned(run), learned(other)
    assert mine
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


def metrics_rows(run: str | Path) -> list[list[str]]:
    """metrics.csv without the columns of time."""
    lines = (Path(run) / "metrics.csv").read_text().splitlines()
    clocks = {i for i, name in enumerate(lines[0].split(",")) if name in ("seconds", "steps_per_second")}
    return [[cell for i, cell in enumerate(line.split(",")) if i not in clocks] for line in lines]
