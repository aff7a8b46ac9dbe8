"""Malformed and malicious files raise only `UserError`, in limited time and memory, and are never executed."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from soak_config import EXAMPLES, record

import zhixing as zx
from zhixing import offline
from zhixing.buffers import segments
from zhixing.envs.crash import crash_report
from zhixing.reports.plots.runs import read_run
from zhixing.training.checkpoint_file import read_archive, write_archive
from zhixing.training.run_folder import RunFolder, read_checkpoint, write_checkpoint

MAX_SECONDS, MAX_MEGABYTES = 5.0, 300  # per input, and for all inputs together
RSS_PER_MB = 2**20 if sys.platform == "darwin" else 2**10  # macOS reports ru_maxrss in bytes, Linux in kilobytes
TINY = {"env_steps": 60, "learning_starts": 20, "batch_size": 4, "replay__capacity": 50, "net__hidden_sizes": [4]}
TINY |= {"eval_every": 0, "eval_episodes": 1, "tensorboard": False, "vector__backend": "serial"}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a valid file of each format."""
    folder = tmp_path_factory.mktemp("samples")
    zx.train("dqn", "CartPole-v1", out=folder / "run", quiet=True, **TINY)
    from zhixing.training.collect_data import collect_from_agent

    collect_from_agent(folder / "run", str(folder / "data"), 40)
    write_hdf5(folder / "d4rl" / "data.hdf5")
    (folder / "run" / "dataset.json").write_text('{"references": {"random": 1.0, "expert": 2.0}}')
    report = {"env": {"name": "toy/match", "options": {}}, "backend": "serial", "step_timeout": None, "index": 0}
    report |= {"origin": {"seed": None, "rng": np.random.default_rng(0).bit_generator.state, "options": None}}
    error = {"type": "ValueError", "message": "no", "traceback": ""}
    crash_report.write(folder / "crash", {**report, "seed": 5, "actions": [0, 1], "error": error})
    return folder


def write_hdf5(path: Path) -> None:
    """Write nine steps in D4RL's layout."""
    import h5py

    path.parent.mkdir()
    with h5py.File(path, "w") as file:
        file["observations"] = np.zeros((9, 3), np.float32)
        file["actions"] = np.zeros((9, 1), np.float32)
        file["rewards"] = np.ones(9, np.float32)
        file["terminals"] = np.arange(9) % 3 == 2
        file["timeouts"] = np.zeros(9, bool)


# --- changes of files ---


def scramble(content: bytes, rng: random.Random) -> bytes:
    """Replace, remove or insert some bytes, or copy them from elsewhere in the file."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        start, length = rng.randrange(len(changed) + 1), rng.choice([1, 1, 2, 4, 100])
        piece = rng.choice(
            [rng.randbytes(length), b"\xff" * length, bytes(length), content[start // 2 : start // 2 + length]]
        )
        if rng.random() < 0.3:
            changed[start:start] = piece
        else:
            changed[start : start + (length if rng.random() < 0.3 else len(piece))] = piece
    return bytes(changed[: rng.randrange(len(changed) + 1)] if rng.random() < 0.1 else changed)


def scramble_zip(content: bytes, rng: random.Random) -> bytes:
    """Scramble one member of a zip archive and keep the checksums valid."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", rng.choice([0, 0, 0, 8])) as new:
        chosen = rng.choice(old.namelist() if rng.random() < 0.3 else old.namelist()[:1])  # the first is the pickle
        for name in old.namelist():
            member = old.read(name)
            new.writestr(name, scramble(member, rng) if name == chosen else member)
    return out.getvalue()


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**63,
    10**30,
    1e308,
    float("nan"),
    "",
    "..",
    "../../x",
    "/etc/passwd",
    "os:system",
]
ODD += [[], {}, [[]], {"a": []}, [0] * 50, "x" * 1000, b"y", torch.zeros(3), torch.zeros(0), np.zeros(2), (1, 2)]


def tamper(tree: Any, rng: random.Random, plain: bool = True) -> Any:
    """Replace, remove or rename one part of a tree. With `plain`, use only values that JSON supports."""
    odd = [value for value in ODD if not plain or isinstance(value, (type(None), bool, int, float, str, list, dict))]
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    if not keys or rng.random() < 0.15:
        return rng.choice(odd)
    key = rng.choice(keys)
    changed: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    if rng.random() < 0.1:
        del changed[key]
    elif isinstance(tree, dict) and rng.random() < 0.1:
        changed[rng.choice([f"{key}x", "..", ""])] = changed.pop(key)
    else:
        changed[key] = tamper(tree[key], rng, plain)
    return changed


# --- readers ---

Change = Callable[[Path, random.Random], None]


def change_bytes(file: str, in_zip: bool = False) -> Change:
    def change(folder: Path, rng: random.Random) -> None:
        path = next(folder.glob(file))
        path.write_bytes((scramble_zip if in_zip else scramble)(path.read_bytes(), rng))

    return change


def change_json(file: str) -> Change:
    def change(folder: Path, rng: random.Random) -> None:
        path = next(folder.glob(file))
        path.write_text(json.dumps(tamper(json.loads(path.read_text()), rng)))

    return change


def change_config(folder: Path, rng: random.Random) -> None:
    path = folder / "run" / "config.yaml"
    path.write_text(json.dumps(tamper(zx.config.read_yaml(path), rng)))  # JSON is YAML


def change_tree_text(folder: Path, rng: random.Random) -> None:
    """Scramble the text of a checkpoint's tree and keep the checksum valid."""
    path = next((folder / "run" / "checkpoints").glob("0*.safetensors"))
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    metadata = header["__metadata__"]
    metadata["tree"] = scramble(metadata["tree"].encode(), rng).decode("utf-8", "replace")
    if rng.random() < 0.5:
        name = rng.choice(list(header))
        header[name] = tamper(header[name], rng)
    metadata["checksum"] = f"{zlib.crc32(whole[end:], zlib.crc32(metadata['tree'].encode())):08x}"
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + whole[end:])


def change_tree(folder: Path, rng: random.Random) -> None:
    """Change a part of a checkpoint's tree and write a valid file."""
    path = next((folder / "run" / "checkpoints").glob("0*.safetensors"))
    with path.open("r+b") as file:
        tree = tamper(read_archive(path), rng, plain=False)
        file.truncate()
        write_archive(file, tree)


def read_whole_run(folder: Path) -> None:
    """Read all files of a run without building its parts."""
    run = RunFolder.open(folder / "run")
    run.read_config()
    run.load()
    for path in run.replay.glob("*.npz"):
        segments.read(path.parent, path.name)
    run.read_references()
    read_run(run.path)


READERS: dict[str, tuple[Callable[[Path], Any], list[Change], str]] = {
    "configuration": (
        lambda folder: RunFolder(folder / "run").read_config(),
        [change_bytes("run/config.yaml"), change_config],
        "run/config.yaml",
    ),
    "checkpoint": (
        lambda folder: read_checkpoint(next((folder / "run" / "checkpoints").glob("0*.safetensors"))),
        [change_bytes("run/checkpoints/0*.safetensors"), change_tree_text, change_tree],
        "run/checkpoints/0*.safetensors",
    ),
    "dataset": (
        lambda folder: offline.open(folder / "data"),
        [
            change_json("data/manifest.json"),
            change_bytes("data/manifest.json"),
            change_bytes("data/obs.npy"),
            change_bytes("data/ends.npy"),
        ],
        "data/*",
    ),
    "HDF5 file": (lambda folder: offline.open(folder / "d4rl" / "data.hdf5"), [change_bytes("d4rl/*")], "d4rl/*"),
    "crash report": (
        lambda folder: crash_report.read(folder / "crash" / "crash-001.json"),
        [change_json("crash/crash-001.json"), change_bytes("crash/crash-001.json")],
        "crash/*",
    ),
    "run folder": (
        read_whole_run,
        [
            change_bytes("run/replay/*.npz"),
            change_bytes("run/replay/*.npz", in_zip=True),
            change_bytes("run/metrics.csv"),
            change_json("run/dataset.json"),
            change_config,
            change_tree,
        ],
        "run/**/*",
    ),
}


@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("name", READERS)
def test_readers_raise_only_user_error(name: str, samples: Path, tmp_path: Path) -> None:
    read, changes, files = READERS[name]
    folder = tmp_path / "here"
    shutil.copytree(samples, folder)
    originals = {path: path.read_bytes() for path in folder.glob(files) if path.is_file()}
    tried = refused = 0
    slowest = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def read_changed(seed: int) -> None:
        nonlocal tried, refused, slowest
        rng = random.Random(seed)
        for path, content in originals.items():
            path.write_bytes(content)
        rng.choice(changes)(folder, rng)
        start = time.process_time()
        try:
            read(folder)
        except zx.UserError:
            refused += 1
        tried += 1
        slowest = max(slowest, time.process_time() - start)

    for _ in range(-(-EXAMPLES // 1000)):  # one long search would store all its inputs
        search = settings(
            max_examples=min(EXAMPLES, 1000),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        )
        search(given(st.integers(0, 2**64 - 1))(read_changed))()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / RSS_PER_MB
    record(
        "inputs", reader=name, tried=tried, refused=refused, slowest_seconds=round(slowest, 3), grown_mb=round(grown)
    )
    assert tried >= min(EXAMPLES, 100)
    assert refused > tried // 10  # otherwise the changes would have no effect
    assert slowest < MAX_SECONDS
    assert grown < MAX_MEGABYTES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


@pytest.mark.parametrize("seed", range(min(EXAMPLES // 20, 1000)))
def test_tampered_state_is_resumed_or_raises_user_error(seed: int, samples: Path, tmp_path: Path) -> None:
    shutil.copytree(samples / "run", tmp_path / "run")
    change_tree(tmp_path, random.Random(seed))
    with suppress(zx.UserError):
        zx.Session.resume(tmp_path / "run", quiet=True).close()
    with suppress(zx.UserError):
        zx.load(tmp_path / "run")


# --- HDF5 files that refer to other files or claim impossible sizes ---


def external_link(file: Any, elsewhere: Path) -> None:
    import h5py

    file["rewards"] = h5py.ExternalLink(str(elsewhere), "rewards")


def external_storage(file: Any, elsewhere: Path) -> None:
    elsewhere.with_suffix(".raw").write_bytes(bytes(36))
    file.create_dataset("rewards", (9,), np.float32, external=[(str(elsewhere.with_suffix(".raw")), 0, 36)])


def virtual_dataset(file: Any, elsewhere: Path) -> None:
    import h5py

    layout = h5py.VirtualLayout((9,), np.float32)
    layout[:] = h5py.VirtualSource(str(elsewhere), "rewards", shape=(9,))
    file.create_virtual_dataset("rewards", layout)


def huge_dataset(file: Any, elsewhere: Path) -> None:
    file.create_dataset("rewards", (10**12,), np.float32, chunks=(1024,))


@pytest.mark.parametrize(
    ("add_rewards", "message"),
    [
        (external_link, "'rewards' is a link, which isn't followed"),
        (external_storage, "'rewards' is stored in other files"),
        (virtual_dataset, "'rewards' is stored in other files"),
        (huge_dataset, "'rewards' claims 4,000,000,000,000 bytes"),
    ],
)
def test_hdf5_reads_no_other_file(add_rewards: Callable[[Any, Path], None], message: str, tmp_path: Path) -> None:
    import h5py

    write_hdf5(tmp_path / "a" / "data.hdf5")
    write_hdf5(tmp_path / "b" / "data.hdf5")
    with h5py.File(tmp_path / "a" / "data.hdf5", "a") as file:
        del file["rewards"]
        add_rewards(file, tmp_path / "b" / "data.hdf5")
    with pytest.raises(zx.UserError, match=message):
        offline.open(tmp_path / "a" / "data.hdf5")


# --- files that execute code when unpickled ---


class Exploit:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


def write_npz(path: Path) -> None:
    np.savez(path.open("wb"), index=np.array([Exploit()], dtype=object))


def write_npy(path: Path) -> None:
    np.save(path.open("wb"), np.array([Exploit()], dtype=object))


EXPLOITS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "checkpoint": (
        "run/checkpoints/0*.safetensors",
        lambda path: torch.save({"format": 1, "kind": "run", "policy": Exploit()}, path),
    ),
    "checkpoint, bare": ("run/checkpoints/0*.safetensors", lambda path: path.write_bytes(pickle.dumps(Exploit()))),
    "checkpoint, older format of torch": (
        "run/checkpoints/0*.safetensors",
        lambda path: torch.save(Exploit(), path, _use_new_zipfile_serialization=False),
    ),
    "replay": ("run/replay/*.npz", write_npz),
    "configuration": (
        "run/config.yaml",
        lambda path: path.write_text("algorithm: !!python/object/apply:os.system ['touch executed']"),
    ),
    "configuration, code": (
        "run/config.yaml",
        lambda path: path.write_text("algorithm: ppo\nenv: {name: 'os:system', command: touch executed}"),
    ),
    "dataset": ("data/obs.npy", write_npy),
    "dataset, manifest": ("data/manifest.json", lambda path: path.write_bytes(pickle.dumps(Exploit()))),
    "crash report": ("crash/crash-001.json", lambda path: path.write_bytes(pickle.dumps(Exploit()))),
    "metrics": ("run/metrics.csv", lambda path: path.write_bytes(pickle.dumps(Exploit()))),
    "references": ("run/dataset.json", lambda path: path.write_bytes(pickle.dumps(Exploit()))),
}


@pytest.mark.parametrize("name", EXPLOITS)
def test_files_are_not_executed(name: str, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZHIXING_TRUST", raising=False)
    shutil.copytree(samples, tmp_path / "here")
    pattern, write = EXPLOITS[name]
    write(next((tmp_path / "here").glob(pattern)))
    reader = name.partition(",")[0]
    read = READERS[reader if reader in ("dataset", "crash report") else "run folder"][0]
    with pytest.raises(zx.UserError):
        read(tmp_path / "here")
    assert not Path("executed").exists()
    record("faults", injected=1, what=f"exploit in {name}")


def checkpoint(tree: str, **tensors: Any) -> bytes:
    """Return a checkpoint with this text as its tree and a valid checksum."""
    metadata = {"tree": tree, "checksum": f"{zlib.crc32(tree.encode()):08x}"}
    content = json.dumps({"__metadata__": metadata, **tensors}).encode()
    return len(content).to_bytes(8, "little") + content


def huge_tensor(shape: list[int], **changes: Any) -> bytes:
    """Return a checkpoint that claims to contain a tensor of this shape, without its data."""
    size = 4 * math.prod(shape)
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]} | changes
    return checkpoint('{"$":"tensor","name":"a"}', a=tensor)


def repeated_tensor(times: int) -> bytes:
    """Return a checkpoint whose tree contains one tensor many times; copies of it would need much memory."""
    tensor = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    return checkpoint("[" + ",".join(['{"$":"tensor","name":"a"}'] * times) + "]", a=tensor)


def dict_with_key(key: str) -> str:
    return f'{{"$":"dict","items":[[{key},1]]}}'


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nested lists": lambda: checkpoint("[" * 1_000_000),
    "nested lists that end": lambda: checkpoint("[" * 200_000 + "]" * 200_000),
    "nested dicts": lambda: checkpoint('{"a":' * 200_000 + "1" + "}" * 200_000),
    "a nested tuple as a key": lambda: checkpoint(
        dict_with_key('{"$":"tuple","items":[' * 100_000 + "1" + "]}" * 100_000)
    ),
    "a less nested tuple as a key": lambda: checkpoint(dict_with_key('{"$":"tuple","items":[' * 80 + "1" + "]}" * 80)),
    "a list as a key": lambda: checkpoint(dict_with_key("[]")),
    "a dict as a key": lambda: checkpoint(dict_with_key("{}")),
    "very many values": lambda: checkpoint("[" + "[]," * 7_000_000 + "0]"),
    "a long number": lambda: checkpoint("9" * 2_000_000),
    "no tree": lambda: b"\2\0\0\0\0\0\0\0{}",
    "no header": lambda: (2**63).to_bytes(8, "little"),
    "a header as large as the file": lambda: (10**6).to_bytes(8, "little") + bytes(10**6),
    "a tensor of a terabyte": lambda: huge_tensor([2**38]),
    "a tensor of no size": lambda: huge_tensor([0, 10**30]),
    "a tensor of many dimensions": lambda: huge_tensor([1] * 10_000),
    "a tensor with a negative side": lambda: huge_tensor([-1, -1]),
    "a tensor of objects": lambda: huge_tensor([], dtype="O"),
    "a tensor before the file": lambda: huge_tensor([1], data_offsets=[-4, 0]),
    "a tensor that is repeated": lambda: repeated_tensor(1000),
    "an unknown kind": lambda: checkpoint('{"$":"code","name":"os:system"}'),
    "an unknown tensor": lambda: checkpoint('{"$":"tensor","name":"a"}'),
}


READ_ALL = """
import json, resource, sys
from pathlib import Path
from zhixing.training.run_folder import read_checkpoint
from zhixing.errors import UserError
for path in sorted(Path(sys.argv[1]).iterdir()):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read_checkpoint(path)
        error = "none"
    except UserError as caught:
        error = str(caught)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // int(sys.argv[2])
    print(json.dumps([path.name, error, grown]), flush=True)
"""


def test_hostile_checkpoints_raise_user_error_in_little_memory(tmp_path: Path) -> None:
    """A separate process reads them, so a crash of the interpreter or a large allocation fails the test."""
    for name, make in HOSTILE.items():
        (tmp_path / name).write_bytes(make())
    completed = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(tmp_path), str(RSS_PER_MB)], capture_output=True, text=True, timeout=300
    )
    results = [json.loads(line) for line in completed.stdout.splitlines()]
    assert completed.returncode == 0, (results[-1:], completed.stderr)
    assert [name for name, _, _ in results] == sorted(HOSTILE)
    for name, error, grown in results:
        assert "is damaged or not a checkpoint" in error, name
        assert grown < MAX_MEGABYTES, name


def doubling_lines(first: str, rest: str) -> str:
    """Return YAML with 20 lines that each contain the line before twice."""
    return first + "".join(rest.format(f"a{i}", f"a{i + 1}") for i in range(20))


@pytest.mark.parametrize(
    "text",
    [
        doubling_lines("a0: &a0 [x, x]\n", "{1}: &{1} [*{0}, *{0}]\n"),
        doubling_lines("a0: &a0 {x: 1}\n", "{1}: &{1} {{<<: [*{0}, *{0}]}}\n"),
    ],
)
def test_yaml_that_expands_exponentially_is_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"algorithm: ppo\nenv: CartPole-v1\n{text}")
    with pytest.raises(zx.UserError, match=r"repeats parts many times|merge keys expand"):
        zx.config.load(tmp_path / "a.yaml")


# --- paths ---


@pytest.fixture
def run(samples: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(samples / "run", tmp_path / "run")
    (tmp_path / "outside.txt").write_text("unchanged")
    yield tmp_path / "run"
    assert (tmp_path / "outside.txt").read_text() == "unchanged"


@pytest.mark.parametrize(
    "name", ["metrics.csv", "checkpoints/best.safetensors", "replay/segment-00000000.npz", "crash"]
)
def test_links_out_of_a_run_are_rejected(name: str, run: Path) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(os.path.relpath(run.parent / "outside.txt", (run / name).parent))
    with pytest.raises(zx.UserError, match="is a link out of"):
        zx.Session.resume(run)


def test_links_within_a_run_and_to_a_run_are_accepted(run: Path, tmp_path: Path) -> None:
    (run / "metrics.csv").rename(run / "rows.csv")
    (run / "metrics.csv").symlink_to("rows.csv")
    (tmp_path / "shortcut").symlink_to(run)
    zx.Session.resume(tmp_path / "shortcut", quiet=True).close()


def test_named_pipe_in_a_run_is_rejected(run: Path) -> None:
    (run / "metrics.csv").unlink()
    os.mkfifo(run / "metrics.csv")
    with pytest.raises(zx.UserError, match="neither a file nor a folder"):
        zx.Session.resume(run)


@pytest.mark.parametrize(
    "name", ["../../outside.npz", "/tmp/outside.npz", "segment-00000000.npz/../x", 7, "segment-1.npz"]
)
def test_checkpoint_may_not_name_files_outside_the_run(name: Any, run: Path) -> None:
    path = next((run / "checkpoints").glob("0*.safetensors"))
    state = read_checkpoint(path)
    state["replay"]["segments"][0]["name"] = name
    write_checkpoint(path, state)
    with pytest.raises(zx.UserError, match="is not the name of a replay segment"):
        zx.Session.resume(run)


# --- code named in a configuration ---


def test_code_named_by_a_run_is_imported_only_with_trust(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZHIXING_TRUST", raising=False)
    (tmp_path / "stranger.py").write_text("import pathlib\npathlib.Path('executed').touch()\n")
    text = (run / "config.yaml").read_text()
    env_readers = (zx.evaluate, zx.Session.resume)
    for line, changed, readers in (
        ("name: CartPole-v1", "name: stranger:make", env_readers),  # an agent acts without its environment
        ("kind: auto", "kind: stranger:make", (zx.load, *env_readers)),
    ):
        (run / "config.yaml").write_text(text.replace(line, changed))
        for reader in readers:
            with pytest.raises(zx.UserError, match=r"names code to import .*: stranger:make; .*--trust"):
                reader(run)
        code, _, error = run_cli("eval", str(run))
        assert code == 2
        assert "add --trust" in error
        assert not Path("executed").exists()
    with pytest.raises(zx.UserError, match="stranger"):  # it is imported, but defines no `make`
        zx.load(run, trust=True)
    assert Path("executed").exists()
