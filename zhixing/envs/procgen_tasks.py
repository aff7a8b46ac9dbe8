"""Procgen (package envpool): sixteen games whose levels are drawn by chance, `procgen/bigfish`. An agent trains on few
levels and is measured on others.

EnvPool steps all copies in one call, so that this is the native back end; a single copy is a pool of one. A level and
the order of levels follow from seeds alone, so that a pool can be put back into the middle of its episodes: all levels
before are dealt again (0.2 to 2 ms each), and the actions of the present ones repeated.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.envs.agents import built, missing
from zhixing.envs.arrays import Array
from zhixing.envs.slots import Numbers, State
from zhixing.envs.vector import Info, Result
from zhixing.errors import UserError
from zhixing.spaces import Spaces
from zhixing.tree import Tree

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


def knows(name: str) -> bool:
    return name in names()


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    constructor = partial(Procgen, name)
    env: Procgen = built(name, constructor, options, named=partial(settings, name))
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
    render_mode: str | None = None,
) -> tuple[str, State]:
    """EnvPool's name of the game and its settings.

    `levels` are those to train on (the first 200, of hard games 500), to test on (all others) or all; `start_level` and
    `num_levels` say it by number, where 0 levels mean all.
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
    return f"{game.capitalize()}{mode.capitalize()}-v0", {
        "start_level": start,
        "num_levels": count,
        "center_agent": center_agent,
        "use_backgrounds": use_backgrounds,
        "use_monochrome_assets": use_monochrome_assets,
        "restrict_themes": restrict_themes,
    }


class Pool:
    """Copies of a game whose episodes are begun by hand. EnvPool fixes seeds for good: others make another pool."""

    def __init__(self, name: str, num: int, options: State) -> None:
        try:
            import envpool
        except ImportError as error:
            raise missing(name, "procgen") from error
        self.name, self.num = name, num
        task, self.settings = settings(name, **options)
        self._make = partial(envpool.make_gymnasium, task, num_envs=num, channel_first=False)
        self.obs = np.zeros((num, 64, 64, 3), np.uint8)
        self.env: Any = None

    def begin_all(self, seeds: Array) -> Array:
        """The first episodes of these seeds."""
        self.close()
        threads = min(self.num, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        try:
            self.env = self._make(seed=seeds.tolist(), num_threads=threads, **self.settings)
        except ImportError as error:
            raise UserError(f"{self.name} needs libraries of Qt 5: {QT}") from error
        self.seeds, self.episodes = seeds, np.zeros(self.num, np.int64)
        self.log: list[list[int]] = [[] for _ in range(self.num)]
        return self.begin(np.arange(self.num))

    def begin(self, rows: Array) -> Array:
        """The next episodes of these rows. Pictures of all, live."""
        obs, info = self.env.reset(rows.astype(np.int32))
        self.obs[info["env_id"]] = obs
        self.episodes[rows] += 1
        for row in rows:
            self.log[row].clear()
        return self.obs

    def act(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        """One step of all, whose episodes may end: pictures (live), rewards, terminated, truncated."""
        obs, reward, terminated, truncated, info = self.env.step(actions)
        rows = info["env_id"]
        self.obs[rows] = obs
        for log, action in zip(self.log, actions.tolist(), strict=True):
            log.append(action)
        order = np.argsort(rows)
        return self.obs, reward[order].astype(np.float32), terminated[order], truncated[order]

    def state_dict(self) -> State:
        actions = [np.array(log, np.uint8) for log in self.log]
        return {"seeds": self.seeds, "episodes": self.episodes.copy(), "actions": actions, "obs": self.obs.copy()}

    def load_state_dict(self, state: State) -> Array:
        """The rows that don't show what they showed then: another version of the games must have made them."""
        self.begin_all(state["seeds"])
        while (left := np.flatnonzero(self.episodes < state["episodes"])).size:
            self.begin(left)
        for row, actions in enumerate(state["actions"]):
            for action in actions.tolist():
                self.env.send(np.array([action]), np.array([row], np.int32))
                self.obs[row] = self.env.recv()[0][0]
            self.log[row] = actions.tolist()
        return np.flatnonzero((self.obs != state["obs"]).any((1, 2, 3)))

    def picture(self, row: int) -> Array:
        return self.obs[row].repeat(ENLARGED, 0).repeat(ENLARGED, 1)

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
            self.env = None


def observations() -> Box:
    return Box(0, 255, (64, 64, 3), np.uint8)


class Procgen(gym.Env[Any, Any]):
    """One copy: a pool of one."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012  (as in gym.Env)

    def __init__(self, name: str, /, render_mode: str | None = None, **options: Any) -> None:
        self.pool = Pool(name, 1, options)
        self.render_mode = render_mode
        self.observation_space, self.action_space = observations(), Discrete(15)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or self.pool.env is None:
            self.pool.begin_all(self.np_random.integers(2**31 - 1, size=1))
        else:
            self.pool.begin(np.arange(1))
        return self.pool.obs[0].copy(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated = self.pool.act(np.array([action]))
        return obs[0].copy(), float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def state_dict(self) -> State:
        return self.pool.state_dict()

    def load_state_dict(self, state: State) -> None:
        if self.pool.load_state_dict(state).size:
            raise RuntimeError("these games aren't those of the saved state")

    def render(self) -> Array | None:
        return None if self.render_mode is None else self.pool.picture(0)

    def close(self) -> None:
        self.pool.close()


class NativeProcgen:
    """Copies that begin anew in the step that ends their episodes; EnvPool itself would do so in the next one."""

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset(settings.__annotations__) - {"name", "return"}

    def __init__(self, num: int, **options: Any) -> None:
        self.pool: Pool = built(self.name, partial(Pool, self.name, num, options), {}, named=settings)
        self.num = num
        self.spaces = Spaces(observations(), Discrete(15))
        self.rng = np.random.default_rng()
        self.inexact: list[int] = []

    def reset(self, seed: int | None) -> tuple[Tree, Info]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        return self.pool.begin_all(self.rng.integers(2**31 - 1, size=self.num)), {}

    def step(self, actions: Array) -> Result:
        obs, reward, terminated, truncated = self.pool.act(actions)
        info: Info = {}
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            numbers: dict[int, Numbers] = {index: {} for index in ended.tolist()}
            info = {"final_obs": obs.copy(), "final_info": numbers}
            self.pool.begin(ended)
        return obs, reward, terminated, truncated, info

    def state_dict(self) -> State:
        return {"rng": dict(self.rng.bit_generator.state), "pool": self.pool.state_dict()}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        self.rng.bit_generator.state = state["rng"]
        strange = self.pool.load_state_dict(state["pool"])
        self.inexact = strange.tolist()
        if self.inexact:
            self.pool.begin(strange)
        return self.pool.obs, {}

    def render(self, index: int) -> Array | None:
        return self.pool.picture(index)

    def close(self) -> None:
        self.pool.close()


# one class per game: a native task is made with nothing but the number of environments and options
NATIVE: dict[str, type[NativeProcgen]] = {
    name: type("NativeProcgen", (NativeProcgen,), {"name": name}) for name in names()
}
