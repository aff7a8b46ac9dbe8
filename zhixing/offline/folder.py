"""Our own format: a folder with `manifest.json` and one `.npy` file per array, mapped into memory when read.

The manifest is written last, so that a folder without one is no dataset. It lists the files with their types and
shapes; a reader takes exactly those that follow from the spaces and counts. Actions are in the task's own terms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zhixing import __version__
from zhixing.buffers.fields import SUCCESSORS
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_map
from zhixing.errors import UserError
from zhixing.offline import space_json
from zhixing.offline.actions import map_to_policy
from zhixing.offline.dataset import Dataset
from zhixing.offline.recording import Array, Header, chunk_rows, labelled
from zhixing.utils.files import write_atomically

FORMAT = 1  # readers keep understanding older ones
MANIFEST = "manifest.json"
LARGEST = 1 << 26  # bytes of a manifest
KEYS = ("format", "zhixing", "env", "options", "references", "note", "spaces", "steps", "episodes", "fields")


class File(NamedTuple):
    """One array of a dataset: which part of which field it is, and the file that holds it."""

    field: str
    file: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def plain(self) -> dict[str, Any]:
        return {"field": self.field, "file": self.file, "dtype": self.dtype.str, "shape": list(self.shape)}


def files(spaces: Spaces, num_steps: int, num_episodes: int) -> dict[str, list[File]]:
    """The files of a dataset: for each field, `last_` of those with successors, and `ends`, in the order of leaves."""
    spec = spaces.fields()
    table = {name: _files(name, tree, num_steps) for name, tree in spec.items()}
    for name in SUCCESSORS:
        if name in spec:
            table[f"last_{name}"] = _files(f"last_{name}", spec[name], num_episodes)
    table["ends"] = [File("ends", "ends.npy", np.dtype(np.int64), (num_episodes,))]
    return table


def _files(name: str, tree: Tree, length: int) -> list[File]:
    leaves = list(labelled(name, tree))
    numbered = [name] if len(leaves) == 1 else [f"{name}.{i}" for i in range(len(leaves))]  # keys may be any text
    return [
        File(label, f"{stem}.npy", field.dtype, (length, *field.shape))
        for stem, (label, field) in zip(numbered, leaves, strict=True)
    ]


# ---------------------------------------------------------------------- writing


def write_manifest(folder: Path, header: Header, num_steps: int, num_episodes: int) -> None:
    manifest = {
        "format": FORMAT,
        "zhixing": __version__,
        "env": header.env,
        "options": header.options,
        "references": header.references,
        "note": header.note,
        "spaces": space_json.encode(header.spaces),
        "steps": num_steps,
        "episodes": num_episodes,
        "fields": _plain(header.spaces, num_steps, num_episodes),
    }
    text = json.dumps(manifest, indent=1, allow_nan=False)
    write_atomically(folder / MANIFEST, lambda file: file.write(text.encode()))


def _plain(spaces: Spaces, num_steps: int, num_episodes: int) -> list[dict[str, Any]]:
    return [file.plain() for listed in files(spaces, num_steps, num_episodes).values() for file in listed]


# ---------------------------------------------------------------------- reading


def is_dataset(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read(path: str | Path, env: str | None = None, options: Mapping[str, Any] | None = None) -> Dataset:
    """Map the files of a folder; actions alone are held in memory, where the policy's scale isn't the task's.

    `env` and `options` are the task's, if the manifest names none.
    """
    folder = Path(path)
    header, num_steps, num_episodes = read_manifest(folder)
    header = header.with_task(env, options)
    spec = header.spaces.fields()
    arrays = {
        name: [_map(folder, file) for file in listed]
        for name, listed in files(header.spaces, num_steps, num_episodes).items()
    }

    def tree(name: str, leaves: list[Array]) -> Tree:
        rest = iter(leaves)
        return tree_map(lambda _: next(rest), spec[name])

    rows = {name: tree(name, arrays[name]) for name in spec}
    rows["action"] = map_to_policy(header.spaces, rows["action"], chunk_rows(spec))
    lasts = {name: tree(name, arrays[f"last_{name}"]) for name in SUCCESSORS if name in spec}
    return Dataset(**vars(header), arrays=rows, lasts=lasts, ends=arrays["ends"][0])


def read_manifest(folder: Path) -> tuple[Header, int, int]:
    """What the manifest says, with the numbers of steps and episodes. Nothing of it is executed or believed."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > LARGEST:
            raise _damaged(path, f"it is larger than {LARGEST >> 20} MB")
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is no JSON: {error}") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is not int or version < 1:
        raise _damaged(path, "it tells no format")
    if version > FORMAT:
        raise UserError(f"the dataset {folder} has format {version}; this version reads up to {FORMAT}")
    if set(manifest) != set(KEYS):
        raise _damaged(path, f"it has the entries {sorted(manifest)}, expected {sorted(KEYS)}")
    counts = manifest["steps"], manifest["episodes"]
    if not all(type(count) is int and 0 < count < 2**48 for count in counts):
        raise _damaged(path, f"it counts {counts[0]!r} steps and {counts[1]!r} episodes")
    for name, kinds in (("env", (str, type(None))), ("options", dict), ("references", dict), ("note", str)):
        if not isinstance(manifest[name], kinds):
            raise _damaged(path, f"{name} is {str(manifest[name])[:80]!r}")
    try:
        spaces = space_json.decode(manifest["spaces"])
        expected = _plain(spaces, *counts)
    except (ValueError, TypeError, AssertionError, OverflowError, RecursionError, MemoryError) as error:
        raise _damaged(path, str(error)) from None
    if manifest["fields"] != expected:
        raise _damaged(path, _difference(manifest["fields"], expected))
    told = {name: manifest[name] for name in ("env", "options", "references", "note")}
    return Header(spaces=spaces, **told, name=str(folder)), *counts


def _difference(found: Any, expected: list[dict[str, Any]]) -> str:
    listed = found if isinstance(found, list) else [found]
    for i, wanted in enumerate(expected):
        if i >= len(listed) or listed[i] != wanted:
            there = str(listed[i])[:200] if i < len(listed) else "nothing"
            return f"its spaces need the field {wanted}, it lists {there}"
    return f"it lists {len(listed)} fields, its spaces need {len(expected)}"


def _map(folder: Path, file: File) -> Array:
    path = folder / file.file
    try:
        if path.is_symlink() or not path.is_file():
            raise _damaged(path, "it is no file" if path.exists() else "it is missing")
        size = path.stat().st_size
        # what np.load does with mmap_mode="r", but for .npy files alone: it never comes near pickles
        array = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    except UserError:
        raise
    except Exception as error:  # foreign bytes fail in many ways on their way through NumPy's parser
        raise _damaged(path, str(error).split("\n")[0] or "it is no .npy file") from None
    if array.dtype != file.dtype or array.shape != file.shape or not array.flags.c_contiguous:
        found = f"{array.dtype.str} {list(array.shape)}"
        raise _damaged(path, f"it holds {found}, the manifest says {file.dtype.str} {list(file.shape)}")
    if size != array.offset + array.nbytes:
        raise _damaged(path, f"it has {size} bytes, expected {array.offset + array.nbytes}")
    return np.asarray(array)  # plain indexing of a memmap makes a memmap each time, which is slow


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged or not of a dataset: {reason}")
