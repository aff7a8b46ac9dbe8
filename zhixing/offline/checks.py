"""Checks of datasets before training. Each error names the dataset, the field and the row."""

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
from zhixing.offline.actions import out_of_bounds, to_env_unclipped
from zhixing.offline.chunks import Array, chunk_rows, named_leaves, take_rows


def check(
    source: str, spaces: Spaces, arrays: Mapping[str, Tree], final_fields: Mapping[str, Tree], ends: Array
) -> None:
    """Check a whole dataset. Values are read in chunks, so memory-mapped files need not fit into memory."""
    spec = spaces.fields()
    num_steps = _length(source, arrays)
    check_arrays(source, spec, arrays, num_steps)
    check_ends(source, ends, num_steps)
    final_spec = {name: spec[name] for name in SUCCESSORS if name in spec}
    check_arrays(f"{source} (final fields)", final_spec, final_fields, len(ends))
    check_flags(source, arrays, ends)
    rows = chunk_rows(spec)
    for part, length, unit in ((arrays, num_steps, "row"), (final_fields, len(ends), "the end of episode")):
        for start in range(0, length, rows):
            chunk = {name: take_rows(tree, slice(start, start + rows)) for name, tree in part.items()}
            check_values(source, spaces, chunk, start, unit)


def _length(source: str, arrays: Mapping[str, Tree]) -> int:
    flags = arrays.get("terminated")
    if not isinstance(flags, np.ndarray) or flags.ndim != 1:
        raise UserError(f"{source} needs the field 'terminated' as an array of one flag per step")
    if len(flags) == 0:
        raise UserError(f"{source} has no steps")
    return len(flags)


def check_arrays(source: str, spec: Mapping[str, Tree], arrays: Mapping[str, Tree], length: int) -> None:
    """Check that the fields are those of the spec, with arrays `[length, ...]` of the right dtype."""
    for name in spec:
        if name not in arrays:
            raise UserError(f"{source} lacks the field {name!r}; it has {', '.join(arrays) or 'none'}")
    for name, tree in arrays.items():
        if name not in spec:
            raise unknown(f"field in {source}:", name, spec)
        expected, actual = dict(named_leaves(name, spec[name])), dict(named_leaves(name, tree))
        if expected.keys() != actual.keys():
            raise UserError(f"{source}: field {name!r} has the parts {sorted(actual)}, expected {sorted(expected)}")
        for label, leaf in actual.items():
            shape, dtype = (length, *expected[label].shape), expected[label].dtype
            if not isinstance(leaf, np.ndarray):
                raise UserError(f"{source}: field {label!r} is a {type(leaf).__name__}, expected a NumPy array")
            if leaf.shape != shape:
                raise UserError(f"{source}: field {label!r} has shape {list(leaf.shape)}, expected {list(shape)}")
            if leaf.dtype != dtype:
                raise UserError(f"{source}: field {label!r} has dtype {leaf.dtype}, expected {dtype}")


def check_ends(source: str, ends: Array, num_steps: int) -> None:
    """Check that the rows where episodes end increase up to the last row."""
    if not isinstance(ends, np.ndarray) or ends.ndim != 1 or ends.dtype != np.int64 or len(ends) == 0:
        raise UserError(f"{source}: ends must be an int64 array of the rows where episodes end, at least one")
    unordered = np.flatnonzero(np.diff(ends) <= 0)
    if len(unordered):
        row, next_row = ends[unordered[0] : unordered[0] + 2].tolist()
        raise UserError(
            f"{source}: ends must increase, but after row {row} comes row {next_row} (episode {unordered[0] + 1})"
        )
    if ends[0] < 0 or ends[-1] != num_steps - 1:
        raise UserError(
            f"{source}: ends go from {int(ends[0])} to {int(ends[-1])}, expected the last row {num_steps - 1}"
        )


def check_flags(source: str, arrays: Mapping[str, Tree], ends: Array, first: int = 0) -> None:
    """Check that `terminated` and `truncated` are true only at the rows `ends`."""
    ended = arrays["terminated"] | arrays["truncated"]
    ended[ends] = False
    rows = np.flatnonzero(ended)
    if len(rows):
        row = int(rows[0])
        name = "terminated" if arrays["terminated"][row] else "truncated"
        raise UserError(
            f"{source}: field {name!r} is true at row {first + row}, but the episode continues: ends lacks this row"
        )


def check_values(source: str, spaces: Spaces, rows: Mapping[str, Tree], first: int, unit: str = "row") -> None:
    """Check that numbers are finite, and that actions (in the policy's scale) and discrete observations are valid."""

    def reject(label: str, invalid: Array, values: Array, rule: str) -> None:
        """Raise `UserError` about the first row with an invalid element, if there is one."""
        if invalid.any():
            row = int(np.flatnonzero(invalid.reshape(len(invalid), -1).any(1))[0])
            value = values[row].tolist() if np.size(values[row]) <= 8 else values[row][invalid[row]].tolist()[:8]
            raise UserError(f"{source}: field {label!r} is {value} at {unit} {first + row}; {rule}")

    for name, tree in rows.items():
        for label, leaf in named_leaves(name, tree):
            if leaf.dtype.kind == "f":
                reject(label, ~np.isfinite(leaf), leaf, "numbers must be finite")
        if name == "action":
            invalid = out_of_bounds(spaces, tree)
            if invalid.any():
                reject(name, invalid, to_env_unclipped(spaces, tree), f"the action space is {spaces.action}")
        elif name == "obs":
            leaf_spaces = _leaf_spaces(name, spaces.obs)
            for label, leaf in named_leaves(name, tree):
                reject(label, _invalid(leaf_spaces[label], leaf), leaf, f"its space is {leaf_spaces[label]}")


def _leaf_spaces(name: str, space: gym.Space[Any]) -> dict[str, gym.Space[Any]]:
    if not isinstance(space, Dict):
        return {name: space}
    parts = [_leaf_spaces(f"{name}.{key}", part) for key, part in space.spaces.items()]
    return {label: leaf for part in parts for label, leaf in part.items()}


def _invalid(space: gym.Space[Any], values: Array) -> Array:
    """Return which observations are invalid. Boxes aren't checked: declared bounds are often wrong and do no harm."""
    if isinstance(space, Discrete):
        return (values < space.start) | (values >= space.start + space.n)
    if isinstance(space, MultiDiscrete):
        return (values < space.start) | (values >= space.start + space.nvec)
    if isinstance(space, MultiBinary):
        return (values < 0) | (values > 1)
    return np.zeros(0, bool)
