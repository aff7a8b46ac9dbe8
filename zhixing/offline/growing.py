"""The files of a dataset while they are written: rows are appended, and headers and manifest follow at the end."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from zhixing.buffers.fields import SUCCESSORS
from zhixing.core.tree import tree_leaves
from zhixing.errors import UserError
from zhixing.offline import space_json
from zhixing.offline.actions import to_policy
from zhixing.offline.checks import check_arrays, check_flags, check_values
from zhixing.offline.folder import MANIFEST, File, files, write_manifest
from zhixing.offline.recording import Chunk, Header


class Growing:
    """A context: leaving it completes the dataset, leaving it by an exception removes what was written."""

    def __init__(self, folder: str | Path, header: Header) -> None:
        self.folder, self.header, self.spec = Path(folder), header, header.spaces.fields()
        self.num_steps = self.num_episodes = 0
        space_json.encode(header.spaces)  # what the manifest can't tell is refused before anything is recorded
        self._open_segment = False
        self._files: dict[str, list[tuple[File, IO[bytes]]]] = {}
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            kind = "already holds something" if self.folder.is_dir() else "is a file"
            raise UserError(f"{self.folder} {kind}; name a new folder for the dataset")
        self._made_folder = not self.folder.exists()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, listed in files(header.spaces, 0, 0).items():
                self._files[name] = []
                for file in listed:
                    stream = (self.folder / file.file).open("xb")
                    self._files[name].append((file, stream))
                    stream.write(npy_header(file, 0))  # to be written over
        except OSError as error:
            self.abort()
            raise self._failed(error) from None

    def append(self, chunk: Chunk) -> None:
        """Check and write steps behind those that are there."""
        header, length = self.header, len(chunk.rows["terminated"])
        check_arrays(header.name, self.spec, chunk.rows, length)
        followed = {name: tree for name, tree in self.spec.items() if name in SUCCESSORS}
        check_arrays(header.name, followed, chunk.lasts, len(chunk.ends))
        check_flags(header.name, chunk.rows, chunk.ends, self.num_steps)
        action = to_policy(header.spaces, chunk.rows["action"])
        check_values(header.name, header.spaces, {**chunk.rows, "action": action}, self.num_steps)
        check_values(header.name, header.spaces, chunk.lasts, self.num_episodes, "the end of episode")
        arrays: dict[str, Any] = {**chunk.rows, "ends": chunk.ends + self.num_steps}
        arrays |= {f"last_{name}": tree for name, tree in chunk.lasts.items()}
        try:
            for name, opened in self._files.items():
                for (_, stream), leaf in zip(opened, tree_leaves(arrays[name]), strict=True):
                    stream.write(np.ascontiguousarray(leaf).data)
        except OSError as error:
            raise self._failed(error) from None
        self.num_steps += length
        self.num_episodes += len(chunk.ends)
        if length:
            self._open_segment = len(chunk.ends) == 0 or int(chunk.ends[-1]) != length - 1

    def finish(self) -> None:
        """Now it is a dataset."""
        if self.num_steps == 0:
            raise UserError(f"nothing was recorded: the dataset {self.folder} would have no steps")
        assert not self._open_segment
        try:
            for opened in self._files.values():
                for file, stream in opened:
                    rows = self.num_steps if file.field.partition(".")[0] in self.spec else self.num_episodes
                    stream.seek(0)
                    stream.write(npy_header(file, rows))
                    stream.flush()
                    os.fsync(stream.fileno())
                    stream.close()
            write_manifest(self.folder, self.header, self.num_steps, self.num_episodes)
        except OSError as error:
            raise self._failed(error) from None

    def abort(self) -> None:
        """Remove what was written: without its manifest it is of no use."""
        if self._files:
            (self.folder / MANIFEST).unlink(missing_ok=True)
        for opened in self._files.values():
            for file, stream in opened:
                with suppress(OSError):  # of a full disk, which was told already
                    stream.close()
                (self.folder / file.file).unlink(missing_ok=True)
        if self._made_folder and self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def __enter__(self) -> Growing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.finish()
        except BaseException:
            self.abort()
            raise

    def _failed(self, error: OSError) -> UserError:
        return UserError(f"the dataset {self.folder} can't be written: {error.strerror or error}")


def npy_header(file: File, rows: int) -> bytes:
    """NumPy leaves room for any number of rows, so that its length is always the same."""
    out = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(file.dtype)
    shape = (rows, *file.shape[1:])
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
    return out.getvalue()
