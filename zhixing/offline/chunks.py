"""The header of a dataset, and the chunks of steps that are passed between formats."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box

from zhixing.core.action_layout import ALLOWED
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field, Tree, tree_map
from zhixing.errors import UserError, unknown

Array = np.ndarray[Any, Any]

REFERENCES = ("random", "expert")
CHUNK_BYTES = 1 << 24  # approximate amount that is read, checked or written at once


@dataclass(frozen=True, kw_only=True)
class Header:
    """A dataset without its arrays.

    `env` and its `options` are None and empty if unknown. `references` are the mean returns of a random and an expert
    policy, or empty. Errors call the dataset by `name`.
    """

    spaces: Spaces
    env: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    references: dict[str, float] = field(default_factory=dict)
    note: str = ""
    name: str = "dataset"

    def __post_init__(self) -> None:
        action = self.spaces.action
        if isinstance(action, Box) and action.dtype.kind != "f":
            raise UserError(f"{self.name} has the action space {action}; {ALLOWED}")
        try:
            self.spaces.fields()  # rejects spaces that can't be stored as arrays
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None
        if not is_json(self.options) or not isinstance(self.options, dict):
            raise UserError(f"{self.name}: options {self.options!r} must be plain values that JSON can represent")
        for kind, value in self.references.items():
            if kind not in REFERENCES:
                raise unknown(f"reference of {self.name}", kind, REFERENCES)
            if not isinstance(value, (int, float)) or not abs(value) < 1e300:
                raise UserError(f"{self.name}: reference {kind!r} is {value!r}, expected a finite number")

    @property
    def header(self) -> Header:
        """The header alone, without what subclasses add."""
        return Header(**{part.name: getattr(self, part.name) for part in fields(Header)})

    def with_env(self, env: str | None, options: Mapping[str, Any] | None) -> Header:
        """Return this header with an environment, unless it has one already."""
        if env is None or self.env is not None:
            return self
        return replace(self, env=env, options=dict(options or {}))


class Chunk(NamedTuple):
    """Consecutive steps as they are stored on disk, with actions in the environment's scale.

    An episode may continue in the next chunk. `ends` are the rows of the chunk where episodes end, and `final_fields`
    the values after these rows (obs, mask, state, alive).
    """

    rows: dict[str, Tree]  # leaves [T, ...]
    ends: Array  # int64 [K]
    final_fields: dict[str, Tree]  # leaves [K, ...]


def is_json(value: Any) -> bool:
    """Return whether JSON can represent a value without loss."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def named_leaves(name: str, tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a field with names for messages and manifests: `obs`, or `obs.arm.angle`."""
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from named_leaves(f"{name}.{key}", part)
    else:
        yield name, tree


def chunk_rows(spec: Mapping[str, Tree]) -> int:
    """Return the number of steps in a chunk."""
    leaves = [leaf for name, tree in spec.items() for _, leaf in named_leaves(name, tree)]
    return max(1, CHUNK_BYTES // max(1, sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)))


def cast(source: str, name: str, tree: Tree, value: Tree, length: int, first: int = 0) -> Tree:
    """Return arrays `[length, ...]` of another format with the dtypes of `tree`. Integers must fit their dtype."""
    if isinstance(tree, Field):
        return _cast(source, name, tree, value, length, first)
    parts = dict(value) if isinstance(value, Mapping) else {}
    if parts.keys() != tree.keys():
        raise UserError(f"{source}: field {name!r} has the parts {sorted(parts) or 'none'}, expected {sorted(tree)}")
    return {key: cast(source, f"{name}.{key}", part, parts[key], length, first) for key, part in tree.items()}


def _cast(source: str, name: str, spec: Field, value: Any, length: int, first: int) -> Array:
    array = np.asarray(value)
    if array.shape != (length, *spec.shape):
        raise UserError(f"{source}: field {name!r} has shape {list(array.shape)}, expected {[length, *spec.shape]}")
    if array.dtype == spec.dtype:
        return array
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and spec.dtype.kind != "f"):
        raise UserError(f"{source}: field {name!r} has dtype {array.dtype}, expected {spec.dtype}")
    with np.errstate(over="ignore"):  # the check of values reports numbers that become infinite
        converted = array.astype(spec.dtype)
    if spec.dtype.kind != "f" and not np.array_equal(converted, array):
        row = int(np.flatnonzero((converted != array).reshape(length, -1).any(1))[0])
        example = array[row].tolist() if array[row].size <= 8 else array[row].max()
        raise UserError(
            f"{source}: field {name!r} is {example} at row {first + row}, outside of the range of {spec.dtype}"
        )
    return converted


def take_rows(tree: Tree, rows: Any) -> Tree:
    """Return these rows of every leaf."""
    return tree_map(lambda leaf: leaf[rows], tree)
