"""Shared fixtures: every registered algorithm, short configurations, and the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_standin import TOKEN, Hub, serve

import zhixing as zx
from zhixing.cli import main
from zhixing.collectors.actor import Actor
from zhixing.config import RunConfig, SearchConfig
from zhixing.core.policy import Phase
from zhixing.errors import UserError
from zhixing.training.collect_data import collect_from_actor
from zhixing.training.run_folder import RunFolder

Command = Callable[..., tuple[int, str, str]]

os.environ["ZHIXING_LANG"] = "en"  # also in Chinese locales
torch.set_num_threads(1)  # small networks; several tests may share the machine


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with a parameter `algorithm` for every registered algorithm."""
    if "algorithm" in metafunc.fixturenames:
        metafunc.parametrize("algorithm", zx.algorithms.names())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Disable coverage in tests that train: it halves their speed and adds little to the unit tests."""
    for item in items:
        if {"learning", "contract"} & set(item.path.parts):
            item.add_marker("no_cover")


def multi_agent(algorithm: str) -> bool:
    return bool(zx.algorithms.get(algorithm).multi_agent)


def is_self_play(algorithm: str) -> bool:
    """Return whether an algorithm only supports two-player games."""
    return zx.algorithms.get(algorithm).settings.scheme == "self_play"


def toy_env(algorithm: str, discrete: bool = True) -> str:
    """Return a toy environment that fits the algorithm's number of agents."""
    if is_self_play(algorithm):
        return "pettingzoo/tictactoe"
    names = ("toy/team-match", "toy/team-reach") if multi_agent(algorithm) else ("toy/match", "toy/reach")
    return names[not discrete]


def supports_discrete(algorithm: str) -> bool:
    """Return whether an algorithm supports discrete actions; if not, it supports continuous ones."""
    name = toy_env(algorithm)
    env = zx.envs.make_vector(name, 1, backend="serial")
    try:
        zx.algorithms.get(algorithm).make(zx.config.load(algorithm=algorithm, env=name), env.spaces)
    except UserError:
        return False
    finally:
        env.close()
    return True


def cli_exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run a command in the working directory and return its exit code."""
    monkeypatch.setattr("sys.argv", ["zhixing", *arguments])
    try:
        main()
    except SystemExit as error:
        return int(error.code or 0)
    return 0


@pytest.fixture(scope="session", autouse=True)
def _configuration_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a temporary configuration folder instead of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("configuration")))
        yield


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Return a function that runs a command in an empty folder and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli_exit_code(monkeypatch, *arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def random_dataset(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that records 400 random steps in an environment, once per environment."""
    datasets: dict[str, str] = {}

    def make(env: str, **options: Any) -> str:
        key = f"{env} {sorted(options.items())}"
        if key not in datasets:
            vector = zx.envs.make_vector(env, 2, backend="serial", options=options)
            algorithm = zx.algorithms.get("mappo" if vector.spaces.agents else "ppo")
            cfg = zx.config.load(algorithm=algorithm.name, env={"name": env, **options}, net__cnn="simple")
            out = str(tmp_path_factory.mktemp("recorded") / "data")
            actor = Actor(algorithm.make(cfg, vector.spaces).policy, vector)
            collect_from_actor(actor, out, 400, env=env, options=options, note="random actions", phase=Phase.RANDOM)
            vector.close()
            datasets[key] = out
        return datasets[key]

    return make


@pytest.fixture(scope="session")
def expert_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that trains an expert for a few steps, once per environment."""
    runs: dict[str, str] = {}

    def make(env: str, **options: Any) -> str:
        key = f"{env} {sorted(options.items())}"
        if key not in runs:
            out = runs[key] = str(tmp_path_factory.mktemp("expert") / "run")
            short = {"env_steps": 64, "rollout_steps": 8, "minibatch_size": 64, "eval_every": 0}
            short |= {"eval_episodes": 1, "tensorboard": False, "net__cnn": "simple", "vector__backend": "serial"}
            zx.train("ppo", env={"name": env, **options}, out=out, quiet=True, **short)
        return runs[key]

    return make


@pytest.fixture
def short_config(
    request: pytest.FixtureRequest, random_dataset: Callable, expert_run: Callable
) -> Callable[..., RunConfig]:
    """Return a function that makes the configuration of a short run; half as long in contracts, which run it often."""
    scale = 1 if "contract" in request.path.parts else 2

    def make(algorithm: str, env: str | None = None, **settings: Any) -> RunConfig:
        searches = issubclass(zx.algorithms.get(algorithm).settings, SearchConfig)
        if env is None and searches:
            env = "pettingzoo/tictactoe"
        elif env is None:
            discrete = supports_discrete(algorithm)
            if multi_agent(algorithm):
                env = toy_env(algorithm, discrete)
            else:
                env = "CartPole-v1" if discrete else "Pendulum-v1"
        model = zx.algorithms.get(algorithm).settings
        scheme = model.scheme
        short: dict[str, Any] = {
            "env_steps": 600 * scale,
            "log_every": 100,
            "eval_every": 250 * scale,
            "eval_episodes": 2,
            "num_envs": 2,
            "tensorboard": False,
            "net__hidden_sizes": [16, 16],
            "critic_hidden_sizes": None,
        }
        if scheme == "off_policy":
            short |= {
                "learning_starts": 100 * scale,
                "batch_size": 16,
                "train_every": 2,
                "updates_per_step": 0.5,
            }
        elif scheme == "offline":
            short |= {"batch_size": 16, "offline_updates": settings.get("env_steps", short["env_steps"])}
        elif searches:
            short |= {"simulations": 4, "rollout_steps": 2, "updates_per_step": 0.2, "batch_size": 16}
            short |= {"net__blocks": 1, "net__channels": 8, "num_envs": 8}
        else:
            short |= {"rollout_steps": 32}
        if scheme == "off_policy" and ("horizon" in model.model_fields or multi_agent(algorithm)):
            short |= {"horizon": 5, "replay__sequence_length": 6, "updates_per_step": 0.1}  # slow updates
        if "minibatch_size" in model.model_fields:
            short["minibatch_size"] = 32
        options = {name.removeprefix("env__"): value for name, value in settings.items() if name.startswith("env__")}
        if model.needs_data:
            short["dataset"] = random_dataset(env, **options)
        if "demonstrations" in model.model_fields:
            short["demonstrations"] = 1
        if "expert" in model.model_fields:
            short["expert"] = expert_run(env, **options)
        if scheme == "multi_policy":
            short["policies"] = short_policies(short | settings)
            short["agents"] = {"agent_0": "first", "*": "second"}
        merged = {name: value for name, value in (short | settings).items() if has_setting(model, name)}
        return zx.config.load(algorithm=algorithm, env=env, **merged)

    return make


def short_policies(settings: dict[str, Any]) -> dict[str, Any]:
    """Return policies of a short run: one learns from rollouts, the other from a replay buffer."""
    net = {name.removeprefix("net__"): value for name, value in settings.items() if name.startswith("net__")}
    replay = {"learning_starts": 64, "batch_size": 16, "train_every": 4, "updates_per_step": 0.2, "replay": {}}
    if "recurrent" in net:
        replay["replay"] = {"sequence_length": 4, "burn_in": 2}
    return {
        "first": {"algorithm": "ppo", "net": net, "rollout_steps": 16, "minibatch_size": 32, "epochs": 2},
        "second": {"algorithm": "dqn", "net": net, **replay},
    }


def has_setting(model: type[RunConfig], name: str) -> bool:
    """Return whether a settings class has a setting, given as a keyword such as `net__cnn`."""
    first, _, rest = name.partition("__")
    group = model.model_fields.get(first)
    return group is not None and (not rest or first == "env" or rest in group.annotation.model_fields)  # type: ignore[union-attr]


def checkpoint_tensors(run: str | Path) -> dict[str, torch.Tensor]:
    """Return all weights, optimizer moments and counters of the last checkpoint of a run, by path."""
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


def differing_tensors(run: str | Path, other: str | Path) -> list[str]:
    """Return the paths of the learners' tensors that differ between two runs in any bit."""
    first, second = checkpoint_tensors(run), checkpoint_tensors(other)
    assert first
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def metrics_rows(run: str | Path) -> list[list[str]]:
    """Return the rows of metrics.csv without the columns that measure time."""
    lines = (Path(run) / "metrics.csv").read_text().splitlines()
    time_columns = {i for i, name in enumerate(lines[0].split(",")) if name in ("seconds", "steps_per_second")}
    return [[cell for i, cell in enumerate(line.split(",")) if i not in time_columns] for line in lines]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in of the Hugging Face Hub, which `zx.push` and `zx.pull` use, and an empty current folder."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in has LFS only
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setenv("ZHIXING_TRUST", "0")
    with serve() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
