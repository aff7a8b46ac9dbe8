"""Schedules run over the budget that ends the run: steps, episodes or time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import differing_tensors, metrics_rows

import zhixing as zx

BUDGETS: dict[str, dict[str, Any]] = {
    "env_steps": {"env_steps": 400},
    "episodes": {"env_steps": 1_000_000, "episodes": 40},
    "duration": {"env_steps": 1_000_000, "duration": "2s"},
}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock by 0.01 s with each reading."""
    ticks = itertools.count()
    monkeypatch.setattr("zhixing.training.loop.time.perf_counter", lambda: 0.01 * next(ticks))


class RecordSchedule(zx.Callback):
    """Records the used fraction of the budget and the value of a schedule in each iteration.

    `value` gets the loop and the environment steps that the policy was called with.
    """

    def __init__(self, value: Callable[[zx.TrainingLoop, int], float]) -> None:
        self.value = value
        self.values: list[tuple[float, float]] = []

    def train_begin(self, loop: zx.TrainingLoop) -> None:
        policy = loop.collector.policy
        act = policy.act
        self.policy_steps = 0

        def spy(obs: Any, hidden: Any, mask: Any, phase: Any, rng: Any, env_steps: int) -> Any:
            self.policy_steps = env_steps
            return act(obs, hidden, mask, phase, rng, env_steps)

        policy.act = spy

    def iteration_begin(self, loop: zx.TrainingLoop) -> None:
        self.used = loop.progress

    def iteration_end(self, loop: zx.TrainingLoop, metrics: Any) -> None:
        self.values.append((self.used, self.value(loop, self.policy_steps)))


def record_schedule(cfg: Any, value: Callable[[zx.TrainingLoop, int], float], out: Path) -> list[tuple[float, float]]:
    callback = RecordSchedule(value)
    zx.Session(cfg, out, [callback], quiet=True).run()
    return callback.values


@pytest.mark.parametrize("budget", BUDGETS)
def test_epsilon_falls_over_the_budget(budget: str, short_config: Callable, tmp_path: Path) -> None:
    settings = {"epsilon_start": 1.0, "epsilon_end": 0.0, "epsilon_fraction": 1.0, "learning_starts": 10}
    cfg = short_config("dqn", "toy/match", eval_every=0, **settings, **BUDGETS[budget])
    values = record_schedule(cfg, lambda loop, steps: loop.learner.policy.epsilon(steps), tmp_path / "run")
    assert values[-1][1] < 0.05
    for used, epsilon in values:
        assert epsilon == pytest.approx(1.0 - used, abs=0.02)


@pytest.mark.parametrize("budget", BUDGETS)
def test_prioritized_beta_grows_over_the_budget(budget: str, short_config: Callable, tmp_path: Path) -> None:
    cfg = short_config("dqn", "toy/match", eval_every=0, replay__prioritized=True, **BUDGETS[budget])
    values = record_schedule(cfg, lambda loop, _: loop.buffer._priorities.progress, tmp_path / "run")
    assert values[-1][1] > 0.9
    assert all(used == pytest.approx(progress, abs=0.02) for used, progress in values)


@pytest.mark.parametrize("budget", BUDGETS)
def test_expert_fraction_of_dagger_falls_over_the_budget(budget: str, short_config: Callable, tmp_path: Path) -> None:
    cfg = short_config("dagger", "CartPole-v1", eval_every=0, expert_fraction=1.0, **BUDGETS[budget])
    values = record_schedule(cfg, lambda loop, steps: loop.learner.expert_probability(steps), tmp_path / "run")
    assert values[-1][1] < 0.1
    assert all(probability == pytest.approx(1.0 - used, abs=0.03) for used, probability in values)


def test_budget_of_episodes_resumes_exactly(short_config: Callable, tmp_path: Path) -> None:
    class StopAt(zx.Callback):
        def iteration_end(self, loop: zx.TrainingLoop, metrics: Any) -> None:
            if loop.episodes >= 15:
                loop.stop("interrupted")

    cfg = short_config("dqn", "CartPole-v1", eval_every=0, replay__prioritized=True, **BUDGETS["episodes"])
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [StopAt()], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")
