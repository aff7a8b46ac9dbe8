"""Replay buffer: a ring that stores experience, a sampler that selects rows, and a view that gathers them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zhixing.buffers import segments
from zhixing.buffers.fields import Array
from zhixing.buffers.her import HER
from zhixing.buffers.ring import Ring
from zhixing.buffers.samplers import Priorities, Prioritized, Uniform, sample_uniform
from zhixing.buffers.views import EpisodeView, NStep, View
from zhixing.core.batch import Batch
from zhixing.core.tree import Tree
from zhixing.errors import UserError


class Buffer:
    """Store the newest `capacity` transitions, rounded up to a multiple of `num_envs`, and sample from them.

    `spec` gives the `Field`s of one step of one environment, without `next_obs`, which is the next row's `obs`. With
    `frame_stack=k` observations are stacks of k frames, see `zhixing.core.stack`; the buffer stores each frame once and
    rebuilds the stacks in samples. With `her` samples are relabeled with achieved goals. With `folder` the arrays are
    memory-mapped files.
    """

    def __init__(
        self,
        spec: Mapping[str, Tree],
        capacity: int,
        num_envs: int = 1,
        *,
        sampler: Uniform | Prioritized = Uniform(),  # noqa: B008 (frozen)
        view: View = NStep(1, 0.99),  # noqa: B008 (frozen)
        her: HER | None = None,
        frame_stack: int = 1,
        device: str = "cpu",
        folder: str | Path | None = None,
    ) -> None:
        if capacity < 1 or num_envs < 1 or frame_stack < 1:
            raise UserError(
                f"capacity {capacity}, num_envs {num_envs} and frame_stack {frame_stack} must be at least 1"
            )
        if her is not None:
            her.check(spec)
            if not isinstance(view, NStep) or view.n != 1 or frame_stack != 1:
                raise UserError(
                    f"HER relabels single transitions (replay.n_step=1, env.stack=1, no recurrent network): it needs "
                    f"NStep(1, gamma) and frame_stack=1, not {view} and frame_stack={frame_stack}"
                )
        if isinstance(sampler, Prioritized) and isinstance(view, EpisodeView):
            raise UserError("Prioritized assigns priorities to rows, but EpisodeView samples episodes: use Uniform")
        if folder is not None:
            if torch.device(device).type != "cpu":
                raise UserError(f"a buffer in a folder must be on the CPU, not on device {device!r}")
            folder = Path(folder)
            folder.mkdir(parents=True, exist_ok=True)
        self.ring = Ring(spec, capacity, num_envs, frame_stack, device, folder)
        min_rows = view.min_rows + frame_stack - 1
        if min_rows > self.ring.capacity_per_env:
            stacks = f" with stacks of {frame_stack} frames" if frame_stack > 1 else ""
            raise UserError(
                f"capacity {capacity} over {num_envs} environments holds {self.ring.capacity_per_env} rows of each, "
                f"{view}{stacks} needs {min_rows}: raise replay.capacity to at least {min_rows * num_envs}"
            )
        self.sampler, self.view, self.her, self.num_envs = sampler, view, her, num_envs
        self.capacity = self.ring.capacity_per_env * num_envs
        self._priorities = Priorities(sampler, self.ring, view.lookahead) if isinstance(sampler, Prioritized) else None
        self._ready = False
        # the last `save`: its folder, the ring's count, and each segment's name with the counts before and after its
        # rows
        self._folder: Path | None = None
        self._saved_count: Array | None = None
        self._segments: list[tuple[str, Array, Array]] = []
        self._next_segment = 0

    @staticmethod
    def from_ring(ring: Ring, *, sampler: Uniform | Prioritized, view: View, her: HER | None = None) -> Buffer:
        """Sample recorded experience in place; see `Ring.from_arrays`."""
        buffer = Buffer(ring.store.spec, view.min_rows, sampler=sampler, view=view, her=her)
        if view.lookahead >= ring.capacity_per_env:
            raise UserError(f"the data holds {ring.capacity_per_env} steps, {view} needs {view.lookahead + 1}")
        buffer.ring, buffer.capacity = ring, ring.capacity_per_env
        if isinstance(sampler, Prioritized):
            buffer._priorities = Priorities(sampler, ring, view.lookahead)
            buffer._priorities.fill()
        return buffer

    def __len__(self) -> int:
        return len(self.ring)

    @property
    def full(self) -> bool:
        return len(self) == self.capacity

    def add(self, batch: Batch, env_ids: Array | None = None, priority: Array | None = None) -> None:
        """Store a step `[N]` or steps `[T,N]` with successors (`next_obs`, ...), of all environments or of `env_ids`.

        `priority [T,N]` sets initial priorities. Without it, new steps get the highest priority so far.
        """
        if env_ids is not None:
            env_ids = self._check_env_ids(env_ids)
        self.ring.add(batch, env_ids)
        if self._priorities is not None and priority is not None:
            index = self.ring.newest_indices(len(priority), env_ids)
            self._priorities.set(index.reshape(-1), priority[-len(index) :].reshape(-1))

    def _check_env_ids(self, env_ids: Array) -> Array:
        array = np.asarray(env_ids, np.int64)
        ids = array.tolist()
        if len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) < self.num_envs:
            raise UserError(f"env_ids {ids} must be distinct numbers from 0 to {self.num_envs - 1}")
        return array

    @property
    def ready(self) -> bool:
        """Whether there is anything to sample. A view of several steps needs as many first."""
        if not self._ready:
            index = self.view.candidates(self.ring)
            if index is None:
                index = self.ring.indices()
                index = index[self.ring.is_complete(index, self.view.lookahead)]
            self._ready = len(index) > 0
        return self._ready

    def sample(self, n: int, rng: np.random.Generator) -> Batch:
        """Return `n` samples of the view, with `index` [n] for `set_priority` and, if prioritized, `weight` [n]."""
        if self._priorities is not None:
            index, weight = self._priorities.sample(n, rng)
            fields = self.view.gather(self.ring, index)
            fields["weight"] = self.ring.store.to_tensor(weight)
        else:
            index = sample_uniform(n, rng, self.ring, self.view)
            fields = self.view.gather(self.ring, index)
        if self.her is not None:
            fields = self.her.relabel(self.ring, index, fields, rng)
        fields["index"] = self.ring.store.to_tensor(index)
        return Batch(**fields)

    def set_progress(self, fraction: float) -> None:
        """Set the used fraction of the run's budget, 0 to 1, which determines β of prioritized replay."""
        if self._priorities is not None:
            self._priorities.progress = fraction

    def set_priority(self, index: Any, priority: Any) -> None:
        """Set new priorities for sampled rows. Does nothing if the sampler has none or `priority` is None."""
        if self._priorities is not None and priority is not None:
            self._priorities.set(_to_numpy(index), _to_numpy(priority))

    def clear(self) -> None:
        self.ring.clear()
        self._ready = False
        if self._priorities is not None:
            self._priorities.clear()

    # --- saving and loading ---

    def save(self, folder: str | Path) -> dict[str, Any]:
        """Write the rows added since the last save as one segment in `folder`, which no other buffer may use.

        Return the remaining state: plain values and tensors, among them the names of the segments that it needs.
        """
        folder = Path(folder)
        if self.ring.read_only:
            return {**self._small_state(), "segments": [], "next_segment": 0}
        if folder != self._folder:
            self._reset_segments(folder)
        count = self.ring.count.copy()
        rows = self.ring.export_rows(self._saved_count)
        if len(rows["index"]):
            name = segments.write(folder, self._next_segment, rows)
            start = np.zeros_like(count) if self._saved_count is None else self._saved_count
            self._segments.append((name, start, count))
            self._next_segment += 1
        self._saved_count = count
        self._segments = [segment for segment in self._segments if self.ring.holds_any(*segment[1:])]
        return {
            **self._small_state(),
            "segments": [
                {"name": name, "start": torch.from_numpy(start), "end": torch.from_numpy(end)}
                for name, start, end in self._segments
            ],
            "next_segment": self._next_segment,
        }

    def load(self, state: Mapping[str, Any], folder: str | Path) -> None:
        """Restore a saved state. Later segments are deleted, because the resumed run collects their steps again."""
        folder = Path(folder)
        if self.ring.read_only:
            self._check_same_kind(state, folder)
            self._load_priorities(state)
            return
        needed = [(part["name"], _to_numpy(part["start"]), _to_numpy(part["end"])) for part in state["segments"]]
        self._load(state, (segments.read(folder, name) for name, _, _ in needed), folder)
        segments.delete_from(folder, state["next_segment"])
        self._folder, self._segments, self._next_segment = folder, needed, state["next_segment"]
        self._saved_count = self.ring.count.copy()

    @staticmethod
    def prune(folder: str | Path, states: Iterable[Mapping[str, Any]]) -> None:
        """Delete the segments that none of these states needs."""
        segments.delete_except(Path(folder), [part["name"] for state in states for part in state["segments"]])

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state, with all rows, in memory."""
        rows = {name: torch.from_numpy(array) for name, array in self.ring.export_rows().items()}
        return {**self._small_state(), "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._load(state, [{name: _to_numpy(rows) for name, rows in state["rows"].items()}], "state_dict")
        self._reset_segments(None)

    def _reset_segments(self, folder: Path | None) -> None:
        self._folder, self._saved_count, self._segments, self._next_segment = folder, None, [], 0

    def _small_state(self) -> dict[str, Any]:
        """Return the state without rows."""
        priorities = {} if self._priorities is None else self._priorities.state_dict()
        ring = self.ring.state_dict()
        return {"capacity": self.capacity, "storage": _copy_to_torch(ring), "sampler": _copy_to_torch(priorities)}

    def _load(self, state: Mapping[str, Any], parts: Iterable[Mapping[str, Array]], source: str | Path) -> None:
        self._check_same_kind(state, source)
        self.ring.load_state_dict({name: _to_numpy(value) for name, value in state["storage"].items()})
        restored = sum(self.ring.import_rows(rows) for rows in parts)
        if restored != len(self):
            raise UserError(f"{source} holds {restored} of the {len(self)} transitions that its state counts")
        self._load_priorities(state)

    def _load_priorities(self, state: Mapping[str, Any]) -> None:
        if self._priorities is not None:
            self._priorities.load_state_dict({name: _to_numpy(value) for name, value in state["sampler"].items()})

    def _check_same_kind(self, state: Mapping[str, Any], source: str | Path) -> None:
        expected, actual = _signature(self._small_state()), _signature(state)
        for name in {**expected, **actual}:
            if actual.get(name) != expected.get(name):
                raise UserError(
                    f"{source} was saved by another kind of buffer: its {name} is {actual.get(name)}, this buffer's "
                    f"{expected.get(name)}"
                )


def _signature(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the capacity, the sampler and the shapes of a state, which are equal for buffers of the same kind."""
    shapes = {name: list(np.shape(_to_numpy(value))) for name, value in state["storage"].items()}
    return {"capacity": state["capacity"], "sampler": sorted(state["sampler"]), **shapes}


def _to_numpy(value: Any) -> Any:
    return value.numpy(force=True) if isinstance(value, torch.Tensor) else value


def _copy_to_torch(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy arrays to tensors, which later steps don't change and which load without unpickling objects."""
    return {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in state.items()
    }
