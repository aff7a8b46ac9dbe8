"""Super Mario Bros. as a Gymnasium environment: one frame per step."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.envs.adapters.mario import cutscenes, ram_obs, rules
from zhixing.envs.adapters.mario.nes_core import NesConsole
from zhixing.envs.adapters.mario.retro_core import RetroConsole
from zhixing.envs.adapters.mario.rules import Level
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.stateful import Info
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
OBSERVATIONS = ("pixels", "ram")
# keyboard keys for each button in `zhixing play`
KEYS = {RIGHT: ("right",), LEFT: ("left",), DOWN: ("down",), UP: ("up",), B: ("x",), A: ("z", "space")}


class SuperMarioEnv(gym.Env[Any, Any]):
    """One level, or the whole game if `level` is None. Each step is one frame.

    Observations are screens [H, W, 3], or with `obs="ram"` vectors that `ram_obs` makes from the console's memory.
    `ram` maps names to addresses of bytes to add to `info`. With `core="nes"`, rewards, info and screens equal those of
    gym-super-mario-bros exactly; `core="retro"` runs the same rules on a faster emulator whose state can be saved.
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
        obs: str = "pixels",
        ram: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        choices: list[tuple[str, str, Collection[str]]] = [
            ("rom", rom, ROMS),
            ("actions", actions, ACTIONS),
            ("core", core, CORES),
            ("obs", obs, OBSERVATIONS),
        ]
        for option, value, allowed in choices:
            if value not in allowed:
                raise UserError(f"{name}: env.{option}={value!r}: allowed are {', '.join(allowed)}")
        self.addresses = _parse_addresses(name, ram or {})
        self.level, self.buttons, self.render_mode = level, ACTIONS[actions], render_mode
        with require_extra(name, "mario"):
            self.console = CORES[core](rom_path(name, rom))
        cutscenes.start_level(self.console, level)
        self.console.save_start()
        self.progress = rules.read_progress(self.console.ram())
        self.reads_ram = obs == "ram"
        self.observation_space = (
            ram_obs.observation_space() if self.reads_ram else Box(0, 255, self.console.shape, np.uint8)
        )
        self.action_space = Discrete(len(self.buttons))
        if isinstance(self.console, RetroConsole):  # set here: with nes-py the env must not have these methods
            self.state_dict, self.load_state_dict = self._state, self._load

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed)
        self.console.restore_start()
        ram = self.console.ram()
        self.progress = rules.read_progress(ram)
        return self.get_obs(), self._info(ram)

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        reward, terminated, truncated, info = self.step_without_obs(action)
        return self.get_obs(), reward, terminated, truncated, info

    def step_without_obs(self, action: Any) -> tuple[float, bool, bool, Info]:
        """Step without rendering the screen."""
        console = self.console
        console.advance(self.buttons[action])
        ram = console.ram()
        reward, self.progress = rules.compute_reward(ram, self.progress)
        terminated = rules.is_terminated(ram, self.level)
        info = self._info(ram)
        if not terminated:
            cutscenes.skip_cutscenes(console, ram, self.level is None)
        return reward, terminated, False, info

    def get_obs(self) -> Array:
        return ram_obs.read_obs(self.console.ram()) if self.reads_ram else self.console.screen()

    def render(self) -> Array | None:
        return self.console.screen() if self.render_mode == "rgb_array" else None

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
        info = rules.read_info(ram)
        return {**info, **rules.read_bytes(ram, self.addresses)} if self.addresses else info

    def _state(self) -> Info:
        rng = dict(self.np_random.bit_generator.state)
        return {"console": self.console.state_dict(), "progress": list(self.progress), "rng": rng}

    def _load(self, state: Info) -> None:
        self.console.load_state_dict(state["console"])
        self.progress = rules.Progress(*state["progress"])
        self.np_random.bit_generator.state = state["rng"]


def rom_path(name: str, rom: str) -> Path:
    """Return the ROM file in gym-super-mario-bros without importing that package, which would import the old Gym."""
    package = find_spec("gym_super_mario_bros")
    if package is None or not package.submodule_search_locations:
        raise missing_extra(name, "mario")
    return Path(package.submodule_search_locations[0]) / "_roms" / ROMS[rom]


def _parse_addresses(name: str, ram: Any) -> dict[str, int]:
    if not isinstance(ram, Mapping):
        raise UserError(f"{name}: env.ram={ram!r}: must map names to addresses, such as {{power: 0x756}}")
    addresses: dict[str, int] = {}
    for key, value in ram.items():
        try:
            address = int(value, 0) if isinstance(value, str) else int(value)
        except (TypeError, ValueError):
            address = -1
        if not 0 <= address < 2048:
            raise UserError(f"{name}: env.ram.{key}={value!r}: must be an address from 0 to 0x7ff")
        if key in rules.INFO_KEYS:
            raise UserError(f"{name}: env.ram.{key}: info already has the key {key}; choose another name")
        addresses[str(key)] = address
    return addresses
