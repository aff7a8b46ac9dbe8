"""Intervals in steps, episodes, updates and seconds: of logs, evaluations, checkpoints and updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import metrics_rows

import zhixing as zx
from zhixing.config import parse_interval
from zhixing.training.loop import Counts, TrainingLoop


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        (0, (0, "steps")),
        (5000, (5000, "steps")),
        ("1 step", (1, "steps")),
        ("20 steps", (20, "steps")),
        ("1 episode", (1, "episodes")),
        ("10 episodes", (10, "episodes")),
        ("10episodes", (10, "episodes")),
        ("100 updates", (100, "updates")),
        ("60 s", (60.0, "seconds")),
        ("1h30m", (5400.0, "seconds")),
        ("1.5 m", (90.0, "seconds")),
    ],
)
def test_interval_is_a_number_and_a_unit(text: int | str, interval: tuple[float, str]) -> None:
    assert parse_interval(text) == interval


@pytest.mark.parametrize(
    "value", [-1, "0 episodes", "ten episodes", "10 epochs", "", "episodes", "-3 s", True, 2.5, [1]]
)
@pytest.mark.parametrize("name", ["log_every", "eval_every", "checkpoint_every", "train_every"])
def test_anything_else_is_rejected(name: str, value: Any) -> None:
    with pytest.raises(
        zx.UserError, match=rf"{name}=.*write a number of steps, such as 5000, or '10 episodes', '100 up"
    ):
        zx.config.load(algorithm="dqn", env="toy/match", **{name: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"log_every": 0}, "log_every=0: must be greater than 0"),
        ({"train_every": 0}, "train_every=0: must be greater than 0"),
        ({"train_every": "100 updates"}, "'100 updates' is not a number of steps or episodes; write for example 4 or"),
        ({"train_every": "60 s"}, "not a number of steps or episodes"),
    ],
)
def test_intervals_that_make_no_sense_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(zx.UserError, match=message):
        zx.config.load(algorithm="dqn", env="toy/match", **settings)


def test_training_between_episodes_needs_one_process(short_config: Callable, tmp_path: Path) -> None:
    for settings in ({"async_collect": True}, {"distributed__workers": 1}):
        with pytest.raises(zx.UserError, match=f"'1 episode' can't be combined with {next(iter(settings))[:8]}"):
            zx.Session(short_config("dqn", train_every="1 episode", **settings), tmp_path / "run", quiet=True)


def test_interval_is_due_when_a_multiple_was_passed(short_config: Callable, tmp_path: Path) -> None:
    session = zx.Session(short_config("ppo", "toy/match"), tmp_path / "run", quiet=True)
    loop = session.loop
    loop.counts_before, loop.counts = Counts(100, 9, 3, 59.0), Counts(164, 10, 4, 61.0)
    for due in (64, 41, "164 steps", "10 episodes", "5 episodes", "4 updates", "2 updates", "60 s", "1m"):
        assert loop.is_due(due), due
    for not_due in (0, 165, 100, "3 episodes", "11 episodes", "3 updates", "59 s", "62 s", "1h"):
        assert not loop.is_due(not_due), not_due
    assert [loop.num_intervals(every) for every in (0, 50, "4 episodes", "20 s")] == [0, 3, 2, 3]
    session.close()


class Recorder(zx.Callback):
    """Records the counters at each evaluation."""

    def __init__(self) -> None:
        self.at: list[tuple[int, int, int]] = []

    def evaluation_end(self, loop: TrainingLoop, evaluation: zx.Evaluation) -> None:
        self.at.append((loop.env_steps, loop.episodes, loop.updates))


def run(cfg: zx.config.RunConfig, folder: Path) -> list[tuple[int, int, int]]:
    recorder = Recorder()
    zx.Session(cfg, folder, recorder, quiet=True).run()
    return recorder.at


def test_evaluations_logs_and_checkpoints_in_episodes_and_updates(short_config: Callable, tmp_path: Path) -> None:
    """Episodes of toy/match have 10 steps. An iteration has 1 step in each of 2 environments, so two episodes end in
    every tenth; updates start after 200 steps."""
    cfg = short_config(
        "dqn", "toy/match", env_steps=400, train_every=1, updates_per_step=0.5,
        eval_every="10 episodes", log_every="40 updates", checkpoint_every="16 episodes", keep_checkpoints=9,
    )  # fmt: skip
    at = run(cfg, tmp_path / "run")
    assert at == [(100, 10, 0), (200, 20, 0), (300, 30, 50), (400, 40, 100)]
    # 40 updates after 200 + 80 steps, 80 after 360; and a row for each evaluation
    assert [int(row[0]) for row in metrics_rows(tmp_path / "run")[1:]] == [100, 200, 280, 300, 360, 400]
    files = sorted((tmp_path / "run" / "checkpoints").glob("0*"))
    assert [int(file.stem) for file in files] == [160, 320, 400]


def test_evaluations_in_seconds(short_config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reading of the clock is a second after the last one, so each iteration takes at least one second."""
    clock = iter(range(10**9))
    monkeypatch.setattr("zhixing.training.loop.time.perf_counter", lambda: float(next(clock)))
    cfg = short_config("ppo", "toy/match", env_steps=640, eval_every="3 s")
    many = len(run(cfg, tmp_path / "often"))
    few = len(run(cfg.model_copy(update={"eval_every": "1 h"}), tmp_path / "seldom"))
    assert few == 1  # at the end
    assert many >= 3


@pytest.mark.parametrize("settings", [{"eval_every": "6 episodes"}, {"train_every": "3 episodes"}])
def test_resumed_run_equals_an_uninterrupted_one(
    settings: dict[str, Any], short_config: Callable, tmp_path: Path
) -> None:
    cfg = short_config("dqn", "toy/match", checkpoint_every="7 episodes", log_every="3 episodes", **settings)
    cfg = cfg.model_copy(update={"env_steps": 600})

    class Stop(zx.Callback):
        def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
            if loop.env_steps >= 354:
                loop.stop("interrupted")

    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", Stop(), quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")
    whole, parts = (zx.load(tmp_path / name).policy.state_dict() for name in ("whole", "parts"))
    assert all(whole[name].equal(parts[name]) for name in whole)


def test_updates_follow_the_end_of_an_episode(short_config: Callable, tmp_path: Path) -> None:
    """Two environments, whose episodes of 10 steps end together: updates after 200, 220, ... steps, 10 each."""
    updates: list[tuple[int, int]] = []

    class Updates(zx.Callback):
        def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
            if loop.updates != (updates[-1][1] if updates else 0):
                updates.append((loop.env_steps, loop.updates))

    cfg = short_config("dqn", "toy/match", env_steps=270, train_every="1 episode", updates_per_step=0.5)
    zx.Session(cfg, tmp_path / "run", Updates(), quiet=True).run()
    assert updates == [(220, 10), (240, 20), (260, 30)]
