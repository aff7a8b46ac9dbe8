"""Memory of large tensors that was used once is kept for the next time, where the C library is glibc."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # as malloc.h numbers them
KEPT_BYTES, AHEAD_BYTES = 1 << 30, 64 << 20


@cache
def keep_freed_memory() -> None:
    """Let malloc keep up to a gigabyte of what was freed, instead of giving it back at once.

    An update makes and drops the same tensors again and again. By default those of many megabytes go back to the
    kernel each time, and come again page by page, empty: with pictures that was nearly half of an update. Who has set
    MALLOC_... in the environment has decided otherwise.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_MAX, 0)  # none has a mapping of its own, which would end with it
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(M_TOP_PAD, AHEAD_BYTES)
