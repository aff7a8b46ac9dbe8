"""Settings of glibc's memory allocator that speed up repeated allocations of large tensors."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # constants of malloc.h
MAX_KEPT_BYTES = 1 << 30
GROWTH_BYTES = 64 << 20


@cache
def keep_freed_memory() -> None:
    """Let malloc keep up to 1 GiB of freed memory instead of returning it to the kernel.

    Each update allocates and frees the same large tensors. By default, the kernel zeroes and maps their pages again
    every time, which took nearly half of the time of an update from images. Does nothing if the C library isn't glibc
    or if the user has set an environment variable `MALLOC_...`.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_MAX, 0)  # no separate mappings, which are always returned
    mallopt(M_TRIM_THRESHOLD, MAX_KEPT_BYTES)
    mallopt(M_TOP_PAD, GROWTH_BYTES)
