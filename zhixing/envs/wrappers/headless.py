"""Render MuJoCo without a display, through EGL if it is installed."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from zhixing.errors import UserError

T = TypeVar("T")
INSTALL = "apt-get install libegl1 libgl1-mesa-dri"


def choose_egl() -> bool:
    """Select EGL for MuJoCo and return True, if there is no display, EGL is installed and the user selected nothing."""
    if not headless() or "MUJOCO_GL" in os.environ or not has_egl():
        return False
    os.environ["MUJOCO_GL"] = "egl"
    return True


def import_with_egl(load: Callable[[], T]) -> T:
    """Call `load`, which imports MuJoCo, with EGL selected if possible.

    The import fails if the EGL library is installed but no driver is. Then import without EGL, as only rendering needs
    it.
    """
    chosen = choose_egl()
    try:
        return load()
    except ImportError:
        if not chosen:
            raise
        del os.environ["MUJOCO_GL"]
        return load()


def render_with_hint(name: str, draw: Callable[[], T]) -> T:
    """Call `draw`. If it fails for lack of EGL, raise `UserError` with the command that installs EGL."""
    try:
        return draw()
    except Exception as error:
        if headless() and ("MUJOCO_GL" not in os.environ or not has_egl()):
            raise UserError(f"{name} needs EGL to render without a display: {INSTALL}") from error
        raise


def has_egl() -> bool:
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError:
        return False
    return True


def headless() -> bool:
    """Return whether this is Linux with neither an X nor a Wayland display."""
    return sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
