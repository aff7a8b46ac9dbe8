"""Files that are whole or not there, states that come back as they were, and every kind of damage told."""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zhixing as zx
from zhixing.checkpoint import FORMAT, RunFolder, decode, encode, read_checkpoint, write_aside, write_checkpoint
from zhixing.errors import UserError
from zhixing.policy import Phase


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    write_aside(file, lambda out: out.write(b"old"))

    def fail(out: Any) -> None:
        out.write(b"half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_aside(file, fail)
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]  # nothing half-written stays behind
    write_aside(file, lambda out: out.write(b"new"))
    assert file.read_bytes() == b"new"


def test_what_is_encoded_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "array": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
        "bytes": np.array([1, 255], np.uint8),
        "flags": np.array([True, False]),
        "empty": np.zeros((0, 3)),
        "without dimensions": np.array(5),  # such as an observation of a Discrete space
        "number": np.float64(1.5),
        "integer": np.int64(2**62),
        "tensor": torch.ones(2),
        "nested": [{"a": (1, "two", None, np.zeros(1))}, []],
        "nan": float("nan"),
        7: "keys may be numbers",
    }
    torch.save(encode(state), tmp_path / "a.pt")
    found = decode(torch.load(tmp_path / "a.pt", weights_only=True))
    assert found.keys() == state.keys()
    for name in ("array", "bytes", "flags", "empty", "without dimensions"):
        assert isinstance(found[name], np.ndarray)
        assert found[name].dtype == state[name].dtype
        assert found[name].shape == state[name].shape, name
        assert np.array_equal(found[name], state[name])
    assert (found["number"], found["integer"], found[7]) == (1.5, 2**62, "keys may be numbers")
    assert found["nan"] != found["nan"]
    assert torch.equal(found["tensor"], torch.ones(2))
    assert found["nested"][0]["a"][:3] == (1, "two", None)
    assert isinstance(found["nested"][0]["a"], tuple)
    assert found["nested"][1] == []


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"mean": {"of": deque([1.0])}}, r"the state\['mean'\]\['of'\] is a deque, which a checkpoint can't hold"),
        ({"where": [Path("runs")]}, r"the state\['where'\]\[0\] is a .*Path"),
        ({"seen": frozenset({1})}, "is a frozenset"),
        ({"phase": Phase.EVAL}, "is a Phase"),
        ({frozenset(): 1}, "a key of the state is a frozenset"),
        ({"objects": np.array([None])}, "is a ndarray"),
    ],
)
def test_what_could_never_be_read_is_refused(state: dict[Any, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(zx.UserError, match=told):
        write_checkpoint(tmp_path / "a.pt", {"kind": "agent", "policy": {}, **state})
    assert list(tmp_path.iterdir()) == []


def test_keys_of_numpy_become_plain_ones(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a.pt", {"kind": "agent", "policy": {}, "counts": {np.int64(3): 1}})
    assert read_checkpoint(tmp_path / "a.pt")["counts"] == {3: 1}


def test_generators_come_back_as_they_were() -> None:
    rng = np.random.default_rng(3)
    rng.random(5)
    other = np.random.default_rng(0)
    other.bit_generator.state = decode(encode(rng.bit_generator.state))
    assert other.random(4).tolist() == rng.random(4).tolist()


def _text(path: Path) -> None:
    path.write_text("hello")


def _truncated(path: Path) -> None:
    torch.save({"format": 1, "kind": "run", "policy": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:-200])


def _flipped(path: Path) -> None:
    torch.save({"format": 1, "kind": "run", "policy": {}}, path)
    whole = bytearray(path.read_bytes())
    whole[40:90] = bytes(50)
    path.write_bytes(whole)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": _text,
    "truncated": _truncated,
    "overwritten": _flipped,
    "a pickle of code": lambda path: path.write_bytes(pickle.dumps(os.system)),
    "a tensor": lambda path: torch.save(torch.zeros(3), path),
    "a dict of something else": lambda path: torch.save({"weights": 1}, path),
    "without a policy": lambda path: torch.save({"format": 1, "kind": "run"}, path),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_told_with_the_name_of_the_file(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    damage(tmp_path / "000000000100.pt")
    with pytest.raises(UserError, match=r"000000000100.pt is damaged or no checkpoint"):
        read_checkpoint(tmp_path / "000000000100.pt")


@pytest.mark.parametrize("version", [FORMAT + 1, 10**6, "two"])
def test_a_newer_format_is_told(version: object, tmp_path: Path) -> None:
    torch.save({"format": version, "kind": "run", "policy": {}}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=f"has format {version}; this version reads up to {FORMAT}"):
        read_checkpoint(tmp_path / "a.pt")


def test_only_the_newest_checkpoints_are_kept_besides_the_best(small: Callable, tmp_path: Path) -> None:
    cfg = small("ppo", "toy/match", checkpoint_every_steps=200, keep_checkpoints=3)
    zx.Session(cfg, tmp_path / "run", quiet=True).run()
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    # 64 steps per iteration: due at 832 (800), 1024 (1000) and the end, 1216 (1200)
    assert names == ["000000000832.pt", "000000001024.pt", "000000001216.pt", "best.pt"]


def test_best_is_the_highest_evaluation_and_can_be_loaded(small: Callable, tmp_path: Path) -> None:
    cfg = small("ppo", "toy/match", eval_every_steps=200)
    result = zx.Session(cfg, tmp_path / "run", quiet=True).run()
    best = read_checkpoint(tmp_path / "run" / "checkpoints" / "best.pt")
    assert best["kind"] == "agent"
    assert best["return"] == result["best_return"]
    assert zx.load(tmp_path / "run", "best").act(np.eye(4, dtype=np.float32)).shape == (4,)
    with pytest.raises(UserError, match="unknown checkpoint 'first': allowed are last and best"):
        zx.load(tmp_path / "run", "first")
    (tmp_path / "run" / "checkpoints" / "best.pt").unlink()
    with pytest.raises(UserError, match="has no best checkpoint"):
        zx.load(tmp_path / "run", "best")


class _StopAt(zx.Callback):
    def __init__(self, env_steps: int) -> None:
        self.env_steps = env_steps

    def iteration_end(self, loop: zx.Loop, metrics: object) -> None:
        if loop.env_steps >= self.env_steps:
            loop.stop("interrupted")


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_newer_file_never_costs_the_checkpoint_just_written(
    keep: int, small: Callable, tmp_path: Path
) -> None:
    """Resumed from before a damaged file, stopped again before it: what was just saved must be there."""
    run = tmp_path / "run"
    zx.Session(small("ppo", "toy/match", checkpoint_every_steps=400), run, quiet=True).run()
    newest = max((run / "checkpoints").glob("0*.pt"))
    newest.write_bytes(b"")
    with pytest.raises(KeyboardInterrupt):
        zx.Session.resume(run, [_StopAt(900)], quiet=True, keep_checkpoints=keep).run()
    assert RunFolder.open(run).load()["steps"] == 960  # 15 iterations of 64 steps, the first beyond 900


def test_a_run_with_replay_goes_past_a_damaged_checkpoint(small: Callable, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cfg = small("dqn", "toy/match", checkpoint_every_steps=400)
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, run, [_StopAt(1000)], quiet=True).run()
    (run / "checkpoints" / "000000001000.pt").write_bytes(b"")
    result = zx.Session.resume(run, quiet=True).run()
    assert result["env_steps"] == 1200
    assert zx.Session.resume(run, quiet=True).finished


def test_folders_that_hold_a_run_or_are_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; name a folder"):
        RunFolder(tmp_path / "file").check_free()
    with pytest.raises(UserError, match="can't be written"):
        RunFolder(tmp_path / "file" / "below").create(zx.config.load(algorithm="ppo", env="toy/match"))
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").check_free()
    with pytest.raises(UserError, match=r"is no run: it holds no config.yaml"):
        RunFolder.open(tmp_path / "empty")
