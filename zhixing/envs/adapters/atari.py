"""Atari games (package ale-py) under Gymnasium's ids: `ALE/Pong-v5`.

The defaults are the standard preprocessing (Machado et al., 2018): actions repeated for 4 frames, max-pooling over
the last two frames, grayscale, 84 x 84, frame stack 4, up to 30 no-op frames at the start, and sticky actions with
probability 0.25. By default, a lost life doesn't end an episode and rewards aren't clipped.
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
from zhixing.envs.options import COMMON_OPTIONS, construct_env
from zhixing.envs.vector.base import Info, Result
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import ScalarInfo, State
from zhixing.envs.wrappers.frames import select_frame_options
from zhixing.envs.wrappers.pixels import PIXEL_OPTIONS, wrap_pixels
from zhixing.errors import UserError
from zhixing.utils.extras import require_extra

NAME = re.compile(r"ALE/\w+-v5")
TWO_PLAYER = {"combat", "joust", "maze_craze", "warlords"}  # games that need two players


@cache
def games() -> dict[str, str]:
    """Return the ROM of each environment name, without importing ale-py; empty if ale-py isn't installed."""
    spec = find_spec("ale_py")
    folders = [] if spec is None else spec.submodule_search_locations or []
    roms = {file.stem for folder in folders for file in Path(folder, "roms").glob("*.bin")} - TWO_PLAYER
    return {f"ALE/{rom.title().replace('_', '')}-v5": rom for rom in sorted(roms)}


def names() -> list[str]:
    return list(games())


def supports(name: str) -> bool:
    """Accept any id of the right form if ale-py isn't installed; `make` then names the missing package."""
    return name in games() or (not games() and NAME.fullmatch(name) is not None)


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    constructor = partial(make_preprocessed, name)
    env: gym.Env[Any, Any] = construct_env(name, constructor, options)
    return env


def make_preprocessed(
    name: str,
    /,
    full_action_space: bool = False,
    mode: int | None = None,
    difficulty: int | None = None,
    action_repeat: int = 4,
    pool: str = "max",
    sticky: float = 0.25,
    noops: int = 30,
    end_on_life_loss: bool = False,
    shaping: str | None = None,
    clip_reward: bool = False,
    max_episode_steps: int | None = 27_000,
    grayscale: bool = True,
    size: Any = 84,
    stack: int = 4,
    render_mode: str | None = None,
) -> gym.Env[Any, Any]:
    """Return a preprocessed game. The default time limit of 27,000 steps of 4 frames is half an hour of play."""
    return wrap_pixels(
        AtariEnv(name, full_action_space, mode, difficulty, grayscale, render_mode),
        action_repeat=action_repeat,
        pool=pool,
        sticky=sticky,
        noops=noops,
        end_on_life_loss=end_on_life_loss,
        shaping=shaping,
        clip_reward=clip_reward,
        max_episode_steps=max_episode_steps,
        grayscale=grayscale,
        size=size,
        stack=stack,
    )


def own_options(name: str, options: dict[str, Any]) -> set[str]:
    return set(COMMON_OPTIONS).intersection(PIXEL_OPTIONS)


def frame_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return how observations are made from screens, for agents that act without the emulator."""
    return select_frame_options(options)


class AtariEnv(gym.Env[Any, Any]):
    """A game with one frame per step. The screen is ALE's grayscale, or RGB."""

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
        grayscale: bool,
        render_mode: str | None,
    ) -> None:
        with require_extra(name, "atari"):
            import ale_py
        self.ale_py: Any = ale_py
        self.rom = self.ale_py.roms.get_rom_path(games()[name])
        self.mode, self.difficulty, self.grayscale, self.render_mode = mode, difficulty, grayscale, render_mode
        self.ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # before the first ALE prints its banner
        self.ale = self.ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)  # `sticky` uses the env's generator instead
        self._load_rom(name)
        ale = self.ale
        self.actions = ale.getLegalActionSet() if full_action_space else ale.getMinimalActionSet()
        self.action_space = Discrete(len(self.actions))
        shape = ale.getScreenDims() if grayscale else (*ale.getScreenDims(), 3)
        self.observation_space = Box(0, 255, tuple(shape), np.uint8)
        self.name = name

    def _load_rom(self, name: str) -> None:
        self.ale.loadROM(self.rom)
        for option, value, allowed, set_value in (
            ("mode", self.mode, self.ale.getAvailableModes(), self.ale.setMode),
            ("difficulty", self.difficulty, self.ale.getAvailableDifficulties(), self.ale.setDifficulty),
        ):
            if value is not None and value not in allowed:
                raise UserError(f"{name}: env.{option}={value!r}: allowed are {', '.join(map(str, allowed))}")
            if value is not None:
                set_value(value)
        self.rom_is_fresh = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None and not self.rom_is_fresh:
            self._load_rom(self.name)  # some games start differently after an earlier episode
        self.rom_is_fresh = False
        self.ale.reset_game()
        return self.get_obs(), {"lives": self.ale.lives()}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        reward, terminated, truncated, info = self.step_without_obs(action)
        return self.get_obs(), reward, terminated, truncated, info

    def step_without_obs(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """Step without rendering the screen."""
        reward = float(self.ale.act(self.actions[action]))
        return reward, self.ale.game_over(with_truncation=False), False, {"lives": self.ale.lives()}

    def get_obs(self) -> Array:
        return self.ale.getScreenGrayscale() if self.grayscale else self.ale.getScreenRGB()

    def render(self) -> Array | None:
        return None if self.render_mode is None else self.ale.getScreenRGB()

    def get_keys_to_action(self) -> dict[tuple[str, ...], int]:
        """Return the action for each combination of held keys, as in Gymnasium; see `zhixing play`."""
        keymap: dict[tuple[str, ...], int] = {}
        for index, action in enumerate(self.actions):  # named NOOP, FIRE, UP, ..., DOWNLEFTFIRE
            directions = tuple(key for key in ("up", "down", "left", "right") if key.upper() in action.name)
            for fire in (("space",), ("z",)) if "FIRE" in action.name else ((),):
                keys = (*directions, *fire)
                keymap[keys] = index
        return keymap

    def state_dict(self) -> State:
        game = np.frombuffer(self.ale.cloneState().serialize(), np.uint8).copy()
        return {"game": game, "rng": dict(self.np_random.bit_generator.state)}

    def load_state_dict(self, state: State) -> None:
        self.ale.restoreState(self.ale_py.ALEState(state["game"].tobytes()))
        self.np_random.bit_generator.state = state["rng"]
        self.rom_is_fresh = False


class NativeAtari:
    """ALE's vector environment, which runs games in threads. It can't be restored in the middle of an episode; use the
    process back end for that.

    ALE starts frame stacks with black frames; this class repeats the first frame instead, as the other back ends do.
    Unlike there, no-ops count toward the time limit, and the last frame of an episode is one or two frames old.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    options: ClassVar[frozenset[str]] = frozenset(
        {
            "action_repeat",
            "pool",
            "sticky",
            "noops",
            "clip_reward",
            "max_episode_steps",
            "size",
            "stack",
            "full_action_space",
        }
    )

    def __init__(
        self,
        num: int,
        action_repeat: int = 4,
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
            raise UserError(f"{self.name}: env.size=null isn't available with vector.backend=native; use process")
        height, width = (size, size) if isinstance(size, int) else size
        frames = np.iinfo(np.int32).max if max_episode_steps is None else max_episode_steps * action_repeat
        self.env: Any = AtariVectorEnv(
            games()[self.name],
            num,
            autoreset_mode="SameStep",
            frameskip=action_repeat,
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
        self.spaces = Spaces(self.env.single_observation_space, self.env.single_action_space, stack=stack)
        self.rng = np.random.default_rng()
        self.inexact = list(range(num))
        self.episode_steps = np.zeros(num, np.int64)
        self.first_frame = np.zeros((num, height, width), np.uint8)

    def reset(self, seed: int | None) -> tuple[Tree, Info]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        obs, _ = self.env.reset(seed=self.rng.integers(2**31 - 1, size=self.num))
        return self._start_episodes(obs, np.arange(self.num)), {}

    def step(self, actions: Array) -> Result:
        obs, reward, terminated, truncated, ale_info = self.env.step(actions)
        info: Info = {}
        self.episode_steps += 1
        ended = (terminated | truncated).nonzero()[0]
        if len(ended):
            final_info: dict[int, ScalarInfo] = {index: {} for index in ended.tolist()}
            info = {"final_obs": self._fill_stacks(ale_info["final_obs"].copy()), "final_info": final_info}
        obs = self._start_episodes(obs, ended)
        return obs, reward.astype(np.float32), terminated, truncated, info

    def _start_episodes(self, obs: Array, rows: Array) -> Array:
        """Remember the first frames of the new episodes in these rows. Return all stacks, filled."""
        self.episode_steps[rows] = 0
        self.first_frame[rows] = obs[rows, -1]
        return self._fill_stacks(obs)

    def _fill_stacks(self, obs: Array) -> Array:
        """Replace the black frames at the start of an episode with its first frame, in place."""
        for row in np.flatnonzero(self.episode_steps < self.stack - 1):
            obs[row, : self.stack - 1 - self.episode_steps[row]] = self.first_frame[row]
        return obs

    def state_dict(self) -> State:
        return {"rng": dict(self.rng.bit_generator.state)}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        """Start new episodes, the same ones whenever this state is loaded."""
        self.rng.bit_generator.state = state["rng"]
        return self.reset(None)

    def render(self, index: int) -> Array | None:
        return None

    def close(self) -> None:
        self.env.close()


# one class per game, because a native environment is constructed with only the number of environments and options
NATIVE: dict[str, type[NativeAtari]] = {name: type("NativeAtari", (NativeAtari,), {"name": name}) for name in names()}
