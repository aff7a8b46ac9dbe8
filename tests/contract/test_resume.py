"""Contract 3: a run stopped at any step and resumed ends as one never stopped, bit for bit."""

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
    """Presses Ctrl-C, so to speak."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        if loop.steps >= self.steps:
            loop.stop("interrupted")


def test_resumed_run_ends_like_one_never_stopped(algorithm: str, short_config: Callable, tmp_path: Path) -> None:
    stop_and_resume(short_config(algorithm, seed=3, checkpoint_every_steps=150, vector__backend="serial"), tmp_path)


# what a back end restores doesn't depend on the algorithm: one of each scheme will do
@pytest.mark.parametrize("backend", ["process", "mixed", "native", "torch"])
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_every_back_end_resumes_exactly(name: str, backend: str, short_config: Callable, tmp_path: Path) -> None:
    stop_and_resume(short_config(name, seed=3, checkpoint_every_steps=150, vector__backend=backend), tmp_path)


def test_battles_in_torch_resume_exactly(short_config: Callable, tmp_path: Path) -> None:
    """With memory, and with battles of several lengths going on."""
    memory = {"net__recurrent": "gru", "net__recurrent_size": 8, "last_action": True, "epochs": 1}
    settings = {"vector__backend": "torch", "num_envs": 4, "checkpoint_every_steps": 150, **memory}
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
def test_a_crash_costs_only_the_steps_since_the_last_checkpoint(
    name: str, short_config: Callable, tmp_path: Path
) -> None:
    """Rows and replay written after that checkpoint are done again, not kept twice."""

    class CrashAt(zx.Callback):
        def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
            if loop.env_steps >= 500:
                raise RuntimeError("power cut")

    cfg = short_config(name, seed=6, checkpoint_every_steps=200)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(RuntimeError, match="power cut"):
        zx.Session(cfg, tmp_path / "parts", [CrashAt()], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")


class Counted(zx.Callback):
    """Keeps the steps of all evaluations and saves them with the run."""

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
def test_interrupted_and_then_killed_has_no_evaluation_or_row_more(
    stop_at: int, crash_at: int, short_config: Callable, tmp_path: Path
) -> None:
    """Iterations have 64 steps; evaluations are at 192, 384, 576 and the end, checkpoints at 256 and 512."""
    normalised = {"normalize_obs": True, "normalize_reward": True, "epochs": 1}
    steps = {"env_steps": 700, "eval_every_steps": 190, "checkpoint_every_steps": 250, "log_every_steps": 128}
    cfg = short_config("ppo", "toy/reach", seed=5, **normalised, **steps)
    whole, parts = Counted(), Counted()
    zx.Session(cfg, tmp_path / "whole", [whole], quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [Counted(), StopAt(stop_at)], quiet=True).run()
    with pytest.raises(RuntimeError, match="killed"):
        zx.Session.resume(tmp_path / "parts", [Counted(crash_at), StopAt(10**9)], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", [parts], quiet=True).run()
    assert whole.evaluated_at == parts.evaluated_at == [192, 384, 576, 704]
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []


def test_killed_after_the_checkpoint_of_the_last_iteration_ends_like_one_never_killed(
    short_config: Callable, tmp_path: Path
) -> None:
    """A checkpoint is due in the last iteration; the evaluation and the row of the end come after it."""

    class Kill(zx.Callback):
        def train_end(self, loop: zx.TrainingLoop) -> None:
            raise RuntimeError("killed")

    cfg = short_config("ppo", "toy/reach", env_steps=256, eval_every_steps=0, checkpoint_every_steps=256, epochs=1)
    whole = zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(RuntimeError, match="killed"):
        zx.Session(cfg, tmp_path / "parts", [Kill()], quiet=True).run()
    parts = zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert whole["final_return"] == parts["final_return"]
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")
