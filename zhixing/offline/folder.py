"""zhixing's own format: a folder with `manifest.json` and one `.npy` file per array, memory-mapped when read.

The manifest is written last, so an incomplete folder has none. It lists the files with their dtypes and shapes; a
reader accepts exactly those that follow from the spaces and counts. Actions are in the environment's scale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zhixing import __version__
from zhixing.buffers.fields import SUCCESSORS
from zhixing.core import space_json
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_map
from zhixing.errors import UserError
from zhixing.offline.actions import from_env_by_chunks
from zhixing.offline.chunks import Array, Header, chunk_rows, named_leaves
from zhixing.offline.dataset import Dataset
from zhixing.utils.files import parse_json, write_atomically

FORMAT = 1  # newer versions keep reading older formats
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 26
KEYS = ("format", "zhixing", "env", "options", "references", "note", "spaces", "steps", "episodes", "fields")


class ArrayFile(NamedTuple):
    """One array of a dataset: the name of its leaf, and the file that holds it."""

    field: str
    file: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {"field": self.field, "file": self.file, "dtype": self.dtype.str, "shape": list(self.shape)}


def list_files(spaces: Spaces, num_steps: int, num_episodes: int) -> dict[str, list[ArrayFile]]:
    """Return the files of a dataset by name: of each field, `final_` of those with successors, and `ends`."""
    spec = spaces.fields()
    files = {name: _leaf_files(name, tree, num_steps) for name, tree in spec.items()}
    for name in SUCCESSORS:
        if name in spec:
            files[f"final_{name}"] = _leaf_files(f"final_{name}", spec[name], num_episodes)
    files["ends"] = [ArrayFile("ends", "ends.npy", np.dtype(np.int64), (num_episodes,))]
    return files


def _leaf_files(name: str, tree: Tree, length: int) -> list[ArrayFile]:
    leaves = list(named_leaves(name, tree))
    # numbers the leaves, because keys may not be valid file names
    stems = [name] if len(leaves) == 1 else [f"{name}.{i}" for i in range(len(leaves))]
    return [
        ArrayFile(label, f"{stem}.npy", field.dtype, (length, *field.shape))
        for stem, (label, field) in zip(stems, leaves, strict=True)
    ]


# --- writing ---


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
        "fields": _fields_json(header.spaces, num_steps, num_episodes),
    }
    text = json.dumps(manifest, indent=1, allow_nan=False)
    write_atomically(folder / MANIFEST, lambda file: file.write(text.encode()))


def _fields_json(spaces: Spaces, num_steps: int, num_episodes: int) -> list[dict[str, Any]]:
    return [file.to_json() for files in list_files(spaces, num_steps, num_episodes).values() for file in files]


# --- reading ---


def is_dataset(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read(path: str | Path, env: str | None = None, options: Mapping[str, Any] | None = None) -> Dataset:
    """Memory-map the files of a folder. Only actions are copied, and only if their scale isn't the policy's.

    `env` and `options` are used if the manifest names no environment.
    """
    folder = Path(path)
    header, num_steps, num_episodes = read_manifest(folder)
    header = header.with_env(env, options)
    spec = header.spaces.fields()
    arrays = {
        name: [_map_file(folder, file) for file in files]
        for name, files in list_files(header.spaces, num_steps, num_episodes).items()
    }

    def to_tree(name: str, leaves: list[Array]) -> Tree:
        remaining = iter(leaves)
        return tree_map(lambda _: next(remaining), spec[name])

    rows = {name: to_tree(name, arrays[name]) for name in spec}
    rows["action"] = from_env_by_chunks(header.spaces, rows["action"], chunk_rows(spec))
    final_fields = {name: to_tree(name, arrays[f"final_{name}"]) for name in SUCCESSORS if name in spec}
    return Dataset(**vars(header), arrays=rows, final_fields=final_fields, ends=arrays["ends"][0])


def read_manifest(folder: Path) -> tuple[Header, int, int]:
    """Return the header and the numbers of steps and episodes. The content is validated and never executed."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise _damaged(path, f"it is larger than {MAX_MANIFEST_BYTES >> 20} MB")
        manifest = parse_json(path.read_bytes())
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not valid JSON: {error}") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is not int or version < 1:
        raise _damaged(path, "it has no format number")
    if version > FORMAT:
        raise UserError(f"the dataset {folder} has format {version}; this version reads up to {FORMAT}")
    if set(manifest) != set(KEYS):
        raise _damaged(path, f"it has the keys {sorted(manifest)}, expected {sorted(KEYS)}")
    counts = manifest["steps"], manifest["episodes"]
    if not all(type(count) is int and 0 < count < 2**48 for count in counts):
        raise _damaged(path, f"it counts {counts[0]!r} steps and {counts[1]!r} episodes")
    for name, types in (("env", (str, type(None))), ("options", dict), ("references", dict), ("note", str)):
        if not isinstance(manifest[name], types):
            raise _damaged(path, f"{name} is {str(manifest[name])[:80]!r}")
    try:
        spaces = space_json.decode(manifest["spaces"])
        expected = _fields_json(spaces, *counts)
    except (ValueError, TypeError, AssertionError, OverflowError, RecursionError, MemoryError) as error:
        raise _damaged(path, str(error)) from None
    if manifest["fields"] != expected:
        raise _damaged(path, _describe_difference(manifest["fields"], expected))
    values = {name: manifest[name] for name in ("env", "options", "references", "note")}
    return Header(spaces=spaces, **values, name=str(folder)), *counts


def _describe_difference(actual: Any, expected: list[dict[str, Any]]) -> str:
    listed = actual if isinstance(actual, list) else [actual]
    for i, entry in enumerate(expected):
        if i >= len(listed) or listed[i] != entry:
            instead = str(listed[i])[:200] if i < len(listed) else "nothing"
            return f"its spaces need the field {entry}, it lists {instead}"
    return f"it lists {len(listed)} fields, its spaces need {len(expected)}"


def _map_file(folder: Path, file: ArrayFile) -> Array:
    path = folder / file.file
    try:
        if path.is_symlink() or not path.is_file():
            raise _damaged(path, "it is not a regular file" if path.exists() else "it is missing")
        size = path.stat().st_size
        # like np.load with mmap_mode="r", but only for .npy files, so nothing is unpickled
        array = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    except UserError:
        raise
    except Exception as error:  # damaged files raise many kinds of errors in NumPy's parser
        raise _damaged(path, str(error).split("\n")[0] or "it is not a .npy file") from None
    if array.dtype != file.dtype or array.shape != file.shape or not array.flags.c_contiguous:
        actual = f"{array.dtype.str} {list(array.shape)}"
        raise _damaged(path, f"it has {actual}, the manifest {file.dtype.str} {list(file.shape)}")
    if size != array.offset + array.nbytes:
        raise _damaged(path, f"it has {size} bytes, expected {array.offset + array.nbytes}")
    return np.asarray(array)  # indexing a memmap creates a memmap each time, which is slow


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged or not part of a dataset: {reason}")
