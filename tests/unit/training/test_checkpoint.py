"""Checkpoint files: atomic writes, exact round trips and damaged files."""

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
    """Write any tree, not only that of a checkpoint."""
    with path.open("wb") as file:
        write_archive(file, tree)


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    write_atomically(file, lambda out: out.write(b"old"))

    def fail(out: Any) -> None:
        out.write(b"half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_atomically(file, fail)
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]  # no temporary file remains
    write_atomically(file, lambda out: out.write(b"new"))
    assert file.read_bytes() == b"new"


def test_archive_round_trip(tmp_path: Path) -> None:
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
    restored = read_archive(tmp_path / "a.safetensors")
    assert restored.keys() == state.keys()
    for name in ("array", "bytes", "flags", "empty", "without dimensions"):
        assert isinstance(restored[name], np.ndarray)
        assert restored[name].dtype == state[name].dtype
        assert restored[name].shape == state[name].shape, name
        assert np.array_equal(restored[name], state[name])
    assert (restored["number"], restored["integer"], restored[7]) == (1.5, 2**62, "keys may be numbers")
    assert restored["nan"] != restored["nan"]
    assert (restored["a", 1], restored["$"]) == ("keys may be tuples", "a dict may have any key")
    assert restored["bytes of text"] == b"\x00\xff"
    for name in ("half", "unsigned", "large", "transposed"):
        assert restored[name].dtype == state[name].dtype
        assert torch.equal(restored[name], state[name]), name
    assert torch.equal(restored["tensor"], torch.ones(2))
    assert restored["nested"][0]["a"][:3] == (1, "two", None)
    assert isinstance(restored["nested"][0]["a"], tuple)
    assert restored["nested"][1] == []


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"mean": {"of": deque([1.0])}}, r"state\.mean\.of is a deque, which can't be saved in a checkpoint"),
        ({"where": [Path("runs")]}, r"state\.where\.0 is a .*Path"),
        ({"seen": frozenset({1})}, "is a frozenset"),
        ({"phase": Phase.EVAL}, "is a Phase"),
        ({frozenset(): 1}, "a dict key in state is a frozenset"),
        ({"objects": np.array([None])}, "is a ndarray of object"),
        ({"words": np.array(["a"])}, "is a ndarray of <U1"),
        ({"phase": torch.zeros(1, dtype=torch.complex128)}, "is a Tensor of torch.complex128"),
        ({((),): 1}, "a dict key in state is a tuple"),
    ],
)
def test_state_that_cannot_be_saved_is_rejected(state: dict[Any, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(zx.UserError, match=message):
        write_checkpoint(tmp_path / "a.safetensors", {"kind": "agent", "policy": {}, **state})
    assert list(tmp_path.iterdir()) == []


def test_numpy_keys_become_python_numbers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a.safetensors", {"kind": "agent", "policy": {}, "counts": {np.int64(3): 1}})
    assert read_checkpoint(tmp_path / "a.safetensors")["counts"] == {3: 1}


def test_random_generator_round_trip(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rng.random(5)
    restored = np.random.default_rng(0)
    save(rng.bit_generator.state, tmp_path / "a")
    restored.bit_generator.state = read_archive(tmp_path / "a")
    assert restored.random(4).tolist() == rng.random(4).tolist()


def _write_text(path: Path) -> None:
    path.write_text("hello")


def _truncate(path: Path) -> None:
    save({"format": 1, "kind": "run", "policy": {"a": torch.zeros(1000)}}, path)
    path.write_bytes(path.read_bytes()[:-200])


def _flip_bit(path: Path) -> None:
    save({"format": 1, "kind": "agent", "policy": {"a": torch.zeros(1000)}}, path)
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": _write_text,
    "truncated": _truncate,
    "flipped bit": _flip_bit,
    "pickled code": lambda path: path.write_bytes(pickle.dumps(os.system)),
    "tensor": lambda path: save(torch.zeros(3), path),
    "unrelated dict": lambda path: save({"weights": 1}, path),
    "missing policy": lambda path: save({"format": 1, "kind": "run"}, path),
    "torch file": lambda path: torch.save({"format": 1, "kind": "agent", "policy": {}}, path),
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_checkpoint_is_rejected_with_its_path(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    damage(tmp_path / "000000000100.safetensors")
    with pytest.raises(UserError, match=r"000000000100.safetensors is damaged or not a checkpoint"):
        read_checkpoint(tmp_path / "000000000100.safetensors")


@pytest.mark.parametrize("version", [FORMAT + 1, 10**6, "two"])
def test_newer_format_is_rejected(version: object, tmp_path: Path) -> None:
    save({"format": version, "kind": "run", "policy": {}}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=f"has format {version}, but this version of zhixing reads up to {FORMAT}"):
        read_checkpoint(tmp_path / "a.safetensors")


def test_newest_checkpoints_and_the_best_are_kept(short_config: Callable, tmp_path: Path) -> None:
    cfg = short_config("ppo", "toy/match", checkpoint_every=200, keep_checkpoints=3)
    zx.Session(cfg, tmp_path / "run", quiet=True).run()
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    # with 64 steps per iteration, checkpoints are due at 832 (800), 1024 (1000) and the end, 1216 (1200)
    assert names == [
        "000000000832.safetensors",
        "000000001024.safetensors",
        "000000001216.safetensors",
        "best.safetensors",
    ]


def test_best_checkpoint_has_the_highest_evaluation(short_config: Callable, tmp_path: Path) -> None:
    cfg = short_config("ppo", "toy/match", eval_every=200)
    result = zx.Session(cfg, tmp_path / "run", quiet=True).run()
    best = read_checkpoint(tmp_path / "run" / "checkpoints" / "best.safetensors")
    assert best["kind"] == "agent"
    assert best["return"] == result["best_return"]
    assert zx.load(tmp_path / "run", "best").act(np.eye(4, dtype=np.float32)).shape == (4,)
    with pytest.raises(UserError, match="has no checkpoint 'first': use last or best, or the step"):
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
def test_damaged_newer_file_does_not_evict_new_checkpoints(keep: int, short_config: Callable, tmp_path: Path) -> None:
    """The run resumes before a damaged file and stops before its step; the new checkpoint must be kept."""
    run = tmp_path / "run"
    zx.Session(short_config("ppo", "toy/match", checkpoint_every=400), run, quiet=True).run()
    newest = max((run / "checkpoints").glob("0*.safetensors"))
    newest.write_bytes(b"")
    with pytest.raises(KeyboardInterrupt):
        zx.Session.resume(run, [_StopAt(900)], quiet=True, keep_checkpoints=keep).run()
    assert RunFolder.open(run).load()["steps"] == 960  # 15 iterations of 64 steps, the first after 900


def test_off_policy_run_resumes_before_a_damaged_checkpoint(short_config: Callable, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cfg = short_config("dqn", "toy/match", checkpoint_every=400)
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, run, [_StopAt(1000)], quiet=True).run()
    (run / "checkpoints" / "000000001000.safetensors").write_bytes(b"")
    result = zx.Session.resume(run, quiet=True).run()
    assert result["env_steps"] == 1200
    assert zx.Session.resume(run, quiet=True).finished


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "missing"])
def test_damaged_replay_segment_falls_back_to_the_previous_checkpoint(
    damage: str, short_config: Callable, tmp_path: Path
) -> None:
    """The resumed run continues from the previous checkpoint and equals an uninterrupted one."""
    cfg = short_config("dqn", "toy/match", checkpoint_every=400)
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
        segment.write_bytes(content[:half] if damage == "truncated" else content[:half] + b"?" + content[half + 1 :])
    session = zx.Session.resume(run, quiet=True)
    (notice,) = session.folder.notices
    assert str(segment) in notice
    assert notice.endswith("continuing from the checkpoint of step 800")
    assert session.run()["env_steps"] == 1200
    assert differing_tensors(tmp_path / "whole", run) == []
    assert metrics_rows(tmp_path / "whole") == metrics_rows(run)


def test_damaged_replay_segments_of_all_checkpoints_are_rejected(short_config: Callable, tmp_path: Path) -> None:
    run = tmp_path / "run"
    zx.Session(short_config("dqn", "toy/match", checkpoint_every=400), run, quiet=True).run()
    for segment in (run / "replay").iterdir():
        segment.write_bytes(b"")
    with pytest.raises(UserError, match=r"replay segment .* is damaged"):
        zx.Session.resume(run, quiet=True)


def test_invalid_run_folders_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; choose a folder"):
        RunFolder(tmp_path / "file").check_free()
    with pytest.raises(UserError, match="can't be written"):
        RunFolder(tmp_path / "file" / "below").create(zx.config.load(algorithm="ppo", env="toy/match"))
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").check_free()
    with pytest.raises(UserError, match=r"is not a run, because it contains no config.yaml"):
        RunFolder.open(tmp_path / "empty")
