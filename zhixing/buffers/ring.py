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

from zhixing.buffers.fields import Array, ArrayStore, BatchValidator, SlotAllocator
from zhixing.core.batch import Batch
from zhixing.core.tree import Field, Tree, tree_leaves, tree_map
from zhixing.errors import UserError

Leaves = list[Array]


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
        self.reader = BatchValidator(spec)
        self.num_envs, self.frame_stack = num_envs, frame_stack
        self.rows = -(-capacity // num_envs)
        self.size = (self.rows + 1) * num_envs
        stored = {**spec, "obs": _single_frames(spec["obs"], frame_stack)} if frame_stack > 1 else dict(spec)
        followed = self.reader.followed
        self.table = ArrayStore(stored, self.size, device, folder)
        self.final_obs_pool = SlotAllocator({name: stored[name] for name in followed}, device)
        self.slot = np.full(self.size, -1, np.int32)  # where the row's true successor lies; -1: it is the next row
        self.episode_start = np.zeros(self.size, np.int64)  # the position of the first row of the row's episode
        self.count = np.zeros(num_envs, np.int64)  # rows ever added, per column
        self.base = np.zeros(num_envs, np.int64)  # rows before this one were cleared
        self.next_began = np.zeros(num_envs, np.int64)  # of the row to come: its own where an episode ended
        # the newest successors as they came: what the next row must begin with to follow, also on a device
        self.latest_next_obs: dict[str, Leaves] = {
            name: [np.zeros((num_envs, *field.shape), field.dtype) for field in tree_leaves(spec[name])]
            for name in followed
        }
        self.fixed = False  # true where rows are only read
        self._columns_aligned = True  # all columns have had as many rows: then one slice holds a step of all
        self._any_new_episode = True  # some columns begin an episode with the row to come
        # the same arrays without names, in the order of the reader's parts
        self._plain_arrays = [array for name in self.reader.plain for array in self.table.arrays[name]]
        self._followed_arrays = [array for name in followed for array in self.table.arrays[name]]
        self._heads = [head for name in followed for head in self.latest_next_obs[name]]
        self._stacks = (
            len(self.latest_next_obs["obs"]) if frame_stack > 1 else 0
        )  # so many of them are stacks of frames

    @staticmethod
    def over(
        spec: Mapping[str, Tree], arrays: Mapping[str, Tree], final_obs_pool: Mapping[str, Tree], ends: Array
    ) -> Ring:
        """A full ring of one column whose rows are arrays `[S,...]` that are only read, such as mapped files.

        After the rows `ends` the stream begins anew; `lasts` are the true successors of these rows. The last row must
        be one of them, so that no row is needed behind it.
        """
        ring, size = Ring(spec, 1, 1), int(ends[-1]) + 1
        ring.rows = ring.size = size
        ring.table = ArrayStore.over(spec, arrays)
        ring.final_obs_pool.table = ArrayStore.over({name: spec[name] for name in final_obs_pool}, final_obs_pool)
        ring.slot = np.full(size, -1, np.int32)
        ring.slot[ends] = np.arange(len(ends))
        starts = np.concatenate([[0], ends[:-1] + 1])
        ring.episode_start = np.repeat(starts, np.diff(np.append(starts, size)))
        ring.count[:] = size
        ring.fixed = True
        return ring

    def __len__(self) -> int:
        if self._columns_aligned:
            first, count = self._span
            return (count - first) * self.num_envs
        return int((self.count - self.oldest).sum())

    @property
    def oldest(self) -> Array:
        """The position of each column's oldest row."""
        return np.maximum(self.count - self.rows, self.base)

    @property
    def _span(self) -> tuple[int, int]:
        """The positions from the oldest row to behind the newest, where they are the same for all columns."""
        count = int(self.count[0])
        return max(count - self.rows, int(self.base[0])), count

    # ------------------------------------------------------------------ adding

    def add(self, batch: Batch, ids: Array | None = None) -> None:
        """Store a step `[M]` or steps `[T,M]`."""
        if self.fixed:
            raise UserError("recorded experience takes no new steps; give the buffer a capacity of its own for these")
        plain, now, after, lead = self.reader.parts(batch)
        columns = self.num_envs if ids is None else len(ids)
        if lead[-1] != columns:
            of = "num_envs" if ids is None else "len(ids)"
            raise UserError(f"field 'terminated' has shape {list(lead)}, expected {columns} columns ({of})")
        if ids is None and self._columns_aligned and (len(lead) == 1 or lead[0] == 1):
            self._add_step(plain, now, after)
            return
        if len(lead) == 1:
            plain, now, after = ([leaf[None] for leaf in leaves] for leaves in (plain, now, after))
        self._add_block(plain, now, after, ids)

    def newest(self, num_steps: int, ids: Array | None = None) -> Array:
        """The indices of the newest rows, as far as they are stored, `[T,M]`."""
        columns = np.arange(self.num_envs) if ids is None else ids
        back = np.arange(-min(num_steps, self.rows), 0)[:, None]
        return (self.count[columns] + back) * self.num_envs + columns

    def _add_step(self, plain: Leaves, now: Leaves, after: Leaves) -> None:
        """One row `[N]` or `[1,N]` for all columns, in step."""
        N, count = self.num_envs, int(self.count[0])
        start, stop = count * N % self.size, (count + 1) * N % self.size
        where, behind = slice(start, start + N), slice(stop, stop + N)
        if not self._continues(now):
            now, after = self._rows(now), self._rows(after)
            follows = self._follows(now, slice(None))
            self._begin(now, after, ~follows)
            self._break(count * N + np.flatnonzero(~follows & (self.next_began < count)))
            self.next_began[~follows] = count
            self.table.write(self._followed_arrays, where, self._stored(now, 1))
        # else the rows hold these observations already, as the successors of the rows before
        self._release(behind)
        stored = self._stored(self._rows(after), 1) if self._stacks else after
        self.table.write(self._followed_arrays, behind, stored)
        for head, value in zip(self._heads, after):  # noqa: B905 (hot, see Table.write)
            head[...] = value
        self.table.write(self._plain_arrays, where, plain)
        self.episode_start[where] = self.next_began
        self._any_new_episode = 1 in plain[0].tobytes() or 1 in plain[1].tobytes()  # a tenth of the cost of any()
        if self._any_new_episode:
            ends = np.flatnonzero(plain[0] | plain[1])
            self._keep_lasts(count * N + ends, [value[ends] for value in self._rows(after)])
            self.next_began[ends] = count + 1
        self.count.fill(count + 1)

    def _add_block(self, plain: Leaves, now: Leaves, after: Leaves, ids: Array | None) -> None:
        """Rows `[T,M]` at once: the same result as one after another, without a loop over T."""
        T, N = len(plain[0]), self.num_envs
        columns: Any = slice(None) if ids is None else ids
        in_step = ids is None and self._columns_aligned
        index: Array
        if in_step:
            first = int(self.count[0]) * N
            index = np.arange(first, first + T * N).reshape(T, N)
        else:
            numbers = np.arange(N) if ids is None else ids
            index = (self.count[columns] + np.arange(T)[:, None]) * N + numbers
        ended: Array = plain[0] | plain[1]
        cut, episode_start = ended, np.empty(index.shape, np.int64)
        episode_start[:] = self.next_began[columns]
        if not in_step or 1 in ended[:-1].tobytes() or not self._unbroken(now, after):
            follows = np.empty(ended.shape, bool)
            follows[0] = self._follows([value[0] for value in now], columns)
            follows[1:] = ~ended[:-1]
            for value, successor in zip(now, after, strict=True):
                follows[1:] &= _same(value[1:], successor[:-1], 2)
            self._begin(now, after, ~follows)
            self._break(index[0][~follows[0] & (episode_start[0] < self.count[columns])])
            episode_start = np.maximum.accumulate(np.where(follows, episode_start, index // N), axis=0)
            cut = ended.copy()
            cut[:-1] |= ~follows[1:]

        if self.rows < T:  # rows that the same batch would overwrite aren't written at all
            index, episode_start, cut = index[-self.rows :], episode_start[-self.rows :], cut[-self.rows :]
            plain, now, after = ([leaf[-self.rows :] for leaf in leaves] for leaves in (plain, now, after))
            self._release((index % self.size).reshape(-1))
        where: Any  # the rows themselves, those of their successors, and of the last successors
        behind: Any
        newest: Any
        start = int(index[0, 0]) % self.size
        stop = start + index.size
        if in_step and stop + N <= self.size:  # slices, which cost a fraction
            where, behind, newest = slice(start, stop), slice(start + N, stop + N), slice(stop, stop + N)
        else:
            where, behind = (index % self.size).reshape(-1), ((index + N) % self.size).reshape(-1)
            newest = behind[-index.shape[1] :]
        self._release(behind)
        self.table.write(self._followed_arrays, where, [_flat(value) for value in self._stored(now, 2)])
        latest_next_obs = [value[-1] for value in after]
        self.table.write(self._followed_arrays, newest, self._stored(latest_next_obs, 1))
        for head, value in zip(self._heads, latest_next_obs, strict=True):
            head[columns] = value
        self.table.write(self._plain_arrays, where, [_flat(value) for value in plain])
        self.episode_start[where] = episode_start.reshape(-1)
        self.count[columns] += T
        self.next_began[columns] = episode_start[-1]
        if 1 in cut.tobytes():
            self._keep_lasts(index[cut], [value[cut] for value in after])
            self.next_began[columns] = np.where(ended[-1], self.count[columns], episode_start[-1])
        self._refresh_flags()

    def _refresh_flags(self) -> None:
        """Look at all columns again after more than a step."""
        self._columns_aligned = len({*self.count.tolist()}) == len({*self.base.tolist()}) == 1
        self._any_new_episode = True in (self.next_began == self.count).tolist()

    def _continues(self, now: Leaves) -> bool:
        """Whether all columns surely go on from their newest successors: a quick look, before `_follows`."""
        if self._any_new_episode:
            return False
        for head, value in zip(self._heads, now):  # noqa: B905, SIM110 (hot, see Table.write)
            if head.tobytes() != value.tobytes():
                return False
        return True

    def _unbroken(self, now: Leaves, after: Leaves) -> bool:
        """Whether all columns go on from their newest successors, and each row of a block from the one before."""
        return self._continues([value[0] for value in now]) and all(
            value[1:].tobytes() == successor[:-1].tobytes() for value, successor in zip(now, after, strict=True)
        )

    def _rows(self, values: Leaves) -> Leaves:
        """What came as `[1,N]` as `[N]`."""
        return [value.reshape(head.shape) for value, head in zip(values, self._heads, strict=True)]

    def _follows(self, now: Leaves, columns: Any) -> Array:
        """For each column, whether its row follows the newest one: that one didn't end and led here."""
        follows = self.next_began[columns] < self.count[columns]
        for head, value in zip(self._heads, now, strict=True):
            follows &= _same(head[columns], value, 1)
        return follows

    def _break(self, index: Array) -> None:
        """The rows before `index` turn out to have no next row: their successors move to the pool."""
        if len(index):
            at = index % self.num_envs
            self._keep_lasts(index - self.num_envs, [head[at] for head in self._heads])

    def _begin(self, now: Leaves, after: Leaves, starts: Array) -> None:
        """Frames are stored once, so a stack must be what a stacker makes: its first frame repeated, then shifted."""
        if not self._stacks or not starts.any():
            return
        for stack, successor in list(zip(now, after, strict=True))[: self._stacks]:
            first, then = stack[starts], successor[starts]
            if not (_same(first[:, 1:], first[:, :-1], 1).all() and _same(then[:, :-1], first[:, 1:], 1).all()):
                raise UserError(
                    f"frame_stack={self.frame_stack}: an episode must begin with its first frame repeated and each "
                    f"step shift the stack by one; for other stacks use frame_stack=1"
                )

    def _stored(self, values: Leaves, lead: int) -> Leaves:
        """The part of followed leaves that is kept: the newest frame of a stack."""
        newest = (slice(None),) * lead + (-1,)
        return [value[newest] if i < self._stacks else value for i, value in enumerate(values)]

    def _keep_lasts(self, index: Array, successors: Leaves) -> None:
        if len(index):
            slots = self.slot[index % self.size] = self.final_obs_pool.allot(len(index))
            arrays = [array for leaves in self.final_obs_pool.table.arrays.values() for array in leaves]
            self.final_obs_pool.table.write(arrays, slots, self._stored(successors, 1))

    def _release(self, where: Any) -> None:
        """The rows `where` are about to be no transitions any more: their slots are free again."""
        slots = self.slot[where]
        if slots.tobytes() != b"\xff" * slots.nbytes:  # not all are -1; a tenth of the cost of any()
            self.final_obs_pool.release(slots[slots >= 0])
            self.slot[where] = -1

    # ----------------------------------------------------------------- reading

    def uniform(self, n: int, rng: np.random.Generator) -> Array:
        """The indices of `n` stored rows, each as likely as any other."""
        if self._columns_aligned:
            first, count = self._span
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
        return self.since(self.base)

    def since(self, mark: Array) -> Array:
        """The indices of the rows that were added after a mark and are stored, in the order of their positions."""
        if self._columns_aligned and len({*mark.tolist()}) == 1:
            first, count = self._span
            return np.arange(max(first, int(mark[0])) * self.num_envs, count * self.num_envs)
        oldest = np.maximum(self.oldest, mark)
        index = np.arange(int(oldest.min()) * self.num_envs, int(self.count.max()) * self.num_envs)
        position, column = np.divmod(index, self.num_envs)
        return index[(position >= oldest[column]) & (position < self.count[column])]

    def index_of(self, flat: Array) -> Array:
        """The indices of the rows that lie at `flat` now."""
        if self._columns_aligned:
            end = int(self.count[0]) * self.num_envs
            return flat + (end - end % self.size) - (flat >= end % self.size) * self.size
        row, column = np.divmod(flat, self.num_envs)
        newest = self.count[column] - 1
        return (newest - (newest - row) % (self.rows + 1)) * self.num_envs + column

    def live(self, index: Array) -> Array:
        """Which of these indices are still stored."""
        if self._columns_aligned:
            first, count = self._span
            return (index >= first * self.num_envs) & (index < count * self.num_envs)
        position, column = np.divmod(index, self.num_envs)
        return (position >= self.oldest[column]) & (position < self.count[column])

    def allowed(self, index: Array, ahead: int) -> Array:
        """Which of these rows are stored with the `ahead` rows after them and all frames of their stack."""
        position, column = np.divmod(index, self.num_envs)
        reach = np.minimum(position - self.episode_start[index % self.size], self.frame_stack - 1)
        return (position - reach >= self.oldest[column]) & (position + ahead < self.count[column])

    def cut(self, index: Array) -> Array:
        """Which of these rows aren't followed by the next row of their column."""
        return self.slot[index % self.size] >= 0

    def is_first(self, index: Array) -> Array:
        return self.episode_start[index % self.size] == index // self.num_envs

    def flat(self, index: Array) -> Array:
        """Where the rows `index` lie."""
        return index % self.size

    def take(self, name: str, flat: Array) -> Tree:
        """The rows at `flat` (one dimension) of a field, as tensors on the device."""
        return self.table.take(name, self._frames(flat) if self.frame_stack > 1 and name == "obs" else flat)

    def take_all(self, flat: Array) -> dict[str, Tree]:
        """The same of every field."""
        if self.frame_stack > 1:
            return {name: self.take(name, flat) for name in self.table.spec}
        return self.table.take_all(flat)

    def successor(self, name: str, flat: Array) -> Tree:
        """What `name` became after the rows at `flat`."""
        stacked = self.frame_stack > 1 and name == "obs"
        after = (flat + self.num_envs) % self.size
        slots = self.slot.take(flat)
        hits = (slots >= 0).nonzero()[0]
        if self.table.on_cpu and name in self.table.single and not stacked:  # the same as below: this is hot
            rows = self.table.arrays[name][0].take(after, 0)
            if len(hits):
                rows[hits] = self.final_obs_pool.table.arrays[name][0].take(slots.take(hits), 0)
            return self.table.tensor(rows)
        if stacked:
            after = np.concatenate([self._frames(flat)[:, 1:], after[:, None]], axis=1)
        leaves = self.table.leaves(name, after)
        if len(hits):
            at: Any = hits if self.table.on_cpu else self.table.tensor(hits)
            for leaf, last in zip(leaves, self.final_obs_pool.table.leaves(name, slots[hits]), strict=True):
                (leaf[:, -1] if stacked else leaf)[at] = last
        return self.table.tree(name, leaves)

    def _frames(self, flat: Array) -> Array:
        """The rows of the frames of each stack, oldest first `[B,k]`; before an episode's first, that one again."""
        age = self.index_of(flat) // self.num_envs - self.episode_start[flat]
        back = np.minimum(np.arange(self.frame_stack - 1, -1, -1), age[:, None])
        return (flat[:, None] - back * self.num_envs) % self.size

    # ------------------------------------------------------------ saving, see segments.py

    def clear(self) -> None:
        """Forget all rows; their indices stay used, so that late priorities for them are ignored."""
        self._release(slice(None))
        self.base = self.count.copy()
        self.next_began[:] = self.count
        self._refresh_flags()

    def mark(self) -> Array:
        """How much was ever added."""
        return self.count.copy()

    def keeps(self, start: Array, end: Array) -> bool:
        """Whether any row added between two marks is still stored."""
        return bool((end > np.maximum(self.oldest, start)).any())

    def contents(self, since: Array | None = None) -> dict[str, Array]:
        """All stored rows, or those added since a mark."""
        index = self.all()
        final_obs_pool = index[self.cut(index)]
        if since is not None:
            index = self.since(since)
            # the newest row of that time may have turned out since to have no next row
            position, column = np.divmod(final_obs_pool, self.num_envs)
            final_obs_pool = final_obs_pool[position >= since[column] - 1]
        flat = index % self.size
        successors = self.final_obs_pool.table.rows(self.slot[final_obs_pool % self.size].astype(np.int64))
        return {
            "index": index,
            "age": (index // self.num_envs - self.episode_start[flat]).astype(
                np.int32
            ),  # rows since the first of its episode
            "cut": final_obs_pool,
            **self.table.rows(flat),
            **{f"last.{name}": rows for name, rows in successors.items()},
        }

    def restore(self, rows: Mapping[str, Array]) -> int:
        """Put back what `contents` gave, as far as the counts say it is still stored; returns the number of rows."""
        index, cut = rows["index"], rows["cut"]
        keep = self.live(index)
        flat = index % self.size
        self.episode_start[flat[keep]] = (index // self.num_envs - rows["age"])[keep]
        self.table.set_rows(flat, rows, keep)
        final_obs_pool = {name.removeprefix("last."): leaf for name, leaf in rows.items() if name.startswith("last.")}
        keep_cut = self.live(cut)
        self._release(cut[keep_cut] % self.size)  # two saves may both have kept the row between them
        self.slot[cut[keep_cut] % self.size] = self.final_obs_pool.allot(int(keep_cut.sum()))
        self.final_obs_pool.table.set_rows(self.slot[cut % self.size], final_obs_pool, keep_cut)
        return int(keep.sum())

    def state(self) -> dict[str, Any]:
        latest_next_obs = {
            f"head.{name}.{i}": leaf for name, leaves in self.latest_next_obs.items() for i, leaf in enumerate(leaves)
        }
        next_age = (self.count - self.next_began).astype(np.int32)  # rows so far of the episodes that go on
        return {"count": self.count, "base": self.base, "next_age": next_age, **latest_next_obs}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Empty the ring and set its counts and heads; `restore` then brings the rows."""
        self._release(slice(None))
        self.count[:], self.base[:] = state["count"], state["base"]
        self.next_began[:] = self.count - state["next_age"]
        head = (self.count * self.num_envs + np.arange(self.num_envs)) % self.size
        for name, leaves in self.latest_next_obs.items():
            for i, leaf in enumerate(leaves):
                leaf[:] = state[f"head.{name}.{i}"]
        self.table.write(self._followed_arrays, head, self._stored(self._heads, 1))
        self._refresh_flags()


def _same(a: Array, b: Array, lead: int) -> Array:
    """Equality of all numbers behind the leading dimensions; a NaN equals a NaN."""
    equal = a == b
    if equal.all():  # then there is no need to look at each row, which takes much longer
        return np.ones(equal.shape[:lead], bool)
    if a.dtype.kind == "f":
        equal |= np.isnan(a) & np.isnan(b)
    return equal.reshape(*equal.shape[:lead], -1).all(-1)


def _flat(value: Array) -> Array:
    """`[T,N,...]` as `[B,...]`."""
    return value.reshape(-1, *value.shape[2:])


def _single_frames(tree: Tree, frame_stack: int) -> Tree:
    def single(field: Field) -> Field:
        if field.shape[:1] != (frame_stack,):
            raise UserError(
                f"frame_stack={frame_stack} needs stacks [{frame_stack}, ...] as observations, not {list(field.shape)}"
            )
        return Field(field.shape[1:], field.dtype)

    return tree_map(single, tree)
