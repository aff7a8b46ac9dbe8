"""Pictures of MuJoCo without a screen: EGL is chosen where there is one, its absence is told with what installs it."""

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
    """Whether EGL was chosen here. What a person chose stays, and without its library numbers are all that is made."""
    if not headless() or "MUJOCO_GL" in os.environ or not has_egl():
        return False
    os.environ["MUJOCO_GL"] = "egl"
    return True


def import_with_egl(load: Callable[[], T]) -> T:
    """What `load` imports. MuJoCo looks at the choice when it is imported; where there is a library but nothing to draw
    with, that fails, and numbers need no picture."""
    chosen = choose_egl()
    try:
        return load()
    except ImportError:
        if not chosen:
            raise
        del os.environ["MUJOCO_GL"]
        return load()


def render_with_hint(name: str, draw: Callable[[], T]) -> T:
    """The picture that `draw` makes."""
    try:
        return draw()
    except Exception as error:
        if headless() and ("MUJOCO_GL" not in os.environ or not has_egl()):
            raise UserError(f"{name} needs EGL to draw pictures without a screen: {INSTALL}") from error
        raise


def has_egl() -> bool:
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError:
        return False
    return True


def headless() -> bool:
    """Return whether there is no screen: on Linux, neither an X nor a Wayland display."""
    return sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
