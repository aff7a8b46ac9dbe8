"""Tests of the profiler: parts that add up, the bottleneck, faster settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zhixing as zx
from zhixing.cli import main
from zhixing.config import RunConfig
from zhixing.experiments import profiler
from zhixing.experiments.profiler import (
    Alternative,
    PartTimer,
    Profile,
    alternatives,
    measure_alternatives,
    profile,
    recommend,
)

ShortConfig = Callable[..., RunConfig]


class Nested:
    def outer(self) -> int:
        time.sleep(0.02)
        return self.inner() + self.inner()

    def inner(self) -> int:
        time.sleep(0.01)
        return 1

    def fails(self) -> None:
        self.inner()
        raise ValueError


def test_nested_time_is_not_counted_twice() -> None:
    nested, timer = Nested(), PartTimer(torch.device("cpu"))
    timer.wrap(nested, "outer", "loss")
    timer.wrap(nested, "inner", "gradient")
    timer.wrap(nested, "fails", "replay")
    start = time.perf_counter()
    assert nested.outer() == 2
    with pytest.raises(ValueError):
        nested.fails()
    total = time.perf_counter() - start
    assert timer.seconds["loss"] >= 0.02
    assert timer.seconds["gradient"] >= 0.03  # three times
    assert timer.seconds["replay"] < 0.01
    assert timer.nested_seconds == [pytest.approx(total, rel=0.1)]
    assert sum(timer.seconds.values()) == pytest.approx(timer.nested_seconds[0])


def test_slow_env_is_the_bottleneck(short_config: ShortConfig) -> None:
    result = profile(short_config("ppo", env="dummy_envs:SlowEnv", vector__backend="serial"), 0.5)
    # 2 ms per step
    assert result.parts["environment"] >= 0.002 * result.steps
    assert result.seconds >= 0.5
    assert result.bottleneck == "environments"
    assert result.group_shares["environments"] > 0.5
    assert result.speed == result.steps / result.seconds < 500
    assert sum(result.shares.values()) == pytest.approx(1.0)


def test_large_network_is_the_bottleneck(short_config: ShortConfig) -> None:
    large = {"net__hidden_sizes": [512, 512], "batch_size": 256, "updates_per_step": 1.0}
    result = profile(short_config("dqn", env="toy/match", **large), 0.3)
    assert result.bottleneck == "learning"
    for part in ("environment", "policy", "actor", "replay", "loss", "gradient", "optimizer"):
        assert result.parts[part] > 0.0
    assert 0.0 <= result.shares["other"] < 0.2


@pytest.mark.parametrize("name", ["gail", "bc", "mcts", "alphazero", "qmix", "impala"])
def test_all_schemes_can_be_profiled(
    name: str, short_config: ShortConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"dataset": short_config("bc", env="CartPole-v1").model_dump()["dataset"]} if name == "gail" else {}
    result = profile(short_config(name, **settings), 0.05)
    assert result.steps > 0
    assert 0.0 <= result.shares["other"] < 0.35
    assert (result.parts["gradient"] > 0) == (name != "mcts")
    assert result.unit == ("updates" if name == "bc" else "steps")
    assert list(tmp_path.iterdir()) == []


def test_profile_restores_num_threads(short_config: ShortConfig) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        profile(short_config("ppo", num_threads=1), 0.01)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def make_profile(cfg: RunConfig, unit: str = "steps") -> Profile:
    return Profile(cfg, unit, 1, 1.0, {})


def test_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "cpu_count", lambda: 8)
    settings = {"algorithm": "ppo", "env": "CartPole-v1", "num_threads": 1}
    cfg = zx.config.load(**settings, num_envs=8, vector={"backend": "native"})
    assert list(alternatives(make_profile(cfg))) == [
        "num_threads=8",
        "num_envs=4",
        "num_envs=16",
        "num_envs=32",
        "vector.backend=serial",
        "vector.backend=process",
        "vector.backend=mixed",
    ]
    single = zx.config.load(**settings, num_envs=1, vector={"backend": "serial"}, minibatch_size=32)
    assert list(alternatives(make_profile(single))) == [
        "num_threads=8",
        "num_envs=2",
        "num_envs=4",
        "vector.backend=native",
    ]
    assert list(alternatives(make_profile(cfg, "updates"))) == ["num_threads=8"]


NUM_ENVS = {f"num_envs={n}": {"num_envs": n} for n in (1, 4)}
REJECTED = {"shared_network=true": {"shared_network": True}}


def test_alternatives_are_measured_and_rejections_reported(
    short_config: ShortConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "alternatives", lambda profile: {"num_envs=1": NUM_ENVS["num_envs=1"], **REJECTED})
    cfg = short_config("ppo", env="toy/match", num_envs=3, critic_lr=1e-3, vector__backend="serial", num_threads=1)
    started: list[str] = []
    measured = measure_alternatives(cfg, make_profile(cfg), 0.05, started.append)
    assert [a.setting for a in measured] == ["current settings", "num_envs=1", "shared_network=true"]
    assert measured[0].speedup == 1.0
    assert measured[1].speed > 0
    assert "leave critic_lr and critic_epochs unset" in measured[2].skipped
    assert started == ["current settings", "num_envs=1", "shared_network=true", "current settings", "num_envs=1"]


def test_only_clearly_faster_alternatives_are_recommended() -> None:
    measured = [
        Alternative("current settings", 100, 1.0),
        Alternative("a", 110, 1.1),
        Alternative("b", 120, 1.2),
        Alternative("c", 300, 3.0),
        Alternative("d", 0, 0, "no"),
    ]
    assert [a.setting for a in recommend(measured)] == ["c", "b"]


def test_profile_command_prints_parts_and_recommendations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiler, "alternatives", lambda profile: NUM_ENVS)
    monkeypatch.setattr(profiler, "MIN_SPEEDUP", 0.0)  # so all are recommended
    command = "zhixing profile ppo --env toy/match --seconds 0.1 num_envs=2 minibatch_size=64 rollout_steps=32"
    monkeypatch.setattr("sys.argv", command.split())
    main()
    out = capsys.readouterr().out
    assert "ppo on toy/match: " in out
    for text in (
        "environment",
        "gradient",
        "bound by ",
        "current settings",
        "faster: ",
        "compare both with `zhixing sweep`",
    ):
        assert text in out


def test_rollouts_are_halved_down_to_a_minibatch() -> None:
    """8 envs x 256 steps = 2048, then 1024, 512, 256: a minibatch of 256 allows no less."""
    settings = {"env": "CartPole-v1", "num_envs": 8, "rollout_steps": 256}
    cfg = zx.config.load(algorithm="ppo", minibatch_size=256, **settings)
    steps = {limit: profiler.shorten_rollout(cfg, limit).rollout_steps for limit in (5000, 2047, 600, 1)}
    assert steps == {5000: 256, 2047: 128, 600: 64, 1: 32}
    assert profiler.shorten_rollout(cfg, None) is cfg
    dqn = zx.config.load(algorithm="dqn", env="CartPole-v1")
    assert profiler.shorten_rollout(dqn, 1) is dqn


def test_slow_env_is_measured_with_short_rollouts(short_config: ShortConfig) -> None:
    """Two envs of 2 ms, one after the other: a rollout of 256 steps takes a second, and three would take too long."""
    cfg = short_config(
        "ppo", env="dummy_envs:SlowEnv", vector__backend="serial", rollout_steps=256, minibatch_size=32, epochs=1
    )
    start = time.monotonic()
    result = profile(cfg, 0.3)
    assert time.monotonic() - start < 3 * 256 * 0.004
    assert result.max_rollout is not None
    assert result.cfg.rollout_steps < 256
    assert result.speed < 500


def test_alternatives_are_skipped_when_time_is_over(short_config: ShortConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "alternatives", lambda profile: NUM_ENVS)
    monkeypatch.setattr(profiler, "MIN_BUDGET_SECONDS", 0.0)
    cfg = short_config("ppo", env="toy/match", vector__backend="serial", num_threads=1)
    measured = measure_alternatives(cfg, make_profile(cfg), 0.0)
    assert [a.skipped for a in measured] == ["", *["not measured: out of time"] * 2]
    assert measured[0].speed > 0
