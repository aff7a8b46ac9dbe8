"""The graphs of one learner: each is recorded when an update of a new kind comes, and then run instead of Python."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx

from zhixing.compile.compiler import Run, check_compiler, compiled
from zhixing.compile.recorder import ForbidHostSync, Leaf, NoGraphError, Recorder, aten
from zhixing.core.batch import Batch
from zhixing.core.learner import LazyMetrics, Update
from zhixing.core.tree import tree_leaves
from zhixing.errors import UserError

if TYPE_CHECKING:
    from zhixing.config import RunConfig
    from zhixing.core.learner import Gradients, Learner

    Find = Callable[..., Gradients]


class Graphs:
    """`step` does what `learner.apply(find(batch, **parts))` does, `find` being a method that gives gradients."""

    def __init__(self, learner: Learner, cfg: RunConfig) -> None:
        if cfg.scheme == "play":
            raise UserError(f"compile=true is for updates, and {cfg.algorithm} makes none: set compile=false")
        if getattr(getattr(cfg, "net", None), "recurrent", "none") != "none":
            raise UserError("compile=true takes no recurrent networks: set net.recurrent=none, or compile=false")
        if cfg.precision == "fp16":
            raise UserError("compile=true takes no precision=fp16, whose factors are decided by the numbers: set bf16")
        if learner.device.type == "cpu":
            check_compiler()
        self.learner, self.algorithm = learner, cfg.algorithm
        self.graphs: list[Graph] = []
        self.seconds = 0.0  # spent on making them

    def step(self, find: Find, batch: Batch, **parts: Any) -> Update:
        for graph in self.graphs:
            leaves = graph.read(find, batch, parts)
            if leaves is not None:
                return graph.step(leaves)
        begin = time.perf_counter()
        try:
            graph = Graph(self.learner, find, batch, parts)
        except NoGraphError as error:
            raise UserError(
                f"compile=true can't compile an update of {self.algorithm}: {error}; set compile=false"
            ) from None
        self.graphs.append(graph)
        self.seconds += time.perf_counter() - begin
        return self.step(find, batch, **parts)


class Graph:
    """One kind of update: what it was recorded for, where its inputs come from and what becomes of its outputs."""

    def __init__(self, learner: Learner, find: Find, batch: Batch, parts: dict[str, Any]) -> None:
        self.learner, self.find, self.parts, self.fields = learner, find, parts, batch.fields
        self.guards: list[UpdateCountGuard] = []
        recorder, update, changed, self.updates = _record(learner, find, batch, parts, self.guards)
        self.metrics, self.has_priority, self.changed = (
            tuple(update.metrics),
            update.priority is not None,
            list(changed),
        )
        self.run: Run = compiled(_module(recorder, update, changed), recorder.examples)
        self.inputs: list[Tensor] = list(recorder.examples)
        self.optimizers = list(learner.optimizers().values())
        self.places = [i for i, source in enumerate(recorder.sources) if isinstance(source, Leaf)]
        self.attributes = [(i, source) for i, source in enumerate(recorder.sources) if isinstance(source, str)]
        self.random = [(i, source) for i, source in enumerate(recorder.sources) if callable(source)]
        leaves = [source for source in recorder.sources if isinstance(source, Leaf)]
        self.input_specs = [(leaf, _look(_leaf(batch, leaf))) for leaf in leaves]

    def read(self, find: Find, batch: Batch, parts: dict[str, Any]) -> list[Tensor] | None:
        """The leaves that the graph reads; None if it is one of another kind of update."""
        fields = batch._fields
        if self.find != find or self.parts != parts or self.fields != tuple(fields):
            return None
        updates = self.learner.updates
        for guards in self.guards:
            if not guards.holds(updates):
                return None
        leaves = []
        for leaf, look in self.input_specs:
            value = fields[leaf.field]  # a tensor, nearly always; a batch's attributes take longer
            if type(value) is not Tensor:
                value = _leaf(batch, leaf)
            if _look(value) != look:
                return None
            leaves.append(value)
        return leaves

    def step(self, leaves: list[Tensor]) -> Update:
        learner, inputs = self.learner, self.inputs
        for optimizer in self.optimizers:
            optimizer.tell_rate()
        for i, leaf in zip(self.places, leaves, strict=True):
            inputs[i] = leaf
        for i, name in self.attributes:
            inputs[i] = getattr(learner, name)
        for i, draw in self.random:
            inputs[i] = draw()
        told, *others = self.run(inputs)
        priority = others.pop(0) if self.has_priority else None
        for name, value in zip(self.changed, others, strict=True):
            setattr(learner, name, value)
        learner.updates += self.updates
        return Update(LazyMetrics(self.metrics, told), priority)


class UpdateCountGuard(NamedTuple):
    """What an update asked of the number of updates: whether `(updates + added) % by == remainder`."""

    added: int
    by: int
    remainder: int
    answer: bool

    def holds(self, updates: int) -> bool:
        return ((updates + self.added) % self.by == self.remainder) is self.answer


class TracedCount(int):
    """The number of updates while recording. It notes what is asked of it, and refuses what can't be checked later."""

    added: int
    by: int  # it is the remainder of dividing by this; 0 for the number itself
    guards: list[UpdateCountGuard]

    @staticmethod
    def of(value: int, guards: list[UpdateCountGuard], added: int = 0, by: int = 0) -> TracedCount:
        count = TracedCount(value)
        count.guards, count.added, count.by = guards, added, by
        return count

    def __add__(self, other: int) -> TracedCount:
        return (
            TracedCount.of(int(self) + other, self.guards, self.added + other) if not self.by else self._refuse(other)
        )

    def __mod__(self, other: int) -> TracedCount:
        return TracedCount.of(int(self) % other, self.guards, self.added, other) if not self.by else self._refuse(other)

    def __eq__(self, other: object) -> bool:
        if not self.by or not isinstance(other, int):
            self._refuse(other)
        answer = int(self) == other
        self.guards.append(UpdateCountGuard(self.added, self.by, int(other), answer))  # type: ignore[call-overload]
        return answer

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self != 0

    def _refuse(self, other: object) -> Any:
        raise NoGraphError("it asks more of the number of updates than whether `updates % n == m`")

    __hash__ = int.__hash__
    __lt__ = __le__ = __gt__ = __ge__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __floordiv__ = _refuse


def _record(
    learner: Learner, find: Find, batch: Batch, parts: dict[str, Any], guards: list[UpdateCountGuard]
) -> tuple[Recorder, Update, dict[str, Tensor], int]:
    """An update that changes nothing: the operations, its result, attributes that it sets, and how much it counts."""
    leaves = {
        id(leaf): Leaf(name, i)
        for name in batch.fields
        for i, leaf in enumerate(tree_leaves(getattr(batch, name)))
        if isinstance(leaf, Tensor)
    }
    before, random = dict(vars(learner)), learner.rng.get_state()
    recorder = Recorder(leaves, {id(part): name for name, part in before.items() if type(part) is Tensor})
    learner.updates = TracedCount.of(learner.updates, guards)
    try:
        for optimizer in learner.optimizers().values():
            optimizer.in_graph = True
        with ForbidHostSync(), recorder:
            update = learner.apply(learner.found(find, batch, **parts))
        after = dict(vars(learner))
    finally:
        for optimizer in learner.optimizers().values():
            optimizer.in_graph = False
        vars(learner).update(before)
        learner.rng.set_state(random)
    counted = int(after.pop("updates")) - before["updates"]
    changed = {name: value for name, value in after.items() if value is not before.get(name)}
    for name, value in changed.items():
        if not isinstance(value, Tensor):
            raise NoGraphError(f"it changes {name!r}, which is no tensor")
    return recorder, update, changed, counted


def _module(recorder: Recorder, update: Update, changed: dict[str, Tensor]) -> fx.GraphModule:
    """Numbers to tell come out as one vector: each output of its own would cost as much as a small operation."""
    graph, node = recorder.graph, recorder.node
    numbers = [node(value) for value in update.metrics.values()]
    told = [graph.call_function(aten._to_copy.default, (number,), {"dtype": torch.float32}) for number in numbers]
    outputs = [graph.call_function(aten.stack.default, (told,))]
    # copies, for an output that is an input, or a view of one, would change with it
    more = [*([] if update.priority is None else [update.priority]), *changed.values()]
    outputs += [graph.call_function(aten.clone.default, (node(tensor),)) for tensor in more]
    graph.output(tuple(outputs))
    return fx.GraphModule({}, graph)


def _leaf(batch: Batch, leaf: Leaf) -> Tensor:
    value = getattr(batch, leaf.field)
    return value if isinstance(value, Tensor) else tree_leaves(value)[leaf.place]


def _look(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    """What a compiled graph takes for granted of an input."""
    return tensor.dtype, tensor.shape, tensor.stride()
