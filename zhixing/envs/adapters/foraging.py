"""Level-based foraging (package lbforaging): `lbf/8x8-2p-3f` is an 8 x 8 grid with 2 players and 3 food items.

As in lbforaging's ids, a suffix `-coop` gives all food the summed level of the three weakest players (of both, if there
are two), and a prefix `2s-` limits the players' sight to 2 cells: `lbf/2s-10x10-3p-3f-coop`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.envs.options import construct_env
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.agents import squeeze_single_agent
from zhixing.errors import UserError
from zhixing.utils.extras import require_extra

NUMBER = r"([1-9]\d*)"
NAME = re.compile(rf"lbf/(?:{NUMBER}s-)?{NUMBER}x{NUMBER}-{NUMBER}p-{NUMBER}f(-coop)?")
PIXELS = 24  # side of a cell in a rendered image
FOOD, PLAYER, GROUND = (60, 180, 90), (90, 140, 240), (40, 40, 40)


def names() -> list[str]:
    """Return the common benchmarks. `supports` accepts all names of the same pattern."""
    sizes = "8x8-2p-3f 8x8-2p-2f-coop 2s-8x8-2p-2f-coop 10x10-3p-3f 2s-10x10-3p-3f 15x15-3p-5f 15x15-4p-3f 15x15-4p-5f"
    return [f"lbf/{size}" for size in sizes.split()]


def supports(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def own_options(name: str, options: dict[str, Any]) -> set[str]:
    return {"max_episode_steps"}


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    match = NAME.fullmatch(name)
    assert match is not None
    rows, cols, players, food = (int(number) for number in match.groups()[1:5])
    sight = int(match[1]) if match[1] else max(rows, cols)
    constructor = partial(LevelBasedForaging, name, (rows, cols), players, food, bool(match[6]), sight)
    return squeeze_single_agent(construct_env(name, constructor, options))


class LevelBasedForaging(gym.Env[Any, Any]):
    """Players around a food item load it together if the sum of their levels is at least the item's level.

    Loading an item is rewarded with its fraction of all food levels, split among the players by level. With `team`,
    every player gets the sum of all rewards, as is usual in benchmarks, and the best return is 1. `info["food"]` is the
    fraction of the food levels loaded so far.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5, "logged_info_keys": ("food",)}  # noqa: RUF012  (as in gym.Env)

    def __init__(
        self,
        name: str,
        grid_size: tuple[int, int],
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
        if min(grid_size) < 5 or 4 * (players + food) > grid_size[0] * grid_size[1]:
            raise UserError(f"{name}: the grid must be at least 5x5, with 4 cells for each player and food item")
        with require_extra(name, "marl"):
            from lbforaging.foraging.environment import ForagingEnv
        self.env = ForagingEnv(
            players=players,
            field_size=grid_size,
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
        # seeding every episode makes this env's generator its only source of randomness
        obs, _ = self.env.reset(seed=int(self.np_random.integers(2**31)) if seed is None else seed)
        self.total_level = int(self.env.field.sum())
        return np.stack(obs), {}

    def step(self, action: Any) -> tuple[Any, Array, bool, bool, dict[str, Any]]:
        obs, rewards, done, _, _ = self.env.step([int(agent_action) for agent_action in action])
        reward = np.array(rewards, np.float32)
        if self.team:
            reward = np.full_like(reward, sum(rewards))
        level_left = int(self.env.field.sum())
        terminated = level_left == 0  # lbforaging also reports the time limit as `done`
        info = {"food": 1.0 - level_left / self.total_level}
        return np.stack(obs), reward, terminated, done and not terminated, info

    def render(self) -> Array:
        """Render food in green and players in blue. Brighter means a higher level."""
        image = np.full((*self.env.field.shape, 3), GROUND)
        brightness = np.clip(self.env.field / max(self.env.field.max(), 1), 0.5, 1.0)[..., None]
        image = np.where(self.env.field[..., None] > 0, brightness * FOOD, image)
        max_level = max(player.level for player in self.env.players)
        for player in self.env.players:
            image[player.position] = max(player.level / max_level, 0.5) * np.array(PLAYER)
        return image.astype(np.uint8).repeat(PIXELS, 0).repeat(PIXELS, 1)

    def close(self) -> None:
        self.env.close()
