"""Games that stable-retro knows, where the user has imported the ROM: `retro/Airstriker-Genesis`, `retro/Zelda-Nes-v0`.

Rewards and endings are those of the game's scenario in stable-retro. All options of `wrap_pixels` are options here.
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

from zhixing.envs.adapters.mario.retro_core import Emulator, one_per_process
from zhixing.envs.options import check_options
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.agents import built
from zhixing.envs.wrappers.pixels import PIXEL_OPTIONS, Info, split_options, wrap_pixels
from zhixing.errors import UserError, unknown
from zhixing.utils.extras import require_extra

PREFIX = "retro/"
ACTIONS = ("discrete", "multi_discrete")


def names() -> list[str]:
    """Only those that can be played: their ROMs are there."""
    return sorted(f"{PREFIX}{game}" for game in _imported())


def knows(name: str) -> bool:
    """Also games that aren't there: `make` says what to do."""
    return name.startswith(PREFIX) and name != PREFIX


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    constructor = partial(RetroGame, name)
    check_options(name, constructor, options, extra=PIXEL_OPTIONS)
    own, pixels = split_options(options)
    env = built(name, constructor, own, named=constructor)
    try:
        return wrap_pixels(env, **pixels)
    except Exception:
        env.close()  # or it would keep the emulator
        raise


class RetroGame(gym.Env[Any, Any]):
    """One frame per step. `state` names a saved state of the game to begin at and `scenario` its rewards and endings,
    as stable-retro has them; `actions` are all allowed combinations of buttons ("discrete"), or a choice for each group
    of buttons ("multi_discrete")."""

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
        if scenario is not None and not re.fullmatch(r"[\w-]+", scenario):  # a path may lead to a script of anybody
            raise UserError(f"{name}: env.scenario={scenario!r}: allowed are names of the game's own scenarios")
        if actions not in ACTIONS:
            raise UserError(f"{name}: env.actions={actions!r}: allowed are {', '.join(ACTIONS)}")
        with require_extra(name, "mario"):
            import stable_retro
        data = stable_retro.data
        known = data.list_games(data.Integrations.ALL)
        if game not in known:
            raise unknown("game", name, [f"{PREFIX}{each}" for each in known])
        if game not in _imported():
            raise UserError(f"{name} needs its ROM: python -m stable_retro.import DIR takes those that you have in DIR")
        states = data.list_states(game, data.Integrations.ALL)
        if state is not None and state not in states:
            raise unknown("state", state, states, f"of {name}")
        Emulator.make_way()
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
            raise one_per_process(name, "another game") from error
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(0, 255, self.env.observation_space.shape, np.uint8)
        self.action_space = self.env.action_space
        self._picture: Array | None = None  # what is on the screen, where the emulator can't tell

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed)
        self.env.reset()
        self._picture = None
        return self.picture(), dict(self.env.data.lookup_all())

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        reward, terminated, truncated, info = self.advance(action)
        return self.picture(), reward, terminated, truncated, info

    def advance(self, action: Any) -> tuple[float, bool, bool, Info]:
        """A step without its picture."""
        env = self.env
        for player, buttons in enumerate(env.action_to_array(action)):
            env.em.set_button_mask(buttons, player)
        env.em.step()
        env.data.update_ram()
        self._picture = None
        reward, done, info = env.compute_step()
        return float(reward), bool(done), False, dict(info)

    def picture(self) -> Array:
        shown = self.env.get_screen(apply_rotation=True) if self._picture is None else self._picture
        return np.ascontiguousarray(shown)

    def render(self) -> Array | None:
        return self.picture() if self.render_mode == "rgb_array" else None

    def state_dict(self) -> Info:
        return {
            "state": np.frombuffer(self.env.em.get_state(), np.uint8),
            "picture": np.frombuffer(zlib.compress(self.picture().tobytes(), 1), np.uint8),
            "rng": dict(self.np_random.bit_generator.state),
        }

    def load_state_dict(self, state: Info) -> None:
        """Exact but for scenarios with a script of their own, whose variables aren't the console's."""
        self.env.em.set_state(state["state"].tobytes())
        self.env.data.reset()
        self.env.data.update_ram()
        pixels = np.frombuffer(zlib.decompress(state["picture"].tobytes()), np.uint8)
        self._picture = pixels.reshape(self.observation_space.shape or ())
        self.np_random.bit_generator.state = state["rng"]

    def close(self) -> None:
        self.env.close()


def _imported() -> set[str]:
    """The games whose folders hold a ROM, not only its checksum or a patch for it. Found without importing the package,
    which takes long."""
    package = find_spec("stable_retro")
    if package is None or not package.submodule_search_locations:
        return set()
    roms = Path(package.submodule_search_locations[0]).glob("data/*/*/rom.*")
    return {rom.parent.name for rom in roms if rom.suffix not in (".sha", ".delta")}
