"""A struct of arrays: experience on its way from the environment to the loss.

Leading dimensions are `[T,N]` (time, environments), `[B]` (flat) or `[B,T]`, then `A` where there are agents.
A field is an array or a tree of arrays (nested dicts for observations, tuples for recurrent state).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from zhixing.core.tree import Tree, tree_leaves, tree_map

BASE_FIELDS = ("obs", "action", "reward", "terminated", "truncated", "next_obs")


class Batch:
    """Named arrays with equal leading dimensions. Its fields are fixed when it is made.

    A field may be given as a function without arguments: it is computed when first read, so that `next_obs`,
    which storage doesn't keep, costs nothing unless a learner asks for it.
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
                f"a learner declares further fields in `fields`"
            ) from None
        if callable(value):
            value = self._fields[name] = value()
        return value

    def __setattr__(self, name: str, value: Tree) -> None:
        raise AttributeError(f"a batch takes no new values; make another with batch.replace({name}=...)")

    def __contains__(self, name: str) -> bool:
        return name in self._fields

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
        """`function` of every array; of those not read yet when they are."""

        def mapped(name: str) -> Tree:
            return tree_map(function, getattr(self, name))

        return Batch(
            **{name: partial(mapped, name) if callable(value) else mapped(name) for name, value in self._fields.items()}
        )

    def select(self, names: Iterable[str]) -> Batch:
        """Only these fields; those not read yet stay so."""
        return Batch(**{name: self._fields[name] for name in names})

    def replace(self, **fields: Tree) -> Batch:
        """The same batch with some fields exchanged; none may be new."""
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
        return self.map(lambda leaf: leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf)

    def to(self, device: torch.device | str) -> Batch:
        """Torch tensors on `device`; NumPy arrays on the CPU share their memory."""
        return self.map(lambda leaf: torch.as_tensor(leaf, device=device))

    @staticmethod
    def allocate(spec: Mapping[str, Tree], leading: tuple[int, ...]) -> Batch:
        """Zeros for every field of `spec` (trees of `Field`)."""
        return Batch(
            **{
                name: tree_map(lambda field: np.zeros((*leading, *field.shape), field.dtype), tree)
                for name, tree in spec.items()
            }
        )

    @staticmethod
    def stack(batches: list[Batch], dim: int = 0) -> Batch:
        return _join(batches, np.stack, torch.stack, dim)

    @staticmethod
    def cat(batches: list[Batch], dim: int = 0) -> Batch:
        return _join(batches, np.concatenate, torch.cat, dim)


def _join(batches: list[Batch], in_numpy: Callable[..., Any], in_torch: Callable[..., Any], dim: int) -> Batch:
    def join(*leaves: Any) -> Any:
        return in_torch(leaves, dim) if isinstance(leaves[0], torch.Tensor) else in_numpy(leaves, dim)

    first = batches[0]
    return Batch(**{name: tree_map(join, *(getattr(batch, name) for batch in batches)) for name in first.fields})
