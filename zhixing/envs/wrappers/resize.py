"""Pictures of bytes made grey and small: by OpenCV where it is installed, else in NumPy, equal but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np

from zhixing.envs.vector.step_buffers import Array

LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # how bright red, green and blue look (BT.601)


@cache
def opencv() -> ModuleType | None:
    try:
        import cv2
    except ImportError:
        return None
    cv2.setNumThreads(1)  # pictures are small, and many processes make them at once: more threads would only wait
    return cv2


def to_grayscale(picture: Array) -> Array:
    """[H, W] of [H, W, 3]."""
    cv2: Any = opencv()
    if cv2 is not None:
        return cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
    return np.rint(picture @ LUMA).astype(np.uint8)


def make_resizer(shape: tuple[int, ...], target: tuple[int, int]) -> Callable[[Array], Array]:
    """What makes pictures of `shape` (height, width) ones of `target`: each new pixel is the mean of the area that it
    covers."""
    if shape == target:
        return np.array  # a copy: whoever steps on may overwrite the picture
    cv2: Any = opencv()
    if cv2 is not None:
        return partial(cv2.resize, dsize=target[::-1], interpolation=cv2.INTER_AREA)
    rows, columns = _area_weights(shape[0], target[0]), _area_weights(shape[1], target[1])

    def resize(picture: Array) -> Array:
        flat = rows @ picture.reshape(shape[0], -1).astype(np.float32)
        wide = flat.reshape(target[0], shape[1], -1)
        small = np.rint(columns @ wide).astype(np.uint8)
        return small[..., 0] if picture.ndim == 2 else small

    return resize


def _area_weights(size: int, target: int) -> Array:
    """[target, size]: the part of each old pixel in a new one, along one side."""
    edges = np.arange(target + 1) * (size / target)
    begin, end = edges[:-1, None], edges[1:, None]
    pixel = np.arange(size)
    covered = np.clip(np.minimum(end, pixel + 1) - np.maximum(begin, pixel), 0.0, None)
    return (covered * (target / size)).astype(np.float32)
