"""Imports of optional packages, and the command that installs them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import zhixing
from zhixing.errors import UserError


def install_hint(extra: str) -> str:
    """Return a command that installs the packages of an extra. It works in any folder."""
    checkout = Path(zhixing.__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}[{extra}]'"
    # list the packages: an index may lack zhixing, or have another version
    return f"pip install {' '.join(repr(package) for package in _packages(extra)) or repr(f'zhixing[{extra}]')}"


def missing_extra(feature: str, extra: str, reason: str = "") -> UserError:
    """Return the error for a feature whose extra isn't installed, or can't be imported for some `reason`."""
    return UserError(f"{feature} needs the extra {extra!r}{reason and f' ({reason})'}: {install_hint(extra)}")


@contextmanager
def require_extra(feature: str, extra: str) -> Iterator[None]:
    """Turn an `ImportError` in the block into a `UserError` that names the extra."""
    try:
        yield
    except ImportError as error:
        reason = "" if isinstance(error, ModuleNotFoundError) else str(error)  # an installed package may be broken
        raise missing_extra(feature, extra, reason) from error


def _packages(extra: str) -> list[str]:
    """Return the requirements of an extra from the metadata of the installed zhixing."""
    try:
        requirements = metadata.requires("zhixing") or []
    except metadata.PackageNotFoundError:
        return []
    # remove only the condition on the extra: pip evaluates others, such as the Python version
    condition = re.compile(rf"""(?: and|;) *extra *== *["']{re.escape(extra)}["']""")
    return [condition.sub("", line).strip() for line in requirements if condition.search(line)]
