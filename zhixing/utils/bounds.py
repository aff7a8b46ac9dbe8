"""Bounds on what files may hold, since they may come from anybody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


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
