"""Atari games (package ale-py) as agents are usually compared on them: `ALE/Pong-v5`, under Gymnasium's ids.

The usual preparation is the default (Machado et al., 2018): each action for 4 frames, of which the last two are laid
over each other, grey, 84 by 84, 4 of these stacked, up to 30 frames of nothing at the start, and a chance of 1/4 that a
frame takes the action of the frame before. Lost lives don't end an episode and rewards aren't clipped unless asked for.
"""

from __future__ import annotations

import re
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.envs.vector.base import Info, Result
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import ScalarInfo, State
from zhixing.envs.wrappers.agents import built
from zhixing.envs.wrappers.pixels import wrap_pixels
from zhixing.errors import UserError
from zhixing.utils.extras import require_extra

NAME = re.compile(r"ALE/\w+-v5")
FOR_TWO = {"combat", "joust", "maze_craze", "warlords"}  # games that one player can't play


@cache
def games() -> dict[str, str]:
    """Names to the ROMs that the package holds; nothing without it. Found without importing it."""
    spec = find_spec("ale_py")
    folders = [] if spec is None else spec.submodule_search_locations or []
    found = {file.stem for folder in folders for file in Path(folder, "roms").glob("*.bin")} - FOR_TWO
    return {f"ALE/{rom.title().replace('_', '')}-v5": rom for rom in sorted(found)}


def names() -> list[str]:
    return list(games())


def supports(name: str) -> bool:
    """Without the package any name may be right: `make` then says what is missing."""
    return name in games() or (not games() and NAME.fullmatch(name) is not None)


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    constructor = partial(prepared, name)
    env: gym.Env[Any, Any] = built(name, constructor, options, named=constructor)
    return env


def prepared(
    name: str,
    /,
    full_action_space: bool = False,
    mode: int | None = None,
    difficulty: int | None = None,
    skip: int = 4,
    pool: str = "max",
    sticky: float = 0.25,
    noops: int = 30,
    end_on_life_loss: bool = False,
    shaping: str | None = None,
    clip_reward: bool = False,
    max_episode_steps: int | None = 27_000,
    grey: bool = True,
    size: Any = 84,
    stack: int = 4,
    render_mode: str | None = None,
) -> gym.Env[Any, Any]:
    """A game as agents see it. 27 000 steps of 4 frames are half an hour of play."""
    return wrap_pixels(
        Game(name, full_action_space, mode, difficulty, grey, render_mode),
        skip=skip,
        pool=pool,
        sticky=sticky,
        noops=noops,
        end_on_life_loss=end_on_life_loss,
        shaping=shaping,
        clip_reward=clip_reward,
        max_episode_steps=max_episode_steps,
        grey=grey,
        size=size,
        stack=stack,
    )


class Game(gym.Env[Any, Any]):
    """A game frame by frame; the screen is grey as the emulator itself makes it, or in colours."""

    metadata = {  # noqa: RUF012  (as in gym.Env)
        "render_modes": ["rgb_array"],
        "render_fps": 60,
        "keys": "arrow keys move, space or Z fires",
    }

    def __init__(
        self,
        name: str,
        full_action_space: bool,
        mode: int | None,
        difficulty: int | None,
        grey: bool,
        render_mode: str | None,
    ) -> None:
        with require_extra(name, "atari"):
            import ale_py
        self.ale_py: Any = ale_py
        self.rom = self.ale_py.roms.get_rom_path(games()[name])
        self.mode, self.difficulty, self.grey, self.render_mode = mode, difficulty, grey, render_mode
        self.ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # before the first one greets
        self.ale = self.ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)  # `sticky` draws from our own generator
        self._load(name)
        ale = self.ale
        self.actions = ale.getLegalActionSet() if full_action_space else ale.getMinimalActionSet()
        self.action_space = Discrete(len(self.actions))
        shape = ale.getScreenDims() if grey else (*ale.getScreenDims(), 3)
        self.observation_space = Box(0, 255, tuple(shape), np.uint8)
        self.name = name

    def _load(self, name: str) -> None:
        self.ale.loadROM(self.rom)
        for what, value, allowed, choose in (
            ("mode", self.mode, self.ale.getAvailableModes(), self.ale.setMode),
            ("difficulty", self.difficulty, self.ale.getAvailableDifficulties(), self.ale.setDifficulty),
        ):
            if value is not None and value not in allowed:
                raise UserError(f"{name}: {what}={value!r} is none of {', '.join(map(str, allowed))}")
            if value is not None:
                choose(value)
        self.fresh = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None and not self.fresh:
            self._load(self.name)  # some games begin differently after others: a seed means the very first
        self.fresh = False
        self.ale.reset_game()
        return self.picture(), {"lives": self.ale.lives()}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        reward, terminated, truncated, info = self.advance(action)
        return self.picture(), reward, terminated, truncated, info

    def advance(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """A step without its picture."""
        reward = float(self.ale.act(self.actions[action]))
        return reward, self.ale.game_over(with_truncation=False), False, {"lives": self.ale.lives()}

    def picture(self) -> Array:
        return self.ale.getScreenGrayscale() if self.grey else self.ale.getScreenRGB()

    def render(self) -> Array | None:
        return None if self.render_mode is None else self.ale.getScreenRGB()

    def get_keys_to_action(self) -> dict[tuple[str, ...], int]:
        """Return the action for each combination of held keys, as in Gymnasium; see `zhixing play`."""
        keymap: dict[tuple[str, ...], int] = {}
        for number, action in enumerate(self.actions):  # their names are NOOP, FIRE, UP, ..., DOWNLEFTFIRE
            directions = tuple(key for key in ("up", "down", "left", "right") if key.upper() in action.name)
            for fire in (("space",), ("z",)) if "FIRE" in action.name else ((),):
                keys = (*directions, *fire)
                keymap[keys] = number
        return keymap

    def state_dict(self) -> State:
        saved = np.frombuffer(self.ale.cloneState().serialize(), np.uint8).copy()
        return {"game": saved, "rng": dict(self.np_random.bit_generator.state)}

    def load_state_dict(self, state: State) -> None:
        self.ale.restoreState(self.ale_py.ALEState(state["game"].tobytes()))
        self.np_random.bit_generator.state = state["rng"]
        self.fresh = False


class NativeAtari:
    """ALE's own vector environment: games in threads. It can't be put back into the middle of an episode; the process
    back end can.

    Its stacks begin with black frames; here, as elsewhere, with the first picture repeated. No-ops count as frames of
    the limit of an episode, and an episode's very last picture is that of a frame or two before.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    options: ClassVar[frozenset[str]] = frozenset(
        {"skip", "pool", "sticky", "noops", "clip_reward", "max_episode_steps", "size", "stack", "full_action_space"}
    )

    def __init__(
        self,
        num: int,
        skip: int = 4,
        pool: str = "max",
        sticky: float = 0.25,
        noops: int = 30,
        clip_reward: bool = False,
        max_episode_steps: int | None = 27_000,
        size: Any = 84,
        stack: int = 4,
        full_action_space: bool = False,
    ) -> None:
        with require_extra(self.name, "atari"):
            from ale_py.vector_env import AtariVectorEnv
        if size is None:
            raise UserError(f"native {self.name} needs a size of pictures; use backend process for size=null")
        height, width = (size, size) if isinstance(size, int) else size
        frames = np.iinfo(np.int32).max if max_episode_steps is None else max_episode_steps * skip
        self.env: Any = AtariVectorEnv(
            games()[self.name],
            num,
            autoreset_mode="SameStep",
            frameskip=skip,
            maxpool=pool == "max",
            repeat_action_probability=sticky,
            noop_max=noops,
            reward_clipping=clip_reward,
            max_num_frames_per_episode=frames,
            img_height=height,
            img_width=width,
            stack_num=stack,
            full_action_space=full_action_space,
            use_fire_reset=False,
        )
        self.num, self.stack = num, stack
        self.spaces = Spaces(self.env.single_observation_space, self.env.single_action_space)
        self.rng = np.random.default_rng()
        self.inexact = list(range(num))
        self.age = np.zeros(num, np.int64)  # steps since an episode's first picture
        self.first = np.zeros((num, height, width), np.uint8)

    def reset(self, seed: int | None) -> tuple[Tree, Info]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        obs, _ = self.env.reset(seed=self.rng.integers(2**31 - 1, size=self.num))
        return self._begun(obs, np.arange(self.num)), {}

    def step(self, actions: Array) -> Result:
        obs, reward, terminated, truncated, told = self.env.step(actions)
        info: Info = {}
        self.age += 1
        ended = (terminated | truncated).nonzero()[0]
        if len(ended):
            numbers: dict[int, ScalarInfo] = {index: {} for index in ended.tolist()}
            info = {"final_obs": self._filled(told["final_obs"].copy()), "final_info": numbers}
        obs = self._begun(obs, ended)
        return obs, reward.astype(np.float32), terminated, truncated, info

    def _begun(self, obs: Array, rows: Array) -> Array:
        """Take the first pictures of the episodes that begin in these rows."""
        self.age[rows] = 0
        self.first[rows] = obs[rows, -1]
        return self._filled(obs)

    def _filled(self, obs: Array) -> Array:
        """Stacks of episodes that have hardly begun, their black frames replaced by the first picture."""
        for row in np.flatnonzero(self.age < self.stack - 1):
            obs[row, : self.stack - 1 - self.age[row]] = self.first[row]
        return obs

    def state_dict(self) -> State:
        return {"rng": dict(self.rng.bit_generator.state)}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        """New episodes, the same ones each time that this state is loaded."""
        self.rng.bit_generator.state = state["rng"]
        return self.reset(None)

    def render(self, index: int) -> Array | None:
        return None

    def close(self) -> None:
        self.env.close()


# one class per game: a native task is made with nothing but the number of environments and options
NATIVE: dict[str, type[NativeAtari]] = {name: type("NativeAtari", (NativeAtari,), {"name": name}) for name in names()}
