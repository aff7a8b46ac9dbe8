"""What tests share: every registered algorithm, and short configurations of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zhixing as zx
from zhixing.cli import main
from zhixing.collect.actor import Actor
from zhixing.config import RunConfig, SearchConfig
from zhixing.core.policy import Phase
from zhixing.errors import UserError
from zhixing.training.collect_data import collect_from_actor
from zhixing.training.run_folder import RunFolder

Command = Callable[..., tuple[int, str, str]]

torch.set_num_threads(1)  # small networks; several tests may share the machine


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `algorithm` runs for everything in the registry."""
    if "algorithm" in metafunc.fixturenames:
        metafunc.parametrize("algorithm", zx.algorithms.names())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Trainings run without coverage, which halves their speed and sees little in them that unit tests don't show."""
    for item in items:
        if {"learning", "contract"} & set(item.path.parts):
            item.add_marker("no_cover")


def multi_agent(algorithm: str) -> bool:
    return bool(zx.algorithms.get(algorithm).multi_agent)


def is_self_play(algorithm: str) -> bool:
    """Whether it takes nothing but games of two players."""
    return zx.algorithms.get(algorithm).settings.scheme == "self_play"


def toy_env(algorithm: str, discrete: bool = True) -> str:
    """A small task for one agent or many."""
    if is_self_play(algorithm):
        return "pettingzoo/tictactoe"
    names = ("toy/team-match", "toy/team-reach") if multi_agent(algorithm) else ("toy/match", "toy/reach")
    return names[not discrete]


def supports_discrete(algorithm: str) -> bool:
    """Whether an algorithm takes discrete actions; the others take continuous ones."""
    task = toy_env(algorithm)
    env = zx.envs.make_vector(task, 1, backend="serial")
    try:
        zx.algorithms.get(algorithm).make(zx.config.load(algorithm=algorithm, env=task), env.spaces)
    except UserError:
        return False
    finally:
        env.close()
    return True


def cli_exit_code(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Of the command line, where we are."""
    monkeypatch.setattr("sys.argv", ["zhixing", *words])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture(scope="session", autouse=True)
def _configuration_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave the user's own folder alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("configuration")))
        yield


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Run the command line in an empty folder: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = cli_exit_code(monkeypatch, *words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def random_dataset(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Data of random actions in a task, recorded once."""
    known: dict[str, str] = {}

    def make(env: str, **options: Any) -> str:
        key = f"{env} {sorted(options.items())}"
        if key not in known:
            vector = zx.envs.make_vector(env, 2, backend="serial", options=options)
            net = zx.algorithms.get("mappo" if vector.spaces.agents else "ppo")
            cfg = zx.config.load(algorithm=net.name, env={"name": env, **options}, net__cnn="simple")
            out = str(tmp_path_factory.mktemp("recorded") / "data")
            actor = Actor(net.make(cfg, vector.spaces).policy, vector)
            collect_from_actor(actor, out, 400, env=env, options=options, note="any action", phase=Phase.RANDOM)
            vector.close()
            known[key] = out
        return known[key]

    return make


@pytest.fixture(scope="session")
def expert_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A run whose agent knows little, but can be asked."""
    known: dict[str, str] = {}

    def make(env: str, **options: Any) -> str:
        key = f"{env} {sorted(options.items())}"
        if key not in known:
            out = known[key] = str(tmp_path_factory.mktemp("expert") / "run")
            short = {"env_steps": 64, "rollout_steps": 8, "minibatch_size": 64, "eval_every_steps": 0}
            short |= {"eval_episodes": 1, "tensorboard": False, "net__cnn": "simple", "vector__backend": "serial"}
            zx.train("ppo", env={"name": env, **options}, out=out, quiet=True, **short)
        return known[key]

    return make


@pytest.fixture
def short_config(
    request: pytest.FixtureRequest, random_dataset: Callable, expert_run: Callable
) -> Callable[..., RunConfig]:
    """A short run of an algorithm; half as long in the contracts, where every algorithm runs it."""
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
            "log_every_steps": 100,
            "eval_every_steps": 250 * scale,
            "eval_episodes": 2,
            "num_envs": 2,
            "tensorboard": False,
            "net__hidden_sizes": [16, 16],
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
            short |= {"horizon": 5, "replay__sequence_length": 6, "updates_per_step": 0.1}  # whose updates are dear
        if "minibatch_size" in model.model_fields:
            short["minibatch_size"] = 32
        options = {name.removeprefix("env__"): value for name, value in settings.items() if name.startswith("env__")}
        if model.needs_data:
            short["dataset"] = random_dataset(env, **options)
        if "demonstrations" in model.model_fields:
            short["demonstrations"] = 1
        if "expert" in model.model_fields:
            short["expert"] = expert_run(env, **options)
        merged = {name: value for name, value in (short | settings).items() if has_setting(model, name)}
        return zx.config.load(algorithm=algorithm, env=env, **merged)

    return make


def has_setting(model: type[RunConfig], name: str) -> bool:
    """Whether these settings have such a name; tests may ask for what only some algorithms have."""
    first, _, rest = name.partition("__")
    group = model.model_fields.get(first)
    return group is not None and (not rest or first == "env" or rest in group.annotation.model_fields)  # type: ignore[union-attr]


def checkpoint_tensors(run: str | Path) -> dict[str, torch.Tensor]:
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


def differing_tensors(run: str | Path, other: str | Path) -> list[str]:
    """The names of what two runs learned differently, bit by bit."""
    mine, theirs = checkpoint_tensors(run), checkpoint_tensors(other)
    assert mine
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


def metrics_rows(run: str | Path) -> list[list[str]]:
    """metrics.csv without the columns of time."""
    lines = (Path(run) / "metrics.csv").read_text().splitlines()
    clocks = {i for i, name in enumerate(lines[0].split(",")) if name in ("seconds", "steps_per_second")}
    return [[cell for i, cell in enumerate(line.split(",")) if i not in clocks] for line in lines]
