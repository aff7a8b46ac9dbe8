"""Level-based foraging (package lbforaging): `lbf/8x8-2p-3f` is a field of 8 x 8 with 2 players and 3 pieces of food.

`-coop` at the end gives all food the level of the three weakest players together (of both, where there are two);
`2s-` at the front lets players see only 2 fields far. So it is in the package's own ids: `lbf/2s-10x10-3p-3f-coop`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.agents import construct_env, squeeze_single_agent
from zhixing.errors import UserError
from zhixing.utils.extras import require_extra

NUMBER = r"([1-9]\d*)"
NAME = re.compile(rf"lbf/(?:{NUMBER}s-)?{NUMBER}x{NUMBER}-{NUMBER}p-{NUMBER}f(-coop)?")
PIXELS = 24  # side of a field in a picture
FOOD, PLAYER, GROUND = (60, 180, 90), (90, 140, 240), (40, 40, 40)


def names() -> list[str]:
    """Those that people compare on; others follow the same pattern."""
    known = "8x8-2p-3f 8x8-2p-2f-coop 2s-8x8-2p-2f-coop 10x10-3p-3f 2s-10x10-3p-3f 15x15-3p-5f 15x15-4p-3f 15x15-4p-5f"
    return [f"lbf/{task}" for task in known.split()]


def supports(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    parts = NAME.fullmatch(name)
    assert parts is not None
    rows, cols, players, food = (int(part) for part in parts.groups()[1:5])
    sight = int(parts[1]) if parts[1] else max(rows, cols)
    constructor = partial(Foraging, name, (rows, cols), players, food, bool(parts[6]), sight)
    return squeeze_single_agent(construct_env(name, constructor, options, named=constructor))


class Foraging(gym.Env[Any, Any]):
    """Players of different levels load food together: those around it need its level in sum.

    Each is paid its share of the food's level, of all food together 1. With `team` all get the sum, as is usual in
    comparisons, and the best return is 1. At the end `food` tells which part of the levels was loaded.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5, "logged_info_keys": ("food",)}  # noqa: RUF012  (as in gym.Env)

    def __init__(
        self,
        name: str,
        field: tuple[int, int],
        players: int,
        food: int,
        coop: bool,
        sight: int,
        /,
        team: bool = True,
        max_episode_steps: int = 50,
        min_player_level: Any = 1,
        max_player_level: Any = 2,
        min_food_level: Any = 1,
        max_food_level: Any = None,
        normalize_reward: bool = True,
        observe_agent_levels: bool = True,
        penalty: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        if min(field) < 5 or 4 * (players + food) > field[0] * field[1]:
            raise UserError(f"{name}: the field must be at least 5x5, with 4 places for each player and piece of food")
        with require_extra(name, "marl"):
            from lbforaging.foraging.environment import ForagingEnv
        self.env = ForagingEnv(
            players=players,
            field_size=field,
            max_num_food=food,
            force_coop=coop,
            sight=sight,
            max_episode_steps=max_episode_steps,
            min_player_level=min_player_level,
            max_player_level=max_player_level,
            min_food_level=min_food_level,
            max_food_level=max_food_level,
            normalize_reward=normalize_reward,
            observe_agent_levels=observe_agent_levels,
            penalty=penalty,
        )
        self.team, self.num_agents, self.render_mode = team, players, render_mode
        self.reward_kind = "shared" if team else "individual"
        space = self.env.observation_space[0]
        self.observation_space = Box(space.low, space.high, dtype=np.float32)
        self.action_space = Discrete(6)  # nothing, north, south, west, east, load

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        # a seed for every episode: our generator alone repeats it
        obs, _ = self.env.reset(seed=int(self.np_random.integers(2**31)) if seed is None else seed)
        self.levels = int(self.env.field.sum())
        return np.stack(obs), {}

    def step(self, action: Any) -> tuple[Any, Array, bool, bool, dict[str, Any]]:
        obs, rewards, done, _, _ = self.env.step([int(each) for each in action])
        reward = np.array(rewards, np.float32)
        if self.team:
            reward = np.full_like(reward, sum(rewards))
        left = int(self.env.field.sum())
        # the package calls both an end: nothing left to load, and no time
        terminated = left == 0
        return np.stack(obs), reward, terminated, done and not terminated, {"food": 1.0 - left / self.levels}

    def render(self) -> Array:
        """Food is green, players are blue; what is brighter has a higher level."""
        picture = np.full((*self.env.field.shape, 3), GROUND)
        bright = np.clip(self.env.field / max(self.env.field.max(), 1), 0.5, 1.0)[..., None]
        picture = np.where(self.env.field[..., None] > 0, bright * FOOD, picture)
        strongest = max(player.level for player in self.env.players)
        for player in self.env.players:
            picture[player.position] = max(player.level / strongest, 0.5) * np.array(PLAYER)
        return picture.astype(np.uint8).repeat(PIXELS, 0).repeat(PIXELS, 1)

    def close(self) -> None:
        self.env.close()
