"""Batches of experience: structs of arrays that pass from the environment to the loss.

Leading dimensions are `[T,N]` (time, environments), `[B]` (flat) or `[B,T]`, then `A` where there are agents.
A field is an array or a tree of arrays: nested dicts for observations, tuples for recurrent states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from zhixing.core.tree import Tree, tree_leaves, tree_map

BASE_FIELDS = ("obs", "action", "reward", "terminated", "truncated", "next_obs")


class Batch:
    """Named arrays with equal leading dimensions. The set of fields is fixed at construction.

    A field may be a function without arguments, which is called when the field is first read. So `next_obs`, which
    isn't stored, costs nothing unless a learner reads it.
    """

    __slots__ = ("_fields",)
    _fields: dict[str, Tree]

    def __init__(self, **fields: Tree) -> None:
        object.__setattr__(self, "_fields", fields)

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self._fields)

    def __getattr__(self, name: str) -> Tree:
        try:
            value = self._fields[name]
        except KeyError:
            raise AttributeError(
                f"this batch has no field {name!r}, only {', '.join(self._fields)}; "
                f"a learner declares additional fields in `extra_fields`"
            ) from None
        if callable(value):
            value = self._fields[name] = value()
        return value

    def __setattr__(self, name: str, value: Tree) -> None:
        raise AttributeError(f"a batch can't be changed; create a new one with batch.replace({name}=...)")

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def get(self, name: str) -> Tree | None:
        """Return a field, or None if the batch doesn't have it."""
        return getattr(self, name) if name in self._fields else None

    def __len__(self) -> int:
        for name in self._fields:
            for leaf in tree_leaves(getattr(self, name)):
                return len(leaf)
        return 0

    def __repr__(self) -> str:
        def shape(leaf: Any) -> str:
            return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"

        parts = [
            f"{name}=<not read yet>" if callable(value) else f"{name}={tree_map(shape, value)}"
            for name, value in self._fields.items()
        ]
        return f"Batch({', '.join(parts)})"

    def __getitem__(self, index: Any) -> Batch:
        return self.map(lambda leaf: leaf[index])

    def map(self, function: Callable[[Any], Any]) -> Batch:
        """Apply `function` to every array; to fields not read yet when they are first read."""

        def apply(name: str) -> Tree:
            return tree_map(function, getattr(self, name))

        return Batch(
            **{name: partial(apply, name) if callable(value) else apply(name) for name, value in self._fields.items()}
        )

    def select(self, names: Iterable[str]) -> Batch:
        """Return a batch of only these fields, without reading them."""
        return Batch(**{name: self._fields[name] for name in names})

    def replace(self, **fields: Tree) -> Batch:
        """Return a batch in which some fields are replaced. New fields are not allowed."""
        for name in fields:
            getattr(self, name)
        return Batch(**{**self._fields, **fields})

    def flatten(self, dims: int = 2) -> Batch:
        """Merge the first `dims` dimensions: `[T,N,...]` to `[B,...]`."""
        return self.map(
            lambda leaf: (
                leaf.flatten(0, dims - 1) if isinstance(leaf, torch.Tensor) else leaf.reshape(-1, *leaf.shape[dims:])
            )
        )

    def numpy(self) -> Batch:
        """Return a batch of NumPy arrays. Those of torch tensors on the CPU share their memory."""
        return self.map(lambda leaf: leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf)

    def to(self, device: torch.device | str) -> Batch:
        """Return a batch of torch tensors on `device`. On the CPU they share the memory of NumPy arrays."""
        return self.map(lambda leaf: torch.as_tensor(leaf, device=device))

    @staticmethod
    def cat(batches: list[Batch], dim: int = 0) -> Batch:
        """Concatenate batches of the same fields along a leading dimension."""

        def concatenate(*leaves: Any) -> Any:
            return torch.cat(leaves, dim) if isinstance(leaves[0], torch.Tensor) else np.concatenate(leaves, dim)

        fields = batches[0].fields
        return Batch(**{name: tree_map(concatenate, *(getattr(batch, name) for batch in batches)) for name in fields})
