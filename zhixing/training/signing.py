"""Sign runs, so the code that a user's own runs name is imported without `--trust`.

A random key in the user's configuration folder signs the configuration of a run and the paths that its code is imported
from. The signature is invalid for other users' runs, for a changed configuration, and if a name would be imported from
another path.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import json
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from zhixing.utils.files import write_atomically

KEY_BYTES = 32
NAME = "signature"  # file in the run folder


def key_file() -> Path:
    """Return the path of the user's key. Raises `RuntimeError` if the user has no home directory."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or "")
    return (base if base.is_absolute() else Path.home() / ".config") / "zhixing" / "key"


def sign(folder: Path, values: Any, names: Iterable[str]) -> None:
    """Write the signature of a run that this user made. Does nothing if no key can be stored."""
    with suppress(OSError, RuntimeError):
        key = _read_key() or _make_key()
        if key is not None:
            text = _signature(key, values, names) + "\n"
            write_atomically(folder / NAME, lambda file: file.write(text.encode()))


def is_signed(folder: Path, values: Any, names: Iterable[str]) -> bool:
    """Return whether this user signed a run with the same values, and the same code would be imported now."""
    try:
        key, signature = _read_key(), (folder / NAME).read_bytes()[:100]
    except (OSError, RuntimeError):
        return False
    return key is not None and hmac.compare_digest(signature.strip(), _signature(key, values, names).encode())


def _signature(key: bytes, values: Any, names: Iterable[str]) -> str:
    text = json.dumps([values, [[name, _origin(name)] for name in sorted(names)]], sort_keys=True, default=repr)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _origin(name: str) -> str:
    """Return the path that the package of a name is, or would be, imported from, without importing it."""
    package = name.partition(":")[0].partition(".")[0]
    if package == "__main__":  # its origin depends on how Python was started
        return ""
    before, here = list(sys.path), os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # as `importing` does
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError, AttributeError):
        return ""
    finally:
        sys.path[:] = before
    if spec is None:
        return ""
    return os.path.realpath(spec.origin) if spec.has_location and spec.origin else repr(spec.submodule_search_locations)


def _read_key() -> bytes | None:
    """Return the user's key; None if it doesn't exist or if other users can read it."""
    with suppress(FileNotFoundError), open(key_file(), "rb") as file:
        status, key = os.fstat(file.fileno()), file.read(KEY_BYTES + 1)
        private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
        return key if private and len(key) == KEY_BYTES else None
    return None


def _make_key() -> bytes | None:
    """Create the user's key and return it. If another process has created one at the same time, return that.

    The key is written to a temporary file and linked, so it is never partial and never replaces an existing one.
    """
    file = key_file()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd, temporary = tempfile.mkstemp(dir=file.parent)  # readable by this user only
    try:
        with open(fd, "wb") as out:
            out.write(secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):
            os.link(temporary, file)
    finally:
        os.unlink(temporary)
    return _read_key()
