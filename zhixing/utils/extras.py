"""Optional packages: the command that installs an extra, whether zhixing runs from a checkout or is installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import zhixing
from zhixing.errors import UserError


def install_hint(extra: str) -> str:
    """Return a command that installs the packages of an extra of this very zhixing, from whatever folder it is run."""
    checkout = Path(zhixing.__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}[{extra}]'"
    # the name zhixing may lead to nothing, or to another version, in the index: its packages don't
    return f"pip install {' '.join(repr(package) for package in _packages(extra)) or repr(f'zhixing[{extra}]')}"


def missing_extra(what: str, extra: str) -> UserError:
    """Return the error for something whose extra isn't installed."""
    return UserError(f"{what} needs the extra {extra!r}: {install_hint(extra)}")


@contextmanager
def require_extra(what: str, extra: str) -> Iterator[None]:
    """Turn an import that fails inside into the error that names the extra."""
    try:
        yield
    except ImportError as error:
        raise missing_extra(what, extra) from error


def _packages(extra: str) -> list[str]:
    try:
        requirements = metadata.requires("zhixing") or []
    except metadata.PackageNotFoundError:
        return []
    # other conditions stay, such as the Python version: pip evaluates them
    of_extra = re.compile(rf"""(?: and|;) *extra *== *["']{re.escape(extra)}["']""")
    return [of_extra.sub("", line).strip() for line in requirements if of_extra.search(line)]
