"""Turn raw screens and single observations into those of training where no environment runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from zhixing.core.spaces import Spaces
from zhixing.core.stack import FrameLayout
from zhixing.core.tree import Tree, tree_map
from zhixing.envs.options import parameter_names
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.pixels import check_frame_options, wrap_pixels
from zhixing.envs.wrappers.resize import make_resizer, to_grayscale
from zhixing.envs.wrappers.stateful import copy_arrays
from zhixing.errors import UserError

FRAME_OPTIONS = ("action_repeat", "pool", "grayscale", "size", "stack")
DEFAULTS = {name: inspect.signature(wrap_pixels).parameters[name].default for name in FRAME_OPTIONS}


def select_frame_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `wrap_pixels` that define how an observation is made from screens."""
    return {name: options.get(name, default) for name, default in DEFAULTS.items()}


class FrameProcessor:
    """Makes observations `[C * stack, H, W]` from uint8 screens `[H, W]` or `[H, W, C]` of any size.

    Each call takes the screens since the last action: `action_repeat` of them, of which the last one or two count. The
    first call after `reset` starts a stack.
    """

    def __init__(
        self, *, action_repeat: int = 4, pool: str = "max", grayscale: bool = True, size: Any = 84, stack: int = 4
    ) -> None:
        self.height, self.width = check_frame_options(action_repeat, pool, size, stack)
        self.action_repeat, self.grayscale, self.stack = action_repeat, grayscale, stack
        self.num_pooled = min(action_repeat, 2 if pool == "max" else 1)
        self.frames: Array | None = None

    def reset(self) -> None:
        """Forget the screens of the episode."""
        self.frames = None

    def __call__(self, screens: Any) -> Array:
        last: list[Any] = list(screens)[-self.num_pooled :] if isinstance(screens, (list, tuple)) else [screens]
        for screen in last:
            if not (isinstance(screen, np.ndarray) and screen.dtype == np.uint8 and screen.ndim in (2, 3)):
                raise UserError(f"a screen is {_describe(screen)}; expected a uint8 array [H, W] or [H, W, C]")
        if not last or any(screen.shape != last[0].shape for screen in last):
            raise UserError("the screens since the last action must be one or more arrays of equal shape")
        image = self._preprocess(np.maximum.reduce(last))
        if self.frames is None:
            self.frames = np.concatenate([image] * self.stack)
        elif self.frames.shape[1:] != image.shape[1:]:
            raise UserError("the screens changed their size; call reset() first")
        else:
            self.frames = np.concatenate([self.frames[len(image) :], image])
        return self.frames.copy()

    def _preprocess(self, image: Array) -> Array:
        if self.grayscale and image.shape[2:] == (3,):
            image = to_grayscale(image)
        target = (self.height or image.shape[0], self.width or image.shape[1])
        resized = make_resizer(image.shape[:2], target)(image)
        return resized[None] if resized.ndim == 2 else np.ascontiguousarray(resized.transpose(2, 0, 1))


class StackProcessor:
    """Makes stacks of single observations. The first call after `reset` starts a stack, which repeats it."""

    def __init__(self, spaces: Spaces) -> None:
        self.stack, self._frames = spaces.stack, None
        self._layouts = tree_map(
            lambda field: FrameLayout.of_stack(field, spaces.stack, len(spaces.agents)), spaces.fields()["obs"]
        )

    def reset(self) -> None:
        """Forget the observations of the episode."""
        self._frames = None

    def __call__(self, obs: Tree) -> Tree:
        try:
            if self._frames is None:
                self._frames = tree_map(lambda layout, part: layout.repeat(part, self.stack), self._layouts, obs)
            else:
                self._frames = tree_map(lambda layout, *pair: layout.push(*pair), self._layouts, self._frames, obs)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(f"the observation doesn't fit one of a stack of {self.stack}: {error}") from None
        return copy_arrays(self._frames)


def _describe(screen: Any) -> str:
    return f"a {screen.dtype} array {list(screen.shape)}" if isinstance(screen, np.ndarray) else repr(screen)[:80]


def make_processor(options: Any, space: gym.Space[Any]) -> FrameProcessor:
    """Return the processor for saved options. Raise `UserError` unless it makes observations of this space."""
    allowed = parameter_names(FrameProcessor)
    if not isinstance(options, Mapping) or set(options) != set(allowed):
        raise UserError(f"options of frames are {str(options)[:80]}; expected {', '.join(allowed)}")
    processor = FrameProcessor(**options)
    shape = space.shape or ()
    fits = len(shape) == 3 and shape[0] % processor.stack == 0
    if not fits or processor.height not in (None, shape[1]) or processor.width not in (None, shape[2]):
        raise UserError(f"the options of frames don't fit the observations {space}")
    return processor
