"""Data-parallel learners: same results as one learner, exact resume, and errors that name a lost learner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import checkpoint_tensors, differing_tensors

import zhixing as zx
from zhixing.config import RunConfig
from zhixing.core.batch import Batch
from zhixing.distributed.learner_group import LearnerGroup

ShortConfig = Callable[..., RunConfig]
MakePair = Callable[..., tuple[zx.Learner, zx.Learner]]


@pytest.fixture
def make_pair(short_config: ShortConfig, tmp_path: Path) -> Iterator[MakePair]:
    """Make two equal learners: one without a group, and rank 0 of a group of two."""
    groups: list[LearnerGroup] = []

    def make(algorithm: str, env: str, **settings: object) -> tuple[zx.Learner, zx.Learner]:
        cfg = short_config(algorithm, env, distributed__learners=2, num_threads=1, **settings)
        env = zx.envs.make_vector(cfg.env.name, 1, backend="serial")
        single, rank_0 = (zx.algorithms.get(algorithm).make(cfg, env.spaces) for _ in range(2))
        groups.append(LearnerGroup(rank_0, cfg, env.spaces, tmp_path))
        rank_0.executor = groups[-1]
        env.close()
        return single, rank_0

    yield make
    for group in groups:
        group.close()


def transitions(rows: int) -> Batch:
    rng = torch.Generator().manual_seed(0)
    return Batch(
        obs=torch.randn(rows, 4, generator=rng),
        action=torch.randint(0, 2, (rows,), generator=rng),
        reward=torch.randn(rows, generator=rng),
        terminated=torch.rand(rows, generator=rng) < 0.1,
        truncated=torch.zeros(rows, dtype=torch.bool),
        next_obs=torch.randn(rows, 4, generator=rng),
        discount=torch.full((rows,), 0.99),
        weight=torch.rand(rows, generator=rng),
        index=torch.arange(rows),
    )


def assert_close_checkpoints(run: Path, other: Path) -> None:
    """Compare up to rounding: sums over shards are added in another order."""
    tensors, other_tensors = checkpoint_tensors(run), checkpoint_tensors(other)
    for name, value in tensors.items():
        torch.testing.assert_close(other_tensors[name], value, rtol=1e-3, atol=1e-5)


def test_two_learners_equal_one(make_pair: MakePair) -> None:
    """Compare weights, metrics and priorities over a few steps."""
    single, rank_0 = make_pair("double_dqn", "CartPole-v1", replay__prioritized=True)
    batch = transitions(12)
    for _ in range(3):
        expected, update = single.update(batch), rank_0.update(batch)
    assert expected.priority is not None
    assert update.priority is not None
    torch.testing.assert_close(update.priority, expected.priority)
    for name, value in expected.metrics.items():
        torch.testing.assert_close(update.metrics[name], value, rtol=1e-4, atol=1e-6)
    for parameter, expected_parameter in zip(rank_0.policy.parameters(), single.policy.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected_parameter)
    assert rank_0.updates == 3


def test_batch_that_cannot_be_split_is_rejected(make_pair: MakePair) -> None:
    _, rank_0 = make_pair("dqn", "CartPole-v1")
    with pytest.raises(zx.UserError, match="2 learners can't split 7 rows equally"):
        rank_0.update(transitions(7))


def test_rollouts_are_split_by_environment(short_config: ShortConfig, tmp_path: Path) -> None:
    """V-trace is computed along time, so shards must contain whole environments."""
    settings = {"num_envs": 4, "actors": 2, "env_steps": 320, "rollout_steps": 20, "vector__backend": "serial"}
    for learners in (1, 2):
        cfg = short_config("impala", "CartPole-v1", distributed__learners=learners, **settings)
        zx.Session(cfg, tmp_path / str(learners), quiet=True).run()
    assert_close_checkpoints(tmp_path / "1", tmp_path / "2")


def test_rollouts_of_one_step_are_split_by_environment(short_config: ShortConfig, tmp_path: Path) -> None:
    settings = {"num_envs": 4, "vector__backend": "serial", "env_steps": 100}
    for learners in (1, 2):
        cfg = short_config("ac", "CartPole-v1", distributed__learners=learners, **settings)
        zx.Session(cfg, tmp_path / str(learners), quiet=True).run()
    assert_close_checkpoints(tmp_path / "1", tmp_path / "2")


def test_killed_learner_is_named(make_pair: MakePair) -> None:
    _, rank_0 = make_pair("dqn", "CartPole-v1")
    rank_0.update(transitions(4))
    before = {name: value.clone() for name, value in rank_0.policy.state_dict().items()}
    assert rank_0.executor is not None
    for process in rank_0.executor._processes:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with pytest.raises(zx.UserError, match="one of the 2 learners ended: learner 1 with exit code -9"):
        rank_0.update(transitions(4))
    assert all(torch.equal(before[name], value) for name, value in rank_0.policy.state_dict().items())


def test_failed_learner_is_named_and_prints_its_error(make_pair: MakePair, capfd: pytest.CaptureFixture[str]) -> None:
    _, rank_0 = make_pair("dqn", "CartPole-v1")
    batch = transitions(4)
    batch.action[-1] = 7  # in the shard of learner 1
    with pytest.raises(zx.UserError, match="one of the 2 learners ended: learner 1 with exit code 1"):
        rank_0.update(batch)
    assert "learner 1 failed: index 7 is out of bounds" in capfd.readouterr().err


def test_learner_that_exits_at_its_start_is_named(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zhixing.distributed.learner_group.PROGRAM", "raise SystemExit(3)")
    _, rank_0 = make_pair("dqn", "CartPole-v1")
    with pytest.raises(zx.UserError, match="one of the 2 learners ended: learner 1 with exit code 3"):
        rank_0.update(transitions(4))


def test_other_learners_ignore_signals(make_pair: MakePair) -> None:
    """At Ctrl-C, rank 0 finishes the iteration and saves a checkpoint, which needs the other learners."""
    _, rank_0 = make_pair("dqn", "CartPole-v1")
    for number in (signal.SIGINT, signal.SIGTERM):
        rank_0.update(transitions(4))
        assert rank_0.executor is not None
        os.kill(rank_0.executor._processes[0].pid, number)
    rank_0.update(transitions(4))
    assert rank_0.updates == 3


def test_close_kills_learners_in_an_unfinished_step(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, rank_0 = make_pair("dqn", "CartPole-v1")
    rank_0.update(transitions(4))

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_0, "run_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rank_0.update(transitions(4))
    assert rank_0.executor is not None
    begin = time.monotonic()
    rank_0.executor.close()
    assert time.monotonic() - begin < 5.0
    assert [process.returncode for process in rank_0.executor._processes] == [-signal.SIGKILL]


def test_scripts_need_no_main_guard(tmp_path: Path) -> None:
    """The other learners don't run the user's script."""
    script = tmp_path / "script.py"
    settings = "env_steps=64, rollout_steps=16, num_envs=4, distributed__learners=2, quiet=True"
    script.write_text(f"import zhixing as zx\nprint('started')\nzx.train('a2c', 'toy/match', out='run', {settings})\n")
    process = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("started") == 1


def test_resume_with_two_learners_is_exact(short_config: ShortConfig, tmp_path: Path) -> None:
    """SAC samples noise in its updates, differently on each learner; rank 0 has the observation statistics."""
    settings = {"distributed__learners": 2, "normalize_obs": True, "vector__backend": "serial", "learning_starts": 32}
    zx.Session(short_config("sac", "toy/reach", env_steps=96, **settings), tmp_path / "whole", quiet=True).run()
    zx.Session(short_config("sac", "toy/reach", env_steps=64, **settings), tmp_path / "half", quiet=True).run()
    zx.Session.resume(tmp_path / "half", quiet=True, env_steps=96).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "half") == []


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("a3c", {}, "its workers compute the gradients"),
        ("ppo", {"net__recurrent": "gru"}, "sequences of recurrent networks can't be split"),
        ("ppo", {"compile": True}, "compile=true makes one graph"),
        ("gail", {}, "it contains another learner"),
        ("a2c", {"num_envs": 3}, "num_envs=3 must be a multiple of the learners"),
        ("ppo", {"minibatch_size": 30}, "minibatch_size=30 must divide the rollout's 64 steps"),
        ("dqn", {"batch_size": 33}, "batch_size=33 must be a multiple of the learners"),
    ],
)
def test_updates_that_cannot_be_split_are_rejected(
    short_config: ShortConfig, tmp_path: Path, name: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(zx.UserError, match=message):
        zx.Session(short_config(name, distributed__learners=2, **settings), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
