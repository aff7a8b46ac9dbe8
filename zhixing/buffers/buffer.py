"""Buffer: storage of experience, a sampler that draws rows, a view that says what a sample shows of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zhixing.buffers import segments
from zhixing.buffers.fields import Array
from zhixing.buffers.her import Hindsight
from zhixing.buffers.reservoir import ReservoirStorage
from zhixing.buffers.ring import Ring
from zhixing.buffers.samplers import Priorities, Prioritized, Reservoir, Uniform, draw_uniform
from zhixing.buffers.views import Episode, NStep, Storage, View
from zhixing.core.batch import Batch
from zhixing.core.tree import Tree
from zhixing.errors import UserError


class Buffer:
    """Up to `capacity` transitions (rounded up to whole rows of `num_envs`) of the fields in `spec`.

    `spec` gives the `Field`s of one step of one environment, without `next_obs`, which is the next row's `obs`.
    With `frame_stack=k` observations arrive as stacks `[k, ...]`, of which only the newest frame is kept; samples
    rebuild the stacks. With `relabel` samples get other goals than those stored. With `folder` the arrays are
    memory-mapped files there.
    """

    def __init__(
        self,
        spec: Mapping[str, Tree],
        capacity: int,
        num_envs: int = 1,
        *,
        sampler: Uniform | Prioritized | Reservoir = Uniform(),  # noqa: B008 (frozen)
        view: View = NStep(1, 0.99),  # noqa: B008 (frozen)
        relabel: Hindsight | None = None,
        frame_stack: int = 1,
        device: str = "cpu",
        folder: str | Path | None = None,
    ) -> None:
        if capacity < 1 or num_envs < 1 or frame_stack < 1:
            raise UserError(
                f"capacity {capacity}, num_envs {num_envs} and frame_stack {frame_stack} must be at least 1"
            )
        if folder is not None:
            if torch.device(device).type != "cpu":
                raise UserError(f"a buffer in a folder lives on the CPU, not on device {device!r}")
            folder = Path(folder)
            folder.mkdir(parents=True, exist_ok=True)
        self.sampler, self.view, self.relabel, self.num_envs = sampler, view, relabel, num_envs
        if relabel is not None:
            relabel.check(spec)
            if not isinstance(view, NStep) or view.n != 1 or frame_stack != 1 or isinstance(sampler, Reservoir):
                raise UserError(
                    f"hindsight exchanges the goals of single transitions (replay.n_step=1, no recurrent network): it "
                    f"goes with NStep(1, gamma), Uniform or Prioritized and frame_stack=1, not with {view}, {sampler} "
                    f"and frame_stack={frame_stack}"
                )
        self.storage: Storage
        self._priorities: Priorities | None = None
        self._ready = False
        if isinstance(sampler, Reservoir):
            if not isinstance(view, NStep) or view.n != 1 or frame_stack != 1:
                raise UserError(
                    f"Reservoir keeps scattered transitions: it goes with NStep(1, gamma) and frame_stack=1 only, "
                    f"not with {view} and frame_stack={frame_stack}"
                )
            self.storage = ReservoirStorage(spec, capacity, sampler.seed, device, folder)
            self.capacity = capacity
        else:
            ring = Ring(spec, capacity, num_envs, frame_stack, device, folder)
            if view.rows > ring.rows:
                raise UserError(
                    f"capacity {capacity} over {num_envs} environments holds {ring.rows} rows of each, "
                    f"{view} needs {view.rows}: raise replay.capacity to at least {view.rows * num_envs}"
                )
            if isinstance(sampler, Prioritized):
                if isinstance(view, Episode):
                    raise UserError("Prioritized gives priorities to rows, Episode draws whole episodes: use Uniform")
                self._priorities = Priorities(sampler, ring, view.ahead)
            self.storage = ring
            self.capacity = ring.rows * num_envs
        # what `save` has written so far: where, up to which mark, and each segment with the marks around its rows
        self._folder: Path | None = None
        self._saved: Array | None = None
        self._segments: list[tuple[str, Array, Array]] = []
        self._next_segment = 0

    @staticmethod
    def over(ring: Ring, *, sampler: Uniform | Prioritized, view: View, relabel: Hindsight | None = None) -> Buffer:
        """Samples of recorded experience (see `Ring.over`), which stays where it is."""
        buffer = Buffer(ring.table.spec, view.rows, view=view, sampler=sampler, relabel=relabel)
        if view.ahead >= ring.rows:
            raise UserError(f"the data holds {ring.rows} steps, {view} needs {view.ahead + 1}")
        buffer.storage, buffer.capacity = ring, ring.rows
        if isinstance(sampler, Prioritized):
            buffer._priorities = Priorities(sampler, ring, view.ahead)
            buffer._priorities.fill()
        return buffer

    def __len__(self) -> int:
        return len(self.storage)

    @property
    def full(self) -> bool:
        return len(self) == self.capacity

    def add(self, batch: Batch, ids: Array | None = None, priority: Array | None = None) -> None:
        """Store a step `[N]` or steps `[T,N]`, with successors (`next_obs`, ...); `ids` are the columns' numbers.

        `priority [T,N]` is what the sampler starts from, where somebody knows; else new steps count as the highest."""
        if ids is not None:
            ids = self._columns(ids)
        self.storage.add(batch, ids)
        if self._priorities is not None and priority is not None:
            index = self._priorities.ring.newest(len(priority), ids)
            self._priorities.set(index.reshape(-1), priority[-len(index) :].reshape(-1))

    def _columns(self, ids: Array) -> Array:
        columns = np.asarray(ids, np.int64)
        numbers = columns.tolist()
        if len(set(numbers)) < len(numbers) or not 0 <= min(numbers) <= max(numbers) < self.num_envs:
            raise UserError(f"ids {numbers} must be different numbers from 0 to {self.num_envs - 1}")
        return columns

    @property
    def ready(self) -> bool:
        """Whether there is anything to sample: views of several steps need as many first."""
        if not self._ready:
            rows = self.view.candidates(self.storage)
            if rows is None and isinstance(self.storage, Ring):
                rows = self.storage.all()
                rows = rows[self.storage.allowed(rows, self.view.ahead)]
            self._ready = len(self.storage if rows is None else rows) > 0
        return self._ready

    def sample(self, n: int, rng: np.random.Generator) -> Batch:
        """`n` draws as the view shows them, with `index` [n] for `set_priority` and, prioritized, `weight` [n]."""
        if self._priorities is not None:
            index, weight = self._priorities.draw(n, rng)
            fields = self.view.gather(self.storage, index)
            fields["weight"] = self.storage.table.tensor(weight)
        else:
            index = draw_uniform(n, rng, self.storage, self.view)
            fields = self.view.gather(self.storage, index)
        if self.relabel is not None:
            assert isinstance(self.storage, Ring)
            fields = self.relabel.relabel(self.storage, index, fields, rng)
        fields["index"] = self.storage.table.tensor(index)
        return Batch(**fields)

    def set_progress(self, fraction: float) -> None:
        """Set how much of the run's budget is used, 0 to 1: what the β of prioritized samples follows."""
        if self._priorities is not None:
            self._priorities.progress = fraction

    def set_priority(self, index: Any, priority: Any) -> None:
        """New priorities for rows of earlier samples. Nothing happens for samplers without, or if there are none."""
        if self._priorities is not None and priority is not None:
            self._priorities.set(_array(index), _array(priority))

    def clear(self) -> None:
        self.storage.clear()
        self._ready = False
        if self._priorities is not None:
            self._priorities.clear()

    # --------------------------------------------------------- saving and loading

    def save(self, folder: str | Path) -> dict[str, Any]:
        """Write the rows that are new since the last save as one segment in `folder`, which is this buffer's alone.

        Returns the rest: a small state of plain values and tensors that names the segments it needs.
        """
        folder = Path(folder)
        if self._fixed:
            return {**self._state(), "segments": [], "next_segment": 0}
        if folder != self._folder:
            self._forget_segments(folder)
        mark = self.storage.mark()
        rows = self.storage.contents(self._saved)
        if len(rows["index"]):
            name = segments.write(folder, self._next_segment, rows)
            self._segments.append((name, np.zeros_like(mark) if self._saved is None else self._saved, mark))
            self._next_segment += 1
        self._saved = mark
        self._segments = [segment for segment in self._segments if self.storage.keeps(*segment[1:])]
        return {
            **self._state(),
            "segments": [
                {"name": name, "start": torch.from_numpy(start), "end": torch.from_numpy(end)}
                for name, start, end in self._segments
            ],
            "next_segment": self._next_segment,
        }

    def load(self, state: Mapping[str, Any], folder: str | Path) -> None:
        """Become what `save` saw. Segments written after it are deleted: they hold steps that will be made again."""
        folder = Path(folder)
        if self._fixed:
            self._check_fits(state, folder)
            self._load_priorities(state)
            return
        needed = [(part["name"], _array(part["start"]), _array(part["end"])) for part in state["segments"]]
        self._load(state, (segments.read(folder, name) for name, _, _ in needed), folder)
        segments.drop_from(folder, state["next_segment"])
        self._folder, self._segments, self._next_segment = folder, needed, state["next_segment"]
        self._saved = self.storage.mark()

    @staticmethod
    def prune(folder: str | Path, states: Iterable[Mapping[str, Any]]) -> None:
        """Delete the segments that none of these states needs."""
        segments.drop_except(Path(folder), [part["name"] for state in states for part in state["segments"]])

    def state_dict(self) -> dict[str, Any]:
        """Everything, in memory."""
        rows = {name: torch.from_numpy(array) for name, array in self.storage.contents().items()}
        return {**self._state(), "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._load(state, [{name: _array(rows) for name, rows in state["rows"].items()}], "state_dict")
        self._forget_segments(None)

    def _forget_segments(self, folder: Path | None) -> None:
        self._folder, self._saved, self._segments, self._next_segment = folder, None, [], 0

    def _state(self) -> dict[str, Any]:
        priorities = {} if self._priorities is None else self._priorities.state()
        return {"capacity": self.capacity, "storage": _plain(self.storage.state()), "sampler": _plain(priorities)}

    def _load(self, state: Mapping[str, Any], parts: Iterable[Mapping[str, Array]], origin: str | Path) -> None:
        self._check_fits(state, origin)
        arrays = {name: _array(value) for name, value in state["storage"].items()}
        self.storage.load_state(arrays)
        restored = sum(self.storage.restore(rows) for rows in parts)
        if restored != len(self):
            raise UserError(f"{origin} holds {restored} of the {len(self)} transitions that its state counts")
        self._load_priorities(state)

    def _load_priorities(self, state: Mapping[str, Any]) -> None:
        if self._priorities is not None:
            self._priorities.load_state({name: _array(value) for name, value in state["sampler"].items()})

    @property
    def _fixed(self) -> bool:
        return isinstance(self.storage, Ring) and self.storage.fixed

    def _check_fits(self, state: Mapping[str, Any], origin: str | Path) -> None:
        own = self._describe(self._state())
        given = self._describe(state)
        for name in {**own, **given}:
            if given.get(name) != own.get(name):
                raise UserError(
                    f"{origin} was saved by another kind of buffer: {name} {given.get(name)}, here {own.get(name)}"
                )

    @staticmethod
    def _describe(state: Mapping[str, Any]) -> dict[str, Any]:
        """What two states of the same kind of buffer have in common."""
        shapes = {name: list(np.shape(_array(value))) for name, value in state["storage"].items()}
        return {"capacity": state["capacity"], "sampler": sorted(state["sampler"]), **shapes}


def _array(value: Any) -> Any:
    return value.numpy(force=True) if isinstance(value, torch.Tensor) else value


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copies that later steps don't change, as tensors, which load without unpickling objects."""
    return {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in state.items()
    }
