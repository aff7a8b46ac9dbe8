"""Ring storage of experience: each environment is a column, and the successor of a row is the column's next row.

The i-th row ever added to a column has the position i and the index `i * N + column`. Indices are never reused. The row
lies at `index % ((capacity_per_env + 1) * N)` in the arrays, its successor at the row of `index + N`. Each column has
one row more than transitions, for the newest `next_obs`. If the next row isn't the successor (after the end of
an episode, or where the stream was interrupted), the true successor lies in a pool, and `slot` is its position there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zhixing.buffers.fields import Array, ArrayStore, BatchValidator, SlotAllocator
from zhixing.buffers.frames import FrameLeaves
from zhixing.core.batch import Batch
from zhixing.core.tree import Tree, tree_leaves
from zhixing.errors import UserError

Leaves = list[Array]


class Ring:
    """Hold the newest transitions of `num_envs` environments; see the top of this module for the layout."""

    def __init__(
        self,
        spec: Mapping[str, Tree],
        capacity: int,
        num_envs: int,
        frame_stack: int = 1,
        device: str = "cpu",
        folder: Path | None = None,
    ) -> None:
        self.validator = BatchValidator(spec)
        self.num_envs, self.frame_stack = num_envs, frame_stack
        self.capacity_per_env = -(-capacity // num_envs)
        self.size = (self.capacity_per_env + 1) * num_envs
        self._frames: FrameLeaves | None = None
        if frame_stack > 1:
            self._frames = FrameLeaves(spec["obs"], frame_stack, agent_dims=len(spec["reward"].shape))
        stored = dict(spec) if self._frames is None else {**spec, "obs": self._frames.spec}
        obs_fields = self.validator.obs_fields
        self.store = ArrayStore(stored, self.size, device, folder)
        self.final_obs_pool = SlotAllocator({name: stored[name] for name in obs_fields}, device)
        self.slot = np.full(self.size, -1, np.int32)  # of the row's successor in the pool; -1: it is the next row
        self.episode_start = np.zeros(self.size, np.int64)  # position of the first row of the row's episode
        self.count = np.zeros(num_envs, np.int64)  # rows ever added, per column
        self.cleared_before = np.zeros(num_envs, np.int64)  # rows before this position were cleared
        self.next_episode_start = np.zeros(num_envs, np.int64)  # `episode_start` of the next row to add
        # The newest successors as they were added, in memory and with whole frame stacks. A row continues its column
        # if its observation equals them.
        self.latest_next_obs: dict[str, Leaves] = {
            name: [np.zeros((num_envs, *field.shape), field.dtype) for field in tree_leaves(spec[name])]
            for name in obs_fields
        }
        self.read_only = False
        self._columns_aligned = True  # all columns have equal counts, so a slice of rows is a step of all
        self._any_new_episode = True  # the next row of at least one column begins an episode
        # the arrays without names, in the order of the validator's leaves
        self._step_arrays = [array for name in self.validator.step_fields for array in self.store.arrays[name]]
        self._obs_arrays = [array for name in obs_fields for array in self.store.arrays[name]]
        self._latest_leaves = [leaf for name in obs_fields for leaf in self.latest_next_obs[name]]

    @staticmethod
    def from_arrays(
        spec: Mapping[str, Tree], arrays: Mapping[str, Tree], final_fields: Mapping[str, Tree], ends: Array
    ) -> Ring:
        """Wrap arrays `[S,...]`, such as memory-mapped files, as a full, read-only ring of one column.

        The stream is interrupted after the rows `ends`, whose true successors are `final_fields`. The last row must be
        one of them.
        """
        ring, size = Ring(spec, 1, 1), int(ends[-1]) + 1
        ring.capacity_per_env = ring.size = size  # without an extra row: the last row's successor is in the pool
        ring.store = ArrayStore.from_arrays(spec, arrays)
        ring.final_obs_pool.store = ArrayStore.from_arrays({name: spec[name] for name in final_fields}, final_fields)
        ring.slot = np.full(size, -1, np.int32)
        ring.slot[ends] = np.arange(len(ends))
        starts = np.concatenate([[0], ends[:-1] + 1])
        ring.episode_start = np.repeat(starts, np.diff(np.append(starts, size)))
        ring.count[:] = size
        ring.read_only = True
        return ring

    def __len__(self) -> int:
        if self._columns_aligned:
            first, count = self._span
            return (count - first) * self.num_envs
        return int((self.count - self.oldest).sum())

    @property
    def oldest(self) -> Array:
        """The position of each column's oldest row."""
        return np.maximum(self.count - self.capacity_per_env, self.cleared_before)

    @property
    def _span(self) -> tuple[int, int]:
        """The position of the oldest row and of the next row to add, for aligned columns."""
        count = int(self.count[0])
        return max(count - self.capacity_per_env, int(self.cleared_before[0])), count

    # --- adding ---

    def add(self, batch: Batch, env_ids: Array | None = None) -> None:
        """Store a step `[M]` or steps `[T,M]` of all environments or of `env_ids`."""
        if self.read_only:
            raise UserError("this buffer reads recorded experience and takes no new steps; make one with a capacity")
        step, obs, next_obs, leading = self.validator.split(batch)
        num_columns = self.num_envs if env_ids is None else len(env_ids)
        if leading[-1] != num_columns:
            source = "num_envs" if env_ids is None else "len(env_ids)"
            raise UserError(
                f"field 'terminated' has shape {list(leading)}, expected {source}={num_columns} as last dimension"
            )
        if env_ids is None and self._columns_aligned and (len(leading) == 1 or leading[0] == 1):
            self._add_step(step, obs, next_obs)
            return
        if len(leading) == 1:
            step, obs, next_obs = ([leaf[None] for leaf in leaves] for leaves in (step, obs, next_obs))
        self._add_block(step, obs, next_obs, env_ids)

    def _add_step(self, step: Leaves, obs: Leaves, next_obs: Leaves) -> None:
        """Store one step `[N]` or `[1,N]` of all columns, which must be aligned."""
        N, count = self.num_envs, int(self.count[0])
        start, next_start = count * N % self.size, (count + 1) * N % self.size
        rows, next_rows = slice(start, start + N), slice(next_start, next_start + N)
        if not self._all_continue(obs):
            obs, next_obs = self._without_time(obs), self._without_time(next_obs)
            continues = self._continues(obs, slice(None))
            starts = np.flatnonzero(~continues)
            missing = self._missing_frames(obs, next_obs, starts, count * N + starts)
            self._end_streams(count * N + np.flatnonzero(~continues & (self.next_episode_start < count)))
            self.next_episode_start[starts] = count - missing
            self.store.write(self._obs_arrays, rows, self._newest_frames(obs, 1))
        # else the rows already hold these observations, as successors of the previous rows
        self._release_slots(next_rows)
        stored = next_obs if self._frames is None else self._newest_frames(self._without_time(next_obs), 1)
        self.store.write(self._obs_arrays, next_rows, stored)
        for latest, value in zip(self._latest_leaves, next_obs):  # noqa: B905 (hot, see ArrayStore.write)
            latest[...] = value
        self.store.write(self._step_arrays, rows, step)
        self.episode_start[rows] = self.next_episode_start
        self._any_new_episode = 1 in step[0].tobytes() or 1 in step[1].tobytes()  # a tenth of the cost of any()
        if self._any_new_episode:
            ends = np.flatnonzero(step[0] | step[1])
            self._store_successors(count * N + ends, [value[ends] for value in self._without_time(next_obs)])
            self.next_episode_start[ends] = count + 1
        self.count.fill(count + 1)

    def _add_block(self, step: Leaves, obs: Leaves, next_obs: Leaves, env_ids: Array | None) -> None:
        """Store steps `[T,M]` at once. The result equals that of single steps, without a loop over T."""
        columns: Any = slice(None) if env_ids is None else env_ids
        aligned = env_ids is None and self._columns_aligned
        ended: Array = step[0] | step[1]
        T = len(ended)
        index = self._next_index(T, env_ids, aligned)
        episode_start, boundary = self._find_episodes(index, ended, obs, next_obs, columns, aligned)
        if self.capacity_per_env < T:  # skip rows that the same block would overwrite
            index, episode_start, boundary = (a[-self.capacity_per_env :] for a in (index, episode_start, boundary))
            step, obs, next_obs = ([a[-self.capacity_per_env :] for a in leaves] for leaves in (step, obs, next_obs))
            self._release_slots((index % self.size).reshape(-1))
        rows, next_rows, newest_rows = self._block_rows(index, aligned)
        self._release_slots(next_rows)
        latest_next_obs = [value[-1] for value in next_obs]
        self.store.write(self._obs_arrays, rows, [_flatten(value) for value in self._newest_frames(obs, 2)])
        self.store.write(self._obs_arrays, newest_rows, self._newest_frames(latest_next_obs, 1))
        for latest, value in zip(self._latest_leaves, latest_next_obs, strict=True):
            latest[columns] = value
        self.store.write(self._step_arrays, rows, [_flatten(value) for value in step])
        self.episode_start[rows] = episode_start.reshape(-1)
        self.count[columns] += T
        self.next_episode_start[columns] = episode_start[-1]
        if 1 in boundary.tobytes():
            self._store_successors(index[boundary], [value[boundary] for value in next_obs])
            self.next_episode_start[columns] = np.where(ended[-1], self.count[columns], episode_start[-1])
        self._refresh_flags()

    def _next_index(self, num_steps: int, env_ids: Array | None, aligned: bool) -> Array:
        """Return the indices of the next steps `[T,M]`."""
        N = self.num_envs
        if aligned:
            first = int(self.count[0]) * N
            return np.arange(first, first + num_steps * N).reshape(num_steps, N)
        columns = np.arange(N) if env_ids is None else env_ids
        index: Array = (self.count[columns] + np.arange(num_steps)[:, None]) * N + columns
        return index

    def _find_episodes(
        self, index: Array, ended: Array, obs: Leaves, next_obs: Leaves, columns: Any, aligned: bool
    ) -> tuple[Array, Array]:
        """Return `episode_start` of the rows of a block, and which of them the next row doesn't continue."""
        episode_start = np.empty(index.shape, np.int64)
        episode_start[:] = self.next_episode_start[columns]
        if aligned and 1 not in ended[:-1].tobytes() and self._block_continues(obs, next_obs):
            return episode_start, ended
        continues = np.empty(ended.shape, bool)
        continues[0] = self._continues([value[0] for value in obs], columns)
        continues[1:] = ~ended[:-1]
        for value, successor in zip(obs, next_obs, strict=True):
            continues[1:] &= _equal(value[1:], successor[:-1], 2)
        starts = ~continues
        missing = self._missing_frames(obs, next_obs, starts, index[starts])
        self._end_streams(index[0][starts[0] & (episode_start[0] < self.count[columns])])
        episode_start[1:] = np.iinfo(np.int64).min  # of the rows that continue, until the maximum of those before
        episode_start[starts] = index[starts] // self.num_envs - missing
        episode_start = np.maximum.accumulate(episode_start, axis=0)
        boundary = ended.copy()
        boundary[:-1] |= ~continues[1:]
        return episode_start, boundary

    def _block_rows(self, index: Array, aligned: bool) -> tuple[Any, Any, Any]:
        """Return the rows of a block, the rows of its successors, and those of the last step's successors."""
        N, start = self.num_envs, int(index[0, 0]) % self.size
        stop = start + index.size
        if aligned and stop + N <= self.size:  # slices cost a fraction of index arrays
            return slice(start, stop), slice(start + N, stop + N), slice(stop, stop + N)
        rows, next_rows = (index % self.size).reshape(-1), ((index + N) % self.size).reshape(-1)
        return rows, next_rows, next_rows[-index.shape[1] :]

    def _refresh_flags(self) -> None:
        """Recompute the cached facts about all columns."""
        self._columns_aligned = len({*self.count.tolist()}) == len({*self.cleared_before.tolist()}) == 1
        self._any_new_episode = True in (self.next_episode_start == self.count).tolist()

    def _all_continue(self, obs: Leaves) -> bool:
        """Return True only if all columns continue: a fast test before the exact `_continues`."""
        if self._any_new_episode:
            return False
        for latest, value in zip(self._latest_leaves, obs):  # noqa: B905, SIM110 (hot, see ArrayStore.write)
            if latest.tobytes() != value.tobytes():
                return False
        return True

    def _block_continues(self, obs: Leaves, next_obs: Leaves) -> bool:
        """Return True only if all columns continue, and each step of the block continues the previous one."""
        return self._all_continue([value[0] for value in obs]) and all(
            value[1:].tobytes() == successor[:-1].tobytes() for value, successor in zip(obs, next_obs, strict=True)
        )

    def _continues(self, obs: Leaves, columns: Any) -> Array:
        """Return, per column, whether its newest row didn't end an episode and has this observation as successor."""
        continues = self.next_episode_start[columns] < self.count[columns]
        for latest, value in zip(self._latest_leaves, obs, strict=True):
            continues &= _equal(latest[columns], value, 1)
        return continues

    def _without_time(self, values: Leaves) -> Leaves:
        """Reshape leaves of one step from `[1,N,...]` to `[N,...]`."""
        return [value.reshape(latest.shape) for value, latest in zip(values, self._latest_leaves, strict=True)]

    def _end_streams(self, index: Array) -> None:
        """Move the successors of the rows before `index` to the pool, because the rows at `index` differ from them."""
        if len(index):
            columns = index % self.num_envs
            self._store_successors(index - self.num_envs, [latest[columns] for latest in self._latest_leaves])

    def _missing_frames(self, obs: Leaves, next_obs: Leaves, starts: Array, index: Array) -> Array | int:
        """Return how many earlier frames are not stored, per stream that starts at `starts` with the row `index`.

        None is missing if it starts with an episode, whose first stack repeats a frame. If it starts in the middle of a
        recorded episode, it must be the first of its column.
        """
        if self._frames is None or len(index) == 0:
            return 0
        num = len(self._frames)
        first, second = ([value[starts] for value in leaves[:num]] for leaves in (obs, next_obs))
        repeated = self._frames.repeat_first(first, second)
        position, column = np.divmod(index, self.num_envs)
        if not (repeated | (position == self.cleared_before[column])).all():
            raise UserError(
                f"frame_stack={self.frame_stack} needs episodes that begin with their first frame repeated; use "
                f"frame_stack=1 for other stacks"
            )
        missing: Array = np.where(repeated, 0, self.frame_stack - 1)
        return missing

    def _newest_frames(self, values: Leaves, num_leading: int) -> Leaves:
        """Return the stored part of observation leaves, which is the newest frame of frame stacks."""
        if self._frames is None:
            return values
        num = len(self._frames)
        return [*self._frames.newest(values[:num], num_leading), *values[num:]]

    def _store_successors(self, index: Array, successors: Leaves) -> None:
        """Store the successors of the rows `index` in the pool."""
        if len(index):
            slots = self.slot[index % self.size] = self.final_obs_pool.allocate(len(index))
            arrays = [array for leaves in self.final_obs_pool.store.arrays.values() for array in leaves]
            self.final_obs_pool.store.write(arrays, slots, self._newest_frames(successors, 1))

    def _release_slots(self, rows: Any) -> None:
        """Release the pool slots of rows that are about to be overwritten."""
        slots = self.slot[rows]
        if slots.tobytes() != b"\xff" * slots.nbytes:  # not all are -1; a tenth of the cost of any()
            self.final_obs_pool.release(slots[slots >= 0])
            self.slot[rows] = -1

    # --- reading ---

    def sample_uniform(self, n: int, rng: np.random.Generator) -> Array:
        """Return the indices of `n` stored rows, drawn uniformly with replacement."""
        if self._columns_aligned:
            first, count = self._span
            draws = (rng.random(n) * ((count - first) * self.num_envs)).astype(np.int64)
            return draws + first * self.num_envs
        oldest = self.oldest
        sizes = self.count - oldest
        draws = (rng.random(n) * int(sizes.sum())).astype(np.int64)
        edges = np.cumsum(sizes)
        column = np.searchsorted(edges, draws, side="right")
        return (oldest[column] + draws - (edges - sizes)[column]) * self.num_envs + column

    def indices(self) -> Array:
        """Return the indices of all stored rows in increasing order."""
        return self.indices_since(self.cleared_before)

    def indices_since(self, count: Array) -> Array:
        """Return the indices of the stored rows added since `self.count` was `count`, in increasing order."""
        if self._columns_aligned and len({*count.tolist()}) == 1:
            first, stop = self._span
            return np.arange(max(first, int(count[0])) * self.num_envs, stop * self.num_envs)
        oldest = np.maximum(self.oldest, count)
        index = np.arange(int(oldest.min()) * self.num_envs, int(self.count.max()) * self.num_envs)
        position, column = np.divmod(index, self.num_envs)
        return index[(position >= oldest[column]) & (position < self.count[column])]

    def newest_indices(self, num_steps: int, env_ids: Array | None = None) -> Array:
        """Return the indices of the newest steps `[T,M]`, T at most the capacity."""
        columns = np.arange(self.num_envs) if env_ids is None else env_ids
        back = np.arange(-min(num_steps, self.capacity_per_env), 0)[:, None]
        return (self.count[columns] + back) * self.num_envs + columns

    def to_row(self, index: Array) -> Array:
        """Return where the rows `index` lie in the arrays."""
        return index % self.size

    def to_index(self, row: Array) -> Array:
        """Return the indices of the transitions that lie at these rows of the arrays."""
        if self._columns_aligned:
            end = int(self.count[0]) * self.num_envs
            return row + (end - end % self.size) - (row >= end % self.size) * self.size
        column_row, column = np.divmod(row, self.num_envs)
        newest = self.count[column] - 1
        return (newest - (newest - column_row) % (self.capacity_per_env + 1)) * self.num_envs + column

    def is_stored(self, index: Array) -> Array:
        """Return which of these rows are still stored."""
        if self._columns_aligned:
            first, count = self._span
            return (index >= first * self.num_envs) & (index < count * self.num_envs)
        position, column = np.divmod(index, self.num_envs)
        return (position >= self.oldest[column]) & (position < self.count[column])

    def is_complete(self, index: Array, lookahead: int) -> Array:
        """Return which of these rows are stored with the next `lookahead` rows and all frames of their stack."""
        position, column = np.divmod(index, self.num_envs)
        frames_back = np.minimum(position - self.episode_start[index % self.size], self.frame_stack - 1)
        return (position - frames_back >= self.oldest[column]) & (position + lookahead < self.count[column])

    def is_boundary(self, index: Array) -> Array:
        """Return which of these rows end an episode, or aren't continued by the next row of their column."""
        return self.slot[index % self.size] >= 0

    def is_first(self, index: Array) -> Array:
        """Return which of these rows begin an episode."""
        return self.episode_start[index % self.size] == index // self.num_envs

    def take(self, name: str, rows: Array) -> Tree:
        """Return a field at rows `[B]` of the arrays, as tensors on the device."""
        if self._frames is not None and name == "obs":
            frames = self.store.take_leaves(name, self._stack_rows(rows))
            return self.store.to_tree(name, self._frames.join(frames))
        return self.store.take(name, rows)

    def take_all(self, rows: Array) -> dict[str, Tree]:
        """Return every field at rows `[B]` of the arrays, as tensors on the device."""
        if self._frames is not None:
            return {name: self.take(name, rows) for name in self.store.spec}
        return self.store.take_all(rows)

    def take_successors(self, name: str, rows: Array) -> Tree:
        """Return the values of the field `name` after the steps at rows `[B]` of the arrays."""
        frames = self._frames if name == "obs" else None
        next_rows = (rows + self.num_envs) % self.size
        slots = self.slot.take(rows)
        in_pool = (slots >= 0).nonzero()[0]
        if self.store.on_cpu and name in self.store.single and frames is None:  # hot: equals the general case below
            array = self.store.arrays[name][0].take(next_rows, 0)
            if len(in_pool):
                array[in_pool] = self.final_obs_pool.store.arrays[name][0].take(slots.take(in_pool), 0)
            return self.store.to_tensor(array)
        if frames is not None:
            next_rows = np.concatenate([self._stack_rows(rows)[:, 1:], next_rows[:, None]], axis=1)
        leaves = self.store.take_leaves(name, next_rows)
        if len(in_pool):
            at: Any = in_pool if self.store.on_cpu else self.store.to_tensor(in_pool)
            final_leaves = self.final_obs_pool.store.take_leaves(name, slots[in_pool])
            for leaf, final in zip(leaves, final_leaves, strict=True):
                (leaf if frames is None else leaf[:, -1])[at] = final
        return self.store.to_tree(name, leaves if frames is None else frames.join(leaves))

    def _stack_rows(self, rows: Array) -> Array:
        """Return the rows of the frames of each stack `[B,k]`, oldest first. An episode's first frame is repeated."""
        age = self.to_index(rows) // self.num_envs - self.episode_start[rows]
        back = np.minimum(np.arange(self.frame_stack - 1, -1, -1), age[:, None])
        return (rows[:, None] - back * self.num_envs) % self.size

    def clear(self) -> None:
        """Remove all rows. Their indices are not reused, so priorities that arrive later are ignored."""
        self._release_slots(slice(None))
        self.cleared_before = self.count.copy()
        self.next_episode_start[:] = self.count
        self._refresh_flags()

    # --- saving and loading, see segments.py ---

    def holds_any(self, start: Array, end: Array) -> bool:
        """Return whether any row added while `self.count` grew from `start` to `end` is still stored."""
        return bool((end > np.maximum(self.oldest, start)).any())

    def export_rows(self, since: Array | None = None) -> dict[str, Array]:
        """Return all stored rows, or those added since `self.count` was `since`."""
        index = self.indices()
        boundary = index[self.is_boundary(index)]
        if since is not None:
            index = self.indices_since(since)
            # the newest row at that time may have become a boundary
            position, column = np.divmod(boundary, self.num_envs)
            boundary = boundary[position >= since[column] - 1]
        rows = index % self.size
        successors = self.final_obs_pool.store.export_rows(self.slot[boundary % self.size].astype(np.int64))
        return {
            "index": index,
            "age": (index // self.num_envs - self.episode_start[rows]).astype(np.int32),  # rows since episode start
            "boundary": boundary,
            **self.store.export_rows(rows),
            **{f"final.{name}": leaf for name, leaf in successors.items()},
        }

    def import_rows(self, leaves: Mapping[str, Array]) -> int:
        """Restore the rows of `export_rows` that the counts include. Return their number."""
        index, boundary = leaves["index"], leaves["boundary"]
        keep, rows = self.is_stored(index), index % self.size
        self.episode_start[rows[keep]] = (index // self.num_envs - leaves["age"])[keep]
        self.store.import_rows(rows, leaves, keep)
        successors = {name.removeprefix("final."): leaf for name, leaf in leaves.items() if name.startswith("final.")}
        keep_boundary, rows = self.is_stored(boundary), boundary % self.size
        self._release_slots(rows[keep_boundary])  # two consecutive segments may both contain the boundary between them
        self.slot[rows[keep_boundary]] = self.final_obs_pool.allocate(int(keep_boundary.sum()))
        self.final_obs_pool.store.import_rows(self.slot[rows], successors, keep_boundary)
        return int(keep.sum())

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and newest successors."""
        latest = {
            f"latest_next.{name}.{i}": leaf
            for name, leaves in self.latest_next_obs.items()
            for i, leaf in enumerate(leaves)
        }
        next_age = (self.count - self.next_episode_start).astype(np.int32)  # rows so far of the current episodes
        return {"count": self.count, "cleared_before": self.cleared_before, "next_age": next_age, **latest}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Empty the ring and set its counts and newest successors. `import_rows` then restores the rows."""
        self._release_slots(slice(None))
        self.count[:], self.cleared_before[:] = state["count"], state["cleared_before"]
        self.next_episode_start[:] = self.count - state["next_age"]
        for name, leaves in self.latest_next_obs.items():
            for i, leaf in enumerate(leaves):
                leaf[:] = state[f"latest_next.{name}.{i}"]
        rows = (self.count * self.num_envs + np.arange(self.num_envs)) % self.size
        self.store.write(self._obs_arrays, rows, self._newest_frames(self._latest_leaves, 1))
        self._refresh_flags()


def _equal(a: Array, b: Array, num_leading: int) -> Array:
    """Return whether all elements behind the leading dimensions are equal. A NaN equals a NaN."""
    equal = a == b
    if equal.all():  # the common case, much faster than testing each row
        return np.ones(equal.shape[:num_leading], bool)
    if a.dtype.kind == "f":
        equal |= np.isnan(a) & np.isnan(b)
    return equal.reshape(*equal.shape[:num_leading], -1).all(-1)


def _flatten(value: Array) -> Array:
    """Reshape `[T,N,...]` to `[B,...]`."""
    return value.reshape(-1, *value.shape[2:])
