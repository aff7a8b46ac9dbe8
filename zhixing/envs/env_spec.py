"""Where the parts of a task's observation are, and where its action mask comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Dict, Discrete, MultiDiscrete, Tuple

from zhixing.core.spaces import Spaces, space_fields
from zhixing.core.tree import tree_leaves
from zhixing.envs.api import check_spaces, first_reset
from zhixing.envs.wrappers.time_limit import time_limit_of
from zhixing.errors import UserError

INFO_KEYS = {"mask": "action_mask", "state": "state", "alive": "alive"}  # fields of a step to where `info` has them
MASK = INFO_KEYS["mask"]
Path = tuple[Any, ...]  # keys that lead from an observation to one of its arrays


@dataclass(frozen=True)
class EnvSpec:
    spaces: Spaces
    paths: tuple[Path, ...]  # one per leaf of `spaces.obs`, in the order of `tree_leaves`
    mask_in_obs: bool  # else in info, where there is a mask at all
    logged_info_keys: tuple[str, ...] = ()  # numbers of the last info that are worth a log
    max_episode_steps: int | None = None  # after which a wrapper truncates; None: no limit is known
    render_fps: float = 30.0


def describe(env: gym.Env[Any, Any], name: str) -> EnvSpec:
    """The layout of a task, found by resetting one copy of it. Refuses what can't be stored as arrays."""
    check_spaces(env, name)
    obs, info = first_reset(env, name)
    space, mask_in_obs = env.observation_space, False
    path: Path = ()
    if isinstance(space, Dict) and MASK in space.spaces:
        mask_in_obs = True
        rest = {key: part for key, part in space.spaces.items() if key != MASK}
        # PettingZoo's manner: the mask stands beside one entry that is the observation proper
        space, path = (rest["observation"], ("observation",)) if set(rest) == {"observation"} else (Dict(rest), ())
    space, paths = _without_tuples(space, path)
    num_agents = int(getattr(env.unwrapped, "num_agents", 1))  # a wrapper hides it
    agents = () if num_agents == 1 else (num_agents,)
    for field, where in zip(tree_leaves(space_fields(space)), paths, strict=True):
        found = np.shape(follow(obs, where))
        if found != agents + field.shape:
            part = f" at {'.'.join(map(str, where))}" if where else ""
            raise UserError(f"{name} gives observations of shape {found}{part}, its space says {agents + field.shape}")
    spaces = Spaces(
        space,
        env.action_space,
        num_agents,
        mask=_mask_size(obs[MASK] if mask_in_obs else info.get(MASK), env.action_space, agents, name),
        state=_state_size(info, agents, name),
        alive=bool(agents) and "alive" in info,
        reward_kind=getattr(env.unwrapped, "reward_kind", "individual") if agents else "individual",
    )
    fps = float(env.metadata.get("render_fps") or 30.0)
    return EnvSpec(spaces, paths, mask_in_obs, tuple(env.metadata.get("logged_info_keys", ())), time_limit_of(env), fps)


def follow(obs: Any, path: Path) -> Any:
    for key in path:
        obs = obs[key]
    return obs


def _without_tuples(space: gym.Space[Any], path: Path) -> tuple[gym.Space[Any], tuple[Path, ...]]:
    """Tuples become dicts with the keys "0", "1", ...; the paths still lead through the task's own tuples. Text is left
    out: no array holds it."""
    if not isinstance(space, (Dict, Tuple)):
        return space, (path,)
    every = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
    items = [(key, part) for key, part in every if not is_text(part)]
    parts = {str(key): _without_tuples(part, (*path, key)) for key, part in items}
    plain = Dict({key: part for key, (part, _) in parts.items()})
    return plain, tuple(where for key in plain.spaces for where in parts[key][1])  # Dict sorts its keys


def is_text(space: gym.Space[Any]) -> bool:
    """Whether its elements are strings, such as the missions of MiniGrid."""
    return space.dtype is not None and np.dtype(space.dtype).kind == "U"


def _state_size(info: dict[str, Any], agents: tuple[int, ...], name: str) -> int | None:
    """Only tasks of many agents have a state apart: to one agent all that there is are its observations."""
    if not agents or "state" not in info:
        return None
    found = np.shape(info["state"])
    if len(found) != 1:
        raise UserError(f"{name} gives a global state of shape {found}; it must be one flat array")
    return found[0]


def _mask_size(mask: Any, space: gym.Space[Any], agents: tuple[int, ...], name: str) -> int | None:
    if mask is None:
        return None
    found = np.shape(mask)
    if isinstance(space, Discrete):
        wanted = int(space.n)
    elif isinstance(space, MultiDiscrete):
        wanted = int(space.nvec.sum())
    else:
        raise UserError(f"{name} gives an action mask, but its action space {space} isn't discrete")
    if found != (*agents, wanted):
        raise UserError(f"{name} gives action masks of shape {found}, its {wanted} actions need {(*agents, wanted)}")
    return wanted
