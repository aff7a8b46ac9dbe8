"""Files of a buffer's rows: each save adds one segment with what is new, so that no row is written twice.

A segment is an uncompressed .npz of plain arrays, read without unpickling. Its number says when it was written.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from zhixing.buffers.fields import Array
from zhixing.errors import UserError

NAME = re.compile(r"segment-(\d{8})\.npz")


def write(folder: Path, number: int, rows: Mapping[str, Array]) -> str:
    """Write aside, then rename: a segment is whole or not there, also after a crash."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"segment-{number:08d}.npz"
    aside = folder / f"{name}.part"
    with aside.open("wb") as file:
        np.savez(file, allow_pickle=False, **rows)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(folder / name)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself must survive too
    finally:
        os.close(directory)
    return name


def read(folder: Path, name: str) -> dict[str, Array]:
    path = folder / name
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except FileNotFoundError:
        raise UserError(f"replay segment {path} is missing: this checkpoint can't be resumed without it") from None
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"replay segment {path} is damaged ({error}); resume from another checkpoint") from None


def drop_from(folder: Path, number: int) -> None:
    """Delete segments written at `number` or later."""
    for path in _segments(folder):
        if _number(path) >= number:
            path.unlink()


def drop_except(folder: Path, names: Iterable[str]) -> None:
    keep = set(names)
    for path in _segments(folder):
        if path.name not in keep:
            path.unlink()


def _segments(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []


def _number(path: Path) -> int:
    return int(path.name[len("segment-") :].removesuffix(".npz"))
