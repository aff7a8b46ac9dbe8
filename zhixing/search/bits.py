"""Bits of boards: 64 cells in one integer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zhixing.envs.vector.step_buffers import Array


def sum_of_bits(boards: Array) -> Array:
    """How many bits are set, where NumPy can't tell: the sums of pairs, of fours and of bytes, then of all bytes."""
    boards = boards - (boards >> 1 & 0x5555555555555555)
    boards = (boards & 0x3333333333333333) + (boards >> 2 & 0x3333333333333333)
    boards = boards + (boards >> 4) & 0x0F0F0F0F0F0F0F0F
    return boards * 0x0101010101010101 >> 56


count_bits: Callable[[Array], Array] = getattr(np, "bitwise_count", sum_of_bits)  # NumPy 2 can
