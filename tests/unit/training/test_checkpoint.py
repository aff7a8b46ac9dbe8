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
from conftest import differing_tensors, metrics_rows

import zhixing as zx
from zhixing.core.policy import Phase
from zhixing.errors import UserError
from zhixing.training.checkpoint_file import read_archive, write_archive
from zhixing.training.run_folder import FORMAT, RunFolder, read_checkpoint, write_checkpoint
from zhixing.utils.files import write_atomically


def save(tree: Any, path: Path) -> None:
    """Any tree, not only that of a checkpoint."""
    with path.open("wb") as file:
        write_archive(file, tree)


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    write_atomically(file, lambda out: out.write(b"old"))

    def fail(out: Any) -> None:
        out.write(b"half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_atomically(file, fail)
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]  # nothing half-written stays behind
    write_atomically(file, lambda out: out.write(b"new"))
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
        "half": torch.tensor([1.5, -0.0, torch.inf], dtype=torch.bfloat16),
        "unsigned": torch.tensor([2**16 - 1], dtype=torch.uint16),
        "large": torch.tensor([2**63], dtype=torch.uint64),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "bytes of text": b"\x00\xff",
        ("a", 1): "keys may be tuples",
        "$": "a dict may have any key",
        "nested": [{"a": (1, "two", None, np.zeros(1))}, []],
        "nan": float("nan"),
        7: "keys may be numbers",
    }
    save(state, tmp_path / "a.safetensors")
    found = read_archive(tmp_path / "a.safetensors")
    assert found.keys() == state.keys()
    for name in ("array", "bytes", "flags", "empty", "without dimensions"):
        assert isinstance(found[name], np.ndarray)
        assert found[name].dtype == state[name].dtype
        assert found[name].shape == state[name].shape, name
        assert np.array_equal(found[name], state[name])
    assert (found["number"], found["integer"], found[7]) == (1.5, 2**62, "keys may be numbers")
    assert found["nan"] != found["nan"]
    assert (found["a", 1], found["$"]) == ("keys may be tuples", "a dict may have any key")
    assert found["bytes of text"] == b"\x00\xff"
    for name in ("half", "unsigned", "large", "transposed"):
        assert found[name].dtype == state[name].dtype
        assert torch.equal(found[name], state[name]), name
    assert torch.equal(found["tensor"], torch.ones(2))
    assert found["nested"][0]["a"][:3] == (1, "two", None)
    assert isinstance(found["nested"][0]["a"], tuple)
    assert found["nested"][1] == []


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"mean": {"of": deque([1.0])}}, r"the state\.mean\.of is a deque, which a checkpoint can't hold"),
        ({"where": [Path("runs")]}, r"the state\.where\.0 is a .*Path"),
        ({"seen": frozenset({1})}, "is a frozenset"),
        ({"phase": Phase.EVAL}, "is a Phase"),
        ({frozenset(): 1}, "a key of the state is a frozenset"),
        ({"objects": np.array([None])}, "is a ndarray of object"),
        ({"words": np.array(["a"])}, "is a ndarray of <U1"),
        ({"phase": torch.zeros(1, dtype=torch.complex128)}, "is a Tensor of torch.complex128"),
        ({((),): 1}, "a key of the state is a tuple"),
    ],
)
def test_what_could_never_be_read_is_refused(state: dict[Any, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(zx.UserError, match=told):
        write_checkpoint(tmp_path / "a.safetensors", {"kind": "agent", "policy": {}, **state})
    assert list(tmp_path.iterdir()) == []


def test_keys_of_numpy_become_plain_ones(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a.safetensors", {"kind": "agent", "policy": {}, "counts": {np.int64(3): 1}})
    assert read_checkpoint(tmp_path / "a.safetensors")["counts"] == {3: 1}


def test_generators_come_back_as_they_were(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rng.random(5)
    other = np.random.default_rng(0)
    save(rng.bit_generator.state, tmp_path / "a")
    other.bit_generator.state = read_archive(tmp_path / "a")
    assert other.random(4).tolist() == rng.random(4).tolist()


def _text(path: Path) -> None:
    path.write_text("hello")


def _truncated(path: Path) -> None:
    save({"format": 1, "kind": "run", "policy": {"a": torch.zeros(1000)}}, path)
    path.write_bytes(path.read_bytes()[:-200])


def _flipped(path: Path) -> None:
    save({"format": 1, "kind": "agent", "policy": {"a": torch.zeros(1000)}}, path)
    whole = bytearray(path.read_bytes())
    whole[-1000] ^= 1
    path.write_bytes(whole)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": _text,
    "truncated": _truncated,
    "overwritten": _flipped,
    "a pickle of code": lambda path: path.write_bytes(pickle.dumps(os.system)),
    "a tensor": lambda path: save(torch.zeros(3), path),
    "a dict of something else": lambda path: save({"weights": 1}, path),
    "without a policy": lambda path: save({"format": 1, "kind": "run"}, path),
    "a file of torch": lambda path: torch.save({"format": 1, "kind": "agent", "policy": {}}, path),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_told_with_the_name_of_the_file(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    damage(tmp_path / "000000000100.safetensors")
    with pytest.raises(UserError, match=r"000000000100.safetensors is damaged or no checkpoint"):
        read_checkpoint(tmp_path / "000000000100.safetensors")


@pytest.mark.parametrize("version", [FORMAT + 1, 10**6, "two"])
def test_a_newer_format_is_told(version: object, tmp_path: Path) -> None:
    save({"format": version, "kind": "run", "policy": {}}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=f"has format {version}; this version reads up to {FORMAT}"):
        read_checkpoint(tmp_path / "a.safetensors")


def test_only_the_newest_checkpoints_are_kept_besides_the_best(short_config: Callable, tmp_path: Path) -> None:
    cfg = short_config("ppo", "toy/match", checkpoint_every_steps=200, keep_checkpoints=3)
    zx.Session(cfg, tmp_path / "run", quiet=True).run()
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    # 64 steps per iteration: due at 832 (800), 1024 (1000) and the end, 1216 (1200)
    assert names == [
        "000000000832.safetensors",
        "000000001024.safetensors",
        "000000001216.safetensors",
        "best.safetensors",
    ]


def test_best_is_the_highest_evaluation_and_can_be_loaded(short_config: Callable, tmp_path: Path) -> None:
    cfg = short_config("ppo", "toy/match", eval_every_steps=200)
    result = zx.Session(cfg, tmp_path / "run", quiet=True).run()
    best = read_checkpoint(tmp_path / "run" / "checkpoints" / "best.safetensors")
    assert best["kind"] == "agent"
    assert best["return"] == result["best_return"]
    assert zx.load(tmp_path / "run", "best").act(np.eye(4, dtype=np.float32)).shape == (4,)
    with pytest.raises(UserError, match="unknown checkpoint 'first': allowed are last and best"):
        zx.load(tmp_path / "run", "first")
    (tmp_path / "run" / "checkpoints" / "best.safetensors").unlink()
    with pytest.raises(UserError, match="has no best checkpoint"):
        zx.load(tmp_path / "run", "best")


class _StopAt(zx.Callback):
    def __init__(self, env_steps: int) -> None:
        self.env_steps = env_steps

    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        if loop.env_steps >= self.env_steps:
            loop.stop("interrupted")


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_newer_file_never_costs_the_checkpoint_just_written(
    keep: int, short_config: Callable, tmp_path: Path
) -> None:
    """Resumed from before a damaged file, stopped again before it: what was just saved must be there."""
    run = tmp_path / "run"
    zx.Session(short_config("ppo", "toy/match", checkpoint_every_steps=400), run, quiet=True).run()
    newest = max((run / "checkpoints").glob("0*.safetensors"))
    newest.write_bytes(b"")
    with pytest.raises(KeyboardInterrupt):
        zx.Session.resume(run, [_StopAt(900)], quiet=True, keep_checkpoints=keep).run()
    assert RunFolder.open(run).load()["steps"] == 960  # 15 iterations of 64 steps, the first beyond 900


def test_a_run_with_replay_goes_past_a_damaged_checkpoint(short_config: Callable, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cfg = short_config("dqn", "toy/match", checkpoint_every_steps=400)
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, run, [_StopAt(1000)], quiet=True).run()
    (run / "checkpoints" / "000000001000.safetensors").write_bytes(b"")
    result = zx.Session.resume(run, quiet=True).run()
    assert result["env_steps"] == 1200
    assert zx.Session.resume(run, quiet=True).finished


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_a_damaged_replay_segment_costs_only_the_newest_checkpoint(
    damage: str, short_config: Callable, tmp_path: Path
) -> None:
    """As a damaged checkpoint does: training continues from the one before and ends as if nothing had happened."""
    cfg = short_config("dqn", "toy/match", checkpoint_every_steps=400)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, run, [_StopAt(1000)], quiet=True).run()
    segment = max((run / "replay").iterdir())
    content = segment.read_bytes()
    if damage == "missing":
        segment.unlink()
    else:
        half = len(content) // 2
        segment.write_bytes(content[:half] if damage == "cut" else content[:half] + b"?" + content[half + 1 :])
    session = zx.Session.resume(run, quiet=True)
    (notice,) = session.folder.notices
    assert str(segment) in notice
    assert notice.endswith("going on from the checkpoint of step 800")
    assert session.run()["env_steps"] == 1200
    assert differing_tensors(tmp_path / "whole", run) == []
    assert metrics_rows(tmp_path / "whole") == metrics_rows(run)


def test_damaged_replay_segments_of_all_checkpoints_are_told(short_config: Callable, tmp_path: Path) -> None:
    run = tmp_path / "run"
    zx.Session(short_config("dqn", "toy/match", checkpoint_every_steps=400), run, quiet=True).run()
    for segment in (run / "replay").iterdir():
        segment.write_bytes(b"")
    with pytest.raises(UserError, match=r"replay segment .* is damaged"):
        zx.Session.resume(run, quiet=True)


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
