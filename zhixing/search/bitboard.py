"""Bitboards: boards of up to 64 cells in one integer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zhixing.envs.vector.step_buffers import Array


def popcount_fallback(boards: Array) -> Array:
    """Count the bits that are set: add up pairs of bits, then groups of four, then bytes, then all bytes."""
    boards = boards - (boards >> 1 & 0x5555555555555555)
    boards = (boards & 0x3333333333333333) + (boards >> 2 & 0x3333333333333333)
    boards = boards + (boards >> 4) & 0x0F0F0F0F0F0F0F0F
    return boards * 0x0101010101010101 >> 56


popcount: Callable[[Array], Array] = getattr(np, "bitwise_count", popcount_fallback)  # NumPy 2 has it built in
