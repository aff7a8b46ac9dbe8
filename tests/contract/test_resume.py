"""Contract 3: a run stopped at any step and resumed is bit-for-bit identical to an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import differing_tensors, metrics_rows

import zhixing as zx
from zhixing.config import RunConfig


class StopAt(zx.Callback):
    """Interrupts a run like Ctrl-C."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        if loop.steps >= self.steps:
            loop.stop("interrupted")


def test_resumed_run_equals_an_uninterrupted_one(algorithm: str, short_config: Callable, tmp_path: Path) -> None:
    stop_and_resume(short_config(algorithm, seed=3, checkpoint_every=150, vector__backend="serial"), tmp_path)


@pytest.mark.parametrize(("name", "env"), [("sac", "Pendulum-v1"), ("td3", "Pendulum-v1"), ("ppo", "CartPole-v1")])
def test_simba_networks_resume_exactly(name: str, env: str, short_config: Callable, tmp_path: Path) -> None:
    """Their observation statistics are part of the state."""
    settings = {"seed": 3, "checkpoint_every": 150, "vector__backend": "serial", "net__kind": "simba"}
    stop_and_resume(short_config(name, env, **settings), tmp_path)


# the state of a back end doesn't depend on the algorithm, so one per scheme is enough
@pytest.mark.parametrize("backend", ["process", "mixed", "native", "torch"])
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_every_back_end_resumes_exactly(name: str, backend: str, short_config: Callable, tmp_path: Path) -> None:
    stop_and_resume(short_config(name, seed=3, checkpoint_every=150, vector__backend=backend), tmp_path)


def test_recurrent_policy_in_a_torch_env_resumes_exactly(short_config: Callable, tmp_path: Path) -> None:
    """The environments are in different steps of their episodes."""
    recurrent = {"net__recurrent": "gru", "net__recurrent_size": 8, "last_action": True, "epochs": 1}
    settings = {"vector__backend": "torch", "num_envs": 4, "checkpoint_every": 150, **recurrent}
    stop_and_resume(short_config("mappo", "skirmish/3m", seed=3, **settings), tmp_path)


def stop_and_resume(cfg: RunConfig, tmp_path: Path) -> None:
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    first, second = sorted(np.random.default_rng().integers(1, 500, 2))
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [StopAt(first)], quiet=True).run()
    try:
        zx.Session.resume(tmp_path / "parts", [StopAt(second)], quiet=True).run()
    except KeyboardInterrupt:
        zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == [], f"stopped at {first} and {second}"
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts"), f"stopped at {first} and {second}"


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_run_resumes_exactly_after_a_crash(name: str, short_config: Callable, tmp_path: Path) -> None:
    """Rows of metrics and replay steps after the last checkpoint are replaced, not duplicated."""

    class CrashAt(zx.Callback):
        def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
            if loop.env_steps >= 500:
                raise RuntimeError("power cut")

    cfg = short_config(name, seed=6, checkpoint_every=200)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(RuntimeError, match="power cut"):
        zx.Session(cfg, tmp_path / "parts", [CrashAt()], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")


class RecordEvaluations(zx.Callback):
    """Records the steps of all evaluations and saves them with the run."""

    def __init__(self, crash_at: int = 10**9) -> None:
        self.crash_at, self.evaluated_at = crash_at, list[int]()

    def evaluation_end(self, loop: zx.TrainingLoop, evaluation: zx.Evaluation) -> None:
        self.evaluated_at.append(loop.env_steps)

    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        if loop.env_steps >= self.crash_at:
            raise RuntimeError("killed")

    def state_dict(self) -> dict[str, Any]:
        return {"evaluated_at": self.evaluated_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.evaluated_at = list(state["evaluated_at"])


@pytest.mark.parametrize(("stop_at", "crash_at"), [(100, 300), (250, 320), (320, 500), (440, 640), (600, 640)])
def test_run_interrupted_and_then_killed_repeats_no_evaluation_or_row(
    stop_at: int, crash_at: int, short_config: Callable, tmp_path: Path
) -> None:
    """Iterations have 64 steps. Evaluations are at 192, 384, 576 and the end, checkpoints at 256 and 512."""
    normalizers = {"normalize_obs": True, "normalize_reward": True, "epochs": 1}
    steps = {"env_steps": 700, "eval_every": 190, "checkpoint_every": 250, "log_every": 128}
    cfg = short_config("ppo", "toy/reach", seed=5, **normalizers, **steps)
    whole, parts = RecordEvaluations(), RecordEvaluations()
    zx.Session(cfg, tmp_path / "whole", [whole], quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [RecordEvaluations(), StopAt(stop_at)], quiet=True).run()
    with pytest.raises(RuntimeError, match="killed"):
        zx.Session.resume(tmp_path / "parts", [RecordEvaluations(crash_at), StopAt(10**9)], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", [parts], quiet=True).run()
    assert whole.evaluated_at == parts.evaluated_at == [192, 384, 576, 704]
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []


def test_run_killed_after_its_last_iteration_resumes_exactly(short_config: Callable, tmp_path: Path) -> None:
    """The checkpoint of the last iteration comes before the final evaluation and the last row."""

    class Kill(zx.Callback):
        def train_end(self, loop: zx.TrainingLoop) -> None:
            raise RuntimeError("killed")

    cfg = short_config("ppo", "toy/reach", env_steps=256, eval_every=0, checkpoint_every=256, epochs=1)
    whole = zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(RuntimeError, match="killed"):
        zx.Session(cfg, tmp_path / "parts", [Kill()], quiet=True).run()
    parts = zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert whole["final_return"] == parts["final_return"]
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")
