"""Super Mario Bros. as a task, frame by frame."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.envs.adapters.mario import rules, scenes
from zhixing.envs.adapters.mario.nes_core import NesConsole
from zhixing.envs.adapters.mario.retro_core import RetroConsole
from zhixing.envs.adapters.mario.rules import Level
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.pixels import Info
from zhixing.errors import UserError
from zhixing.utils.extras import missing_extra, require_extra

ROMS = {
    "standard": "super-mario-bros.nes",
    "downsample": "super-mario-bros-downsample.nes",
    "pixel": "super-mario-bros-pixel.nes",
    "rectangle": "super-mario-bros-rectangle.nes",
}
RIGHT, LEFT, DOWN, UP, B, A = 0x80, 0x40, 0x20, 0x10, 0x02, 0x01
RIGHT_ONLY = (0, RIGHT, RIGHT | A, RIGHT | B, RIGHT | A | B)
SIMPLE = (*RIGHT_ONLY, A, LEFT)
ACTIONS: dict[str, tuple[int, ...]] = {
    "right": RIGHT_ONLY,
    "simple": SIMPLE,
    "complex": (*SIMPLE, LEFT | A, LEFT | B, LEFT | A | B, DOWN, UP),
    "all": tuple(range(256)),
}
CORES: dict[str, Any] = {"retro": RetroConsole, "nes": NesConsole}
# keys of the keyboard that press a button when a person plays
KEYS = {RIGHT: ("right",), LEFT: ("left",), DOWN: ("down",), UP: ("up",), B: ("x",), A: ("z", "space")}


class SuperMario(gym.Env[Any, Any]):
    """One level, or the whole game where `level` is None. A step is a frame; pictures are [H, W, 3].

    `ram` names further bytes of the memory that `info` shall hold. With `core="nes"` it does to the number what
    gym-super-mario-bros does; with `core="retro"` the same rules run on a faster emulator, whose state can be saved.
    """

    metadata = {  # noqa: RUF012
        "render_modes": ["rgb_array"],
        "render_fps": 60,
        "logged_info_keys": ("x_pos", "flag_get"),
        "keys": "arrow keys move and duck, Z or space jumps, X runs",
    }

    def __init__(
        self,
        name: str,
        level: Level | None,
        /,
        rom: str = "standard",
        actions: str = "simple",
        core: str = "retro",
        ram: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        for option, value, allowed in (("rom", rom, ROMS), ("actions", actions, ACTIONS), ("core", core, CORES)):
            if value not in allowed:
                raise UserError(f"{name}: env.{option}={value!r}: allowed are {', '.join(allowed)}")
        self.addresses = _addresses(name, ram or {})
        self.level, self.buttons, self.render_mode = level, ACTIONS[actions], render_mode
        with require_extra(name, "mario"):
            self.console = CORES[core](rom_path(name, rom))
        scenes.to_the_start(self.console, level)
        self.console.begin_here()
        self.mark = rules.mark(self.console.ram())
        self.observation_space = Box(0, 255, self.console.shape, np.uint8)
        self.action_space = Discrete(len(self.buttons))
        if isinstance(self.console, RetroConsole):  # else a task without a state to save must have none of these
            self.state_dict, self.load_state_dict = self._state, self._load

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed)
        self.console.rewind()
        ram = self.console.ram()
        self.mark = rules.mark(ram)
        return self.picture(), self._info(ram)

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        reward, terminated, truncated, info = self.advance(action)
        return self.picture(), reward, terminated, truncated, info

    def advance(self, action: Any) -> tuple[float, bool, bool, Info]:
        """A step without its picture."""
        console = self.console
        console.advance(self.buttons[action])
        ram = console.ram()
        reward, self.mark = rules.reward_of(ram, self.mark)
        terminated = rules.over(ram, self.level)
        info = self._info(ram)
        if not terminated:  # what follows an end is left out anyway
            scenes.skip(console, ram, self.level is None)
        return reward, terminated, False, info

    def picture(self) -> Array:
        return self.console.picture()

    def render(self) -> Array | None:
        return self.picture() if self.render_mode == "rgb_array" else None

    def get_keys_to_action(self) -> dict[tuple[str, ...], int]:
        """Return the action for each combination of held keys, as in Gymnasium; see `zhixing play`."""
        return {
            keys: action
            for action, pressed in enumerate(self.buttons)
            if not pressed & ~sum(KEYS)  # start and select have no key
            for keys in itertools.product(*(KEYS[button] for button in KEYS if pressed & button))
        }

    def close(self) -> None:
        if self.console is not None:
            self.console.close()
            self.console = None

    def _info(self, ram: bytes) -> Info:
        info = rules.info_of(ram)
        return {**info, **rules.read(ram, self.addresses)} if self.addresses else info

    def _state(self) -> Info:
        rng = dict(self.np_random.bit_generator.state)
        return {"console": self.console.state_dict(), "mark": list(self.mark), "rng": rng}

    def _load(self, state: Info) -> None:
        self.console.load_state_dict(state["console"])
        self.mark = rules.Mark(*state["mark"])
        self.np_random.bit_generator.state = state["rng"]


def rom_path(name: str, rom: str) -> Path:
    """The file inside gym-super-mario-bros, found without importing that and the old Gym with it."""
    package = find_spec("gym_super_mario_bros")
    if package is None or not package.submodule_search_locations:
        raise missing_extra(name, "mario")
    return Path(package.submodule_search_locations[0]) / "_roms" / ROMS[rom]


def _addresses(name: str, ram: Any) -> dict[str, int]:
    if not isinstance(ram, Mapping):
        raise UserError(f"{name}: env.ram={ram!r}: must name addresses, such as {{power: 0x756}}")
    found: dict[str, int] = {}
    for key, given in ram.items():
        try:
            address = int(given, 0) if isinstance(given, str) else int(given)
        except (TypeError, ValueError):
            address = -1
        if not 0 <= address < 2048:
            raise UserError(f"{name}: env.ram.{key}={given!r}: must be an address from 0 to 0x7ff")
        if key in rules.NAMES:
            raise UserError(f"{name}: env.ram.{key}: info has a {key} already; give it another name")
        found[str(key)] = address
    return found
