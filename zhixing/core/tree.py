"""Trees of arrays: an array, or a dict or tuple of trees. Free of torch, so that environment workers start fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

Tree = Any  # an array, or a dict / tuple of trees


class Field(NamedTuple):
    """What one step of one environment puts into a field."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def tree_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply `function` to each leaf (and the leaves at the same place in `others`)."""
    if isinstance(tree, Mapping):
        return {key: tree_map(function, tree[key], *(other[key] for other in others)) for key in tree}
    if isinstance(tree, tuple) and not isinstance(tree, Field):
        return tuple(tree_map(function, *parts) for parts in zip(tree, *others, strict=True))
    return function(tree, *others)


def tree_leaves(tree: Tree) -> list[Any]:
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves


def check_size(tree: Any, most: int) -> None:
    """Refuse a tree that has more parts than the text it came from has bytes: a part that holds the same part twice,
    which holds one twice, and so on, is a few bytes that become all memory when somebody walks through them."""
    stack: list[Iterator[Any]] = [iter([tree])]
    count = 0
    while stack:
        part = next(stack[-1], stack)
        if part is stack:
            stack.pop()
            continue
        count += 1
        if count > most + 100 or len(stack) > 500:
            raise ValueError("it holds itself again and again")
        if isinstance(part, Mapping):
            stack += [iter(part), iter(part.values())]
        elif isinstance(part, (list, tuple, set, frozenset)):
            stack.append(iter(part))
