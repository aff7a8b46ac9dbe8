"""Errors for optional packages that aren't installed, and the commands that install them."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from pathlib import Path

import pytest

import zhixing
from zhixing.errors import UserError
from zhixing.utils import extras

ROOT = Path(zhixing.__file__).resolve().parents[1]


def test_hint_in_a_checkout_installs_from_its_folder() -> None:
    assert extras.install_hint("mario") == f"pip install -e '{ROOT}[mario]'"
    assert str(extras.missing_extra("mario/1-1", "mario")) == (
        f"mario/1-1 needs the extra 'mario': pip install -e '{ROOT}[mario]'"
    )


def test_hint_of_an_installed_package_lists_requirements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(zhixing, "__file__", str(tmp_path / "site-packages" / "zhixing" / "__init__.py"))
    lines = ["torch>=2.5", 'ale-py>=0.11; extra == "atari"', 'cv2>=4; extra == "atari"', 'ray>=2; extra == "ray"']
    monkeypatch.setattr(metadata, "requires", lambda _: lines)
    assert extras.install_hint("atari") == "pip install 'ale-py>=0.11' 'cv2>=4'"
    assert extras.install_hint("ray") == "pip install 'ray>=2'"
    monkeypatch.setattr(metadata, "requires", lambda _: ['a>=1; python_version >= "3.11" and extra == "atari"', "b"])
    assert extras.install_hint("atari") == """pip install 'a>=1; python_version >= "3.11"'"""

    def absent(_: str) -> None:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "requires", absent)
    assert extras.install_hint("ray") == "pip install 'zhixing[ray]'"


def test_failed_import_names_the_extra() -> None:
    with (
        pytest.raises(UserError, match=re.escape(extras.install_hint("ray"))) as caught,
        extras.require_extra("a job", "ray"),
    ):
        importlib.import_module("no_such_package")
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(ValueError, match="other"), extras.require_extra("a job", "ray"):
        raise ValueError("other")


def test_all_hints_name_declared_extras() -> None:
    sources = [file.read_text() for file in (ROOT / "zhixing").rglob("*.py")]
    pattern = re.compile(
        r"""(?:missing_extra|require_extra|install_hint)\([^()\n]*(?:\([^()\n]*\))?[^()\n]*?["']([\w-]+)["']\)"""
    )
    extras_in_hints = {extra for source in sources for extra in pattern.findall(source)}
    assert {"mario", "atari", "marl", "ray", "tune", "offline", "envpool"} <= extras_in_hints
    declared = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extras_in_hints <= set(declared)
    # no other code contains such a command
    assert not [source for source in sources if "pip install 'zhixing[" in source or 'pip install "zhixing[' in source]
