"""What turns a task of pictures into what agents learn from: fewer frames, smaller and grey, stacked, rewards shaped.

The task shows uint8 pictures [H, W] or [H, W, C]; behind `wrap_pixels` they are [C * stack, H, W]. A task may save time
by having `advance(action)`, a step without its picture, and `picture()`, a new array of what it shows now: then no
picture is made of frames that nobody looks at. One that has `state_dict()` and `load_state_dict(state)`, its generator
within, keeps them behind the wrappers; one that hasn't stays without, so that it is resumed by replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.envs.options import parameters
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.resize import resizer, to_grey
from zhixing.errors import UserError
from zhixing.utils.importing import import_object

Info = dict[str, Any]
Step = tuple[Any, float, bool, bool, Info]
# shaping(reward, info, before, terminated): `before` is the info of the step before, or of the reset
Shaping = Callable[[float, Info, Info, bool], float]
POOLS = ("max", "last")
# where tasks tell how many lives are left, and the fewest with which the game goes on
LIVES = {"lives": 1, "life": 0}


def wrap_pixels(
    env: gym.Env[Any, Any],
    *,
    skip: int = 4,
    pool: str = "max",
    sticky: float = 0.0,
    noops: int = 0,
    end_on_life_loss: bool = False,
    shaping: str | Shaping | None = None,
    clip_reward: bool = False,
    max_episode_steps: int | None = None,
    grey: bool = True,
    size: Any = 84,
    stack: int = 4,
) -> gym.Env[Any, Any]:
    """The usual way to train from pictures; every part can be left out.

    - `skip`: each action is done for so many frames, their rewards summed; 1 for every frame
    - `pool`: an observation shows the brighter pixels of the last two of these frames ("max": old games draw some
      things in every other frame only), or the "last"
    - `sticky`: the chance with which a frame takes the action of the frame before (Machado et al., 2018)
    - `noops`: an episode begins with 0 to so many frames without action, at random
    - `end_on_life_loss`: a lost life terminates the episode; the next one continues the game
    - `shaping`: a function, or "my.module:function", called as `(reward, info, before, terminated)` for the new reward
    - `clip_reward`: only the reward's sign is left, after any shaping
    - `max_episode_steps`: episodes are truncated after so many actions; the next one starts a new game
    - `grey`, `size` (a side, or [height, width]; None: as it is) and `stack` make the observation. An episode begins
      with its first picture repeated. Of grey stacks [stack, H, W] a replay with `frame_stack=stack` keeps each picture
      once; coloured ones are [3 * stack, H, W], as networks take them, and stored whole.
    """
    height, width = _checked(skip, pool, sticky, noops, max_episode_steps, size, stack)
    if noops:
        env = Noops(env, noops)
    env = Frames(env, skip, pool, sticky)
    if end_on_life_loss:
        env = LifeEnds(env)
    if shaping is not None or clip_reward:
        function: Any = import_object(shaping) if isinstance(shaping, str) else shaping
        env = Rewards(env, function, clip_reward)
    if max_episode_steps is not None:
        env = Limit(env, max_episode_steps)
    env = Pictures(env, grey, height, width)
    return Stack(env, stack) if stack > 1 else env


PIXEL_OPTIONS = tuple(parameters(wrap_pixels)[0][1:])


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a task, apart from those of `wrap_pixels`."""
    own = {key: value for key, value in options.items() if key not in PIXEL_OPTIONS}
    return own, {key: value for key, value in options.items() if key in PIXEL_OPTIONS}


class Chained(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper whose own attributes `kept` are saved and restored with the task, where the task can be."""

    kept: tuple[str, ...] = ()

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        # attributes, not methods: whoever looks for them must find them only if the task has them, too
        if hasattr(env, "state_dict") and hasattr(env, "load_state_dict"):
            self.state_dict, self.load_state_dict = self._state, self._load

    def _state(self) -> Info:
        own = {name: _copied(getattr(self, name)) for name in self.kept}
        return {"own": own, "env": self.env.state_dict()}  # type: ignore[attr-defined]

    def _load(self, state: Info) -> None:
        self.env.load_state_dict(state["env"])  # type: ignore[attr-defined]
        for name in self.kept:
            setattr(self, name, _copied(state["own"][name]))


class Noops(Chained):
    def __init__(self, env: gym.Env[Any, Any], most: int) -> None:
        super().__init__(env)
        self.most = most

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        for _ in range(int(self.np_random.integers(self.most + 1))):
            obs, _, terminated, truncated, info = self.env.step(noop(self.action_space))
            if terminated or truncated:
                obs, info = self.env.reset(options=options)
        return obs, info


class Frames(Chained):
    """One action for several frames, which may each take the one before instead."""

    kept = ("last",)

    def __init__(self, env: gym.Env[Any, Any], skip: int, pool: str, sticky: float) -> None:
        super().__init__(env)
        self.skip, self.sticky = skip, sticky
        self.seen = min(skip, 2 if pool == "max" else 1)  # so many of the last frames make an observation
        self.last = noop(self.action_space)
        # pictures of those skipped aren't made, where the task can do without
        quick = env.has_wrapper_attr("advance") and env.has_wrapper_attr("picture")
        self.advance = env.get_wrapper_attr("advance") if quick else None
        self.picture = env.get_wrapper_attr("picture") if quick else None
        # a picture is shown for each action, not for each frame
        self.metadata = {**env.metadata, "render_fps": (env.metadata.get("render_fps") or 60) / skip}

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        self.last = noop(self.action_space)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Step:
        total, seen = 0.0, []
        for left in reversed(range(self.skip)):
            if not self.sticky or self.np_random.random() >= self.sticky:
                self.last = action
            if self.advance is None:
                shown, reward, terminated, truncated, info = self.env.step(self.last)
            else:
                reward, terminated, truncated, info = self.advance(self.last)
            total += float(reward)
            over = terminated or truncated
            if left < self.seen or over:
                seen.append(np.array(shown) if self.picture is None else self.picture())
            if over:
                break
        return (np.maximum(*seen) if len(seen) == 2 else seen[0]), total, terminated, truncated, info


class LifeEnds(Chained):
    """End the episode when a life is lost. Only after a lost life the next episode continues the game.

    Any other reset restarts the game: after its end, with a seed, and after a truncation, whichever wrapper made it.
    """

    kept = ("lives", "over")

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.lives, self.over = 0, True

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        over = self.over or seed is not None
        if not over:
            obs, _, terminated, truncated, info = self.env.step(noop(self.action_space))
            over = terminated or truncated
        if over:
            obs, info = self.env.reset(seed=seed, options=options)
        self.lives, self.over = info[_lives(info)], False
        return obs, info

    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = self.env.step(action)
        key = _lives(info)
        lost = LIVES[key] <= info[key] < self.lives
        self.lives, self.over = info[key], terminated or truncated or not lost
        return obs, float(reward), terminated or lost, truncated, info


class Rewards(Chained):
    kept = ("before",)

    def __init__(self, env: gym.Env[Any, Any], shaping: Shaping | None, clip: bool) -> None:
        super().__init__(env)
        self.shaping, self.clip = shaping, clip
        self.before: Info = {}

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        self.before = _plain(info)
        return obs, info

    def step(self, action: Any) -> Step:
        obs, given, terminated, truncated, info = self.env.step(action)
        reward = float(given)
        if self.shaping is not None:
            reward = float(self.shaping(reward, info, self.before, terminated))
            self.before = _plain(info)
        return obs, float(np.sign(reward)) if self.clip else reward, terminated, truncated, info


class Limit(Chained):
    """Gymnasium's TimeLimit, but its count can be saved."""

    kept = ("steps",)

    def __init__(self, env: gym.Env[Any, Any], most: int) -> None:
        super().__init__(env)
        self.most, self.steps = most, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        self.steps = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        return obs, reward, terminated, truncated or self.steps >= self.most, info


class Pictures(Chained):
    """Grey, smaller, channels first: [C, H, W]."""

    def __init__(self, env: gym.Env[Any, Any], grey: bool, height: int | None, width: int | None) -> None:
        super().__init__(env)
        shape = env.observation_space.shape or ()
        if len(shape) not in (2, 3) or env.observation_space.dtype != np.uint8:
            raise UserError(f"{env} shows {env.observation_space}, not a picture of bytes [H, W] or [H, W, C]")
        self.grey = grey and shape[2:] == (3,)
        target = (height or shape[0], width or shape[1])
        self.resize = resizer(shape[:2], target)
        channels = 1 if self.grey else int(np.prod(shape[2:]))
        self.observation_space = Box(0, 255, (channels, *target), np.uint8)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._seen(obs), info

    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._seen(obs), float(reward), terminated, truncated, info

    def _seen(self, picture: Array) -> Array:
        small = self.resize(to_grey(picture) if self.grey else picture)
        return small[None] if small.ndim == 2 else np.ascontiguousarray(small.transpose(2, 0, 1))


class Stack(Chained):
    kept = ("frames",)

    def __init__(self, env: gym.Env[Any, Any], count: int) -> None:
        super().__init__(env)
        channels, height, width = env.observation_space.shape or ()
        self.count, self.channels = count, channels
        self.observation_space = Box(0, 255, (count * channels, height, width), np.uint8)
        self.frames = np.zeros(self.observation_space.shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        self.frames = np.concatenate([obs] * self.count)
        return self.frames.copy(), info

    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.frames = np.concatenate([self.frames[self.channels :], obs])
        return self.frames.copy(), float(reward), terminated, truncated, info


def noop(space: gym.Space[Any]) -> Any:
    """The action that does nothing: by convention the first of choices, or zeros."""
    return int(space.start) if isinstance(space, Discrete) else np.zeros(space.shape or (), space.dtype)


def _checked(
    skip: int, pool: str, sticky: float, noops: int, limit: int | None, size: Any, stack: int
) -> tuple[int | None, int | None]:
    """The height and width that `size` says; None where they stay as they are."""
    for name, value, least in (("skip", skip, 1), ("noops", noops, 0), ("stack", stack, 1)):
        if not _whole(value) or value < least:
            raise UserError(f"env.{name}={value!r}: must be a whole number, at least {least}")
    if limit is not None and (not _whole(limit) or limit < 1):
        raise UserError(f"env.max_episode_steps={limit!r}: must be a whole number, at least 1, or null for no limit")
    if pool not in POOLS:
        raise UserError(f"env.pool={pool!r}: allowed are {' and '.join(POOLS)}")
    if not 0.0 <= sticky < 1.0:
        raise UserError(f"env.sticky={sticky!r}: must be a chance, at least 0 and below 1")
    if size is None:
        return None, None
    sides = [size, size] if _whole(size) else list(size) if isinstance(size, (list, tuple)) else []
    if len(sides) != 2 or not all(_whole(side) and side > 0 for side in sides):
        raise UserError(f"env.size={size!r}: must be a side, [height, width], or null to leave pictures as they are")
    return sides[0], sides[1]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _lives(info: Info) -> str:
    for key in LIVES:
        if key in info:
            return key
    raise UserError(
        f"env.end_on_life_loss=true needs a task that tells {' or '.join(LIVES)} in info; leave it out here"
    )


def _plain(info: Info) -> Info:
    """What can be saved of it."""
    return {key: value for key, value in info.items() if isinstance(value, (bool, int, float, str, np.ndarray))}


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    return {key: _copied(part) for key, part in value.items()} if isinstance(value, dict) else value
