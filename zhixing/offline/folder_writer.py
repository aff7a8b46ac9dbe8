"""Write a dataset folder chunk by chunk. Array headers and the manifest are written at the end."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from zhixing.buffers.fields import SUCCESSORS
from zhixing.core import space_json
from zhixing.core.tree import tree_leaves
from zhixing.errors import UserError
from zhixing.offline.actions import from_env
from zhixing.offline.checks import check_arrays, check_flags, check_values
from zhixing.offline.chunks import Chunk, Header
from zhixing.offline.folder import MANIFEST, ArrayFile, list_files, write_manifest


class FolderWriter:
    """A context manager that completes the dataset on exit, or removes what was written after an exception."""

    def __init__(self, folder: str | Path, header: Header) -> None:
        self.folder, self.header, self.spec = Path(folder), header, header.spaces.fields()
        self.num_steps = self.num_episodes = 0
        space_json.encode(header.spaces)  # rejects spaces that a manifest can't hold before anything is recorded
        self._open_episode = False
        self._files: dict[str, list[tuple[ArrayFile, IO[bytes]]]] = {}
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            problem = "is not empty" if self.folder.is_dir() else "is a file"
            raise UserError(f"{self.folder} {problem}; name a new folder for the dataset")
        self._created_folder = not self.folder.exists()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, files in list_files(header.spaces, 0, 0).items():
                self._files[name] = []
                for file in files:
                    stream = (self.folder / file.file).open("xb")
                    self._files[name].append((file, stream))
                    stream.write(npy_header(file, 0))  # a placeholder of the final size
        except OSError as error:
            self.abort()
            raise self._write_error(error) from None

    def append(self, chunk: Chunk) -> None:
        """Check steps and append them to the files."""
        header, length = self.header, len(chunk.rows["terminated"])
        check_arrays(header.name, self.spec, chunk.rows, length)
        final_spec = {name: tree for name, tree in self.spec.items() if name in SUCCESSORS}
        check_arrays(f"{header.name} (final fields)", final_spec, chunk.final_fields, len(chunk.ends))
        check_flags(header.name, chunk.rows, chunk.ends, self.num_steps)
        action = from_env(header.spaces, chunk.rows["action"])
        check_values(header.name, header.spaces, {**chunk.rows, "action": action}, self.num_steps)
        check_values(header.name, header.spaces, chunk.final_fields, self.num_episodes, "the end of episode")
        arrays: dict[str, Any] = {**chunk.rows, "ends": chunk.ends + self.num_steps}
        arrays |= {f"final_{name}": tree for name, tree in chunk.final_fields.items()}
        try:
            for name, files in self._files.items():
                for (_, stream), leaf in zip(files, tree_leaves(arrays[name]), strict=True):
                    stream.write(np.ascontiguousarray(leaf).data)
        except OSError as error:
            raise self._write_error(error) from None
        self.num_steps += length
        self.num_episodes += len(chunk.ends)
        if length:
            self._open_episode = len(chunk.ends) == 0 or int(chunk.ends[-1]) != length - 1

    def finish(self) -> None:
        """Write the array headers and the manifest, which completes the dataset."""
        if self.num_steps == 0:
            raise UserError(f"nothing was recorded: the dataset {self.folder} would have no steps")
        assert not self._open_episode
        try:
            for files in self._files.values():
                for file, stream in files:
                    rows = self.num_steps if file.field.partition(".")[0] in self.spec else self.num_episodes
                    stream.seek(0)
                    stream.write(npy_header(file, rows))
                    stream.flush()
                    os.fsync(stream.fileno())
                    stream.close()
            write_manifest(self.folder, self.header, self.num_steps, self.num_episodes)
        except OSError as error:
            raise self._write_error(error) from None

    def abort(self) -> None:
        """Remove what was written."""
        if self._files:
            (self.folder / MANIFEST).unlink(missing_ok=True)
        for files in self._files.values():
            for file, stream in files:
                with suppress(OSError):  # such as a full disk, which was reported before
                    stream.close()
                (self.folder / file.file).unlink(missing_ok=True)
        if self._created_folder and self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def __enter__(self) -> FolderWriter:
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

    def _write_error(self, error: OSError) -> UserError:
        return UserError(f"the dataset {self.folder} can't be written: {error.strerror or error}")


def npy_header(file: ArrayFile, rows: int) -> bytes:
    """Return the header of a .npy file. NumPy pads it, so its size doesn't depend on the number of rows."""
    out = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(file.dtype)
    shape = (rows, *file.shape[1:])
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
    return out.getvalue()
