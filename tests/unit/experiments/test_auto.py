"""`num_envs=auto` and `num_threads=auto`: what is fastest, with as much learning per step as without."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Command

import zhixing as zx
from zhixing.config import RunConfig
from zhixing.experiments import auto
from zhixing.utils.cpus import cpu_count


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Steps per second by number of copies, which the test fills in."""
    known: dict[int, float] = {}
    monkeypatch.setattr(auto, "profile", lambda cfg, seconds: SimpleNamespace(speed=known[cfg.num_envs]))
    return known


def built(algorithm: str, **settings: object) -> RunConfig:
    return auto.build([{"algorithm": algorithm, "env": "Acrobot-v1"}], {"num_envs": "auto", **settings})


def test_copies_are_doubled_as_long_as_it_pays(speeds: dict[int, float], capsys: pytest.CaptureFixture[str]) -> None:
    speeds |= {8: 1000.0, 16: 1500.0, 32: 1600.0}  # 1600 is less than 1.15 times 1500
    cfg = built("ppo", rollout_steps=64)
    assert cfg.num_envs == 16
    assert "num_envs=auto is 16 (steps per second by number of copies: 8: 1,000, 16: 1,500, 32: 1,600)" in (
        capsys.readouterr().err
    )


def test_a_rollout_keeps_its_size(speeds: dict[int, float]) -> None:
    speeds |= {8: 1.0, 16: 2.0, 32: 4.0, 64: 8.0}
    cfg = built("ppo", rollout_steps=32)
    # 8 x 32 = 256 steps: 32 x 8 is the widest whose copies take 8 steps each, and 64 isn't even tried
    assert (cfg.num_envs, cfg.rollout_steps) == (32, 8)


def test_a_replay_gets_few_copies(speeds: dict[int, float]) -> None:
    speeds |= {num: float(num) for num in (1, 2, 4, 8, 16)}
    assert built("dqn").num_envs == 16


def test_what_it_measures_is_real(capsys: pytest.CaptureFixture[str]) -> None:
    """Which is fastest is up to the machine and its other work."""
    slow = zx.config.load(algorithm="ppo", env="CartPole-v1", num_envs=1, vector__backend="native", epochs=1)
    assert auto.best_copies(slow).num_envs in (1, 2, 4, 8, 16)
    assert re.search(r"by number of copies: 1: [1-9][\d,]+, 2: [1-9][\d,]+", capsys.readouterr().err)


def test_other_numbers_are_left_as_they_are() -> None:
    assert auto.build([{"algorithm": "dqn", "env": "Acrobot-v1"}], {"num_envs": 3}).num_envs == 3


def test_a_file_that_is_only_read_measures_nothing() -> None:
    with pytest.raises(zx.UserError, match=r"num_envs='auto' is decided when training begins"):
        zx.config.load(algorithm="ppo", env="CartPole-v1", num_envs="auto")


def test_the_run_holds_what_was_decided(speeds: dict[int, float], run_cli: Command) -> None:
    speeds |= {8: 2.0, 16: 1.0}
    words = ["num_envs=auto", "env_steps=64", "rollout_steps=8", "minibatch_size=64", "eval_episodes=1"]
    code, _, error = run_cli("train", "ppo", "--env", "CartPole-v1", "--out", "run", *words)
    assert code == 0, error
    assert "num_envs: 8" in Path("run", "config.yaml").read_text()


@pytest.mark.parametrize(("on_four", "best"), [(100.0, 1), (114.0, 1), (115.0, 4), (300.0, 4)])
def test_threads_are_many_where_it_pays(
    on_four: float, best: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {1: 100.0, 4: on_four}
    monkeypatch.setattr(auto, "profile", lambda cfg, seconds: SimpleNamespace(speed=known[cfg.num_threads]))
    monkeypatch.setattr(auto, "cpu_count", lambda: 4)
    assert auto.build([{"algorithm": "ppo", "env": "CartPole-v1"}], {"num_threads": "auto"}).num_threads == best
    told = f"num_threads=auto is {best} (steps per second by number of threads: 1: 100, 4: {on_four:.0f})"
    assert told in capsys.readouterr().err


def test_threads_that_nobody_asks_for_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "profile", None)  # would be called
    assert auto.build([{"algorithm": "ppo", "env": "CartPole-v1"}], {}).num_threads == "auto"


def test_threads_are_measured_for_real(capsys: pytest.CaptureFixture[str]) -> None:
    best = auto.build([{"algorithm": "a2c", "env": "CartPole-v1"}], {"num_threads": "auto"}).num_threads
    assert best in (1, cpu_count())  # which of them, other work on the machine decides too
    assert f"num_threads=auto is {best} (" in capsys.readouterr().err
