"""Which policy acts for each agent."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from zhixing.errors import unknown


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
