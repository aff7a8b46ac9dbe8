"""Games of stable-retro whose ROM is installed: `retro/Airstriker-Genesis-v0`.

Rewards and termination are those of the game's scenario in stable-retro. All options of `wrap_pixels` are available.
"""

from __future__ import annotations

import re
import zlib
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from zhixing.envs.adapters.mario.retro_core import Emulator, one_per_process_error
from zhixing.envs.options import COMMON_OPTIONS, check_options, construct_env
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.frames import select_frame_options
from zhixing.envs.wrappers.pixels import PIXEL_OPTIONS, split_options, wrap_pixels
from zhixing.envs.wrappers.stateful import Info
from zhixing.errors import UserError, unknown
from zhixing.utils.extras import require_extra

PREFIX = "retro/"
ACTIONS = ("discrete", "multi_discrete")


def names() -> list[str]:
    """Return the games whose ROM is installed."""
    return sorted(f"{PREFIX}{game}" for game in _games_with_rom())


def supports(name: str) -> bool:
    """Accept any game. `make` explains what is missing."""
    return name.startswith(PREFIX) and name != PREFIX


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    constructor = partial(RetroGame, name)
    check_options(name, constructor, options, extra=PIXEL_OPTIONS)
    game_options, pixel_options = split_options(options)
    env = construct_env(name, constructor, game_options)
    try:
        return wrap_pixels(env, **pixel_options)
    except Exception:
        env.close()  # frees the emulator
        raise


def own_options(name: str, options: dict[str, Any]) -> set[str]:
    return set(COMMON_OPTIONS).intersection(PIXEL_OPTIONS)


def frame_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return how observations are made from screens, for agents that act without the emulator."""
    return select_frame_options(options)


class RetroGame(gym.Env[Any, Any]):
    """One game of stable-retro, one frame per step.

    `state` names the saved state to start from, and `scenario` defines rewards and termination, both as in
    stable-retro. With `actions="discrete"` an action is an allowed combination of buttons, with "multi_discrete" one
    choice per group of buttons.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}  # noqa: RUF012  (as in gym.Env)

    def __init__(
        self,
        name: str,
        /,
        state: str | None = None,
        scenario: str | None = None,
        actions: str = "discrete",
        render_mode: str | None = None,
    ) -> None:
        game = name.removeprefix(PREFIX)
        if scenario is not None and not re.fullmatch(r"[\w-]+", scenario):  # a path could load an untrusted script
            raise UserError(f"{name}: env.scenario={scenario!r}: allowed are names of the game's scenarios, not paths")
        if actions not in ACTIONS:
            raise UserError(f"{name}: env.actions={actions!r}: allowed are {', '.join(ACTIONS)}")
        with require_extra(name, "mario"):
            import stable_retro
        data = stable_retro.data
        games = data.list_games(data.Integrations.ALL)
        if game not in games:
            raise unknown("game", name, [f"{PREFIX}{known}" for known in games])
        if game not in _games_with_rom():
            raise UserError(f"{name} needs its ROM; import your ROM files with: python -m stable_retro.import DIR")
        states = data.list_states(game, data.Integrations.ALL)
        if state is not None and state not in states:
            raise unknown("state", state, states, f"of {name}")
        Emulator.release_unused()
        try:
            self.env = stable_retro.make(
                game,
                stable_retro.State.DEFAULT if state is None else state,
                inttype=data.Integrations.ALL,
                scenario=scenario,
                use_restricted_actions=stable_retro.Actions[actions.upper()],
                render_mode="rgb_array",
            )
        except RuntimeError as error:
            raise one_per_process_error(name, "another game") from error
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(0, 255, self.env.observation_space.shape, np.uint8)
        self.action_space = self.env.action_space
        self._screen: Array | None = None  # set where the emulator can't provide it: after loading a state

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed)
        self.env.reset()
        self._screen = None
        return self.get_obs(), dict(self.env.data.lookup_all())

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        reward, terminated, truncated, info = self.step_without_obs(action)
        return self.get_obs(), reward, terminated, truncated, info

    def step_without_obs(self, action: Any) -> tuple[float, bool, bool, Info]:
        """Step without rendering the screen."""
        env = self.env
        for player, buttons in enumerate(env.action_to_array(action)):
            env.em.set_button_mask(buttons, player)
        env.em.step()
        env.data.update_ram()
        self._screen = None
        reward, done, info = env.compute_step()
        return float(reward), bool(done), False, dict(info)

    def get_obs(self) -> Array:
        screen = self.env.get_screen(apply_rotation=True) if self._screen is None else self._screen
        return np.ascontiguousarray(screen)

    def render(self) -> Array | None:
        return self.get_obs() if self.render_mode == "rgb_array" else None

    def state_dict(self) -> Info:
        return {
            "state": np.frombuffer(self.env.em.get_state(), np.uint8),
            "screen": np.frombuffer(zlib.compress(self.get_obs().tobytes(), 1), np.uint8),
            "rng": dict(self.np_random.bit_generator.state),
        }

    def load_state_dict(self, state: Info) -> None:
        """Restore the game exactly, except for variables of a scenario's Lua script, which aren't in the state."""
        self.env.em.set_state(state["state"].tobytes())
        self.env.data.reset()
        self.env.data.update_ram()
        pixels = np.frombuffer(zlib.decompress(state["screen"].tobytes()), np.uint8)
        self._screen = pixels.reshape(self.observation_space.shape or ())
        self.np_random.bit_generator.state = state["rng"]

    def close(self) -> None:
        self.env.close()


def _games_with_rom() -> set[str]:
    """Return the games whose folder contains a ROM, without importing stable-retro, which is slow.

    Other folders contain only the ROM's checksum or a patch for it.
    """
    package = find_spec("stable_retro")
    if package is None or not package.submodule_search_locations:
        return set()
    roms = Path(package.submodule_search_locations[0]).glob("data/*/*/rom.*")
    return {rom.parent.name for rom in roms if rom.suffix not in (".sha", ".delta")}
