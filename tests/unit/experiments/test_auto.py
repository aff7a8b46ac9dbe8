"""Tests of `num_envs=auto` and `num_threads=auto`: the fastest values that keep the learning per step."""

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
    """Fake steps per second by number of environments, which the test fills in."""
    by_num_envs: dict[int, float] = {}
    monkeypatch.setattr(auto, "profile", lambda cfg, seconds: SimpleNamespace(speed=by_num_envs[cfg.num_envs]))
    return by_num_envs


def build_auto(algorithm: str, **settings: object) -> RunConfig:
    return auto.build([{"algorithm": algorithm, "env": "Acrobot-v1"}], {"num_envs": "auto", **settings})


def test_num_envs_doubles_while_training_gets_faster(
    speeds: dict[int, float], capsys: pytest.CaptureFixture[str]
) -> None:
    speeds |= {8: 1000.0, 16: 1500.0, 32: 1600.0}  # 1600 is less than 1.15 times 1500
    cfg = build_auto("ppo", rollout_steps=64)
    assert cfg.num_envs == 16
    assert "num_envs=auto is 16 (steps per second by number of environments: 8: 1,000, 16: 1,500, 32: 1,600)" in (
        capsys.readouterr().err
    )


def test_rollout_keeps_its_total_size(speeds: dict[int, float]) -> None:
    speeds |= {8: 1.0, 16: 2.0, 32: 4.0, 64: 8.0}
    cfg = build_auto("ppo", rollout_steps=32)
    # 8 x 32 = 256 steps: 32 envs leave 8 steps each, the minimum, so 64 aren't tried
    assert (cfg.num_envs, cfg.rollout_steps) == (32, 8)


def test_off_policy_gets_at_most_16_envs(speeds: dict[int, float]) -> None:
    speeds |= {num: float(num) for num in (1, 2, 4, 8, 16)}
    assert build_auto("dqn").num_envs == 16


def test_num_envs_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """The result depends on the machine and its load."""
    cfg = zx.config.load(algorithm="ppo", env="CartPole-v1", num_envs=1, vector__backend="native", epochs=1)
    assert auto.choose_num_envs(cfg).num_envs in (1, 2, 4, 8, 16)
    assert re.search(r"by number of environments: 1: [1-9][\d,]+, 2: [1-9][\d,]+", capsys.readouterr().err)


def test_explicit_num_envs_is_kept() -> None:
    assert auto.build([{"algorithm": "dqn", "env": "Acrobot-v1"}], {"num_envs": 3}).num_envs == 3


def test_reading_a_config_rejects_auto_num_envs() -> None:
    with pytest.raises(zx.UserError, match=r"num_envs='auto' is only allowed in `zhixing train` and zx.train"):
        zx.config.load(algorithm="ppo", env="CartPole-v1", num_envs="auto")


def test_run_config_holds_the_chosen_num_envs(speeds: dict[int, float], run_cli: Command) -> None:
    speeds |= {8: 2.0, 16: 1.0}
    settings = ["num_envs=auto", "env_steps=64", "rollout_steps=8", "minibatch_size=64", "eval_episodes=1"]
    code, _, error = run_cli("train", "ppo", "--env", "CartPole-v1", "--out", "run", *settings)
    assert code == 0, error
    assert "num_envs: 8" in Path("run", "config.yaml").read_text()


@pytest.mark.parametrize(("speed_on_four", "best"), [(100.0, 1), (114.0, 1), (115.0, 4), (300.0, 4)])
def test_all_cpus_are_used_if_clearly_faster(
    speed_on_four: float, best: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = {1: 100.0, 4: speed_on_four}
    monkeypatch.setattr(auto, "profile", lambda cfg, seconds: SimpleNamespace(speed=speeds[cfg.num_threads]))
    monkeypatch.setattr(auto, "cpu_count", lambda: 4)
    assert auto.build([{"algorithm": "ppo", "env": "CartPole-v1"}], {"num_threads": "auto"}).num_threads == best
    message = f"num_threads=auto is {best} (steps per second by number of threads: 1: 100, 4: {speed_on_four:.0f})"
    assert message in capsys.readouterr().err


def test_default_num_threads_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "profile", None)  # calling it would raise
    assert auto.build([{"algorithm": "ppo", "env": "CartPole-v1"}], {}).num_threads == "auto"


def test_num_threads_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    best = auto.build([{"algorithm": "a2c", "env": "CartPole-v1"}], {"num_threads": "auto"}).num_threads
    assert best in (1, cpu_count())  # depends on the load of the machine
    assert f"num_threads=auto is {best} (" in capsys.readouterr().err
