"""Files from anywhere: only our own error comes out, soon and in little memory, and nothing in them is executed."""

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
from soaking import EXAMPLES, count

import zhixing as zx
from zhixing import offline
from zhixing.buffers import segments
from zhixing.envs.crash import crash_report
from zhixing.report.plots.runs import read_run
from zhixing.training.checkpoint_file import read_archive, write_archive
from zhixing.training.run_folder import RunFolder, read_checkpoint, write_checkpoint

SECONDS, MEGABYTES = 5.0, 300  # for one input, and for all of them
RSS_PER_MB = 2**20 if sys.platform == "darwin" else 2**10  # macOS reports ru_maxrss in bytes, Linux in kilobytes
TINY = {"env_steps": 60, "learning_starts": 20, "batch_size": 4, "replay__capacity": 50, "net__hidden_sizes": [4]}
TINY |= {"eval_every_steps": 0, "eval_episodes": 1, "tensorboard": False, "vector__backend": "serial"}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A right one of each format."""
    folder = tmp_path_factory.mktemp("samples")
    zx.train("dqn", "CartPole-v1", out=folder / "run", quiet=True, **TINY)
    from zhixing.training.collect_data import collect_from_agent

    collect_from_agent(folder / "run", str(folder / "data"), 40)
    write_hdf5(folder / "d4rl" / "data.hdf5")
    (folder / "run" / "dataset.json").write_text('{"references": {"random": 1.0, "expert": 2.0}}')
    told = {"env": {"name": "toy/match", "options": {}}, "backend": "serial", "step_timeout": None, "index": 0}
    told |= {"origin": {"seed": None, "rng": np.random.default_rng(0).bit_generator.state, "options": None}}
    error = {"type": "ValueError", "message": "no", "traceback": ""}
    crash_report.write(folder / "crash", {**told, "seed": 5, "actions": [0, 1], "error": error})
    return folder


def write_hdf5(path: Path) -> None:
    """Nine steps as D4RL writes them."""
    import h5py

    path.parent.mkdir()
    with h5py.File(path, "w") as file:
        file["observations"] = np.zeros((9, 3), np.float32)
        file["actions"] = np.zeros((9, 1), np.float32)
        file["rewards"] = np.ones(9, np.float32)
        file["terminals"] = np.arange(9) % 3 == 2
        file["timeouts"] = np.zeros(9, bool)


# --- what is done to a file ---


def scramble(content: bytes, rng: random.Random) -> bytes:
    """Some bytes are others, missing, more, or come from elsewhere in the file."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at, length = rng.randrange(len(changed) + 1), rng.choice([1, 1, 2, 4, 100])
        piece = rng.choice(
            [rng.randbytes(length), b"\xff" * length, bytes(length), content[at // 2 : at // 2 + length]]
        )
        if rng.random() < 0.3:
            changed[at:at] = piece
        else:
            changed[at : at + (length if rng.random() < 0.3 else len(piece))] = piece
    return bytes(changed[: rng.randrange(len(changed) + 1)] if rng.random() < 0.1 else changed)


def scramble_inside(content: bytes, rng: random.Random) -> bytes:
    """A zip archive that is right but for one part, whose sum is right as well."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", rng.choice([0, 0, 0, 8])) as new:
        chosen = rng.choice(old.namelist() if rng.random() < 0.3 else old.namelist()[:1])  # the first is the pickle
        for name in old.namelist():
            part = old.read(name)
            new.writestr(name, scramble(part, rng) if name == chosen else part)
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
    """A tree in which one part is something else, is missing, or is there under another name."""
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


# --- who reads them ---

Change = Callable[[Path, random.Random], None]


def bytes_of(file: str, inside: bool = False) -> Change:
    def change(folder: Path, rng: random.Random) -> None:
        path = next(folder.glob(file))
        path.write_bytes((scramble_inside if inside else scramble)(path.read_bytes(), rng))

    return change


def json_of(file: str) -> Change:
    def change(folder: Path, rng: random.Random) -> None:
        path = next(folder.glob(file))
        path.write_text(json.dumps(tamper(json.loads(path.read_text()), rng)))

    return change


def yaml_of(folder: Path, rng: random.Random) -> None:
    path = folder / "run" / "config.yaml"
    path.write_text(json.dumps(tamper(zx.config.read_yaml(path), rng)))  # JSON is YAML


def resealed(folder: Path, rng: random.Random) -> None:
    """The tree, as text, is something else, and the checksum is right."""
    path = next((folder / "run" / "checkpoints").glob("0*.safetensors"))
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    about = json.loads(whole[8:end])
    metadata = about["__metadata__"]
    metadata["tree"] = scramble(metadata["tree"].encode(), rng).decode("utf-8", "replace")
    if rng.random() < 0.5:
        name = rng.choice(list(about))
        about[name] = tamper(about[name], rng)
    metadata["checksum"] = f"{zlib.crc32(whole[end:], zlib.crc32(metadata['tree'].encode())):08x}"
    content = json.dumps(about).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + whole[end:])


def tree_of(folder: Path, rng: random.Random) -> None:
    path = next((folder / "run" / "checkpoints").glob("0*.safetensors"))
    with path.open("r+b") as file:
        tree = tamper(read_archive(path), rng, plain=False)
        file.truncate()
        write_archive(file, tree)


def read_whole_run(folder: Path) -> None:
    """All that is read of a run without making its parts."""
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
        [bytes_of("run/config.yaml"), yaml_of],
        "run/config.yaml",
    ),
    "checkpoint": (
        lambda folder: read_checkpoint(next((folder / "run" / "checkpoints").glob("0*.safetensors"))),
        [bytes_of("run/checkpoints/0*.safetensors"), resealed, tree_of],
        "run/checkpoints/0*.safetensors",
    ),
    "dataset": (
        lambda folder: offline.open(folder / "data"),
        [
            json_of("data/manifest.json"),
            bytes_of("data/manifest.json"),
            bytes_of("data/obs.npy"),
            bytes_of("data/ends.npy"),
        ],
        "data/*",
    ),
    "HDF5 file": (lambda folder: offline.open(folder / "d4rl" / "data.hdf5"), [bytes_of("d4rl/*")], "d4rl/*"),
    "crash report": (
        lambda folder: crash_report.read(folder / "crash" / "crash-001.json"),
        [json_of("crash/crash-001.json"), bytes_of("crash/crash-001.json")],
        "crash/*",
    ),
    "run folder": (
        read_whole_run,
        [
            bytes_of("run/replay/*.npz"),
            bytes_of("run/replay/*.npz", inside=True),
            bytes_of("run/metrics.csv"),
            json_of("run/dataset.json"),
            yaml_of,
            tree_of,
        ],
        "run/**/*",
    ),
}


@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("name", READERS)
def test_only_our_own_error_comes_out(name: str, samples: Path, tmp_path: Path) -> None:
    read, changes, files = READERS[name]
    folder = tmp_path / "here"
    shutil.copytree(samples, folder)
    kept = {path: path.read_bytes() for path in folder.glob(files) if path.is_file()}
    kept |= (
        {path: path.read_bytes() for path in folder.glob("run/**/*") if path.is_file()} if name == "run folder" else {}
    )
    tried = refused = 0
    slowest = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def one(seed: int) -> None:
        nonlocal tried, refused, slowest
        rng = random.Random(seed)
        for path, content in kept.items():
            path.write_bytes(content)
        rng.choice(changes)(folder, rng)
        began = time.process_time()
        try:
            read(folder)
        except zx.UserError:
            refused += 1
        tried += 1
        slowest = max(slowest, time.process_time() - began)

    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    for _ in range(-(-EXAMPLES // 1000)):  # one long search would remember all that it tried
        few = settings(
            max_examples=min(EXAMPLES, 1000),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=quiet,
        )
        few(given(st.integers(0, 2**64 - 1))(one))()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / RSS_PER_MB
    count("inputs", reader=name, tried=tried, refused=refused, slowest_seconds=round(slowest, 3), grown_mb=round(grown))
    assert tried >= min(EXAMPLES, 100)
    assert refused > tried // 10  # else the changes would be none
    assert slowest < SECONDS
    assert grown < MEGABYTES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


@pytest.mark.parametrize("seed", range(min(EXAMPLES // 20, 1000)))
def test_a_run_whose_state_was_tampered_with_is_resumed_or_refused(seed: int, samples: Path, tmp_path: Path) -> None:
    shutil.copytree(samples / "run", tmp_path / "run")
    tree_of(tmp_path, random.Random(seed))
    with suppress(zx.UserError):
        zx.Session.resume(tmp_path / "run", quiet=True).close()
    with suppress(zx.UserError):
        zx.load(tmp_path / "run")


# --- files that reach out of themselves, or claim what they can't hold ---


def external_link(file: Any, elsewhere: Path) -> None:
    import h5py

    file["rewards"] = h5py.ExternalLink(str(elsewhere), "rewards")


def external_storage(file: Any, elsewhere: Path) -> None:
    elsewhere.with_suffix(".raw").write_bytes(bytes(36))
    file.create_dataset("rewards", (9,), np.float32, external=[(str(elsewhere.with_suffix(".raw")), 0, 36)])


def virtual(file: Any, elsewhere: Path) -> None:
    import h5py

    layout = h5py.VirtualLayout((9,), np.float32)
    layout[:] = h5py.VirtualSource(str(elsewhere), "rewards", shape=(9,))
    file.create_virtual_dataset("rewards", layout)


def hollow(file: Any, elsewhere: Path) -> None:
    file.create_dataset("rewards", (10**12,), np.float32, chunks=(1024,))


@pytest.mark.parametrize(
    ("put", "told"),
    [
        (external_link, "'rewards' is a link, which isn't followed"),
        (external_storage, "'rewards' is stored in other files"),
        (virtual, "'rewards' is stored in other files"),
        (hollow, "'rewards' claims 4,000,000,000,000 bytes"),
    ],
)
def test_hdf5_reaches_nowhere_else(put: Callable[[Any, Path], None], told: str, tmp_path: Path) -> None:
    import h5py

    write_hdf5(tmp_path / "a" / "data.hdf5")
    write_hdf5(tmp_path / "b" / "data.hdf5")
    with h5py.File(tmp_path / "a" / "data.hdf5", "a") as file:
        del file["rewards"]
        put(file, tmp_path / "b" / "data.hdf5")
    with pytest.raises(zx.UserError, match=told):
        offline.open(tmp_path / "a" / "data.hdf5")


# --- traps ---


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("sprung"),))


def trapped_npz(path: Path) -> None:
    np.savez(path.open("wb"), index=np.array([Trap()], dtype=object))


def trapped_npy(path: Path) -> None:
    np.save(path.open("wb"), np.array([Trap()], dtype=object))


TRAPS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "checkpoint": (
        "run/checkpoints/0*.safetensors",
        lambda path: torch.save({"format": 1, "kind": "run", "policy": Trap()}, path),
    ),
    "checkpoint, bare": ("run/checkpoints/0*.safetensors", lambda path: path.write_bytes(pickle.dumps(Trap()))),
    "checkpoint, older format of torch": (
        "run/checkpoints/0*.safetensors",
        lambda path: torch.save(Trap(), path, _use_new_zipfile_serialization=False),
    ),
    "replay": ("run/replay/*.npz", trapped_npz),
    "configuration": (
        "run/config.yaml",
        lambda path: path.write_text("algorithm: !!python/object/apply:os.system ['touch sprung']"),
    ),
    "configuration, code": (
        "run/config.yaml",
        lambda path: path.write_text("algorithm: ppo\nenv: {name: 'os:system', command: touch sprung}"),
    ),
    "dataset": ("data/obs.npy", trapped_npy),
    "dataset, manifest": ("data/manifest.json", lambda path: path.write_bytes(pickle.dumps(Trap()))),
    "crash report": ("crash/crash-001.json", lambda path: path.write_bytes(pickle.dumps(Trap()))),
    "metrics": ("run/metrics.csv", lambda path: path.write_bytes(pickle.dumps(Trap()))),
    "references": ("run/dataset.json", lambda path: path.write_bytes(pickle.dumps(Trap()))),
}


@pytest.mark.parametrize("name", TRAPS)
def test_no_trap_is_sprung(name: str, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZHIXING_TRUST", raising=False)
    shutil.copytree(samples, tmp_path / "here")
    pattern, write = TRAPS[name]
    write(next((tmp_path / "here").glob(pattern)))
    readers = {"dataset": "dataset", "crash report": "crash report"}
    with pytest.raises(zx.UserError):
        READERS[readers.get(name.partition(",")[0], "run folder")][0](tmp_path / "here")
    assert not Path("sprung").exists()
    count("faults", injected=1, what=f"trap in {name}")


def header(tree: str, **tensors: Any) -> bytes:
    """A checkpoint whose header holds this text as its tree, with a right checksum."""
    metadata = {"tree": tree, "checksum": f"{zlib.crc32(tree.encode()):08x}"}
    content = json.dumps({"__metadata__": metadata, **tensors}).encode()
    return len(content).to_bytes(8, "little") + content


def claim(shape: list[int], **about: Any) -> bytes:
    """A tensor that claims to be larger than the file."""
    size = 4 * math.prod(shape)
    return header('{"$":"tensor","name":"a"}', a={"dtype": "F32", "shape": shape, "data_offsets": [0, size]} | about)


def shared(places: int) -> bytes:
    """A tensor that stands in many places: copied at each, a small file would become a large state."""
    tensor = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    return header("[" + ",".join(['{"$":"tensor","name":"a"}'] * places) + "]", a=tensor)


def as_key(key: str) -> str:
    return f'{{"$":"dict","items":[[{key},1]]}}'


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nested lists": lambda: header("[" * 1_000_000),
    "nested lists that end": lambda: header("[" * 200_000 + "]" * 200_000),
    "nested dicts": lambda: header('{"a":' * 200_000 + "1" + "}" * 200_000),
    "a nested tuple as a key": lambda: header(as_key('{"$":"tuple","items":[' * 100_000 + "1" + "]}" * 100_000)),
    "a less nested tuple as a key": lambda: header(as_key('{"$":"tuple","items":[' * 80 + "1" + "]}" * 80)),
    "a list as a key": lambda: header(as_key("[]")),
    "a dict as a key": lambda: header(as_key("{}")),
    "very many values": lambda: header("[" + "[]," * 7_000_000 + "0]"),
    "a long number": lambda: header("9" * 2_000_000),
    "no tree": lambda: b"\2\0\0\0\0\0\0\0{}",
    "no header": lambda: (2**63).to_bytes(8, "little"),
    "a header as large as the file": lambda: (10**6).to_bytes(8, "little") + bytes(10**6),
    "a tensor of a terabyte": lambda: claim([2**38]),
    "a tensor of no size": lambda: claim([0, 10**30]),
    "a tensor of many dimensions": lambda: claim([1] * 10_000),
    "a tensor with a negative side": lambda: claim([-1, -1]),
    "a tensor of objects": lambda: claim([], dtype="O"),
    "a tensor before the file": lambda: claim([1], data_offsets=[-4, 0]),
    "a tensor in too many places": lambda: shared(1000),
    "an unknown kind": lambda: header('{"$":"code","name":"os:system"}'),
    "an unknown tensor": lambda: header('{"$":"tensor","name":"a"}'),
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
    except UserError as told:
        error = str(told)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // int(sys.argv[2])
    print(json.dumps([path.name, error, grown]), flush=True)
"""


def test_hostile_checkpoints_are_refused_in_little_memory(tmp_path: Path) -> None:
    """In a process of its own: neither a crash of the interpreter nor a large allocation goes unseen."""
    for name, make in HOSTILE.items():
        (tmp_path / name).write_bytes(make())
    found = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(tmp_path), str(RSS_PER_MB)], capture_output=True, text=True, timeout=300
    )
    read = [json.loads(line) for line in found.stdout.splitlines()]
    assert found.returncode == 0, (read[-1:], found.stderr)
    assert [name for name, _, _ in read] == sorted(HOSTILE)
    for name, error, grown in read:
        assert "is damaged or not a checkpoint" in error, name
        assert grown < MEGABYTES, name


def doubled(first: str, rest: str) -> str:
    """Twenty lines, each of which holds the one before twice."""
    return first + "".join(rest.format(f"a{i}", f"a{i + 1}") for i in range(20))


@pytest.mark.parametrize(
    "text",
    [
        doubled("a0: &a0 [x, x]\n", "{1}: &{1} [*{0}, *{0}]\n"),
        doubled("a0: &a0 {x: 1}\n", "{1}: &{1} {{<<: [*{0}, *{0}]}}\n"),
    ],
)
def test_a_small_configuration_does_not_become_a_large_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"algorithm: ppo\nenv: CartPole-v1\n{text}")
    with pytest.raises(zx.UserError, match="again and again"):
        zx.config.load(tmp_path / "a.yaml")


# --- paths ---


@pytest.fixture
def run(samples: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(samples / "run", tmp_path / "run")
    (tmp_path / "mine.txt").write_text("precious")
    yield tmp_path / "run"
    assert (tmp_path / "mine.txt").read_text() == "precious"


@pytest.mark.parametrize(
    "name", ["metrics.csv", "checkpoints/best.safetensors", "replay/segment-00000000.npz", "crash"]
)
def test_links_out_of_a_run_are_refused(name: str, run: Path) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(os.path.relpath(run.parent / "mine.txt", (run / name).parent))
    with pytest.raises(zx.UserError, match="is a link out of"):
        zx.Session.resume(run)


def test_links_within_a_run_and_to_a_run_are_taken(run: Path, tmp_path: Path) -> None:
    (run / "metrics.csv").rename(run / "rows.csv")
    (run / "metrics.csv").symlink_to("rows.csv")
    (tmp_path / "shortcut").symlink_to(run)
    zx.Session.resume(tmp_path / "shortcut", quiet=True).close()


def test_a_pipe_in_a_run_is_not_waited_for(run: Path) -> None:
    (run / "metrics.csv").unlink()
    os.mkfifo(run / "metrics.csv")
    with pytest.raises(zx.UserError, match="neither a file nor a folder"):
        zx.Session.resume(run)


@pytest.mark.parametrize("name", ["../../mine.npz", "/tmp/mine.npz", "segment-00000000.npz/../x", 7, "segment-1.npz"])
def test_a_checkpoint_names_no_file_elsewhere(name: Any, run: Path) -> None:
    path = next((run / "checkpoints").glob("0*.safetensors"))
    state = read_checkpoint(path)
    state["replay"]["segments"][0]["name"] = name
    write_checkpoint(path, state)
    with pytest.raises(zx.UserError, match="is not the name of a replay segment"):
        zx.Session.resume(run)


# --- code that a run names ---


def test_code_that_a_run_names_is_imported_only_on_the_users_word(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZHIXING_TRUST", raising=False)
    (tmp_path / "stranger.py").write_text("import pathlib\npathlib.Path('sprung').touch()\n")
    text = (run / "config.yaml").read_text()
    for line, named in (("name: CartPole-v1", "name: stranger:make"), ("kind: auto", "kind: stranger:make")):
        (run / "config.yaml").write_text(text.replace(line, named))
        for reader in (zx.load, zx.evaluate, zx.Session.resume):
            with pytest.raises(zx.UserError, match=r"names code to import .*: stranger:make; .*--trust"):
                reader(run)
        code, _, said = run_cli("eval", str(run))
        assert code == 2
        assert "with --trust" in said
        assert not Path("sprung").exists()
    with pytest.raises(zx.UserError, match="stranger"):  # there is nothing in it, but it was looked at
        zx.load(run, trust=True)
    assert Path("sprung").exists()
