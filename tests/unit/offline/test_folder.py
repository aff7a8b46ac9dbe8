"""zhixing's own format: round trips, memory mapping, and the rejection of damaged or malicious files."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_streams import KINDS, assert_same, record_dataset
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zhixing import offline
from zhixing.core import space_json
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_leaves
from zhixing.errors import UserError


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_spaces_survive_a_conversion(kind: str, tmp_path: Path) -> None:
    header = {
        "env": "my:Env",
        "options": {"a": [1, None]},
        "references": {"random": -1.5, "expert": 7},
        "note": "知行",
    }
    first = offline.open(record_dataset(tmp_path / "a", kind, **header))
    assert first.spaces == KINDS[kind]
    assert {name: getattr(first, name) for name in header} == header
    assert first.name == str(tmp_path / "a")
    offline.convert(tmp_path / "a", tmp_path / "b")
    second = offline.open(tmp_path / "b")
    assert_same(first, second, action_tolerance=1e-6)
    assert {name: getattr(second, name) for name in header} == header
    offline.convert(first.select([1, 0]), tmp_path / "c")
    assert_same(offline.open(tmp_path / "c"), first.select([1, 0]), action_tolerance=1e-6)


def base_of(array: Any) -> Any:
    """Return the memory map behind an array, or None."""
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    return array


@pytest.mark.parametrize("kind", ["dict", "same scale", "box"])
def test_data_is_memory_mapped(kind: str, tmp_path: Path) -> None:
    data = offline.open(record_dataset(tmp_path / "a", kind))
    for part in (data.arrays, data.final_fields):
        for name, tree in part.items():
            for leaf in tree_leaves(tree):
                assert type(leaf) is np.ndarray  # indexing a memmap is slow
                # only actions are copied, where the environment's scale isn't the policy's
                assert isinstance(base_of(leaf), np.memmap) == (name != "action" or kind == "same scale"), name
                assert not leaf.flags.writeable
    assert isinstance(base_of(data.ends), np.memmap)
    assert isinstance(base_of(data.episode(0).reward), np.memmap)


def test_rounding_errors_of_actions_at_bounds_are_clipped(tmp_path: Path) -> None:
    folder = record_dataset(tmp_path / "a", "same scale")
    raw = np.load(folder / "action.npy")
    raw[7] = [1.0005, -1.0005]
    np.save(folder / "action.npy", raw)
    action = offline.open(folder).arrays["action"]
    assert action[7].tolist() == [1.0, -1.0]
    assert np.array_equal(np.delete(action, 7, 0), np.delete(raw, 7, 0))
    raw[7] = [1.5, 0.0]
    np.save(folder / "action.npy", raw)
    with pytest.raises(UserError, match=r"a: field 'action' is \[1\.5, 0\.0\] at row 7; the action space is Box"):
        offline.open(folder)


def test_files_are_readable_with_plain_numpy(tmp_path: Path) -> None:
    folder = record_dataset(tmp_path / "a", "team")
    manifest = json.loads((folder / "manifest.json").read_text())
    data = offline.open(folder)
    assert (manifest["steps"], manifest["episodes"]) == (len(data), data.num_episodes) == (60, len(data.ends))
    assert {entry["file"] for entry in manifest["fields"]} | {"manifest.json"} == set(os.listdir(folder))
    for entry in manifest["fields"]:
        array = np.load(folder / entry["file"])
        assert (list(array.shape), array.dtype.str) == (entry["shape"], entry["dtype"])
    assert np.array_equal(np.load(folder / "reward.npy"), data.arrays["reward"])


# --- spaces ---


@pytest.mark.parametrize(
    "space",
    [
        Box(-np.inf, np.inf, (3,), np.float32),
        Box(np.float32([-np.inf, 0.1]), np.float32([1e30, np.inf])),
        Box(0, 255, (3, 4, 2), np.uint8),
        Box(-(2**63), 2**63 - 1, (1,), np.int64),
        Box(-1.0, 1.0, (), np.float64),
        Box(0.0, 1.0, (0,), np.float32),
        Discrete(3),
        Discrete(2**40, start=-7),
        MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, -3]]),
        MultiDiscrete([2, 3], dtype=np.int8),
        MultiBinary(4),
        MultiBinary([2, 3]),
        Dict(a=Discrete(2), b=Dict(c=Box(0.0, 1.0, (1,)))),
    ],
    ids=str,
)
def test_spaces_survive_json(space: Any) -> None:
    spaces = Spaces(space, Discrete(2), num_agents=2, mask=2, state=3, alive=True)
    data = json.loads(json.dumps(space_json.encode(spaces), allow_nan=False))
    assert space_json.decode(data) == spaces
    assert space_json.decode(data).fields() == spaces.fields()


def test_equal_bounds_are_stored_as_one_number() -> None:
    encoded = space_json.encode(Spaces(Box(0, 255, (84, 84, 4), np.uint8), Box(-np.inf, np.inf, (2,), np.float32)))
    assert encoded["obs"] == {"type": "Box", "shape": [84, 84, 4], "dtype": "uint8", "low": 0, "high": 255}
    assert (encoded["action"]["low"], encoded["action"]["high"]) == ("-inf", "inf")


def test_json_keeps_the_order_of_parts() -> None:
    space = Dict(OrderedDict(b=Discrete(2), a=Discrete(3)))
    back = space_json.decode(json.loads(json.dumps(space_json.encode(Spaces(space, Discrete(2))))))
    assert list(back.obs.spaces) == ["b", "a"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"type": "Box", "shape": [10**12], "dtype": "float32", "low": 0, "high": 1}, "has the shape"),
        ({"type": "Box", "shape": [2**13, 2**13], "dtype": "float32", "low": 0, "high": 1}, "has the shape"),
        ({"type": "Box", "shape": [-1], "dtype": "float32", "low": 0, "high": 1}, "has the shape"),
        ({"type": "Box", "shape": 3, "dtype": "float32", "low": 0, "high": 1}, "has the shape"),
        ({"type": "Box", "shape": [3], "dtype": "object", "low": 0, "high": 1}, "the dtype 'object'"),
        ({"type": "Box", "shape": [3], "dtype": "V999999999", "low": 0, "high": 1}, "the dtype"),
        ({"type": "Box", "shape": [3], "dtype": "float32", "low": [0, 0], "high": 1}, "has 2 bounds"),
        ({"type": "Box", "shape": [1], "dtype": "float32", "low": "nan", "high": 1}, "bounds of a box must be"),
        ({"type": "Box", "shape": [1], "dtype": "float32", "low": 0}, "are described by"),
        ({"type": "Discrete", "n": 0, "start": 0, "dtype": "int64"}, "n is 0, expected a positive"),
        ({"type": "Discrete", "n": True, "start": 0, "dtype": "int64"}, "n is True"),
        ({"type": "Discrete", "n": 2, "start": 0.5, "dtype": "int64"}, "start is 0.5"),
        ({"type": "MultiDiscrete", "nvec": [2, [3]], "start": [0, 0], "dtype": "int64"}, ""),
        ({"type": "MultiDiscrete", "nvec": ["2"], "start": [0], "dtype": "int64"}, "must be integers"),
        ({"type": "MultiBinary", "n": -1}, "n is -1"),
        ({"type": "Dict", "parts": [1]}, "parts of a Dict"),
        ({"type": "Text"}, "has the type 'Text'; allowed are"),
        ("Discrete(2)", "has the type None"),
    ],
)
def test_invalid_spaces_are_rejected(space: Any, message: str, tmp_path: Path) -> None:
    folder = record_dataset(tmp_path / "a")
    edit(folder, lambda manifest: manifest["spaces"].__setitem__("obs", space))
    with pytest.raises(UserError, match=f"manifest.json is damaged or not part of a dataset: .*{message}"):
        offline.open(folder)


# --- damage ---


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no format": (lambda m: m.pop("format"), "it has no format number"),
    "newer": (lambda m: m.update(format=2), "has format 2; this version reads up to 1"),
    "missing entry": (lambda m: m.pop("steps"), "it has the keys"),
    "more entries": (lambda m: m.update(run="rm"), "it has the keys"),
    "negative": (lambda m: m.update(steps=-60), "it counts -60 steps"),
    "text": (lambda m: m.update(episodes="2"), "it counts 60 steps and '2' episodes"),
    "many": (lambda m: m.update(steps=10**60), "it counts 1"),
    "more steps": (lambda m: m.update(steps=61), "its spaces need the field"),
    "env": (lambda m: m.update(env=[1]), r"env is '\[1\]'"),
    "options": (lambda m: m.update(options=3), "options is"),
    "references": (lambda m: m.update(references={"random": 10**400}), "reference 'random' is"),
    "note": (lambda m: m.update(note=None), "note is"),
    "agents": (lambda m: m["spaces"].update(num_agents=0), "num_agents is 0"),
    "alive": (lambda m: m["spaces"].update(alive=1), "alive is 1"),
    "mask": (lambda m: m["spaces"].update(mask="3"), "mask is '3'"),
    "no spaces": (lambda m: m.update(spaces=None), "spaces are described by NoneType"),
    "path above": (lambda m: m["fields"][0].update(file="../obs.npy"), r"it lists .*\.\./obs\.npy"),
    "absolute path": (lambda m: m["fields"][0].update(file="/etc/passwd"), r"it lists .*/etc/passwd"),
    "another file": (lambda m: m["fields"][1].update(file="reward.npy"), "its spaces need the field"),
    "fewer fields": (lambda m: m["fields"].pop(), "it lists nothing"),
    "more fields": (lambda m: m["fields"].append(1), "it lists .* fields, its spaces need"),
    "no fields": (lambda m: m.update(fields="obs"), "its spaces need the field"),
}


@pytest.mark.parametrize(("change", "message"), MANIFESTS.values(), ids=MANIFESTS.keys())
def test_invalid_manifests_are_rejected(change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path) -> None:
    folder = record_dataset(tmp_path / "a")
    (tmp_path / "obs.npy").write_bytes((folder / "obs.0.npy").read_bytes())
    edit(folder, change)
    with pytest.raises(UserError, match=message):
        offline.open(folder)


@pytest.mark.parametrize(
    "text", ["", "hello", "[1]", "3", "[" * 100_000, '{"format": 1', '{"format": ' + "1" * 5000 + "}"]
)
def test_manifests_that_are_not_json_are_rejected(text: str, tmp_path: Path) -> None:
    folder = record_dataset(tmp_path / "a")
    (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest.json is damaged or not part of a dataset"):
        offline.open(folder)


class Malicious:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["TRAP"],)


def _object_array(path: Path) -> None:
    np.save(path, np.array([Malicious()] * 60, object), allow_pickle=True)


def _zip(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, a=np.zeros(60, np.float32))


def _claims(shape: str, descr: str = "'<f4'") -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
        path.write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + bytes(240))

    return write


def _cut(length: int) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(path.read_bytes()[:length])


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "empty": _cut(0),
    "cut in the magic": _cut(5),
    "cut in the header": _cut(40),
    "cut in the data": _cut(-1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "text": lambda path: path.write_text("hello" * 100),
    "an object array": _object_array,
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Malicious())),
    "a zip": _zip,
    "another type": lambda path: np.save(path, np.zeros(60, np.float64)),
    "another order of bytes": lambda path: np.save(path, np.zeros(60, ">f4")),
    "another shape": lambda path: np.save(path, np.zeros((60, 1), np.float32)),
    "fewer rows": lambda path: np.save(path, np.zeros(59, np.float32)),
    "a header that claims much": _claims("(1000000000000000,)"),
    "a header that claims more than there can be": _claims("(10000000000000000000000000,)"),
    "a header with negative rows": _claims("(-60,)"),
    "a header that is code": _claims("__import__('os').mkdir('trap')"),
    "a header of a record": _claims("(60,)", "[('a', 'O')]"),
    "a header that doesn't end": _claims("((((", ""),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_files_are_rejected_without_executing_anything(
    damage: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "trap"))
    monkeypatch.chdir(tmp_path)
    folder = record_dataset(tmp_path / "a", "box")
    damage(folder / "reward.npy")
    with pytest.raises(UserError, match=r"a/reward.npy is damaged or not part of a dataset: \S"):
        offline.open(folder)
    assert not (tmp_path / "trap").exists()


def test_the_malicious_file_works_with_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "trap"))
    _object_array(tmp_path / "a.npy")
    np.load(tmp_path / "a.npy", allow_pickle=True)
    assert (tmp_path / "trap").exists()


@pytest.mark.filterwarnings("ignore")  # NumPy warns about some headers
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 127), st.binary(min_size=1, max_size=6))
def test_any_header_is_read_or_rejected(tmp_path: Path, at: int, junk: bytes) -> None:
    folder = tmp_path / "a"
    if not folder.exists():
        record_dataset(folder, "box")
        (tmp_path / "whole").write_bytes((folder / "reward.npy").read_bytes())
    whole = bytearray((tmp_path / "whole").read_bytes())
    whole[at : at + len(junk)] = junk
    (folder / "reward.npy").write_bytes(whole)
    try:
        assert len(offline.open(folder)) == 60
    except UserError as error:
        assert "\n" not in str(error)


def test_values_are_checked_when_opened(tmp_path: Path) -> None:
    folder = record_dataset(tmp_path / "a", "box")
    reward = np.load(folder / "reward.npy")
    reward[33] = np.nan
    np.save(folder / "reward.npy", reward)
    with pytest.raises(UserError, match="a: field 'reward' is nan at row 33; numbers must be finite"):
        offline.open(folder)


def test_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = record_dataset(tmp_path / "a", "box")
    (folder / "reward.npy").write_bytes(b"")
    with pytest.raises(UserError, match="is damaged"):
        offline.convert(folder, tmp_path / "b")
    assert not (tmp_path / "b").exists()
