"""Spaces, observation layout and metadata of an environment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Dict, Discrete, Text, Tuple

from zhixing.core.action_layout import ActionLayout
from zhixing.core.spaces import CONVERSIONS, Spaces, space_fields
from zhixing.core.tree import tree_leaves
from zhixing.envs.api import check_spaces, reset_and_check
from zhixing.envs.info_fields import infer_fields
from zhixing.envs.wrappers.action_repeat import action_repeat_of
from zhixing.envs.wrappers.frame_stack import stack_of
from zhixing.envs.wrappers.time_limit import time_limit_of
from zhixing.errors import UserError

INFO_KEYS = {"mask": "action_mask", "state": "state", "alive": "alive"}  # fields of a step, and their keys in `info`
MASK = INFO_KEYS["mask"]
ENCODE_TEXT = f"wrap the environment to {CONVERSIONS[Text]}"
Path = tuple[Any, ...]  # keys that lead from an observation to one of its arrays


@dataclass(frozen=True)
class EnvSpec:
    spaces: Spaces
    paths: tuple[Path, ...]  # one per leaf of `spaces.obs`, in the order of `tree_leaves`
    mask_in_obs: bool  # whether the action mask, if there is one, is in the observation rather than in `info`
    logged_info_keys: tuple[str, ...] = ()  # numbers in the last info of an episode to log
    max_episode_steps: int | None = None  # at which a wrapper truncates episodes; None if no limit is known
    render_fps: float = 30.0


def inspect_env(env: gym.Env[Any, Any], name: str) -> EnvSpec:
    """Return the spec of an environment. Raise `UserError` if arrays can't store its data.

    The environment is reset for this, and takes a step if it declares fields of `info`.
    """
    check_spaces(env, name)
    obs, info = reset_and_check(env, name)
    space, mask_in_obs = env.observation_space, False
    path: Path = ()
    if isinstance(space, Dict) and MASK in space.spaces:
        mask_in_obs = True
        others = {key: part for key, part in space.spaces.items() if key != MASK}
        if set(others) == {"observation"}:  # PettingZoo's convention
            space, path = others["observation"], ("observation",)
        else:
            space = Dict(others)
    space, paths = _convert_tuples(space, path, name)
    num_agents = int(getattr(env.unwrapped, "num_agents", 1))  # wrappers don't forward it
    agents = () if num_agents == 1 else (num_agents,)
    for field, leaf_path in zip(tree_leaves(space_fields(space)), paths, strict=True):
        shape, expected = np.shape(get_leaf(obs, leaf_path)), agents + field.shape
        if shape != expected:
            where = f" at {'.'.join(map(str, leaf_path))}" if leaf_path else ""
            raise UserError(
                f"{name} returned an observation of shape {shape}{where}; its observation space has shape {expected}"
            )
    mask = obs[MASK] if mask_in_obs else info.get(MASK)
    if mask is not None and action_repeat_of(env) > 1:
        raise UserError(
            f"{name} has action masks, so a repeated action may be forbidden; set env.action_repeat=1, not "
            f"{action_repeat_of(env)}"
        )
    agent_spaces = tuple(getattr(env.unwrapped, "agent_spaces", ())) if agents else ()
    if agent_spaces and stack_of(env) > 1:
        raise UserError(
            f"{name} has agents with different kinds of spaces, whose padded observations can't be stacked; set "
            f"env.stack=1, not {stack_of(env)}"
        )
    sized_by = env.action_space if not agent_spaces else _largest_discrete([action for _, action in agent_spaces])
    spaces = Spaces(
        space,
        env.action_space,
        num_agents,
        mask=_mask_size(mask, sized_by, agents, name),
        state=_state_size(info, agents, name),
        alive=bool(agents) and "alive" in info,
        reward_kind=getattr(env.unwrapped, "reward_kind", "individual") if agents else "individual",
        agent_names=tuple(map(str, getattr(env.unwrapped, "agent_names", ()))) if agents else (),
        agent_spaces=agent_spaces,
        stack=stack_of(env),
    )
    spaces = replace(spaces, info=infer_fields(env, name, spaces, mask))
    fps = float(env.metadata.get("render_fps") or 30.0)
    return EnvSpec(spaces, paths, mask_in_obs, tuple(env.metadata.get("logged_info_keys", ())), time_limit_of(env), fps)


def _largest_discrete(actions: list[gym.Space[Any]]) -> gym.Space[Any]:
    """Return the largest Discrete space, which has the size of the masks, or the first space if there is none."""
    return max((space for space in actions if isinstance(space, Discrete)), key=lambda s: s.n, default=actions[0])


def get_leaf(obs: Any, path: Path) -> Any:
    """Return the part of an observation at a path of keys."""
    for key in path:
        obs = obs[key]
    return obs


def _convert_tuples(space: gym.Space[Any], path: Path, name: str) -> tuple[gym.Space[Any], tuple[Path, ...]]:
    """Convert Tuple spaces to Dict spaces with the keys "0", "1", ..., and drop text, which arrays can't store.

    Return the space and the path to each of its leaves in the original observation.
    """
    if not isinstance(space, (Dict, Tuple)):
        try:
            space_fields(space)
        except UserError as error:
            raise UserError(f"{name}{' at ' if path else ''}{'.'.join(map(str, path))}: {error}") from None
        return space, (path,)
    parts = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
    converted = {str(key): _convert_tuples(part, (*path, key), name) for key, part in parts if not is_text(part)}
    if not converted:
        raise UserError(f"{name} observes nothing but text, which policies don't receive: {space}; {ENCODE_TEXT}")
    dict_space = Dict({key: part for key, (part, _) in converted.items()})
    return dict_space, tuple(
        leaf_path for key in dict_space.spaces for leaf_path in converted[key][1]
    )  # sorted by Dict


def is_text(space: gym.Space[Any]) -> bool:
    """Return whether the elements of a space are strings, such as MiniGrid's missions."""
    return space.dtype is not None and np.dtype(space.dtype).kind == "U"


def _state_size(info: dict[str, Any], agents: tuple[int, ...], name: str) -> int | None:
    """Return the size of the global state, or None if there is none. A single agent has only observations."""
    if not agents or "state" not in info:
        return None
    shape = np.shape(info["state"])
    if len(shape) != 1:
        raise UserError(f"{name} returned a global state of shape {shape}; it must be a one-dimensional array")
    return shape[0]


def _mask_size(mask: Any, space: gym.Space[Any], agents: tuple[int, ...], name: str) -> int | None:
    if mask is None:
        return None
    size = ActionLayout(space).mask_size
    if size == 0:
        raise UserError(f"{name} returned an action mask, but its action space {space} has no discrete choices")
    if np.shape(mask) != (*agents, size):
        raise UserError(
            f"{name} returned an action mask of shape {np.shape(mask)}; it must have shape {(*agents, size)}"
        )
    return size
