"""Procgen (package envpool): sixteen games with procedurally generated levels, such as `procgen/bigfish`.

Agents train on a few levels and are tested on others. EnvPool steps all environments in one call, so it provides the
native back end; a single environment is a pool of one. Levels and their order depend only on seeds, so a pool can be
restored in the middle of its episodes. Generating a level again takes 0.2 to 2 ms.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.envs.options import construct_env
from zhixing.envs.vector.base import Info, Result
from zhixing.envs.vector.resumable_pool import ResumablePool, ShiftedObsPool
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import State
from zhixing.errors import UserError
from zhixing.utils.extras import require_extra

NUM_TRAIN_LEVELS = {"easy": 200, "hard": 500, "extreme": 500, "memory": 500, "exploration": 500}  # by mode
EXTRA_MODES = {  # only some games have these modes
    "extreme": ("chaser", "dodgeball", "leaper", "starpilot"),
    "memory": ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"),
    "exploration": ("caveflyer", "climber", "coinrun", "heist", "jumper", "leaper", "maze", "ninja"),
}
GAMES = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot", "heist", "jumper",
    "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip
NUM_TEST_LEVELS = 10**9  # practically unlimited
RENDER_SCALE = 6  # rendered images are this many times larger than observations
INSTALL_QT = "apt-get install libqt5core5a libqt5gui5"


def names() -> list[str]:
    return [f"procgen/{game}" for game in GAMES]


def supports(name: str) -> bool:
    return name in names()


def own_options(name: str, options: dict[str, Any]) -> set[str]:
    return {"action_repeat"}


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    constructor = partial(ProcgenEnv, name)
    env: ProcgenEnv = construct_env(name, constructor, options, signature=partial(envpool_settings, name))
    return env


def envpool_settings(
    name: str,
    /,
    mode: str = "easy",
    levels: str = "train",
    start_level: int | None = None,
    num_levels: int | None = None,
    center_agent: bool = True,
    use_backgrounds: bool = True,
    use_monochrome_assets: bool = False,
    restrict_themes: bool = False,
    action_repeat: int = 1,
    shift: int = 0,
    render_mode: str | None = None,
) -> tuple[str, State]:
    """Return EnvPool's name of the game and its settings.

    `levels` is "train" (the first 200 levels, or 500 in modes other than easy), "test" (all others) or "all".
    `start_level` and `num_levels` override it; 0 levels means all. Each action is repeated for `action_repeat` steps.
    With `shift`, observations are shifted randomly by up to this many pixels.
    """
    game = name.removeprefix("procgen/")
    allowed_modes = [allowed for allowed in NUM_TRAIN_LEVELS if game in EXTRA_MODES.get(allowed, GAMES)]
    if mode not in allowed_modes:
        raise UserError(f"{name}: env.mode={mode!r}: allowed are {', '.join(allowed_modes)}")
    num_train_levels = NUM_TRAIN_LEVELS[mode]
    ranges = {"train": (0, num_train_levels), "test": (num_train_levels, NUM_TEST_LEVELS), "all": (0, 0)}
    if levels not in ranges:
        raise UserError(f"{name}: env.levels={levels!r}: allowed are {', '.join(ranges)}")
    start, count = ranges[levels]
    start, count = start if start_level is None else start_level, count if num_levels is None else num_levels
    if min(start, count) < 0 or start + count >= 2**31:
        raise UserError(
            f"{name}: env.start_level={start} and env.num_levels={count}: must be 0 or more, with a sum below 2^31"
        )
    if not 0 <= shift <= 32:
        raise UserError(f"{name}: env.shift={shift}: must be from 0 to 32 pixels")
    return f"{game.capitalize()}{mode.capitalize()}-v0", {
        "start_level": start,
        "num_levels": count,
        "center_agent": center_agent,
        "use_backgrounds": use_backgrounds,
        "use_monochrome_assets": use_monochrome_assets,
        "restrict_themes": restrict_themes,
    }


def make_pool(name: str, num: int, options: State) -> ResumablePool:
    with require_extra(name, "procgen"):
        import envpool
    envpool_name, settings = envpool_settings(name, **options)

    def make(**pool_settings: Any) -> Any:
        try:
            return envpool.make_gymnasium(envpool_name, channel_first=False, **settings, **pool_settings)
        except ImportError as error:
            raise UserError(f"{name} needs the Qt 5 libraries: {INSTALL_QT}") from error

    obs = np.zeros((num, 64, 64, 3), np.uint8)
    repeat, shift = options.get("action_repeat", 1), options.get("shift", 0)
    return ShiftedObsPool(make, num, obs, repeat, shift) if shift else ResumablePool(make, num, obs, repeat)


def render_obs(obs: Array) -> Array:
    return obs.repeat(RENDER_SCALE, 0).repeat(RENDER_SCALE, 1)


def make_obs_space() -> Box:
    return Box(0, 255, (64, 64, 3), np.uint8)


class ProcgenEnv(gym.Env[Any, Any]):
    """One environment: a pool of one."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012  (as in gym.Env)

    def __init__(self, name: str, /, render_mode: str | None = None, **options: Any) -> None:
        self.pool = make_pool(name, 1, options)
        self.render_mode = render_mode
        self.observation_space, self.action_space = make_obs_space(), Discrete(15)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or self.pool.env is None:
            self.pool.start(self.np_random.integers(2**31 - 1, size=1))
        else:
            self.pool.start_episodes(np.arange(1))
        return self.pool.returned_obs[0].copy(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated = self.pool.step_without_reset(np.array([action]))
        return obs[0].copy(), float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def state_dict(self) -> State:
        return self.pool.state_dict()

    def load_state_dict(self, state: State) -> None:
        if self.pool.load_state_dict(state):
            raise RuntimeError("the saved state can't be restored: the game differs from the saved observation")

    def render(self) -> Array | None:
        return None if self.render_mode is None else render_obs(self.pool.obs[0])

    def close(self) -> None:
        self.pool.close()


class NativeProcgen:
    """N environments in one pool."""

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset(envpool_settings.__annotations__) - {"name", "return"}

    def __init__(self, num: int, **options: Any) -> None:
        self.pool: ResumablePool = construct_env(
            self.name, partial(make_pool, self.name, num, options), {}, signature=envpool_settings
        )
        self.spaces = Spaces(make_obs_space(), Discrete(15))
        self.inexact: list[int] = []

    def reset(self, seed: int | None) -> tuple[Tree, Info]:
        return self.pool.reset(seed), {}

    def step(self, actions: Array) -> Result:
        return self.pool.step(actions)

    def state_dict(self) -> State:
        return self.pool.state_dict()

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self.inexact = self.pool.load_state_dict(state)
        return self.pool.returned_obs, {}

    def render(self, index: int) -> Array | None:
        return render_obs(self.pool.obs[index])

    def close(self) -> None:
        self.pool.close()


# one class per game, because a native environment is constructed with only the number of environments and options
NATIVE: dict[str, type[NativeProcgen]] = {
    name: type("NativeProcgen", (NativeProcgen,), {"name": name}) for name in names()
}
