"""With compile=true an update does the same as without, for every algorithm, and the other contracts hold.

Recording is tested for all of them. What the compiler makes of it takes it half a minute each where it isn't in the
cache: here for one, for more of them with ZHIXING_COMPILE="dqn sac td3 a2c", or all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import checkpoint_tensors, differing_tensors
from gymnasium.spaces import Box, Discrete

import zhixing as zx
from zhixing.algorithms.bc import BC
from zhixing.compile import compiler, updates
from zhixing.config import RunConfig
from zhixing.errors import NonFiniteError, UserError
from zhixing.training.loop import TrainingLoop

ALL = [name for name in zx.algorithms.names() if name not in ("a3c", "mcts")]  # which are refused
ASKED = os.environ.get("ZHIXING_COMPILE", "").split()
SETTINGS = {"seed": 1, "vector__backend": "serial", "eval_every_steps": 0, "net__recurrent": "none"}


class StopAfter(zx.Callback):
    """Ends a run after so many updates."""

    def __init__(self, number: int, why: str = "enough") -> None:
        self.number, self.why = number, why

    def iteration_end(self, loop: TrainingLoop, metrics: object) -> None:
        if loop.updates >= self.number:
            loop.stop(self.why)


class Damped(zx.Callback):
    """Adam divides by a gradient's own size, so that of one that is nearly none, as a new actor's of dreamer, rounding
    alone would make a whole step. Not beside a larger epsilon."""

    def train_begin(self, loop: TrainingLoop) -> None:
        for optimizer in loop.learner.optimizers().values():
            optimizer.epsilon = 1e-4


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are recorded and then done operation by operation."""
    monkeypatch.setattr(updates, "compile_graph", lambda module, examples: lambda inputs: list(module(*inputs)))


def learns_alike(make: Callable[..., RunConfig], folder: Path, number: int) -> None:
    for graph in (False, True):
        watching = [Damped(), StopAfter(number)]
        session = zx.Session(make(compile=graph, **SETTINGS), folder / str(graph), watching, quiet=True)
        session.run()
        assert bool(session.learner.executor and session.learner.executor.graphs) is graph
    eager, graphed = checkpoint_tensors(folder / "False"), checkpoint_tensors(folder / "True")
    assert eager.keys() == graphed.keys()
    for name, value in eager.items():
        torch.testing.assert_close(graphed[name], value, rtol=1e-3, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", ALL)
def test_recorded_update_is_the_eager_one(name: str, short_config: Callable, tmp_path: Path) -> None:
    learns_alike(lambda **more: short_config(name, **more), tmp_path, 3)


# delayed actors, targets that are copied at times, priorities, and learning rates that fall: each changes the graph
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("td3", {"policy_delay": 3, "replay__prioritized": True}),
        ("sac", {"env": "CartPole-v1", "policy_delay": 2, "normalize_obs": True}),
        ("dqn", {"target_update_interval": 3, "replay__prioritized": True, "replay__n_step": 3}),
        ("ppo", {"anneal_lr": True, "normalize_obs": True, "entropy_coef": 0.01, "critic_lr": 1e-3, "epochs": 2}),
        ("ppo", {"env": "toy/match", "shared_network": True, "minibatch_size": 64}),
        ("sac", {"env": "dummy_envs:MaskedEnv"}),
        ("dqn", {"precision": "bf16"}),
    ],
)
def test_settings_that_change_the_graph(name: str, settings: dict, short_config: Callable, tmp_path: Path) -> None:
    learns_alike(lambda **more: short_config(name, **settings, **more), tmp_path, 8)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ALL if ASKED == ["all"] else ["ppo", *ASKED])
def test_compiled_once_learns_alike_and_resumes_exactly(
    name: str, short_config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learns_alike(lambda **more: short_config(name, **more), tmp_path, 3)
    cfg = short_config(name, compile=True, **SETTINGS)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    monkeypatch.setattr(compiler, "_compile", None)  # a second start finds all that it needs
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [StopAfter(25, "interrupted")], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", ["a2c", "td3"])  # one of each optimizer
def test_gradient_that_is_not_finite_changes_no_weight(name: str, short_config: Callable, tmp_path: Path) -> None:
    session = zx.Session(short_config(name, compile=True, **SETTINGS), tmp_path / "run", [Spoil()], quiet=True)
    with pytest.raises(NonFiniteError, match="were not changed"):
        session.run()
    weights = [p for optimizer in session.learner.optimizers().values() for p in optimizer.parameters]
    assert all(p.isfinite().all() for p in weights)
    assert session.learner.skipped_steps() >= 1


class Spoil(zx.Callback):
    """After some updates rewards are NaN."""

    def iteration_begin(self, loop: TrainingLoop) -> None:
        if loop.updates > 3:
            update = loop.learner.update
            bad = torch.nan
            loop.learner.update = lambda batch: update(batch.replace(reward=batch.reward + bad))  # type: ignore[method-assign]


def test_recurrent_networks_are_refused_by_name(short_config: Callable, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"net\.recurrent=none"):
        zx.Session(short_config("ppo", compile=True, net__recurrent="gru"), tmp_path / "run", quiet=True)


def test_search_without_learning_is_refused(short_config: Callable, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mcts makes none"):
        zx.Session(short_config("mcts", compile=True), tmp_path / "run", quiet=True)


def test_gradients_that_are_taken_apart_are_refused(short_config: Callable) -> None:
    with pytest.raises(UserError, match="a3c computes gradients in its workers"):
        short_config("a3c", compile=True)


def test_missing_compiler_is_told_with_what_to_install(
    short_config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"no-such-compiler isn't installed: install one \(apt install g\+\+"):
        zx.Session(short_config("ppo", compile=True), tmp_path / "run", quiet=True)


@pytest.mark.usefixtures("uncompiled")
def test_learner_made_by_its_class_does_not_ignore_compile() -> None:
    cfg = zx.config.load(algorithm="bc", env="CartPole-v1", compile=True)
    spaces = zx.Spaces(Box(-1.0, 1.0, (4,), np.float32), Discrete(2))
    batch = zx.Batch(obs=torch.zeros(8, 4), action=torch.zeros(8, dtype=torch.int64))
    by_name = zx.algorithms.get("bc").make(cfg, spaces)
    by_name.update(batch)
    assert len(by_name.executor.graphs) == 1
    with pytest.raises(UserError, match=r"this BC has no compiled updates: make it with zx\.algorithms\.get"):
        BC(cfg, spaces).update(batch)
