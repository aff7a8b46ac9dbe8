"""Several learners: what they find together is what one finds alone, also after a resume, and deaths are told."""

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

Small = Callable[..., RunConfig]


@pytest.fixture
def pair(short_config: Small, tmp_path: Path) -> Iterator[Callable[..., tuple[zx.Learner, zx.Learner]]]:
    """One that learns alone and one with a partner, alike otherwise."""
    opened: list[LearnerGroup] = []

    def make(algorithm: str, env: str, **settings: object) -> tuple[zx.Learner, zx.Learner]:
        cfg = short_config(algorithm, env, distributed__learners=2, num_threads=1, **settings)
        env = zx.envs.make_vector(cfg.env.name, 1, backend="serial")
        alone, first = (zx.algorithms.get(algorithm).make(cfg, env.spaces) for _ in range(2))
        opened.append(LearnerGroup(first, cfg, env.spaces, tmp_path))
        first.executor = opened[-1]
        env.close()
        return alone, first

    yield make
    for group in opened:
        group.close()


def transitions(rows: int) -> Batch:
    random = torch.Generator().manual_seed(0)
    return Batch(
        obs=torch.randn(rows, 4, generator=random),
        action=torch.randint(0, 2, (rows,), generator=random),
        reward=torch.randn(rows, generator=random),
        terminated=torch.rand(rows, generator=random) < 0.1,
        truncated=torch.zeros(rows, dtype=torch.bool),
        next_obs=torch.randn(rows, 4, generator=random),
        discount=torch.full((rows,), 0.99),
        weight=torch.rand(rows, generator=random),
        index=torch.arange(rows),
    )


def test_two_learners_find_what_one_finds(pair: Callable[..., tuple[zx.Learner, zx.Learner]]) -> None:
    """Weights, what is told, and the priority of each row, over a few steps."""
    alone, first = pair("double_dqn", "CartPole-v1", replay__prioritized=True)
    batch = transitions(12)
    for _ in range(3):
        expected, found = alone.update(batch), first.update(batch)
    assert expected.priority is not None
    assert found.priority is not None
    torch.testing.assert_close(found.priority, expected.priority)
    for name, value in expected.metrics.items():
        torch.testing.assert_close(found.metrics[name], value, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(first.policy.parameters(), alone.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert first.updates == 3

    with pytest.raises(zx.UserError, match="2 learners can't split 7 rows equally"):
        first.update(batch[:7])


def test_rollouts_are_shared_by_environments(short_config: Small, tmp_path: Path) -> None:
    """V-trace looks along time, which must stay whole: two learners learn what one does, up to rounding."""
    settings = {"num_envs": 4, "actors": 2, "env_steps": 320, "rollout_steps": 20, "vector__backend": "serial"}
    for learners in (1, 2):
        cfg = short_config("impala", "CartPole-v1", distributed__learners=learners, **settings)
        zx.Session(cfg, tmp_path / str(learners), quiet=True).run()
    one, two = checkpoint_tensors(tmp_path / "1"), checkpoint_tensors(tmp_path / "2")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5)


def test_a_partner_that_dies_is_told(pair: Callable[..., tuple[zx.Learner, zx.Learner]]) -> None:
    _, first = pair("dqn", "CartPole-v1")
    first.update(transitions(4))
    before = {name: value.clone() for name, value in first.policy.state_dict().items()}
    assert first.executor is not None
    for process in first.executor._processes:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with pytest.raises(zx.UserError, match="one of the 2 learners ended: learner 1 with exit code -9"):
        first.update(transitions(4))
    assert all(torch.equal(before[name], value) for name, value in first.policy.state_dict().items())


def test_a_failure_of_a_partner_is_told(
    pair: Callable[..., tuple[zx.Learner, zx.Learner]], capfd: pytest.CaptureFixture[str]
) -> None:
    _, first = pair("dqn", "CartPole-v1")
    batch = transitions(4)
    batch.action[-1] = 7  # in the partner's share
    with pytest.raises(zx.UserError, match="one of the 2 learners ended: learner 1 with exit code 1"):
        first.update(batch)
    assert "learner 1 failed: index 7 is out of bounds" in capfd.readouterr().err


def test_signals_are_for_the_first_alone(pair: Callable[..., tuple[zx.Learner, zx.Learner]]) -> None:
    """At Ctrl-C the first goes on to the end of the iteration and saves."""
    _, first = pair("dqn", "CartPole-v1")
    for number in (signal.SIGINT, signal.SIGTERM):
        first.update(transitions(4))
        assert first.executor is not None
        os.kill(first.executor._processes[0].pid, number)
    first.update(transitions(4))
    assert first.updates == 3


def test_a_failure_of_the_first_keeps_nobody_waiting(
    pair: Callable[..., tuple[zx.Learner, zx.Learner]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = pair("dqn", "CartPole-v1")
    first.update(transitions(4))

    def fail(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(first, "run_step", fail)
    with pytest.raises(KeyboardInterrupt):
        first.update(transitions(4))
    assert first.executor is not None
    begin = time.monotonic()
    first.executor.close()
    assert time.monotonic() - begin < 5.0
    assert [process.returncode for process in first.executor._processes] == [-signal.SIGKILL]


def test_a_partner_that_never_comes_is_told(
    pair: Callable[..., tuple[zx.Learner, zx.Learner]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zhixing.distributed.learner_group.PROGRAM", "raise SystemExit(3)")
    _, first = pair("dqn", "CartPole-v1")
    with pytest.raises(zx.UserError, match="one of the 2 learners ended: learner 1 with exit code 3"):
        first.update(transitions(4))


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    """Partners don't run it again."""
    script = tmp_path / "script.py"
    settings = "env_steps=64, rollout_steps=16, num_envs=4, distributed__learners=2, quiet=True"
    script.write_text(f"import zhixing as zx\nprint('begun')\nzx.train('a2c', 'toy/match', out='run', {settings})\n")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begun") == 1


def test_short_rollouts_are_shared_by_environments(short_config: Small, tmp_path: Path) -> None:
    for learners in (1, 2):
        settings = {"distributed__learners": learners, "num_envs": 4, "vector__backend": "serial", "env_steps": 100}
        zx.Session(short_config("ac", "CartPole-v1", **settings), tmp_path / str(learners), quiet=True).run()
    one, two = checkpoint_tensors(tmp_path / "1"), checkpoint_tensors(tmp_path / "2")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5)


def test_runs_with_two_learners_resume_exactly(short_config: Small, tmp_path: Path) -> None:
    """SAC draws noise in its updates, a stream for each learner; statistics of observations come from the first."""
    settings = {"distributed__learners": 2, "normalize_obs": True, "vector__backend": "serial", "learning_starts": 32}
    zx.Session(short_config("sac", "toy/reach", env_steps=96, **settings), tmp_path / "whole", quiet=True).run()
    zx.Session(short_config("sac", "toy/reach", env_steps=64, **settings), tmp_path / "half", quiet=True).run()
    zx.Session.resume(tmp_path / "half", quiet=True, env_steps=96).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "half") == []


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("a3c", {}, "its workers take gradients already"),
        ("ppo", {"net__recurrent": "gru"}, "sequences of recurrent networks aren't shared"),
        ("ppo", {"compile": True}, "compile=true makes one graph"),
        ("gail", {}, "it is made of several learners itself"),
        ("a2c", {"num_envs": 3}, "num_envs=3 must be a multiple of the learners"),
        ("ppo", {"minibatch_size": 30}, "minibatch_size=30 must divide the rollout's 64 steps"),
        ("dqn", {"batch_size": 33}, "batch_size=33 must be a multiple of the learners"),
    ],
)
def test_what_several_learners_refuse(
    short_config: Small, tmp_path: Path, name: str, settings: dict[str, object], told: str
) -> None:
    with pytest.raises(zx.UserError, match=told):
        zx.Session(short_config(name, distributed__learners=2, **settings), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
