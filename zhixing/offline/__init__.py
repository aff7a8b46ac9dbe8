"""Datasets of recorded experience, in zhixing's own format and those of Minari and D4RL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zhixing.errors import UserError, unknown
from zhixing.offline import d4rl, folder, minari_data
from zhixing.offline.chunks import Chunk, Header
from zhixing.offline.dataset import Dataset
from zhixing.offline.folder_writer import FolderWriter
from zhixing.offline.writer import Writer

__all__ = ["Dataset", "Writer", "convert", "open"]

HDF5 = (".hdf5", ".h5")
ALLOWED = "a folder that zhixing or Minari wrote, minari:NAMESPACE/NAME-v0, or a .hdf5 file like D4RL's"


def open(source: str | Path, env: str | None = None, options: Mapping[str, Any] | None = None) -> Dataset:
    """Open a dataset: a folder that `Writer` or Minari wrote, `minari:NAMESPACE/NAME-v0`, or a .hdf5 file of D4RL.

    A folder of `Writer` is memory-mapped; the other formats are read into memory, and `convert` writes them as such a
    folder. `env`, with its `options`, is used if the data names no environment; arrays of D4RL are read as its spaces.
    """
    if folder.is_dataset(Path(source)):
        return folder.read(source, env, options)
    return Dataset.from_chunks(*_read_foreign(source, env, options))


def convert(
    source: str | Path | Dataset, to: str | Path, env: str | None = None, options: Mapping[str, Any] | None = None
) -> None:
    """Write a dataset to a new folder in zhixing's own format, chunk by chunk."""
    header: Header
    chunks: Iterable[Chunk]
    if isinstance(source, Dataset):
        header, chunks = source.header.with_env(env, options), source.chunks()
    elif folder.is_dataset(Path(source)):
        dataset = folder.read(source, env, options)
        header, chunks = dataset.header, dataset.chunks()
    else:
        header, chunks = _read_foreign(source, env, options)
    with FolderWriter(to, header) as writer:
        for chunk in chunks:
            writer.append(chunk)


def _read_foreign(
    source: str | Path, env: str | None, options: Mapping[str, Any] | None
) -> tuple[Header, Iterable[Chunk]]:
    path = Path(source)
    if str(source).startswith(minari_data.PREFIX) or minari_data.data_folder(path):
        header, chunks = minari_data.read_chunks(source)
        return header.with_env(env, options), chunks
    if path.suffix in HDF5 and path.is_file():
        return d4rl.read_chunks(path, env, options)
    if path.is_dir():
        raise UserError(f"{source} is not a dataset: it has no manifest.json; allowed are {ALLOWED}")
    if path.exists():
        raise UserError(f"{source} is not a dataset; allowed are {ALLOWED}")
    raise unknown("dataset", str(source), map(str, _list_datasets(path.parent)), f"(allowed are {ALLOWED})")


def _list_datasets(parent: Path) -> list[Path]:
    """Return the datasets in a folder, as suggestions for a misspelled name."""
    if not parent.is_dir():
        return []
    return [path for path in parent.iterdir() if folder.is_dataset(path) or path.suffix in HDF5]
