"""Preprocess image observations: repeated actions, grayscale, resizing, stacking and reward shaping.

The environment must return uint8 images [H, W] or [H, W, C]. `wrap_pixels` turns them into [C * stack, H, W].

If the environment has `state_dict()` and `load_state_dict(state)`, which must include its random generator, the
wrappers extend them. Otherwise the wrapped environment has neither, and is restored by replaying its actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from zhixing.envs.options import parameter_names
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.action_repeat import POOLS, ActionRepeat, noop
from zhixing.envs.wrappers.frame_stack import FrameStack
from zhixing.envs.wrappers.resize import make_resizer, to_grayscale
from zhixing.envs.wrappers.stateful import Info, StatefulWrapper
from zhixing.envs.wrappers.time_limit import StatefulTimeLimit
from zhixing.errors import UserError
from zhixing.utils.importing import import_object

Step = tuple[Any, float, bool, bool, Info]
# shaping(reward, info, previous_info, terminated), where `previous_info` is that of the last step or reset
Shaping = Callable[[float, Info, Info, bool], float]
# keys of `info` that hold the number of lives, with the lowest number at which the game continues
LIVES = {"lives": 1, "life": 0}


def wrap_pixels(
    env: gym.Env[Any, Any],
    *,
    action_repeat: int = 4,
    pool: str = "max",
    sticky: float = 0.0,
    noops: int = 0,
    end_on_life_loss: bool = False,
    shaping: str | Shaping | None = None,
    clip_reward: bool = False,
    max_episode_steps: int | None = None,
    grayscale: bool = True,
    size: Any = 84,
    stack: int = 4,
) -> gym.Env[Any, Any]:
    """Apply the usual preprocessing of image observations. Every part is optional.

    - `action_repeat`: number of frames that repeat an action; rewards are summed. 1 disables it.
    - `pool`: "max" takes the pixelwise maximum of the last two of these frames, because old games draw some objects in
      every other frame only; "last" takes the last frame.
    - `sticky`: probability that a frame repeats the action of the frame before (Machado et al., 2018)
    - `noops`: maximum number of no-op frames at the start of an episode; the number is random
    - `end_on_life_loss`: terminate the episode when a life is lost; the next episode continues the game
    - `shaping`: a function, or "my.module:function", called as `(reward, info, previous_info, terminated)`, that
      returns the new reward
    - `clip_reward`: replace the reward by its sign, after any shaping
    - `max_episode_steps`: number of actions after which an episode is truncated; the next one starts a new game
    - `grayscale`: convert to gray
    - `size`: side, or [height, width], of the image; None keeps its size
    - `stack`: number of images in an observation. An episode starts with its first image repeated. A replay buffer
      stores each image once.
    """
    height, width = _check_options(action_repeat, pool, sticky, noops, max_episode_steps, size, stack)
    env = wrap_frames(
        env,
        action_repeat=action_repeat,
        pool=pool,
        sticky=sticky,
        noops=noops,
        end_on_life_loss=end_on_life_loss,
        shaping=shaping,
        clip_reward=clip_reward,
        max_episode_steps=max_episode_steps,
    )
    env = PreprocessImage(env, grayscale, height, width)
    return FrameStack(env, stack) if stack > 1 else env


def wrap_frames(
    env: gym.Env[Any, Any],
    *,
    action_repeat: int = 4,
    pool: str = "max",
    sticky: float = 0.0,
    noops: int = 0,
    end_on_life_loss: bool = False,
    shaping: str | Shaping | None = None,
    clip_reward: bool = False,
    max_episode_steps: int | None = None,
) -> gym.Env[Any, Any]:
    """Apply the parts of `wrap_pixels` that don't process images. With `pool="last"`, any observations are allowed."""
    _check_options(action_repeat, pool, sticky, noops, max_episode_steps, None, 1)
    if noops:
        env = NoopReset(env, noops)
    env = ActionRepeat(env, action_repeat, pool, sticky)
    if end_on_life_loss:
        env = EpisodicLife(env)
    if shaping is not None or clip_reward:
        function: Any = import_object(shaping) if isinstance(shaping, str) else shaping
        env = ShapeReward(env, function, clip_reward)
    return env if max_episode_steps is None else StatefulTimeLimit(env, max_episode_steps)


PIXEL_OPTIONS = tuple(parameter_names(wrap_pixels)[1:])
IMAGE_OPTIONS = ("pool", "grayscale", "size", "stack")  # those of them that only concern images


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into those of the environment and those of `wrap_pixels`."""
    env_options = {key: value for key, value in options.items() if key not in PIXEL_OPTIONS}
    return env_options, {key: value for key, value in options.items() if key in PIXEL_OPTIONS}


class NoopReset(StatefulWrapper):
    def __init__(self, env: gym.Env[Any, Any], max_noops: int) -> None:
        super().__init__(env)
        self.max_noops = max_noops

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        for _ in range(int(self.np_random.integers(self.max_noops + 1))):
            obs, _, terminated, truncated, info = self.env.step(noop(self.action_space))
            if terminated or truncated:
                obs, info = self.env.reset(options=options)
        return obs, info


class EpisodicLife(StatefulWrapper):
    """End the episode when a life is lost. Only after a lost life does the next episode continue the game.

    Any other reset restarts the game: after its end, with a seed, and after a truncation by any wrapper.
    """

    saved_attributes = ("lives", "game_over")

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.lives, self.game_over = 0, True

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        restart = self.game_over or seed is not None
        if not restart:
            obs, _, terminated, truncated, info = self.env.step(noop(self.action_space))
            restart = terminated or truncated
        if restart:
            obs, info = self.env.reset(seed=seed, options=options)
        self.lives, self.game_over = info[_lives_key(info)], False
        return obs, info

    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = self.env.step(action)
        key = _lives_key(info)
        lost_life = LIVES[key] <= info[key] < self.lives
        self.lives, self.game_over = info[key], terminated or truncated or not lost_life
        return obs, float(reward), terminated or lost_life, truncated, info


class ShapeReward(StatefulWrapper):
    saved_attributes = ("previous_info",)

    def __init__(self, env: gym.Env[Any, Any], shaping: Shaping | None, clip: bool) -> None:
        super().__init__(env)
        self.shaping, self.clip = shaping, clip
        self.previous_info: Info = {}

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        self.previous_info = _serializable(info)
        return obs, info

    def step(self, action: Any) -> Step:
        obs, env_reward, terminated, truncated, info = self.env.step(action)
        reward = float(env_reward)
        if self.shaping is not None:
            reward = float(self.shaping(reward, info, self.previous_info, terminated))
            self.previous_info = _serializable(info)
        return obs, float(np.sign(reward)) if self.clip else reward, terminated, truncated, info


class PreprocessImage(StatefulWrapper):
    """Convert to gray, resize, and put channels first: [C, H, W]."""

    def __init__(self, env: gym.Env[Any, Any], grayscale: bool, height: int | None, width: int | None) -> None:
        super().__init__(env)
        shape = env.observation_space.shape or ()
        if len(shape) not in (2, 3) or env.observation_space.dtype != np.uint8:
            raise UserError(
                f"{env} has the observation space {env.observation_space}; expected uint8 images [H, W] or [H, W, C]"
            )
        self.grayscale = grayscale and shape[2:] == (3,)
        target = (height or shape[0], width or shape[1])
        self.resize = make_resizer(shape[:2], target)
        channels = 1 if self.grayscale else int(np.prod(shape[2:]))
        self.observation_space = Box(0, 255, (channels, *target), np.uint8)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._preprocess(obs), info

    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._preprocess(obs), float(reward), terminated, truncated, info

    def _preprocess(self, image: Array) -> Array:
        resized = self.resize(to_grayscale(image) if self.grayscale else image)
        return resized[None] if resized.ndim == 2 else np.ascontiguousarray(resized.transpose(2, 0, 1))


def _check_options(
    action_repeat: int, pool: str, sticky: float, noops: int, limit: int | None, size: Any, stack: int
) -> tuple[int | None, int | None]:
    """Return height and width, or None where they stay unchanged. Raise `UserError` for an invalid option."""
    if not _is_int(noops) or noops < 0:
        raise UserError(f"env.noops={noops!r}: must be an integer of at least 0")
    if limit is not None and (not _is_int(limit) or limit < 1):
        raise UserError(f"env.max_episode_steps={limit!r}: must be an integer of at least 1, or null for no limit")
    if not 0.0 <= sticky < 1.0:
        raise UserError(f"env.sticky={sticky!r}: must be a probability of at least 0 and below 1")
    return check_frame_options(action_repeat, pool, size, stack)


def check_frame_options(action_repeat: int, pool: str, size: Any, stack: int) -> tuple[int | None, int | None]:
    """Return height and width, or None where they stay unchanged. Raise `UserError` for an invalid option."""
    for name, value in (("action_repeat", action_repeat), ("stack", stack)):
        if not _is_int(value) or value < 1:
            raise UserError(f"env.{name}={value!r}: must be an integer of at least 1")
    if pool not in POOLS:
        raise UserError(f"env.pool={pool!r}: allowed are {' and '.join(POOLS)}")
    if size is None:
        return None, None
    sides = [size, size] if _is_int(size) else list(size) if isinstance(size, (list, tuple)) else []
    if len(sides) != 2 or not all(_is_int(side) and side > 0 for side in sides):
        raise UserError(f"env.size={size!r}: must be a number of pixels, [height, width], or null to keep the size")
    return sides[0], sides[1]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _lives_key(info: Info) -> str:
    for key in LIVES:
        if key in info:
            return key
    raise UserError(
        f"env.end_on_life_loss=true needs an environment with {' or '.join(LIVES)} in info; remove the option"
    )


def _serializable(info: Info) -> Info:
    """Return the items that can be saved."""
    return {key: value for key, value in info.items() if isinstance(value, (bool, int, float, str, np.ndarray))}
