"""Independent streams of random numbers, derived by name from the seed of a run."""

from __future__ import annotations

import zlib

import numpy as np


def derive_seed(seed: int, name: str, index: int = 0) -> int:
    """Return the seed of the stream `name`. Different names, indices and seeds give independent streams."""
    words = np.random.SeedSequence([seed, zlib.crc32(name.encode()), index]).generate_state(2)
    return int(words[0]) << 31 | int(words[1]) >> 1
