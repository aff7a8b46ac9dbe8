"""Which policy acts for each agent, and the spaces of a policy."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gymnasium.spaces import Discrete

from zhixing.core.spaces import Spaces
from zhixing.errors import UserError, unknown


def match_agents(patterns: Mapping[str, str], names: tuple[str, ...], setting: str) -> dict[str, str]:
    """Return the policy of each agent that has one. An exact name precedes patterns, which apply in order."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise unknown(f"agent in {setting}:", pattern, names)
    ordered = sorted(patterns, key=lambda pattern: pattern not in names)
    matches = {name: [p for p in ordered if p == name or fnmatch.fnmatchcase(name, p)] for name in names}
    return {name: patterns[found[0]] for name, found in matches.items() if found}


def group_agents(policy_of: Mapping[str, str], names: tuple[str, ...]) -> dict[str, list[int]]:
    """Return the indices of the agents of each policy."""
    return {policy: [i for i, name in enumerate(names) if policy_of[name] == policy] for policy in policy_of.values()}


def member_spaces(spaces: Spaces, agents: Sequence[int], num_agents: int) -> Spaces:
    """Return the spaces of a policy for these agents: one that acts for each of them, or for a team of `num_agents`."""
    changes: dict[str, Any] = {"num_agents": num_agents, "agent_names": (), "agent_spaces": ()}
    if num_agents == 1:
        changes |= {"reward_kind": "individual", "state": None, "alive": False}
    if spaces.agent_spaces:
        obs, action = spaces.agent_spaces[agents[0]]
        for other in agents:
            if spaces.agent_spaces[other] != (obs, action):
                first, second = spaces.agent_names[agents[0]], spaces.agent_names[other]
                raise UserError(
                    f"{first} and {second} have different kinds of spaces, so they can't have the same policy; set "
                    f"agents.{second} to a policy of another name"
                )
        mask = int(action.n) if spaces.mask is not None and isinstance(action, Discrete) else None
        changes |= {"obs": obs, "action": action, "mask": mask}
    return replace(spaces, **changes)
