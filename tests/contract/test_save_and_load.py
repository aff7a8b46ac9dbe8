"""Contract 4: a loaded agent acts like the trained one, and reading a checkpoint executes nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import zhixing as zx
from zhixing.config import SearchConfig
from zhixing.core.seeding import derive_seed
from zhixing.training.run_folder import FORMAT, RunFolder, read_checkpoint, write_checkpoint


def test_loaded_agent_acts_like_the_trained_policy(algorithm: str, short_config: Callable, tmp_path: Path) -> None:
    session = zx.Session(short_config(algorithm), tmp_path / "run", quiet=True)
    session.run()
    agent = zx.load(tmp_path / "run")
    policy, spaces = session.learner.policy, session.spaces
    env = zx.envs.make_vector(session.cfg.env.name, 32, backend="serial")
    rng = torch.Generator().manual_seed(derive_seed(session.cfg.seed, "agent"))
    obs, info = env.reset(seed=0)
    with torch.no_grad():
        for _ in range(3):  # random steps, so observations differ
            action = policy.random_action(32, as_mask(info), torch.Generator().manual_seed(0))
            obs, _, _, _, info = env.step(spaces.to_env(action.numpy()))
        decision = policy.act(torch.as_tensor(obs), policy.initial_hidden(32), as_mask(info), zx.Phase.EVAL, rng, 0)
    expected = spaces.to_env(decision.action.numpy())
    mask = info.get("action_mask")
    assert np.array_equal(agent.act(obs, mask), expected)
    if not isinstance(session.cfg, SearchConfig):  # random numbers of a search depend on the size of the batch
        agent.reset()
        action = agent.act(obs[0], None if mask is None else mask[0])
        assert np.allclose(action, expected[0], atol=1e-5)  # a single row may be rounded differently
    env.close()


def as_mask(info: dict) -> torch.Tensor | None:
    return torch.as_tensor(info["action_mask"], dtype=torch.bool) if "action_mask" in info else None


def test_evaluation_with_the_same_seed_is_identical(short_config: Callable, tmp_path: Path) -> None:
    zx.Session(short_config("ppo"), tmp_path / "run", quiet=True).run()
    first, second = (zx.evaluate(tmp_path / "run", episodes=5, seed=1) for _ in range(2))
    assert first.summary() == second.summary()
    assert first.summary() != zx.evaluate(tmp_path / "run", episodes=5, seed=2).summary()


def test_checkpoint_of_a_newer_format_is_rejected(short_config: Callable, tmp_path: Path) -> None:
    zx.Session(short_config("ppo"), tmp_path / "run", quiet=True).run()
    file = max((tmp_path / "run" / "checkpoints").glob("0*.safetensors"))
    state = read_checkpoint(file)
    assert state["format"] == FORMAT
    write_checkpoint(file, state | {"format": FORMAT + 1})
    with pytest.raises(zx.UserError, match="this version of zhixing reads up to"):
        zx.load(tmp_path / "run")


class _Exploit:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("executed"),))


def test_checkpoint_with_pickled_code_is_rejected(
    short_config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    zx.Session(short_config("ppo"), tmp_path / "run", quiet=True).run()
    file = max((tmp_path / "run" / "checkpoints").glob("0*.safetensors"))
    for write in (torch.save, lambda thing, path: Path(path).write_bytes(pickle.dumps(thing))):
        write({"format": 1, "kind": "run", "policy": _Exploit()}, file)
        with pytest.raises(zx.UserError, match="damaged or not a checkpoint"):
            zx.load(tmp_path / "run")
    assert not Path("executed").exists()


def test_damaged_newest_checkpoint_falls_back_to_the_previous_one(short_config: Callable, tmp_path: Path) -> None:
    zx.Session(short_config("ppo", checkpoint_every=250), tmp_path / "run", quiet=True).run()
    newest = max((tmp_path / "run" / "checkpoints").glob("0*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:1000])
    folder = RunFolder.open(tmp_path / "run")
    assert folder.load()["steps"] < 600
    assert newest.name in folder.notices[0]
