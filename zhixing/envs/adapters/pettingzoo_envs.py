"""PettingZoo environments: `mpe/NAME` (package mpe2), whose agents act in parallel, and `pettingzoo/NAME`, the classic
games, whose agents take turns.

`PettingZooParallelEnv` and `PettingZooAECEnv` wrap any other environment with PettingZoo's Parallel or AEC API.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import warnings
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np

from zhixing.core.spaces import RewardKind
from zhixing.core.tree import tree_map
from zhixing.envs.env_spec import MASK
from zhixing.envs.options import construct_env
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.agents import mask_of, squeeze_single_agent
from zhixing.envs.wrappers.flat_agents import FlatAgents, pad_agents
from zhixing.errors import UserError
from zhixing.utils.extras import require_extra

Step = tuple[Array, Array, bool, bool, dict[str, Any]]

# listed here so that names are known, and errors can name the extra, even if the packages aren't installed
MPE = (
    "collect_treasure", "simple", "simple_adversary", "simple_crypto", "simple_formation", "simple_line",
    "simple_push", "simple_reference", "simple_speaker_listener", "simple_spread", "simple_tag", "simple_world_comm",
)  # fmt: skip
GAMES = (
    "chess", "connect_four", "go", "hanabi", "leduc_holdem", "rps", "texas_holdem", "texas_holdem_no_limit",
    "tictactoe",
)  # fmt: skip
OPPOSED_MPE = ("simple_adversary", "simple_crypto", "simple_push", "simple_tag", "simple_world_comm")
PACKAGES = {"mpe": "mpe2", "pettingzoo": "pettingzoo.classic"}


def names() -> list[str]:
    return [*(f"mpe/{env}" for env in MPE), *(f"pettingzoo/{game}" for game in GAMES)]


def supports(name: str) -> bool:
    return name in names()


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    module = import_newest(name)
    family, short = name.split("/")
    if family == "mpe":
        kind: RewardKind = "opposed" if short in OPPOSED_MPE else "individual"
        env = construct_env(name, module.parallel_env, options, signature=module.raw_env)
        # MPE's global state only concatenates the observations, and its agents end together
        parallel_env = PettingZooParallelEnv(env, name, agents_leave=False, include_state=False, reward_kind=kind)
        return squeeze_single_agent(parallel_env)
    kind = "shared" if short == "hanabi" else "opposed"
    return squeeze_single_agent(
        PettingZooAECEnv(construct_env(name, module.env, options, signature=module.raw_env), name, reward_kind=kind)
    )


class _PettingZooEnv(gym.Env[Any, Any]):
    """Base of both wrappers. Agents are numbered in the order of `possible_agents`.

    Every episode is seeded from `np_random`, which makes it the only source of randomness.
    `reward_kind` is that of `zhixing.core.spaces.Spaces`.
    """

    def __init__(self, env: Any, name: str | None = None, *, reward_kind: RewardKind = "individual") -> None:
        self.env, self.reward_kind = env, reward_kind
        self.agents: list[Any] = list(env.possible_agents)
        self.num_agents, self.agent_names = len(self.agents), tuple(map(str, self.agents))
        self.padding = pad_agents(
            name or str(env),
            [env.observation_space(agent) for agent in self.agents],
            [env.action_space(agent) for agent in self.agents],
        )
        self.observation_space, self.action_space = self.padding.observation_space, self.padding.action_space
        if isinstance(self.padding, FlatAgents):
            self.agent_spaces = self.padding.agent_spaces
        self.metadata = {"render_fps": 10, **env.metadata}
        self.render_mode = getattr(env, "render_mode", None)

    def _reset_rng(self, seed: int | None) -> int:
        """Seed `np_random` if a seed is given. Return the seed of the next episode."""
        super().reset(seed=seed)
        return int(self.np_random.integers(2**31)) if seed is None else seed

    def _episode_ends(self, ended: bool, terminated: dict[Any, bool], truncated: dict[Any, bool]) -> tuple[bool, bool]:
        """Return terminated and truncated of the whole episode.

        It is truncated if any agent that was present until the end was truncated, and terminated otherwise.
        """
        any_truncated = any(truncated[agent] and not terminated[agent] for agent in truncated)
        return ended and not any_truncated, ended and any_truncated

    def _by_index(self, values: Any) -> dict[int, Any]:
        """Return a dict by agent index from PettingZoo's dict by agent name."""
        return {index: values[agent] for index, agent in enumerate(self.agents) if agent in values}

    def _rewards(self, rewards: Any) -> Array:
        return np.array([rewards.get(agent, 0.0) for agent in self.agents], np.float32)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


class PettingZooParallelEnv(_PettingZooEnv):
    """Wrap an environment with PettingZoo's Parallel API: all agents act at every step.

    With `agents_leave`, agents may leave before the episode ends, and `info["alive"]` marks those present. With
    `include_state`, `info["state"]` holds the global state if the environment has one.
    """

    def __init__(
        self,
        env: Any,
        name: str | None = None,
        *,
        agents_leave: bool = True,
        include_state: bool = True,
        reward_kind: RewardKind = "individual",
    ) -> None:
        super().__init__(env, name, reward_kind=reward_kind)
        self.agents_leave, self.has_state = agents_leave, include_state
        self.has_mask = self.padding.valid_actions is not None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, infos = self.env.reset(seed=self._reset_rng(seed), options=options)
        if self.has_state:
            try:
                self.env.state()
            except (NotImplementedError, AttributeError):
                self.has_state = False
        self.has_mask |= any(mask_of(obs[agent], infos.get(agent, {})) is not None for agent in obs)
        alive = [agent in self.env.agents for agent in self.agents]
        obs_by_index = self._by_index(obs)
        return self.padding.stack_obs(obs_by_index), self._make_info(obs_by_index, infos, alive)

    def step(self, action: Any) -> Step:
        agents = set(self.env.agents)
        actions = {
            agent: self.padding.to_agent_action(i, tree_map(lambda leaf, i=i: leaf[i], action))
            for i, agent in enumerate(self.agents)
            if agent in agents
        }
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        remaining = set(self.env.agents)
        ended = not remaining
        # agents present until the end get their final observation; agents that left earlier get zeros
        obs_by_index = self._by_index({agent: obs[agent] for agent in obs if agent in remaining or ended})
        alive = remaining
        if ended:  # truncated agents still have a future
            alive = {agent for agent in agents if truncated[agent] and not terminated[agent]}
        info = self._make_info(obs_by_index, infos, [agent in alive for agent in self.agents])
        ends = self._episode_ends(ended, terminated, truncated)
        return self.padding.stack_obs(obs_by_index), self._rewards(rewards), *ends, info

    def _make_info(self, obs: dict[int, Any], infos: Any, alive: list[bool]) -> dict[str, Any]:
        info: dict[str, Any] = {}
        if self.has_mask:
            acting = [index for index, is_alive in enumerate(alive) if is_alive]
            info[MASK] = self.padding.stack_masks(obs, self._by_index(infos), acting)
        if self.has_state:
            info["state"] = np.asarray(self.env.state(), np.float32).reshape(-1)
        if self.agents_leave:
            info["alive"] = np.array(alive)
        return info


class PettingZooAECEnv(_PettingZooEnv):
    """Wrap an environment with PettingZoo's AEC API: only the agent with the index `info["turn"]` acts in a step.

    The mask allows the other agents only action 0, which is ignored. All agents observe the game at every step.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.env.reset(seed=self._reset_rng(seed), options=options)
        return self._observe()

    def step(self, action: Any) -> Step:
        env = self.env
        turn = self.agents.index(env.agent_selection)
        env.step(self.padding.to_agent_action(turn, action[turn]))
        reward = self._rewards(env.rewards)
        terminated, truncated = dict(env.terminations), dict(env.truncations)
        ended = all(terminated[agent] or truncated[agent] for agent in env.agents)
        ends = self._episode_ends(ended, terminated, truncated)
        while not ended and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            env.step(None)  # as PettingZoo requires, to remove an agent that is out of the game
        obs, info = self._observe()
        return obs, reward, *ends, info

    def _observe(self) -> tuple[Array, dict[str, Any]]:
        env = self.env
        turn = self.agents.index(env.agent_selection)
        obs = self._by_index({agent: env.observe(agent) for agent in env.agents})
        return self.padding.stack_obs(obs), {
            MASK: self.padding.stack_masks(obs, self._by_index(env.infos), [turn]),
            "turn": turn,
        }


def import_newest(name: str) -> ModuleType:
    """Import the newest version of an environment's module, such as tictactoe_v3."""
    family, short = name.split("/")
    package = PACKAGES[family]
    with require_extra(name, "marl"):
        modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
        matches = [re.fullmatch(rf"{short}_v(\d+)", module.name) for module in modules]
        versions = [int(match[1]) for match in matches if match]
        if not versions:
            raise UserError(f"{name}: the installed version of {package} has no {short}; install a newer version")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # PettingZoo's modules warn on import
            return importlib.import_module(f"{package}.{short}_v{max(versions)}")
