"""Contract 4: what is saved and loaded acts the same, and reading executes nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import zhixing as zx
from zhixing.checkpoint import FORMAT, RunFolder


def test_loaded_agent_acts_as_the_trained_policy(algorithm: str, small: Callable, tmp_path: Path) -> None:
    session = zx.Session(small(algorithm), tmp_path / "run", quiet=True)
    session.run()
    agent = zx.load(tmp_path / "run")
    spaces = session.spaces
    rows = [[spaces.obs.sample() for _ in range(spaces.num_agents)] for _ in range(32)]
    obs = np.array(rows).clip(-3, 3).reshape(32, *spaces.agents, -1)
    with torch.no_grad():
        rng = torch.Generator().manual_seed(0)
        decision = session.learner.policy.act(
            torch.as_tensor(obs), session.learner.policy.initial_hidden(32), None, zx.Phase.EVAL, rng, 0
        )
    expected = spaces.to_env(decision.action.numpy())
    assert np.array_equal(agent.act(obs), expected)
    agent.reset()
    assert np.allclose(agent.act(obs[0]), expected[0], atol=1e-5)  # one row may be computed in another order


def test_evaluation_of_a_run_repeats(small: Callable, tmp_path: Path) -> None:
    zx.Session(small("ppo"), tmp_path / "run", quiet=True).run()
    first, again = (zx.evaluate(tmp_path / "run", episodes=5, seed=1) for _ in range(2))
    assert first.summary() == again.summary()
    assert first.summary() != zx.evaluate(tmp_path / "run", episodes=5, seed=2).summary()


def test_checkpoints_carry_a_format_and_refuse_a_newer_one(small: Callable, tmp_path: Path) -> None:
    zx.Session(small("ppo"), tmp_path / "run", quiet=True).run()
    file = max((tmp_path / "run" / "checkpoints").glob("0*.pt"))
    state = torch.load(file, weights_only=True)
    assert state["format"] == FORMAT
    torch.save(state | {"format": FORMAT + 1}, file)
    with pytest.raises(zx.UserError, match="this version reads up to"):
        zx.load(tmp_path / "run")


class _Trap:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("sprung"),))


def test_a_checkpoint_that_would_execute_code_is_refused(
    small: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    zx.Session(small("ppo"), tmp_path / "run", quiet=True).run()
    file = max((tmp_path / "run" / "checkpoints").glob("0*.pt"))
    for write in (torch.save, lambda thing, path: Path(path).write_bytes(pickle.dumps(thing))):
        write({"format": 1, "kind": "run", "policy": _Trap()}, file)
        with pytest.raises(zx.UserError, match="damaged or no checkpoint"):
            zx.load(tmp_path / "run")
    assert not Path("sprung").exists()


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(small: Callable, tmp_path: Path) -> None:
    zx.Session(small("ppo", checkpoint_every_steps=250), tmp_path / "run", quiet=True).run()
    newest = max((tmp_path / "run" / "checkpoints").glob("0*.pt"))
    newest.write_bytes(newest.read_bytes()[:1000])
    folder = RunFolder.open(tmp_path / "run")
    assert folder.load()["steps"] < 600
    assert newest.name in folder.notices[0]
