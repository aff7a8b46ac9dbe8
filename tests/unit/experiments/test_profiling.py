"""The profile: parts that add up, who is to blame, what would be faster."""

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
from zhixing.experiments.profiler import Clock, Profile, Try, advice, alternatives, profile, try_alternatives

Small = Callable[..., RunConfig]


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


def test_what_is_inside_is_not_counted_twice() -> None:
    nested, clock = Nested(), Clock(torch.device("cpu"))
    clock.time(nested, "outer", "loss")
    clock.time(nested, "inner", "gradient")
    clock.time(nested, "fails", "replay")
    begin = time.perf_counter()
    assert nested.outer() == 2
    with pytest.raises(ValueError):
        nested.fails()
    whole = time.perf_counter() - begin
    assert clock.seconds["loss"] >= 0.02
    assert clock.seconds["gradient"] >= 0.03  # three times
    assert clock.seconds["replay"] < 0.01
    assert clock.inside == [pytest.approx(whole, rel=0.1)]
    assert sum(clock.seconds.values()) == pytest.approx(clock.inside[0])


def test_a_slow_task_is_to_blame(short_config: Small) -> None:
    found = profile(short_config("ppo", env="dummy_envs:SlowEnv", vector__backend="serial"), 0.5)
    # two environments in turn take 4 ms at least for two steps
    assert found.parts["environment"] >= 0.002 * found.steps
    assert found.seconds >= 0.5
    assert found.bound_by == "environments"
    assert found.groups["environments"] > 0.5
    assert found.speed == found.steps / found.seconds < 500
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_a_large_network_is_to_blame(short_config: Small) -> None:
    large = {"net__hidden_sizes": [512, 512], "batch_size": 256, "updates_per_step": 1.0}
    found = profile(short_config("dqn", env="toy/match", **large), 0.3)
    assert found.bound_by == "learning"
    for part in ("environment", "policy", "actor", "replay", "loss", "gradient", "optimizer"):
        assert found.parts[part] > 0.0
    assert 0.0 <= found.shares["the rest"] < 0.2


@pytest.mark.parametrize("name", ["gail", "bc", "mcts", "alphazero", "qmix", "impala"])
def test_every_way_of_training_is_taken_apart(
    name: str, short_config: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"dataset": short_config("bc", env="CartPole-v1").model_dump()["dataset"]} if name == "gail" else {}
    found = profile(short_config(name, **settings), 0.05)
    assert found.steps > 0
    assert 0.0 <= found.shares["the rest"] < 0.35
    assert (found.parts["gradient"] > 0) == (name != "mcts")
    assert found.unit == ("updates" if name == "bc" else "steps")
    assert list(tmp_path.iterdir()) == []


def test_the_profile_leaves_threads_as_they_were(short_config: Small) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        profile(short_config("ppo", num_threads=1), 0.01)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def made_up(cfg: RunConfig, unit: str = "steps") -> Profile:
    return Profile(cfg, unit, 1, 1.0, {})


def test_settings_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "cpu_count", lambda: 8)
    task = {"algorithm": "ppo", "env": "CartPole-v1", "num_threads": 1}
    cfg = zx.config.load(**task, num_envs=8, vector={"backend": "native"})
    assert list(alternatives(made_up(cfg))) == [
        "num_threads=8",
        "num_envs=4",
        "num_envs=16",
        "num_envs=32",
        "vector.backend=serial",
        "vector.backend=process",
        "vector.backend=mixed",
    ]
    alone = zx.config.load(**task, num_envs=1, vector={"backend": "serial"}, minibatch_size=32)
    assert list(alternatives(made_up(alone))) == [
        "num_threads=8",
        "num_envs=2",
        "num_envs=4",
        "vector.backend=native",
    ]
    assert list(alternatives(made_up(cfg, "updates"))) == ["num_threads=8"]


NUMS = {f"num_envs={n}": {"num_envs": n} for n in (1, 4)}
REJECTED = {"shared_network=true": {"shared_network": True}}


def test_tries_are_measured_and_refusals_told(short_config: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "alternatives", lambda found: {"num_envs=1": NUMS["num_envs=1"], **REJECTED})
    cfg = short_config("ppo", env="toy/match", num_envs=3, critic_lr=1e-3, vector__backend="serial", num_threads=1)
    told: list[str] = []
    tries = try_alternatives(cfg, made_up(cfg), 0.05, told.append)
    assert [one.setting for one in tries] == ["as it is", "num_envs=1", "shared_network=true"]
    assert tries[0].times == 1.0
    assert tries[1].speed > 0
    assert "shared_network=true allows no critic_lr" in tries[2].untold
    assert told == ["as it is", "num_envs=1", "shared_network=true", "as it is", "num_envs=1"]


def test_only_what_is_clearly_faster_is_advised() -> None:
    tries = [
        Try("as it is", 100, 1.0),
        Try("a", 110, 1.1),
        Try("b", 120, 1.2),
        Try("c", 300, 3.0),
        Try("d", 0, 0, "no"),
    ]
    assert [one.setting for one in advice(tries)] == ["c", "b"]


def test_the_command_tells_all_of_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(profiler, "alternatives", lambda found: NUMS)
    monkeypatch.setattr(profiler, "WORTH", 0.0)  # then all are advised
    words = "zhixing profile ppo --env toy/match --seconds 0.1 num_envs=2 minibatch_size=64 rollout_steps=32"
    monkeypatch.setattr("sys.argv", words.split())
    main()
    out = capsys.readouterr().out
    assert "ppo on toy/match: " in out
    for word in ("environment", "gradient", "bound by ", "as it is", "faster: ", "compare both with `zhixing sweep`"):
        assert word in out


def test_iterations_are_halved_down_to_a_minibatch() -> None:
    """8 environments x 256 steps are 2048: half is 1024, then 512, 256; a minibatch of 256 allows no less."""
    task = {"env": "CartPole-v1", "num_envs": 8, "rollout_steps": 256}
    cfg = zx.config.load(algorithm="ppo", minibatch_size=256, **task)
    steps = {room: profiler.shorter(cfg, room).rollout_steps for room in (5000, 2047, 600, 1)}
    assert steps == {5000: 256, 2047: 128, 600: 64, 1: 32}
    assert profiler.shorter(cfg, None) is cfg
    dqn = zx.config.load(algorithm="dqn", env="CartPole-v1")
    assert profiler.shorter(dqn, 1) is dqn


def test_a_slow_task_is_measured_in_short_iterations(short_config: Small) -> None:
    """Two environments of 2 ms in turn: an iteration of 256 steps would take a second, so that three take more."""
    cfg = short_config(
        "ppo", env="dummy_envs:SlowEnv", vector__backend="serial", rollout_steps=256, minibatch_size=32, epochs=1
    )
    begin = time.monotonic()
    found = profile(cfg, 0.3)
    assert time.monotonic() - begin < 3 * 256 * 0.004
    assert found.rollout is not None
    assert found.cfg.rollout_steps < 256
    assert found.speed < 500


def test_tries_end_when_their_time_is_over(short_config: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "alternatives", lambda found: NUMS)
    monkeypatch.setattr(profiler, "TRIES_SECONDS", 0.0)
    cfg = short_config("ppo", env="toy/match", vector__backend="serial", num_threads=1)
    tries = try_alternatives(cfg, made_up(cfg), 0.0)
    assert [one.untold for one in tries] == ["", *["not tried: no time was left"] * 2]
    assert tries[0].speed > 0
