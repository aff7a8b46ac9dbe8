"""Storage of streams: each environment is a column, a ring of rows; what follows a row is the next row.

A transition is known by `index = position * N + column`, where `position` counts the rows ever added to its column.
It lies in the flat row `index % ((rows + 1) * N)`, its successor in that of `index + N`. There is one row more than
transitions, for the newest `next_obs`. Where the next row doesn't follow (an episode's end, or rows that don't belong
together) the true successor lies in a side pool and `slot` tells where.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zhixing.batch import Batch
from zhixing.buffers.fields import SUCCESSORS, Array, Pool, Reader, Table
from zhixing.errors import UserError
from zhixing.tree import Field, Tree, tree_leaves, tree_map

Leaves = dict[str, list[Array]]


class Ring:
    def __init__(
        self,
        spec: Mapping[str, Tree],
        capacity: int,
        num_envs: int,
        frame_stack: int = 1,
        device: str = "cpu",
        folder: Path | None = None,
    ) -> None:
        self.reader = Reader(spec)
        self.num_envs, self.frame_stack = num_envs, frame_stack
        self.rows = -(-capacity // num_envs)
        self.size = (self.rows + 1) * num_envs
        stored = {**spec, "obs": _single_frames(spec["obs"], frame_stack)} if frame_stack > 1 else dict(spec)
        self._followed = [name for name in SUCCESSORS if name in spec]
        self._plain = [name for name in spec if name not in SUCCESSORS]
        self.table = Table(stored, self.size, device, folder)
        self.lasts = Pool({name: stored[name] for name in self._followed}, device)
        self.slot = np.full(self.size, -1, np.int32)  # where the row's true successor lies; -1: it is the next row
        self.age = np.zeros(self.size, np.int32)  # rows since the stream began: 0 at an episode's first
        self.count = np.zeros(num_envs, np.int64)  # rows ever added, per column
        self.base = np.zeros(num_envs, np.int64)  # rows before this one were cleared
        self.next_age = np.zeros(num_envs, np.int32)  # of the row to come; 0 where the last one ended its episode
        # the newest successors as they came: what the next row must begin with to follow, also on a device
        self.heads: Leaves = {
            name: [np.zeros((num_envs, *field.shape), field.dtype) for field in tree_leaves(spec[name])]
            for name in self._followed
        }
        self.fixed = False  # true where rows are only read
        self._together = True  # all columns have had as many rows: then one slice holds a step of all

    @staticmethod
    def over(spec: Mapping[str, Tree], arrays: Mapping[str, Tree], lasts: Mapping[str, Tree], ends: Array) -> Ring:
        """A full ring of one column whose rows are arrays `[S,...]` that are only read, such as mapped files.

        After the rows `ends` the stream begins anew; `lasts` are the true successors of these rows. The last row must
        be one of them, so that no row is needed behind it.
        """
        ring, size = Ring(spec, 1, 1), int(ends[-1]) + 1
        ring.rows = ring.size = size
        ring.table = Table.over(spec, arrays)
        ring.lasts.table = Table.over({name: spec[name] for name in lasts}, lasts)
        ring.slot = np.full(size, -1, np.int32)
        ring.slot[ends] = np.arange(len(ends))
        starts = np.concatenate([[0], ends[:-1] + 1])
        ring.age = (np.arange(size) - np.repeat(starts, np.diff(np.append(starts, size)))).astype(np.int32)
        ring.count[:] = size
        ring.fixed = True
        return ring

    def __len__(self) -> int:
        if self._together:
            return min(int(self.count[0] - self.base[0]), self.rows) * self.num_envs
        return int((self.count - self.oldest).sum())

    @property
    def oldest(self) -> Array:
        """The position of each column's oldest row."""
        return np.maximum(self.count - self.rows, self.base)

    # ------------------------------------------------------------------ adding

    def add(self, batch: Batch, ids: Array | None = None) -> Array:
        """Store a step `[M]` or steps `[T,M]`; returns the indices of those that remain, `[T,M]`."""
        if self.fixed:
            raise UserError("recorded experience takes no new steps; give the buffer a capacity of its own for these")
        values, lead = self.reader.read(batch)
        columns = self.num_envs if ids is None else len(ids)
        if lead[-1] != columns:
            of = "num_envs" if ids is None else "len(ids)"
            raise UserError(f"field 'terminated' has shape {list(lead)}, expected {columns} columns ({of})")
        if len(lead) == 2 and lead[0] > 1:
            return self._add_block(values, np.arange(columns) if ids is None else ids)
        if len(lead) == 2:
            values = {name: [leaf[0] for leaf in leaves] for name, leaves in values.items()}
        return self._add_step(values, np.arange(columns) if ids is None and not self._together else ids)

    def _add_step(self, values: Leaves, columns: Array | None) -> Array:
        """One row for each of `columns`; None for all of them, in step."""
        where: Any
        after: Any
        heads: Any
        if columns is None:
            first = int(self.count[0]) * self.num_envs
            index = np.arange(first, first + self.num_envs)
            start, stop = first % self.size, (first + self.num_envs) % self.size
            where, after = slice(start, start + self.num_envs), slice(stop, stop + self.num_envs)
            heads = slice(None)
        else:
            index = self.count[columns] * self.num_envs + columns
            where, after, heads = index % self.size, (index + self.num_envs) % self.size, columns

        if not self._continues(values, heads):
            follows = self._follows(values, heads)
            self._begin(values, ~follows)
            self._break(index, np.flatnonzero(~follows & (self.next_age[heads] > 0)))
            self.next_age[heads] *= follows
            for name in self._followed:
                self.table.put(name, where, self._stored(name, values[name], 1))
        # else the rows hold these observations already, as the successors of the rows before
        self._release(after)
        for name in self._followed:
            successors = values[SUCCESSORS[name]]
            self.table.put(name, after, self._stored(name, successors, 1))
            for head, value in zip(self.heads[name], successors):  # noqa: B905 (hot, see Table.put)
                head[heads] = value
        for name in self._plain:
            self.table.put(name, where, values[name])

        ages = self.next_age[heads]
        self.age[where] = ages
        self.next_age[heads] = ages + 1
        terminated, truncated = values["terminated"][0], values["truncated"][0]
        if b"\1" in terminated.tobytes() or b"\1" in truncated.tobytes():  # a third of the cost of any()
            ends = np.flatnonzero(terminated | truncated)
            self._keep_lasts(
                index[ends], {name: [v[ends] for v in values[SUCCESSORS[name]]] for name in self._followed}
            )
            self.next_age[ends if columns is None else columns[ends]] = 0
        self.count[heads] += 1
        if columns is not None:
            self._together = self._in_step()
        return index[None]

    def _add_block(self, values: Leaves, columns: Array) -> Array:
        """Rows `[T,M]` at once: the same result as one after another, without a loop over T."""
        T, N = len(values["terminated"][0]), self.num_envs
        ended = values["terminated"][0] | values["truncated"][0]
        follows = np.empty(ended.shape, bool)
        follows[0] = self._follows({name: [v[0] for v in values[name]] for name in self._followed}, columns)
        follows[1:] = ~ended[:-1]
        for name in self._followed:
            for value, successor in zip(values[name], values[SUCCESSORS[name]], strict=True):
                follows[1:] &= _same(value[1:], successor[:-1], 2)
        self._begin(values, ~follows)
        time = np.arange(T)[:, None]
        began = np.maximum.accumulate(np.where(follows, -1, time), axis=0)
        ages = np.where(began >= 0, time - began, self.next_age[columns] + time)
        cut = ended.copy()
        cut[:-1] |= ~follows[1:]

        index = (self.count[columns] + time) * N + columns
        self._break(index[0], np.flatnonzero(~follows[0] & (self.next_age[columns] > 0)))
        keep = slice(max(0, T - self.rows), None)  # rows that the same batch would overwrite aren't written at all
        index, ages, cut = index[keep], ages[keep], cut[keep]
        where = index % self.size
        self._release((index + N) % self.size)
        if self.rows < T:
            self._release(where)
        for name in self._followed:
            successors = values[SUCCESSORS[name]]
            self.table.put(name, where, self._stored(name, [v[keep] for v in values[name]], 2))
            self.table.put(name, (index[-1] + N) % self.size, self._stored(name, [v[-1] for v in successors], 1))
            for head, value in zip(self.heads[name], successors, strict=True):
                head[columns] = value[-1]
        for name in self._plain:
            self.table.put(name, where, [v[keep] for v in values[name]])
        self.age[where] = ages
        self._keep_lasts(
            index[cut], {name: [v[keep][cut] for v in values[SUCCESSORS[name]]] for name in self._followed}
        )
        self.next_age[columns] = np.where(ended[-1], 0, ages[-1] + 1)
        self.count[columns] += T
        self._together = self._in_step()
        return index

    def _in_step(self) -> bool:
        return bool((self.count == self.count[0]).all() and (self.base == self.base[0]).all())

    def _continues(self, values: Leaves, heads: Any) -> bool:
        """Whether all columns surely go on from their newest successors: a quick look, before `_follows`."""
        if 0 in self.next_age[heads].tolist():
            return False
        for name in self._followed:
            for head, value in zip(self.heads[name], values[name], strict=True):
                if head[heads].tobytes() != value.tobytes():
                    return False
        return True

    def _follows(self, values: Leaves, heads: Any) -> Array:
        """For each column, whether its row follows the newest one: that one didn't end and led here."""
        follows = self.next_age[heads] > 0
        for name in self._followed:
            for head, value in zip(self.heads[name], values[name], strict=True):
                follows &= _same(head[heads], value, 1)
        return follows

    def _break(self, index: Array, columns: Array) -> None:
        """The rows before `index[columns]` turn out to have no next row: their successors move to the pool."""
        if len(columns):
            broken = index[columns] - self.num_envs
            at = broken % self.num_envs
            self._keep_lasts(broken, {name: [head[at] for head in self.heads[name]] for name in self._followed})

    def _begin(self, values: Leaves, starts: Array) -> None:
        """Frames are stored once, so a stack must be what a stacker makes: its first frame repeated, then shifted."""
        if self.frame_stack == 1 or not starts.any():
            return
        for stack, successor in zip(values["obs"], values["next_obs"], strict=True):
            first, then = stack[starts], successor[starts]
            if not (_same(first[:, 1:], first[:, :-1], 1).all() and _same(then[:, :-1], first[:, 1:], 1).all()):
                raise UserError(
                    f"frame_stack={self.frame_stack}: an episode must begin with its first frame repeated and each "
                    f"step shift the stack by one; for other stacks use frame_stack=1"
                )

    def _stored(self, name: str, values: list[Array], lead: int) -> list[Array]:
        """The part of incoming arrays that is kept: the newest frame of a stack."""
        if self.frame_stack == 1 or name != "obs":
            return values
        return [value[(slice(None),) * lead + (-1,)] for value in values]

    def _keep_lasts(self, index: Array, successors: Leaves) -> None:
        if len(index):
            slots = self.slot[index % self.size] = self.lasts.allot(len(index))
            for name, values in successors.items():
                self.lasts.table.put(name, slots, self._stored(name, values, 1))

    def _release(self, where: Any) -> None:
        """The rows `where` are about to be no transitions any more: their slots are free again."""
        slots = self.slot[where]
        if slots.tobytes().strip(b"\xff"):  # not all are -1; a tenth of the cost of any()
            self.lasts.release(slots[slots >= 0])
            self.slot[where] = -1

    # ----------------------------------------------------------------- reading

    def uniform(self, n: int, rng: np.random.Generator) -> Array:
        """The indices of `n` stored rows, each as likely as any other."""
        if self._together:
            count = int(self.count[0])
            first = max(count - self.rows, int(self.base[0]))
            drawn = (rng.random(n) * ((count - first) * self.num_envs)).astype(np.int64)
            return drawn + first * self.num_envs
        oldest = self.oldest
        sizes = self.count - oldest
        drawn = (rng.random(n) * int(sizes.sum())).astype(np.int64)
        edges = np.cumsum(sizes)
        column = np.searchsorted(edges, drawn, side="right")
        return (oldest[column] + drawn - (edges - sizes)[column]) * self.num_envs + column

    def all(self) -> Array:
        """The indices of all stored rows, in the order of their positions."""
        oldest = self.oldest
        index = np.arange(int(oldest.min()) * self.num_envs, int(self.count.max()) * self.num_envs)
        return index if self._together else index[self.live(index)]

    def index_of(self, flat: Array) -> Array:
        """The indices of the rows that lie at `flat` now."""
        row, column = np.divmod(flat, self.num_envs)
        newest = self.count[column] - 1
        return (newest - (newest - row) % (self.rows + 1)) * self.num_envs + column

    def live(self, index: Array) -> Array:
        """Which of these indices are still stored."""
        position, column = np.divmod(index, self.num_envs)
        return (position >= self.oldest[column]) & (position < self.count[column])

    def allowed(self, index: Array, ahead: int) -> Array:
        """Which of these rows are stored with the `ahead` rows after them and all frames of their stack."""
        position, column = np.divmod(index, self.num_envs)
        reach = np.minimum(self.age[index % self.size], self.frame_stack - 1)
        return (position - reach >= self.oldest[column]) & (position + ahead < self.count[column])

    def cut(self, index: Array) -> Array:
        """Which of these rows aren't followed by the next row of their column."""
        return self.slot[index % self.size] >= 0

    def is_first(self, index: Array) -> Array:
        return self.age[index % self.size] == 0

    def flat(self, index: Array) -> Array:
        """Where the rows `index` lie."""
        return index % self.size

    def take(self, name: str, flat: Array) -> Tree:
        """The rows at `flat` (one dimension) of a field, as tensors on the device."""
        return self.table.take(name, self._frames(flat) if self.frame_stack > 1 and name == "obs" else flat)

    def successor(self, name: str, flat: Array) -> Tree:
        """What `name` became after the rows at `flat`."""
        stacked = self.frame_stack > 1 and name == "obs"
        after = (flat + self.num_envs) % self.size
        if stacked:
            after = np.concatenate([self._frames(flat)[:, 1:], after[:, None]], axis=1)
        leaves = self.table.leaves(name, after)
        slots = self.slot.take(flat)
        hits = (slots >= 0).nonzero()[0]
        if len(hits):
            at: Any = hits if self.table.on_cpu else self.table.tensor(hits)
            for leaf, last in zip(leaves, self.lasts.table.leaves(name, slots[hits]), strict=True):
                (leaf[:, -1] if stacked else leaf)[at] = last
        return self.table.tree(name, leaves)

    def _frames(self, flat: Array) -> Array:
        """The rows of the frames of each stack, oldest first `[B,k]`; before an episode's first, that one again."""
        back = np.minimum(np.arange(self.frame_stack - 1, -1, -1), self.age[flat][:, None])
        return (flat[:, None] - back * self.num_envs) % self.size

    # ------------------------------------------------------------ saving, see segments.py

    def clear(self) -> None:
        """Forget all rows; their indices stay used, so that late priorities for them are ignored."""
        self._release(slice(None))
        self.base = self.count.copy()
        self.next_age[:] = 0
        self._together = self._in_step()

    def mark(self) -> Array:
        """How much was ever added."""
        return self.count.copy()

    def keeps(self, start: Array, end: Array) -> bool:
        """Whether any row added between two marks is still stored."""
        return bool((end > np.maximum(self.oldest, start)).any())

    def contents(self, since: Array | None = None) -> dict[str, Array]:
        """All stored rows, or those added since a mark."""
        index = self.all()
        lasts = index[self.cut(index)]
        if since is not None:
            position, column = np.divmod(index, self.num_envs)
            index = index[position >= since[column]]
            # the newest row of that time may have turned out since to have no next row
            position, column = np.divmod(lasts, self.num_envs)
            lasts = lasts[position >= since[column] - 1]
        flat = index % self.size
        successors = self.lasts.table.rows(self.slot[lasts % self.size].astype(np.int64))
        return {
            "index": index,
            "age": self.age[flat],
            "cut": lasts,
            **self.table.rows(flat),
            **{f"last.{name}": rows for name, rows in successors.items()},
        }

    def restore(self, rows: Mapping[str, Array]) -> int:
        """Put back what `contents` gave, as far as the counts say it is still stored; returns the number of rows."""
        index, cut = rows["index"], rows["cut"]
        keep = self.live(index)
        flat = index % self.size
        self.age[flat[keep]] = rows["age"][keep]
        self.table.set_rows(flat, rows, keep)
        lasts = {name.removeprefix("last."): leaf for name, leaf in rows.items() if name.startswith("last.")}
        keep_cut = self.live(cut)
        self._release(cut[keep_cut] % self.size)  # two saves may both have kept the row between them
        self.slot[cut[keep_cut] % self.size] = self.lasts.allot(int(keep_cut.sum()))
        self.lasts.table.set_rows(self.slot[cut % self.size], lasts, keep_cut)
        return int(keep.sum())

    def state(self) -> dict[str, Any]:
        heads = {f"head.{name}.{i}": leaf for name, leaves in self.heads.items() for i, leaf in enumerate(leaves)}
        return {"count": self.count, "base": self.base, "next_age": self.next_age, **heads}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Empty the ring and set its counts and heads; `restore` then brings the rows."""
        self._release(slice(None))
        self.count[:], self.base[:], self.next_age[:] = state["count"], state["base"], state["next_age"]
        head = (self.count * self.num_envs + np.arange(self.num_envs)) % self.size
        for name, leaves in self.heads.items():
            for i, leaf in enumerate(leaves):
                leaf[:] = state[f"head.{name}.{i}"]
            self.table.put(name, head, self._stored(name, leaves, 1))
        self._together = self._in_step()


def _same(a: Array, b: Array, lead: int) -> Array:
    """Equality of all numbers behind the leading dimensions; a NaN equals a NaN."""
    equal = a == b
    if a.dtype.kind == "f":
        equal |= np.isnan(a) & np.isnan(b)
    return equal.reshape(*equal.shape[:lead], -1).all(-1)


def _single_frames(tree: Tree, frame_stack: int) -> Tree:
    def single(field: Field) -> Field:
        if field.shape[:1] != (frame_stack,):
            raise UserError(
                f"frame_stack={frame_stack} needs stacks [{frame_stack}, ...] as observations, not {list(field.shape)}"
            )
        return Field(field.shape[1:], field.dtype)

    return tree_map(single, tree)
