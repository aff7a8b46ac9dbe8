"""Convert uint8 images to grayscale and resize them, with OpenCV or NumPy. Their results are equal up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np

from zhixing.envs.vector.step_buffers import Array

LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # weights of red, green and blue (BT.601)


@cache
def opencv() -> ModuleType | None:
    try:
        import cv2
    except ImportError:
        return None
    cv2.setNumThreads(1)  # images are small, and many processes share the CPUs
    return cv2


def to_grayscale(image: Array) -> Array:
    """Convert an RGB image [H, W, 3] to a grayscale image [H, W]."""
    cv2: Any = opencv()
    if cv2 is not None:
        return cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    return np.rint(image @ LUMA).astype(np.uint8)


def make_resizer(shape: tuple[int, ...], target: tuple[int, int]) -> Callable[[Array], Array]:
    """Return a function that resizes images of size `shape` to size `target`, both (height, width).

    Each new pixel is the mean of the area that it covers.
    """
    if shape == target:
        return np.array  # a copy, because the next step may overwrite the image
    cv2: Any = opencv()
    if cv2 is not None:
        return partial(cv2.resize, dsize=target[::-1], interpolation=cv2.INTER_AREA)
    rows, columns = _area_weights(shape[0], target[0]), _area_weights(shape[1], target[1])

    def resize(image: Array) -> Array:
        flat = rows @ image.reshape(shape[0], -1).astype(np.float32)
        wide = flat.reshape(target[0], shape[1], -1)
        small = np.rint(columns @ wide).astype(np.uint8)
        return small[..., 0] if image.ndim == 2 else small

    return resize


def _area_weights(size: int, target: int) -> Array:
    """Return weights [target, size]: the contribution of each old pixel to each new pixel, along one axis."""
    edges = np.arange(target + 1) * (size / target)
    begin, end = edges[:-1, None], edges[1:, None]
    pixel = np.arange(size)
    covered = np.clip(np.minimum(end, pixel + 1) - np.maximum(begin, pixel), 0.0, None)
    return (covered * (target / size)).astype(np.float32)
