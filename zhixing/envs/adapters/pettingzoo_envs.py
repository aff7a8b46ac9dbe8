"""PettingZoo's tasks: `mpe/NAME` (package mpe2), whose agents act at once, and `pettingzoo/NAME`, its classic games,
whose seats take turns. `ParallelEnv` and `TurnsEnv` wrap any other task of PettingZoo's two kinds."""

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
from zhixing.envs.env_spec import MASK
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.agents import AgentPadding, construct_env, mask_of, squeeze_single_agent
from zhixing.errors import UserError
from zhixing.utils.extras import require_extra

Step = tuple[Array, Array, bool, bool, dict[str, Any]]

# written down, not looked up: a name is known, and its extra told, where the package isn't installed
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
    return [*(f"mpe/{task}" for task in MPE), *(f"pettingzoo/{game}" for game in GAMES)]


def supports(name: str) -> bool:
    return name in names()


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    module = _newest(name)
    family, short = name.split("/")
    if family == "mpe":
        kind: RewardKind = "opposed" if short in OPPOSED_MPE else "individual"
        task = construct_env(name, module.parallel_env, options, named=module.raw_env)
        # its global state is the agents' observations in a row, and its agents end together
        return squeeze_single_agent(ParallelEnv(task, name, leaving=False, state=False, reward_kind=kind))
    kind = "shared" if short == "hanabi" else "opposed"
    return squeeze_single_agent(
        TurnsEnv(construct_env(name, module.env, options, named=module.raw_env), name, reward_kind=kind)
    )


class _PettingZooEnv(gym.Env[Any, Any]):
    """What both kinds share. Agents are seats, numbered in the order of `possible_agents`.

    PettingZoo's generators are its own. Each episode gets a seed of ours, so that our generator alone repeats it.
    `reward_kind` is that of `zhixing.core.spaces.Spaces`.
    """

    def __init__(self, env: Any, name: str | None = None, *, reward_kind: RewardKind = "individual") -> None:
        self.env, self.reward_kind = env, reward_kind
        self.agents: list[Any] = list(env.possible_agents)
        self.num_agents = len(self.agents)
        self.seats = AgentPadding(
            name or str(env),
            [env.observation_space(agent) for agent in self.agents],
            [env.action_space(agent) for agent in self.agents],
        )
        self.observation_space, self.action_space = self.seats.observation_space, self.seats.action_space
        self.metadata = {"render_fps": 10, **env.metadata}
        self.render_mode = getattr(env, "render_mode", None)

    def _begin(self, seed: int | None) -> int:
        super().reset(seed=seed)
        return int(self.np_random.integers(2**31)) if seed is None else seed

    def _ends(self, ended: bool, terminated: dict[Any, bool], truncated: dict[Any, bool]) -> tuple[bool, bool]:
        """An episode is truncated if one of the agents that were there until its end was, and terminated otherwise."""
        cut = any(truncated[agent] and not terminated[agent] for agent in truncated)
        return ended and not cut, ended and cut

    def _by_seat(self, values: Any) -> dict[int, Any]:
        return {seat: values[agent] for seat, agent in enumerate(self.agents) if agent in values}

    def _rewards(self, rewards: Any) -> Array:
        return np.array([rewards.get(agent, 0.0) for agent in self.agents], np.float32)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


class ParallelEnv(_PettingZooEnv):
    """A task of PettingZoo's parallel kind: all agents act at every step.

    With `leaving`, agents may be gone before the episode is over; it then tells who is alive. With `state`, the task's
    global state is told where it has one.
    """

    def __init__(
        self,
        env: Any,
        name: str | None = None,
        *,
        leaving: bool = True,
        state: bool = True,
        reward_kind: RewardKind = "individual",
    ) -> None:
        super().__init__(env, name, reward_kind=reward_kind)
        self.leaving, self.has_state = leaving, state
        self.has_mask = self.seats.allowed is not None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, infos = self.env.reset(seed=self._begin(seed), options=options)
        if self.has_state:
            try:
                self.env.state()
            except (NotImplementedError, AttributeError):
                self.has_state = False
        self.has_mask |= any(mask_of(obs[agent], infos.get(agent, {})) is not None for agent in obs)
        here = [agent in self.env.agents for agent in self.agents]
        shown = self._by_seat(obs)
        return self.seats.observe(shown), self._tell(shown, infos, here)

    def step(self, action: Any) -> Step:
        before = set(self.env.agents)
        acts = {
            agent: self.seats.to_agent_action(i, action[i]) for i, agent in enumerate(self.agents) if agent in before
        }
        obs, rewards, terminated, truncated, infos = self.env.step(acts)
        left = set(self.env.agents)
        ended = not left
        # what the last to leave see is the episode's end; whoever left earlier sees nothing
        shown = self._by_seat({agent: seen for agent, seen in obs.items() if agent in left or ended})
        if ended:  # the future of those whose time was over still counts
            left = {agent for agent in before if truncated[agent] and not terminated[agent]}
        info = self._tell(shown, infos, [agent in left for agent in self.agents])
        return self.seats.observe(shown), self._rewards(rewards), *self._ends(ended, terminated, truncated), info

    def _tell(self, shown: dict[int, Any], infos: Any, here: list[bool]) -> dict[str, Any]:
        info: dict[str, Any] = {}
        if self.has_mask:
            acting = [seat for seat, alive in enumerate(here) if alive]
            info[MASK] = self.seats.masks(shown, self._by_seat(infos), acting)
        if self.has_state:
            info["state"] = np.asarray(self.env.state(), np.float32).reshape(-1)
        if self.leaving:
            info["alive"] = np.array(here)
        return info


class TurnsEnv(_PettingZooEnv):
    """A game of PettingZoo's other kind (AEC): one seat acts at a step, the one that `info["turn"]` names.

    The mask lets the others do nothing but action 0, and what they do is ignored. Everyone sees the game as it stands
    at every step, and is paid when PettingZoo pays.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.env.reset(seed=self._begin(seed), options=options)
        return self._look()

    def step(self, action: Any) -> Step:
        env = self.env
        seat = self.agents.index(env.agent_selection)
        env.step(self.seats.to_agent_action(seat, action[seat]))
        reward = self._rewards(env.rewards)
        terminated, truncated = dict(env.terminations), dict(env.truncations)
        ended = all(terminated[agent] or truncated[agent] for agent in env.agents)
        ends = self._ends(ended, terminated, truncated)
        while not ended and self._over(env.agent_selection):
            env.step(None)  # PettingZoo's way to let go of who is out of the game
        obs, info = self._look()
        return obs, reward, *ends, info

    def _over(self, agent: Any) -> bool:
        return bool(self.env.terminations[agent] or self.env.truncations[agent])

    def _look(self) -> tuple[Array, dict[str, Any]]:
        env = self.env
        turn = self.agents.index(env.agent_selection)
        shown = self._by_seat({agent: env.observe(agent) for agent in env.agents})
        return self.seats.observe(shown), {
            MASK: self.seats.masks(shown, self._by_seat(env.infos), [turn]),
            "turn": turn,
        }


def _newest(name: str) -> ModuleType:
    """The module of a task: packages carry versions in names, as tictactoe_v3."""
    family, task = name.split("/")
    package = PACKAGES[family]
    with require_extra(name, "marl"):
        modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
        versions = [int(found[1]) for module in modules if (found := re.fullmatch(rf"{task}_v(\d+)", module.name))]
        if not versions:
            raise UserError(f"the installed {package} has no {task}; a newer version of it has")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # PettingZoo's modules warn of being there
            return importlib.import_module(f"{package}.{task}_v{max(versions)}")
