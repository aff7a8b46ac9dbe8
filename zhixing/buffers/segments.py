"""Segment files of a buffer: each save writes the new rows to one more file, so no row is written twice.

A segment is an uncompressed .npz of plain arrays, read without unpickling. Segments are numbered in the order of saves.
"""

from __future__ import annotations

import io
import math
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from zhixing.buffers.fields import Array
from zhixing.errors import UserError
from zhixing.utils.files import write_atomically

NAME = re.compile(r"segment-(\d{8})\.npz")


def write(folder: Path, number: int, rows: Mapping[str, Array]) -> str:
    """Write a segment atomically, so a crash leaves no partial file. Return its name."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"segment-{number:08d}.npz"
    write_atomically(folder / name, lambda file: np.savez(file, allow_pickle=False, **rows))
    return name


def read(folder: Path, name: str) -> dict[str, Array]:
    """Read a segment. Neither its name nor its content is trusted, and it takes no more memory than its file size."""
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise UserError(
            f"{str(name)[:80]!r} is not the name of a replay segment in {folder}: the checkpoint is damaged"
        )
    path = folder / name
    try:
        with zipfile.ZipFile(path) as parts:
            if any(info.compress_type or not info.filename.endswith(".npy") for info in parts.infolist()):
                raise ValueError("it is compressed, or contains more than arrays")
            if sum(info.file_size for info in parts.infolist()) > path.stat().st_size:
                raise ValueError("its parts are larger than the file")
            return {info.filename.removesuffix(".npy"): _parse_npy(parts.read(info)) for info in parts.infolist()}
    except FileNotFoundError:
        raise UserError(
            f"replay segment {path} is missing: this checkpoint can't be resumed without it; resume from another one"
        ) from None
    except Exception as error:  # damaged files raise many kinds of errors
        reason = str(error).split("\n")[0][:200] or type(error).__name__
        raise UserError(f"replay segment {path} is damaged ({reason}); resume from another checkpoint") from None


def _parse_npy(content: bytes) -> Array:
    """Return the array of a .npy file, after checking that its header fits the size of the content."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(file)
    if dtype.hasobject or len(content) - file.tell() != math.prod(shape) * dtype.itemsize:
        raise ValueError("an array holds objects, or its size differs from its header")
    return np.frombuffer(content, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")


def delete_from(folder: Path, number: int) -> None:
    """Delete the segments with this or a higher number."""
    for path in _segments(folder):
        if int(path.stem.removeprefix("segment-")) >= number:
            path.unlink()


def delete_except(folder: Path, names: Iterable[str]) -> None:
    """Delete the segments with other names."""
    keep = set(names)
    for path in _segments(folder):
        if path.name not in keep:
            path.unlink()


def _segments(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
