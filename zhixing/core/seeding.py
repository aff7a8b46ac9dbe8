"""One seed, many independent streams of random numbers, each known by a name."""

from __future__ import annotations

import zlib

import numpy as np


def derive_seed(seed: int, name: str, index: int = 0) -> int:
    """A seed for the stream `name`, unrelated to that of any other name, index or seed."""
    words = np.random.SeedSequence([seed, zlib.crc32(name.encode()), index]).generate_state(2)
    return int(words[0]) << 31 | int(words[1]) >> 1
