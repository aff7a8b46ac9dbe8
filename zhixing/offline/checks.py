"""What a recording must be before anybody trains on it; each problem is told with dataset, field and row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Dict, Discrete, MultiBinary, MultiDiscrete

from zhixing.buffers.fields import SUCCESSORS
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.errors import UserError, unknown
from zhixing.offline.actions import as_task_would_say, outside
from zhixing.offline.recording import Array, chunk_rows, labelled, take


def check(who: str, spaces: Spaces, arrays: Mapping[str, Tree], lasts: Mapping[str, Tree], ends: Array) -> None:
    """All of it. Values are read by chunks, so that mapped files need not fit into memory."""
    spec = spaces.fields()
    num_steps = _length(who, arrays)
    check_arrays(who, spec, arrays, num_steps)
    followed = {name: spec[name] for name in SUCCESSORS if name in spec}
    check_ends(who, ends, num_steps)
    check_arrays(f"{who}, after the ends of its episodes", followed, lasts, len(ends))
    check_flags(who, arrays, ends)
    rows = chunk_rows(spec)
    for part, length, unit in ((arrays, num_steps, "row"), (lasts, len(ends), "the end of episode")):
        for start in range(0, length, rows):
            chunk = {name: take(tree, slice(start, start + rows)) for name, tree in part.items()}
            check_values(who, spaces, chunk, start, unit)


def _length(who: str, arrays: Mapping[str, Tree]) -> int:
    flags = arrays.get("terminated")
    if not isinstance(flags, np.ndarray) or flags.ndim != 1:
        raise UserError(f"{who} needs the field 'terminated' as an array of one flag per step")
    if len(flags) == 0:
        raise UserError(f"{who} has no steps")
    return len(flags)


def check_arrays(who: str, spec: Mapping[str, Tree], arrays: Mapping[str, Tree], length: int) -> None:
    """Every field is there, no other, and each of its arrays is `[length, ...]` of the right type."""
    for name in spec:
        if name not in arrays:
            raise UserError(f"{who} lacks the field {name!r}; it has {', '.join(arrays) or 'none'}")
    for name, tree in arrays.items():
        if name not in spec:
            raise unknown(f"field in {who}:", name, spec)
        expected, found = dict(labelled(name, spec[name])), dict(labelled(name, tree))
        if expected.keys() != found.keys():
            raise UserError(f"{who}: field {name!r} has the parts {sorted(found)}, expected {sorted(expected)}")
        for label, leaf in found.items():
            shape, dtype = (length, *expected[label].shape), expected[label].dtype
            if not isinstance(leaf, np.ndarray):
                raise UserError(f"{who}: field {label!r} is a {type(leaf).__name__}, expected a NumPy array")
            if leaf.shape != shape:
                raise UserError(f"{who}: field {label!r} has shape {list(leaf.shape)}, expected {list(shape)}")
            if leaf.dtype != dtype:
                raise UserError(f"{who}: field {label!r} has numbers of type {leaf.dtype}, expected {dtype}")


def check_ends(who: str, ends: Array, num_steps: int) -> None:
    if not isinstance(ends, np.ndarray) or ends.ndim != 1 or ends.dtype != np.int64 or len(ends) == 0:
        raise UserError(f"{who}: ends must be an int64 array of the rows where episodes end, at least one")
    falls = np.flatnonzero(np.diff(ends) <= 0)
    if len(falls):
        one, next_one = ends[falls[0] : falls[0] + 2].tolist()
        raise UserError(f"{who}: ends must increase, but after row {one} comes row {next_one} (episode {falls[0] + 1})")
    if ends[0] < 0 or ends[-1] != num_steps - 1:
        raise UserError(f"{who}: ends go from {int(ends[0])} to {int(ends[-1])}, expected the last row {num_steps - 1}")


def check_flags(who: str, arrays: Mapping[str, Tree], ends: Array, first: int = 0) -> None:
    """Where an episode ended, the next row is another one's."""
    ended = arrays["terminated"] | arrays["truncated"]
    ended[ends] = False
    rows = np.flatnonzero(ended)
    if len(rows):
        row = int(rows[0])
        name = "terminated" if arrays["terminated"][row] else "truncated"
        raise UserError(f"{who}: field {name!r} is true at row {first + row}, but the episode goes on: ends lacks it")


def check_values(who: str, spaces: Spaces, rows: Mapping[str, Tree], first: int, unit: str = "row") -> None:
    """Numbers are finite, actions (in the policy's scale) and discrete observations are possible ones."""
    for name, tree in rows.items():
        for label, leaf in labelled(name, tree):
            if leaf.dtype.kind == "f":
                _tell(~np.isfinite(leaf), leaf, f"{who}: field {label!r}", first, unit, "numbers must be finite")
        if name == "action":
            bad = outside(spaces, tree)
            if bad.any():
                told = as_task_would_say(spaces, tree)
                _tell(bad, told, f"{who}: field 'action'", first, unit, f"the action space is {spaces.action}")
        elif name == "obs":
            parts = _leaf_spaces(name, spaces.obs)
            for label, leaf in labelled(name, tree):
                bad = _impossible(parts[label], leaf)
                _tell(bad, leaf, f"{who}: field {label!r}", first, unit, f"its space is {parts[label]}")


def _leaf_spaces(name: str, space: gym.Space[Any]) -> dict[str, gym.Space[Any]]:
    if not isinstance(space, Dict):
        return {name: space}
    parts = [_leaf_spaces(f"{name}.{key}", part) for key, part in space.spaces.items()]
    return {label: leaf for part in parts for label, leaf in part.items()}


def _impossible(space: gym.Space[Any], values: Array) -> Array:
    """Boxes are left alone: what tasks say of the bounds of their observations is often wrong, and does no harm."""
    if isinstance(space, Discrete):
        return (values < space.start) | (values >= space.start + space.n)
    if isinstance(space, MultiDiscrete):
        return (values < space.start) | (values >= space.start + space.nvec)
    if isinstance(space, MultiBinary):
        return (values < 0) | (values > 1)
    return np.zeros(0, bool)


def _tell(bad: Array, values: Array, what: str, first: int, unit: str, why: str) -> None:
    if bad.any():
        row = int(np.flatnonzero(bad.reshape(len(bad), -1).any(1))[0])
        found = values[row].tolist() if np.size(values[row]) <= 8 else values[row][bad[row]].tolist()[:8]
        raise UserError(f"{what} is {found} at {unit} {first + row}; {why}")
