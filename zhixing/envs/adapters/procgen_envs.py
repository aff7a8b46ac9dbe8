"""Procgen (package envpool): sixteen games whose levels are drawn by chance, `procgen/bigfish`. An agent trains on few
levels and is measured on others.

EnvPool steps all copies in one call, so that this is the native back end; a single copy is a pool of one. A level and
the order of levels follow from seeds alone, so that a pool can be put back into the middle of its episodes; to deal a
level again takes 0.2 to 2 ms.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.envs.vector.base import Info, Result
from zhixing.envs.vector.resumable_pool import ResumablePool, ShiftedObsPool
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import State
from zhixing.envs.wrappers.agents import construct_env
from zhixing.errors import UserError
from zhixing.utils.extras import require_extra

MODES = {"easy": 200, "hard": 500, "extreme": 500, "memory": 500, "exploration": 500}  # and their levels for training
FURTHER = {  # what some games have besides easy and hard
    "extreme": ("chaser", "dodgeball", "leaper", "starpilot"),
    "memory": ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"),
    "exploration": ("caveflyer", "climber", "coinrun", "heist", "jumper", "leaper", "maze", "ninja"),
}
GAMES = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot", "heist", "jumper",
    "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip
UNSEEN = 10**9  # levels to test on: as good as all
ENLARGED = 6  # a picture shows each pixel as so many by so many
QT = "apt-get install libqt5core5a libqt5gui5"


def names() -> list[str]:
    return [f"procgen/{game}" for game in GAMES]


def supports(name: str) -> bool:
    return name in names()


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    constructor = partial(Procgen, name)
    env: Procgen = construct_env(name, constructor, options, named=partial(settings, name))
    return env


def settings(
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
    skip: int = 1,
    shift: int = 0,
    render_mode: str | None = None,
) -> tuple[str, State]:
    """EnvPool's name of the game and its settings.

    `levels` are those to train on (the first 200, of hard games 500), to test on (all others) or all; `start_level` and
    `num_levels` say it by number, where 0 levels mean all. Each action is done for `skip` steps of the game.
    """
    game = name.removeprefix("procgen/")
    allowed = [known for known in MODES if game in FURTHER.get(known, GAMES)]
    if mode not in allowed:
        raise UserError(f"{name}: mode={mode!r} is none of {', '.join(allowed)}")
    train = MODES[mode]
    known_levels = {"train": (0, train), "test": (train, UNSEEN), "all": (0, 0)}
    if levels not in known_levels:
        raise UserError(f"{name}: levels={levels!r} is none of {', '.join(known_levels)}")
    start, count = known_levels[levels]
    start, count = start if start_level is None else start_level, count if num_levels is None else num_levels
    if min(start, count) < 0 or start + count >= 2**31:
        raise UserError(f"{name}: start_level={start} and num_levels={count} must be 0 or more, together below 2^31")
    if skip < 1:
        raise UserError(f"{name}: skip={skip} must be at least 1")
    if not 0 <= shift <= 32:
        raise UserError(f"{name}: shift={shift} must be 0 to 32 pixels")
    return f"{game.capitalize()}{mode.capitalize()}-v0", {
        "start_level": start,
        "num_levels": count,
        "center_agent": center_agent,
        "use_backgrounds": use_backgrounds,
        "use_monochrome_assets": use_monochrome_assets,
        "restrict_themes": restrict_themes,
    }


def pool(name: str, num: int, options: State) -> ResumablePool:
    with require_extra(name, "procgen"):
        import envpool
    task, chosen = settings(name, **options)

    def make(**more: Any) -> Any:
        try:
            return envpool.make_gymnasium(task, channel_first=False, **chosen, **more)
        except ImportError as error:
            raise UserError(f"{name} needs libraries of Qt 5: {QT}") from error

    obs = np.zeros((num, 64, 64, 3), np.uint8)
    skip, shift = options.get("skip", 1), options.get("shift", 0)
    return ShiftedObsPool(make, num, obs, skip, shift) if shift else ResumablePool(make, num, obs, skip)


def picture(obs: Array) -> Array:
    return obs.repeat(ENLARGED, 0).repeat(ENLARGED, 1)


def observations() -> Box:
    return Box(0, 255, (64, 64, 3), np.uint8)


class Procgen(gym.Env[Any, Any]):
    """One copy: a pool of one."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012  (as in gym.Env)

    def __init__(self, name: str, /, render_mode: str | None = None, **options: Any) -> None:
        self.pool = pool(name, 1, options)
        self.render_mode = render_mode
        self.observation_space, self.action_space = observations(), Discrete(15)

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
            raise RuntimeError("these games aren't those of the saved state")

    def render(self) -> Array | None:
        return None if self.render_mode is None else picture(self.pool.obs[0])

    def close(self) -> None:
        self.pool.close()


class NativeProcgen:
    """All copies in one pool."""

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset(settings.__annotations__) - {"name", "return"}

    def __init__(self, num: int, **options: Any) -> None:
        self.pool: ResumablePool = construct_env(self.name, partial(pool, self.name, num, options), {}, named=settings)
        self.spaces = Spaces(observations(), Discrete(15))
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
        return picture(self.pool.obs[index])

    def close(self) -> None:
        self.pool.close()


# one class per game: a native task is made with nothing but the number of environments and options
NATIVE: dict[str, type[NativeProcgen]] = {
    name: type("NativeProcgen", (NativeProcgen,), {"name": name}) for name in names()
}
