"""What every recording says of itself, and the chunks in which experience passes between formats."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Dict

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field, Tree, tree_map
from zhixing.errors import UserError, unknown
from zhixing.utils.extras import install_hint

Array = np.ndarray[Any, Any]

REFERENCES = ("random", "expert")
CHUNK_BYTES = 1 << 24  # how much is read, checked or written at once, about


@dataclass(frozen=True, kw_only=True)
class Header:
    """A recording but for its arrays. `env` and `options` are the task's, None and empty where unknown.

    `references` are the mean returns of a random and an expert policy, or empty; `name` is what errors call it.
    """

    spaces: Spaces
    env: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    references: dict[str, float] = field(default_factory=dict)
    note: str = ""
    name: str = "dataset"

    def __post_init__(self) -> None:
        action = self.spaces.action
        if isinstance(action, Dict) or (isinstance(action, Box) and action.dtype.kind != "f"):
            raise UserError(
                f"{self.name} has the action space {action}; allowed are Box of floats, Discrete, MultiDiscrete and "
                f"MultiBinary"
            )
        self.spaces.fields()  # refuses spaces that are no arrays
        if not plain(self.options) or not isinstance(self.options, dict):
            raise UserError(f"{self.name}: options {self.options!r} must be plain values that JSON holds")
        for kind, value in self.references.items():
            if kind not in REFERENCES:
                raise unknown(f"reference of {self.name}", kind, REFERENCES)
            if not isinstance(value, (int, float)) or not abs(value) < 1e300:
                raise UserError(f"{self.name}: reference {kind!r} is {value!r}, expected a finite number")

    @property
    def header(self) -> Header:
        """The header alone, of whatever has one."""
        return Header(**{part.name: getattr(self, part.name) for part in fields(Header)})

    def with_task(self, env: str | None, options: Mapping[str, Any] | None) -> Header:
        """With this task, if there is none yet."""
        if env is None or self.env is not None:
            return self
        return replace(self, env=env, options=dict(options or {}))


class Chunk(NamedTuple):
    """Steps in order, as they are stored on disk: actions in the task's own terms.

    A segment may go on in the next chunk. Those that end here do so after the rows `ends` (counted in the chunk), and
    `lasts` are what they showed then.
    """

    rows: dict[str, Tree]  # leaves [T, ...]
    ends: Array  # int64 [K]
    lasts: dict[str, Tree]  # leaves [K, ...]


def plain(value: Any) -> bool:
    """Whether JSON gives it back as it is."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def labelled(name: str, tree: Tree) -> Iterator[tuple[str, Any]]:
    """The leaves of a field with names for messages and manifests: `obs`, or `obs.arm.angle`."""
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from labelled(f"{name}.{key}", part)
    else:
        yield name, tree


def chunk_rows(spec: Mapping[str, Tree]) -> int:
    """How many steps make a chunk."""
    fields = [leaf for name, tree in spec.items() for _, leaf in labelled(name, tree)]
    return max(1, CHUNK_BYTES // max(1, sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in fields)))


def cast(who: str, name: str, tree: Tree, value: Tree, length: int, first: int = 0) -> Tree:
    """Foreign arrays `[length, ...]` as the fields of `tree`: floats in single precision, integers as they fit."""
    if isinstance(tree, Field):
        return _cast(who, name, tree, value, length, first)
    parts = dict(value) if isinstance(value, Mapping) else {}
    if parts.keys() != tree.keys():
        raise UserError(f"{who}: field {name!r} has the parts {sorted(parts) or 'none'}, expected {sorted(tree)}")
    return {key: cast(who, f"{name}.{key}", part, parts[key], length, first) for key, part in tree.items()}


def _cast(who: str, name: str, spec: Field, value: Any, length: int, first: int) -> Array:
    array = np.asarray(value)
    if array.shape != (length, *spec.shape):
        raise UserError(f"{who}: field {name!r} has shape {list(array.shape)}, expected {[length, *spec.shape]}")
    if array.dtype == spec.dtype:
        return array
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and spec.dtype.kind != "f"):
        raise UserError(f"{who}: field {name!r} has numbers of type {array.dtype}, expected {spec.dtype}")
    with np.errstate(over="ignore"):  # what becomes infinite is told by the check of values
        new = array.astype(spec.dtype)
    if spec.dtype.kind != "f" and not np.array_equal(new, array):
        row = int(np.flatnonzero((new != array).reshape(length, -1).any(1))[0])
        found = array[row].tolist() if array[row].size <= 8 else array[row].max()
        raise UserError(f"{who}: field {name!r} is {found} at row {first + row}, beyond what {spec.dtype} holds")
    return new


def take(tree: Tree, rows: Any) -> Tree:
    """These rows of every leaf."""
    return tree_map(lambda leaf: leaf[rows], tree)


def from_extra(module: str, who: str) -> Any:
    """A module of an optional package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        too_old = package == "minari" and sys.version_info < (3, 11)
        hint = "use Python 3.11 or newer, which Minari needs" if too_old else install_hint("offline")
        raise UserError(f"{who} needs {package}, which can't be imported ({error}): {hint}") from error
