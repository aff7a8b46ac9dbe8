"""Updates with compile=true equal eager ones for every algorithm, and resume exactly.

Tracing is tested for all algorithms. Compilation takes about 30 s per algorithm without the cache, so it is tested for
one; the environment variable ZHIXING_COMPILE names others, such as "dqn sac td3 a2c" or "all".
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

ALL = [name for name in zx.algorithms.names() if name not in ("a3c", "mcts")]  # those reject it
REQUESTED = os.environ.get("ZHIXING_COMPILE", "").split()
SETTINGS = {"seed": 1, "vector__backend": "serial", "eval_every": 0, "net__recurrent": "none"}


class StopAfter(zx.Callback):
    """Stops a run after a number of updates."""

    def __init__(self, updates: int, reason: str = "enough") -> None:
        self.updates, self.reason = updates, reason

    def iteration_end(self, loop: TrainingLoop, metrics: object) -> None:
        if loop.updates >= self.updates:
            loop.stop(self.reason)


class LargeEpsilon(zx.Callback):
    """Sets a large epsilon of Adam, so rounding errors in gradients near zero don't become full steps.

    For example, the gradients of Dreamer's actor are near zero at first.
    """

    def train_begin(self, loop: TrainingLoop) -> None:
        for optimizer in loop.learner.optimizers().values():
            optimizer.epsilon = 1e-3


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace graphs, but run them operation by operation."""
    monkeypatch.setattr(updates, "compile_graph", lambda module, examples: lambda inputs: list(module(*inputs)))


def check_compiled_equals_eager(make: Callable[..., RunConfig], folder: Path, updates: int) -> None:
    for compiled in (False, True):
        callbacks = [LargeEpsilon(), StopAfter(updates)]
        session = zx.Session(make(compile=compiled, **SETTINGS), folder / str(compiled), callbacks, quiet=True)
        session.run()
        learners = getattr(session.learner, "learners", {"": session.learner}).values()
        assert any(bool(learner.executor and learner.executor.graphs) for learner in learners) is compiled
    eager_tensors, tensors = checkpoint_tensors(folder / "False"), checkpoint_tensors(folder / "True")
    assert eager_tensors.keys() == tensors.keys()
    for name, value in eager_tensors.items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-3, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", ALL)
def test_traced_update_equals_the_eager_one(name: str, short_config: Callable, tmp_path: Path) -> None:
    check_compiled_equals_eager(lambda **settings: short_config(name, **settings), tmp_path, 3)


# delayed policies, periodic target updates, priorities and annealed learning rates change the graph
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("td3", {"policy_delay": 3, "replay__prioritized": True}),
        ("sac", {"env": "CartPole-v1", "policy_delay": 2, "normalize_obs": True}),
        ("dqn", {"target_update_interval": 3, "replay__prioritized": True, "replay__n_step": 3}),
        ("ppo", {"lr_schedule": "linear", "normalize_obs": True, "entropy_coef": 0.01, "critic_lr": 1e-3, "epochs": 2}),
        ("ppo", {"env": "toy/match", "shared_network": True, "minibatch_size": 64}),
        ("sac", {"env": "dummy_envs:MaskedEnv"}),
        ("dqn", {"precision": "bf16"}),
        ("mappo", {"clip_range_schedule": "linear", "entropy_coef_schedule": "cosine"}),
        ("sac", {"optimizer": "adamw", "weight_decay": 0.1, "optimizer_betas": [0.8, 0.99]}),
        ("a2c", {"weight_decay": 0.1}),
        ("dqn", {"optimizer": "sgd", "optimizer_momentum": 0.9, "weight_decay": 0.01}),
        ("dqn", {"optimizer": "sgd"}),
        ("sac", {"env": "Pendulum-v1", "net__kind": "simba"}),
        ("td3", {"net__kind": "simba", "critic_hidden_sizes": [24, 24]}),
        ("ppo", {"net__kind": "simba"}),
        ("crossq", {"net__kind": "simba", "renorm_warmup": 4}),
        ("droq", {"env": "CartPole-v1", "critic_dropout": 0.2}),
    ],
)
def test_traced_update_equals_the_eager_one_with(
    name: str, settings: dict, short_config: Callable, tmp_path: Path
) -> None:
    check_compiled_equals_eager(lambda **common: short_config(name, **settings, **common), tmp_path, 8)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ALL if REQUESTED == ["all"] else ["ppo", *REQUESTED])
def test_compiled_update_equals_the_eager_one_and_resumes_exactly(
    name: str, short_config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_compiled_equals_eager(lambda **settings: short_config(name, **settings), tmp_path, 3)
    cfg = short_config(name, compile=True, **SETTINGS)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    monkeypatch.setattr(compiler, "_compile", None)  # the compiled graphs are in the cache
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [StopAfter(25, "interrupted")], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", ["a2c", "td3"])  # one of each optimizer
def test_nonfinite_gradient_changes_no_weights(name: str, short_config: Callable, tmp_path: Path) -> None:
    session = zx.Session(short_config(name, compile=True, **SETTINGS), tmp_path / "run", [NanRewards()], quiet=True)
    with pytest.raises(NonFiniteError, match="didn't change the weights"):
        session.run()
    weights = [p for optimizer in session.learner.optimizers().values() for p in optimizer.parameters]
    assert all(p.isfinite().all() for p in weights)
    assert session.learner.skipped_steps() >= 1


class NanRewards(zx.Callback):
    """Replaces rewards by NaN after a few updates."""

    def iteration_begin(self, loop: TrainingLoop) -> None:
        if loop.updates > 3:
            update = loop.learner.update
            nan = torch.nan
            loop.learner.update = lambda batch: update(batch.replace(reward=batch.reward + nan))  # type: ignore[method-assign]


def test_compile_rejects_recurrent_networks(short_config: Callable, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"net\.recurrent=none"):
        zx.Session(short_config("ppo", compile=True, net__recurrent="gru"), tmp_path / "run", quiet=True)


@pytest.mark.usefixtures("uncompiled")
def test_compiled_graphs_read_scheduled_coefficients(short_config: Callable, tmp_path: Path) -> None:
    schedules = dict.fromkeys(("lr_schedule", "clip_range_schedule", "entropy_coef_schedule"), "linear")
    settings = {"entropy_coef": 0.5, "clip_range": 0.01, "rollout_steps": 8, **schedules}
    check_compiled_equals_eager(lambda **common: short_config("ppo", **settings, **common), tmp_path, 10_000)


def test_compile_rejects_custom_optimizers(short_config: Callable, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"compile=true doesn't support optimizer=torch\.optim:NAdam"):
        zx.Session(short_config("ppo", compile=True, optimizer="torch.optim:NAdam"), tmp_path / "run", quiet=True)


def test_compile_rejects_algorithms_without_updates(short_config: Callable, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mcts makes none"):
        zx.Session(short_config("mcts", compile=True), tmp_path / "run", quiet=True)


def test_compile_rejects_gradients_on_workers(short_config: Callable) -> None:
    with pytest.raises(UserError, match="a3c computes gradients in its workers"):
        short_config("a3c", compile=True)


def test_missing_compiler_error_names_the_package(
    short_config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"no-such-compiler isn't installed: install one \(apt install g\+\+"):
        zx.Session(short_config("ppo", compile=True), tmp_path / "run", quiet=True)


@pytest.mark.usefixtures("uncompiled")
def test_learner_created_from_its_class_rejects_compile() -> None:
    cfg = zx.config.load(algorithm="bc", env="CartPole-v1", compile=True)
    spaces = zx.Spaces(Box(-1.0, 1.0, (4,), np.float32), Discrete(2))
    batch = zx.Batch(obs=torch.zeros(8, 4), action=torch.zeros(8, dtype=torch.int64))
    by_name = zx.algorithms.get("bc").make(cfg, spaces)
    by_name.update(batch)
    assert len(by_name.executor.graphs) == 1
    with pytest.raises(UserError, match=r"this BC has no compiled updates: make it with zx\.algorithms\.get"):
        BC(cfg, spaces).update(batch)
