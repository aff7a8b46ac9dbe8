"""Signatures of one's own runs: code that they name is imported without `--trust`.

A random key in the user's configuration folder signs the configuration of a run together with the places that its code
is imported from. A run of somebody else, a changed configuration, or another module of the same name isn't recognized.
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
NAME = "signature"  # of the file in a run's folder


def key_file() -> Path:
    """Raise RuntimeError if the user has no home."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or "")
    return (base if base.is_absolute() else Path.home() / ".config") / "zhixing" / "key"


def sign(folder: Path, values: Any, names: Iterable[str]) -> None:
    """Mark a run as made by this user. Does nothing where no key can be kept."""
    with suppress(OSError, RuntimeError):
        key = _key() or _make_key()
        if key is not None:
            text = _signature(key, values, names) + "\n"
            write_atomically(folder / NAME, lambda file: file.write(text.encode()))


def is_signed(folder: Path, values: Any, names: Iterable[str]) -> bool:
    """Whether `sign` was called by this user with the same values, and the same code would be imported now."""
    try:
        key, found = _key(), (folder / NAME).read_bytes()[:100]
    except (OSError, RuntimeError):
        return False
    return key is not None and hmac.compare_digest(found.strip(), _signature(key, values, names).encode())


def _signature(key: bytes, values: Any, names: Iterable[str]) -> str:
    text = json.dumps([values, [[name, _origin(name)] for name in sorted(names)]], sort_keys=True, default=repr)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _origin(name: str) -> str:
    """Where the package of a name is, or would be, imported from. Imports nothing."""
    package = name.partition(":")[0].partition(".")[0]
    before, here = list(sys.path), os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # as `importing` does
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError, AttributeError):  # such as __main__
        return ""
    finally:
        sys.path[:] = before
    if spec is None:
        return ""
    return os.path.realpath(spec.origin) if spec.has_location and spec.origin else repr(spec.submodule_search_locations)


def _key() -> bytes | None:
    """The user's key, unless there is none or others could read it."""
    with suppress(FileNotFoundError), open(key_file(), "rb") as file:
        about, key = os.fstat(file.fileno()), file.read(KEY_BYTES + 1)
        private = about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & 0o077
        return key if private and len(key) == KEY_BYTES else None
    return None


def _make_key() -> bytes | None:
    """Whole or not at all, and never in place of one that is there: another process may make it at the same time."""
    file = key_file()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd, aside = tempfile.mkstemp(dir=file.parent)  # readable by this user only
    try:
        with open(fd, "wb") as out:
            out.write(secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):
            os.link(aside, file)
    finally:
        os.unlink(aside)
    return _key()
