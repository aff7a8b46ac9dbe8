"""Contract 3: a run stopped at any step and resumed ends as one never stopped, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import differing, metrics_rows

import zhixing as zx
from zhixing.config import RunConfig


class StopAt(zx.Callback):
    """Presses Ctrl-C, so to speak."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def iteration_end(self, loop: zx.Loop, metrics: object) -> None:
        if loop.steps >= self.steps:
            loop.stop("interrupted")


def test_resumed_run_ends_like_one_never_stopped(algorithm: str, small: Callable, tmp_path: Path) -> None:
    stop_and_resume(small(algorithm, seed=3, checkpoint_every_steps=150, vector__backend="serial"), tmp_path)


# what a back end restores doesn't depend on the algorithm: one of each scheme will do
@pytest.mark.parametrize("backend", ["process", "mixed", "native", "torch"])
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_every_back_end_resumes_exactly(name: str, backend: str, small: Callable, tmp_path: Path) -> None:
    stop_and_resume(small(name, seed=3, checkpoint_every_steps=150, vector__backend=backend), tmp_path)


def test_battles_in_torch_resume_exactly(small: Callable, tmp_path: Path) -> None:
    """With memory, and with battles of several lengths going on."""
    memory = {"net__recurrent": "gru", "net__recurrent_size": 8, "last_action": True, "epochs": 1}
    settings = {"vector__backend": "torch", "vector__num": 4, "checkpoint_every_steps": 150, **memory}
    stop_and_resume(small("mappo", "skirmish/3m", seed=3, **settings), tmp_path)


def stop_and_resume(cfg: RunConfig, tmp_path: Path) -> None:
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    first, second = sorted(np.random.default_rng().integers(1, 500, 2))
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [StopAt(first)], quiet=True).run()
    try:
        zx.Session.resume(tmp_path / "parts", [StopAt(second)], quiet=True).run()
    except KeyboardInterrupt:
        zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing(tmp_path / "whole", tmp_path / "parts") == [], f"stopped at {first} and {second}"
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts"), f"stopped at {first} and {second}"


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_a_crash_costs_only_the_steps_since_the_last_checkpoint(name: str, small: Callable, tmp_path: Path) -> None:
    """Rows and replay written after that checkpoint are done again, not kept twice."""

    class CrashAt(zx.Callback):
        def iteration_end(self, loop: zx.Loop, metrics: object) -> None:
            if loop.env_steps >= 500:
                raise RuntimeError("power cut")

    cfg = small(name, seed=6, checkpoint_every_steps=200)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(RuntimeError, match="power cut"):
        zx.Session(cfg, tmp_path / "parts", [CrashAt()], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing(tmp_path / "whole", tmp_path / "parts") == []
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")
