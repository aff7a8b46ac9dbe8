"""Exclusive locks on folders, so two processes never write the same run, and a check for links out of a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
import weakref
from contextlib import suppress
from pathlib import Path

from zhixing.errors import UserError, note

NAME = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def check_inside(folder: Path, writing: bool = False) -> None:
    """Raise `UserError` if a folder contains links out of it, or entries that are neither files nor folders.

    Such entries in an untrusted run could redirect writes to other files, or block reads forever (named pipes). With
    `writing`, also reject hard links: writing to one changes another file.
    """
    inside = folder.resolve()
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(where, name)
            try:
                status = path.lstat()
                outside = stat.S_ISLNK(status.st_mode) and inside not in path.resolve().parents
            except FileNotFoundError:  # another process has just removed it
                continue
            except (OSError, RuntimeError):  # a link that leads to itself
                outside = True
            if outside:
                raise UserError(f"{path} is a link out of {folder}; replace it by a copy of its target")
            if not (stat.S_ISLNK(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
                raise UserError(f"{path} is neither a file nor a folder; remove it")
            if writing and stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                raise UserError(
                    f"{path} is a hard link, so writing to it would change another file; replace it by a copy"
                )


class FolderLock:
    """Lock a folder until `release`, or until the process ends, however it ends.

    The lock is `flock` on the file `.lock` in the folder: the kernel releases it after `kill -9`, and network file
    systems that support `flock` apply it across machines. The file names its holder. Forked children don't keep it.
    """

    def __init__(self, folder: Path, wait_seconds: float = 0.0) -> None:
        """Raise `UserError` naming the holder if another process still has the lock after `wait_seconds`."""
        check_inside(folder, writing=True)
        self.file = folder / NAME
        deadline = time.monotonic() + wait_seconds
        while (fd := self._try()) is None:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"{folder} is in use by {self._holder()}; wait until it has ended or stop it, "
                    f"or choose another folder"
                )
            time.sleep(0.05)
        self.fd: int = fd
        self._close = weakref.finalize(self, os.close, fd)
        self._describe()
        _held.add(self)

    def _try(self) -> int | None:
        """Return a locked file descriptor, or None while another process holds the lock."""
        while True:
            fd = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # the holder before us may have removed the file between our open and our lock
                if os.path.exists(self.file) and os.path.samestat(os.fstat(fd), os.stat(self.file)):
                    return fd
            except BlockingIOError:
                os.close(fd)
                return None
            except OSError as error:
                if error.errno in UNSUPPORTED:
                    note(f"{self.file.parent} can't be locked ({error.strerror}); don't resume it twice at once")
                    return fd
                os.close(fd)
                raise
            os.close(fd)

    def _describe(self) -> None:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # on a full disk, the lock file doesn't name its holder
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, json.dumps(holder).encode(), 0)

    def _holder(self) -> str:
        try:
            with open(self.file, "rb") as file:
                holder = json.loads(file.read(1000))
            return f"process {int(holder['pid'])} on {str(holder['host'])!r} since {str(holder['since'])[:19]!r}"
        except (OSError, ValueError, LookupError, TypeError):
            return "another process"

    def release(self) -> None:
        """Unlock the folder, even if a child of this process still has the file open."""
        if self._close.alive:
            with suppress(OSError):
                self.file.unlink()
            with suppress(OSError):
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            self.drop()

    def drop(self) -> None:
        """Close this process's descriptor. Processes that were given the same descriptor keep the folder locked."""
        _held.discard(self)
        self._close()


def _drop_in_child() -> None:
    for lock in list(_held):
        lock.drop()


os.register_at_fork(after_in_child=_drop_in_child)
