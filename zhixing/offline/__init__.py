"""Recorded experience on disk: our own format, Minari's and D4RL's, all opened as a `Dataset`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zhixing.errors import UserError, unknown
from zhixing.offline import d4rl, folder, minari_data
from zhixing.offline.dataset import Dataset
from zhixing.offline.growing import Growing
from zhixing.offline.recording import Chunk, Header
from zhixing.offline.writer import Writer

__all__ = ["Dataset", "Writer", "convert", "open"]

HDF5 = (".hdf5", ".h5")
ALLOWED = "a folder that zhixing or Minari wrote, minari:NAMESPACE/NAME-v0, or a .hdf5 file like D4RL's"


def open(source: str | Path, env: str | None = None, options: Mapping[str, Any] | None = None) -> Dataset:
    """The dataset that `source` names: a folder that `Writer` or Minari wrote, `minari:NAMESPACE/NAME-v0`, or one of
    D4RL's .hdf5 files. All but the first are read into memory; `convert` makes the first of any.

    `env`, with its `options`, is the task of data that doesn't name one; D4RL's arrays are read as its spaces.
    """
    if folder.is_dataset(Path(source)):
        return folder.read(source, env, options)
    return Dataset.gather(*_foreign(source, env, options))


def convert(
    source: str | Path | Dataset, to: str | Path, env: str | None = None, options: Mapping[str, Any] | None = None
) -> None:
    """Write a dataset, by its name or as it is, to a new folder in our own format, a little at a time."""
    header: Header
    chunks: Iterable[Chunk]
    if isinstance(source, Dataset):
        header, chunks = source.header.with_task(env, options), source.chunks()
    elif folder.is_dataset(Path(source)):
        dataset = folder.read(source, env, options)
        header, chunks = dataset.header, dataset.chunks()
    else:
        header, chunks = _foreign(source, env, options)
    with Growing(to, header) as files:
        for chunk in chunks:
            files.append(chunk)


def _foreign(source: str | Path, env: str | None, options: Mapping[str, Any] | None) -> tuple[Header, Iterable[Chunk]]:
    path = Path(source)
    if str(source).startswith(minari_data.PREFIX) or minari_data.data_folder(path):
        header, chunks = minari_data.recording(source)
        return header.with_task(env, options), chunks
    if path.suffix in HDF5 and path.is_file():
        return d4rl.recording(path, env, options)
    if path.is_dir():
        raise UserError(f"{source} is no dataset: it holds no manifest.json; allowed are {ALLOWED}")
    if path.exists():
        raise UserError(f"{source} is no dataset; allowed are {ALLOWED}")
    raise unknown("dataset", str(source), map(str, _beside(path)), f"(allowed are {ALLOWED})")


def _beside(path: Path) -> list[Path]:
    """Datasets in the same folder, for a name that was misspelt."""
    if not path.parent.is_dir():
        return []
    return [other for other in path.parent.iterdir() if folder.is_dataset(other) or other.suffix in HDF5]
