"""Limits for data from files, which may be malicious."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 500
EXTRA_NODES = 100  # that short texts may have in addition to one per byte


def check_size(tree: Any, num_bytes: int) -> None:
    """Raise `ValueError` if a tree has more nodes than the text it was parsed from has bytes.

    A few bytes of YAML can define a list that contains another list twice, which contains a third list twice, and so
    on. Walking through it would take exponential time and memory.
    """
    stack: list[Iterator[Any]] = [iter([tree])]
    count = 0
    while stack:
        node = next(stack[-1], stack)  # `stack` itself marks the end of an iterator
        if node is stack:
            stack.pop()
            continue
        count += 1
        if count > num_bytes + EXTRA_NODES or len(stack) > MAX_DEPTH:
            raise ValueError("it contains itself, or repeats parts many times")
        if isinstance(node, Mapping):
            stack += [iter(node), iter(node.values())]
        elif isinstance(node, (list, tuple, set, frozenset)):
            stack.append(iter(node))
