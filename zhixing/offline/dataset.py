"""A dataset: recorded steps as arrays, in memory or memory-mapped, checked at construction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zhixing.buffers.fields import SUCCESSORS
from zhixing.core.batch import Batch
from zhixing.core.tree import Tree, tree_map
from zhixing.errors import UserError
from zhixing.offline.actions import from_env, to_env
from zhixing.offline.checks import check
from zhixing.offline.chunks import Array, Chunk, Header, chunk_rows, take_rows


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Dataset(Header):
    """Recorded steps of episodes, one after the other. Some episodes may be incomplete.

    `arrays` has the fields of `spaces.fields()` with leaves `[S, ...]`. `obs` is the observation before the step, and
    actions are in the policy's scale. `ends` `[E]` are the rows of the last steps of episodes, and `final_fields` the
    values after these (obs, mask, state, alive), with leaves `[E, ...]`. An episode that ends neither terminated nor
    truncated is incomplete. All arrays are read-only.
    """

    arrays: dict[str, Tree]
    final_fields: dict[str, Tree]
    ends: Array

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.name, self.spaces, self.arrays, self.final_fields, self.ends)
        spec = self.spaces.fields()
        for attribute, trees in (("arrays", self.arrays), ("final_fields", self.final_fields)):
            names = [name for name in spec if name in trees]
            # puts the parts of dicts into the order of the space
            ordered = {name: tree_map(lambda _, leaf: _read_only(leaf), spec[name], trees[name]) for name in names}
            object.__setattr__(self, attribute, ordered)
        object.__setattr__(self, "ends", _read_only(self.ends))

    def __len__(self) -> int:
        return len(self.arrays["terminated"])

    def __repr__(self) -> str:
        return f"Dataset({self.name}: {len(self)} steps in {self.num_episodes} episodes of {self.env})"

    @property
    def num_episodes(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> Array:
        """The rows of the first steps of episodes, int64 [E]."""
        return np.concatenate([[0], self.ends[:-1] + 1])

    def returns(self) -> Array:
        """Return the undiscounted return of each episode, float64 [E]. With several agents it is their mean."""
        sums = np.add.reduceat(self.arrays["reward"], self.starts, axis=0, dtype=np.float64)
        return sums.reshape(self.num_episodes, -1).mean(1)

    def complete(self) -> Array:
        """Return which episodes were terminated or truncated, bool [E]. The return of the others is only partial."""
        return np.asarray(self.arrays["terminated"])[self.ends] | np.asarray(self.arrays["truncated"])[self.ends]

    def score(self, mean_return: float) -> float:
        """Return the normalized score as D4RL defines it: 0 for a random policy, 100 for an expert."""
        if set(self.references) != {"random", "expert"}:
            raise UserError(
                f"{self.name} has no score: it has the references {sorted(self.references)}, both 'random' and "
                f"'expert' are needed; set them with dataclasses.replace(dataset, references={{...}})"
            )
        random, expert = self.references["random"], self.references["expert"]
        if random == expert:
            raise UserError(f"{self.name} has no score: its references 'random' and 'expert' are both {random}")
        return 100.0 * (mean_return - random) / (expert - random)

    def episode(self, i: int) -> Batch:
        """Return one episode: arrays `[T, ...]` with successors."""
        if not 0 <= i < self.num_episodes:
            raise self._no_episode(i)
        return self._rows(int(self.ends[i - 1]) + 1 if i else 0, int(self.ends[i]) + 1)

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all steps in order, as batches `[T,1]` with successors for a `Buffer` of one environment."""
        if size < 1:
            raise UserError(f"the batch size is {size}; it must be at least 1")
        for start in range(0, len(self), size):
            yield self._rows(start, min(start + size, len(self))).map(lambda leaf: leaf[:, None])

    def select(self, episodes: Any) -> Dataset:
        """Return a copy in memory with only these episodes, in this order."""
        chosen = np.asarray(episodes)
        if chosen.ndim != 1 or len(chosen) == 0 or chosen.dtype.kind not in "iu":
            raise UserError(f"episodes to select must be a list of at least one integer, not {episodes!r}")
        invalid = chosen[(chosen < 0) | (chosen >= self.num_episodes)]
        if len(invalid):
            raise self._no_episode(int(invalid[0]))
        lengths = (self.ends - self.starts + 1)[chosen]
        ends = np.cumsum(lengths) - 1
        rows = np.arange(int(lengths.sum())) + np.repeat(self.ends[chosen] - ends, lengths)
        return Dataset(
            **vars(self.header),
            arrays={name: take_rows(tree, rows) for name, tree in self.arrays.items()},
            final_fields={name: take_rows(tree, chosen) for name, tree in self.final_fields.items()},
            ends=ends,
        )

    # --- chunks ---

    def chunks(self) -> Iterator[Chunk]:
        """Yield the dataset in chunks, for conversion to another format."""
        size = chunk_rows(self.spaces.fields())
        for start in range(0, len(self), size):
            rows = {name: take_rows(tree, slice(start, start + size)) for name, tree in self.arrays.items()}
            rows["action"] = to_env(self.spaces, rows["action"])
            first, stop = np.searchsorted(self.ends, [start, start + size])
            final_fields = {name: take_rows(tree, slice(first, stop)) for name, tree in self.final_fields.items()}
            yield Chunk(rows, self.ends[first:stop] - start, final_fields)

    @staticmethod
    def from_chunks(header: Header, chunks: Iterable[Chunk]) -> Dataset:
        """Read all chunks into memory."""
        parts = [chunk for chunk in chunks if len(chunk.rows["terminated"])]
        if not parts:
            raise UserError(f"{header.name} has no steps")
        firsts = np.cumsum([0, *(len(part.rows["terminated"]) for part in parts[:-1])])
        ends = np.concatenate([part.ends + first for part, first in zip(parts, firsts, strict=True)])

        def join(trees: list[dict[str, Tree]]) -> dict[str, Tree]:
            # pops, so at most one field is in memory twice
            return {name: tree_map(_concatenate, *(tree.pop(name) for tree in trees)) for name in list(trees[0])}

        arrays, final_fields = join([part.rows for part in parts]), join([part.final_fields for part in parts])
        arrays["action"] = from_env(header.spaces, arrays["action"])
        return Dataset(**vars(header), arrays=arrays, final_fields=final_fields, ends=ends)

    # --- rows ---

    def _rows(self, start: int, stop: int) -> Batch:
        rows = {name: take_rows(tree, slice(start, stop)) for name, tree in self.arrays.items()}
        successors = {SUCCESSORS[name]: partial(self._successors, name, start, stop) for name in self.final_fields}
        return Batch(**rows, **successors)

    def _successors(self, name: str, start: int, stop: int) -> Tree:
        """Return the successors of the rows: the next rows, and final values at the ends of episodes."""
        first, last = np.searchsorted(self.ends, [start, stop])
        at = self.ends[first:last] - start

        def shift(leaf: Array, final: Array) -> Array:
            successors = np.empty((stop - start, *leaf.shape[1:]), leaf.dtype)
            next_rows = leaf[start + 1 : stop + 1]
            successors[: len(next_rows)] = next_rows
            successors[at] = final[first:last]
            return successors

        return tree_map(shift, self.arrays[name], self.final_fields[name])

    def _no_episode(self, i: int) -> UserError:
        return UserError(f"{self.name} has the episodes 0 to {self.num_episodes - 1}, but no episode {i}")


def _concatenate(*arrays: Array) -> Array:
    return np.concatenate(arrays)


def _read_only(array: Array) -> Array:
    if array.flags.writeable:
        array = array.view()
        array.setflags(write=False)
    return array
