"""A dataset: recorded steps as arrays, in memory or mapped from files, checked when it is made."""

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
from zhixing.offline.actions import to_policy, to_task
from zhixing.offline.checks import check
from zhixing.offline.recording import Array, Chunk, Header, chunk_rows, take


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Dataset(Header):
    """Steps of whole episodes, or of pieces of them whose rest wasn't recorded: segments, one behind the other.

    `arrays` are the fields that `spaces.fields()` lists, leaves `[S, ...]`: `obs` is what was seen before the step,
    actions are in the policy's scale. `ends` `[E]` are the rows of the segments' last steps, and `lasts` what was seen
    after them (obs, mask, state, alive), leaves `[E, ...]`. A segment that ends neither terminated nor truncated is a
    piece. All arrays are only to be read.
    """

    arrays: dict[str, Tree]
    lasts: dict[str, Tree]
    ends: Array

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.name, self.spaces, self.arrays, self.lasts, self.ends)
        spec = self.spaces.fields()
        for part, given in (("arrays", self.arrays), ("lasts", self.lasts)):
            names = [name for name in spec if name in given]
            # parts of dicts in the order of the space, as everything else has them
            ordered = {name: tree_map(lambda _, leaf: _frozen(leaf), spec[name], given[name]) for name in names}
            object.__setattr__(self, part, ordered)
        object.__setattr__(self, "ends", _frozen(self.ends))

    def __len__(self) -> int:
        return len(self.arrays["terminated"])

    def __repr__(self) -> str:
        return f"Dataset({self.name}: {len(self)} steps in {self.num_episodes} episodes of {self.env})"

    @property
    def num_episodes(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> Array:
        """The rows of the segments' first steps, int64 [E]."""
        return np.concatenate([[0], self.ends[:-1] + 1])

    def returns(self) -> Array:
        """The undiscounted return of each segment, float64 [E]; of many agents their mean, as everywhere."""
        sums = np.add.reduceat(self.arrays["reward"], self.starts, axis=0, dtype=np.float64)
        return sums.reshape(self.num_episodes, -1).mean(1)

    def complete(self) -> Array:
        """Whether each segment is an episode that ended by itself or by a time limit, bool [E]. The others are pieces:
        their returns say nothing of whole episodes."""
        return np.asarray(self.arrays["terminated"])[self.ends] | np.asarray(self.arrays["truncated"])[self.ends]

    def score(self, mean_return: float) -> float:
        """As D4RL defines it: 0 is a random policy's mean return, 100 an expert's."""
        if set(self.references) != {"random", "expert"}:
            raise UserError(
                f"{self.name} has no score: it tells the references {sorted(self.references)}, both 'random' and "
                f"'expert' are needed; give them with dataclasses.replace(dataset, references={{...}})"
            )
        random, expert = self.references["random"], self.references["expert"]
        if random == expert:
            raise UserError(f"{self.name} has no score: its references 'random' and 'expert' are both {random}")
        return 100.0 * (mean_return - random) / (expert - random)

    def episode(self, i: int) -> Batch:
        """One segment: arrays `[T, ...]` with successors."""
        if not 0 <= i < self.num_episodes:
            raise self._no_episode(i)
        return self._rows(int(self.ends[i - 1]) + 1 if i else 0, int(self.ends[i]) + 1)

    def batches(self, size: int) -> Iterator[Batch]:
        """All steps in order, as batches `[T,1]` with successors that a `Buffer` of one environment takes."""
        if size < 1:
            raise UserError(f"batches of {size} steps can't be made; the size must be at least 1")
        for start in range(0, len(self), size):
            yield self._rows(start, min(start + size, len(self))).map(lambda leaf: leaf[:, None])

    def select(self, episodes: Any) -> Dataset:
        """Only these segments, in this order, copied to memory."""
        chosen = np.asarray(episodes)
        if chosen.ndim != 1 or len(chosen) == 0 or chosen.dtype.kind not in "iu":
            raise UserError(f"episodes to select must be a list of at least one number, not {episodes!r}")
        wrong = chosen[(chosen < 0) | (chosen >= self.num_episodes)]
        if len(wrong):
            raise self._no_episode(int(wrong[0]))
        lengths = (self.ends - self.starts + 1)[chosen]
        ends = np.cumsum(lengths) - 1
        rows = np.arange(int(lengths.sum())) + np.repeat(self.ends[chosen] - ends, lengths)
        return Dataset(
            **vars(self.header),
            arrays={name: take(tree, rows) for name, tree in self.arrays.items()},
            lasts={name: take(tree, chosen) for name, tree in self.lasts.items()},
            ends=ends,
        )

    # ------------------------------------------------------------------ chunks

    def chunks(self) -> Iterator[Chunk]:
        """All of it for another format, a little at a time."""
        size = chunk_rows(self.spaces.fields())
        for start in range(0, len(self), size):
            rows = {name: take(tree, slice(start, start + size)) for name, tree in self.arrays.items()}
            rows["action"] = to_task(self.spaces, rows["action"])
            first, stop = np.searchsorted(self.ends, [start, start + size])
            lasts = {name: take(tree, slice(first, stop)) for name, tree in self.lasts.items()}
            yield Chunk(rows, self.ends[first:stop] - start, lasts)

    @staticmethod
    def gather(header: Header, chunks: Iterable[Chunk]) -> Dataset:
        """All chunks, in memory."""
        parts = [chunk for chunk in chunks if len(chunk.rows["terminated"])]
        if not parts:
            raise UserError(f"{header.name} has no steps")
        firsts = np.cumsum([0, *(len(part.rows["terminated"]) for part in parts[:-1])])
        ends = np.concatenate([part.ends + first for part, first in zip(parts, firsts, strict=True)])

        def joined(trees: list[dict[str, Tree]]) -> dict[str, Tree]:
            # popped, so that only one field is ever in memory twice
            return {name: tree_map(_concatenate, *(tree.pop(name) for tree in trees)) for name in list(trees[0])}

        arrays, lasts = joined([part.rows for part in parts]), joined([part.lasts for part in parts])
        arrays["action"] = to_policy(header.spaces, arrays["action"])
        return Dataset(**vars(header), arrays=arrays, lasts=lasts, ends=ends)

    # -------------------------------------------------------------------- rows

    def _rows(self, start: int, stop: int) -> Batch:
        rows = {name: take(tree, slice(start, stop)) for name, tree in self.arrays.items()}
        return Batch(**rows, **{SUCCESSORS[name]: partial(self._successors, name, start, stop) for name in self.lasts})

    def _successors(self, name: str, start: int, stop: int) -> Tree:
        """What followed the rows: the next ones, but at the ends of segments what was seen last."""
        first, last = np.searchsorted(self.ends, [start, stop])
        at = self.ends[first:last] - start

        def follow(leaf: Array, final: Array) -> Array:
            after = np.empty((stop - start, *leaf.shape[1:]), leaf.dtype)
            following = leaf[start + 1 : stop + 1]
            after[: len(following)] = following
            after[at] = final[first:last]
            return after

        return tree_map(follow, self.arrays[name], self.lasts[name])

    def _no_episode(self, i: int) -> UserError:
        return UserError(f"{self.name} has the episodes 0 to {self.num_episodes - 1}, none with the number {i}")


def _concatenate(*arrays: Array) -> Array:
    return np.concatenate(arrays)


def _frozen(array: Array) -> Array:
    if array.flags.writeable:
        array = array.view()
        array.setflags(write=False)
    return array
