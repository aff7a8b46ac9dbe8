"""The compiled train steps of one learner: each kind of step is traced when it first occurs, then runs as a graph."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx

from zhixing.compile.compiler import Run, check_compiler, compile_graph
from zhixing.compile.tracer import ForbidHostSync, Leaf, NotTraceableError, Tracer, aten
from zhixing.core.batch import Batch
from zhixing.core.learner import LazyMetrics, StepMethod, Update
from zhixing.core.tree import tree_leaves
from zhixing.errors import UserError

if TYPE_CHECKING:
    from zhixing.config import RunConfig
    from zhixing.core.learner import Learner

Options = dict[str, Any]  # keyword arguments of a train step


class CompiledUpdates:
    """Runs the train steps of a learner as compiled graphs."""

    def __init__(self, learner: Learner, cfg: RunConfig) -> None:
        if cfg.scheme == "play":
            raise UserError(f"compile=true is for updates, and {cfg.algorithm} makes none: set compile=false")
        if getattr(getattr(cfg, "net", None), "recurrent", "none") != "none":
            raise UserError("compile=true doesn't support recurrent networks: set net.recurrent=none or compile=false")
        if cfg.precision == "fp16":
            raise UserError("compile=true doesn't support precision=fp16 (its loss scale depends on data): set bf16")
        custom = next((one.kind for one in learner.optimizers().values() if one.custom is not None), None)
        if custom is not None:
            raise UserError(
                f"compile=true doesn't support optimizer={custom}, which can't be traced: use adam, adamw, rmsprop or "
                f"sgd, or set compile=false"
            )
        if learner.device.type == "cpu":
            check_compiler()
        self.learner, self.algorithm = learner, cfg.algorithm
        self.graphs: list[StepGraph] = []
        self.compile_seconds = 0.0

    def run_step(self, method: StepMethod, batch: Batch, options: Options) -> Update:
        for graph in self.graphs:
            inputs = graph.match(method, batch, options)
            if inputs is not None:
                return graph.run(inputs)
        begin = time.perf_counter()
        try:
            graph = StepGraph(self.learner, method, batch, options)
        except NotTraceableError as error:
            raise UserError(
                f"compile=true can't compile an update of {self.algorithm}: {error}; set compile=false"
            ) from None
        self.graphs.append(graph)
        self.compile_seconds += time.perf_counter() - begin
        return self.run_step(method, batch, options)

    def close(self) -> None:
        """Do nothing: graphs hold no processes or files."""


class StepGraph:
    """One kind of train step: its guards, the sources of its inputs and the destinations of its outputs."""

    def __init__(self, learner: Learner, method: StepMethod, batch: Batch, options: Options) -> None:
        self.learner, self.method, self.options, self.fields = learner, method, options, batch.fields
        self.guards: list[UpdateCountGuard] = []
        tracer, update, assigned = _trace(learner, method, batch, options, self.guards)
        self.metrics, self.has_priority = tuple(update.metrics), update.priority is not None
        self.assigned = list(assigned)
        self.call: Run = compile_graph(_build_module(tracer, update, assigned), tracer.examples)
        self.inputs: list[Tensor] = list(tracer.examples)
        self.optimizers = list(learner.optimizers().values())
        sources = list(enumerate(tracer.sources))
        self.leaf_positions = [i for i, source in sources if isinstance(source, Leaf)]
        self.attributes = [(i, source) for i, source in sources if isinstance(source, str)]
        self.samplers = [(i, source) for i, source in sources if callable(source)]
        leaves = [source for source in tracer.sources if isinstance(source, Leaf)]
        self.input_specs = [(leaf, _input_spec(_leaf(batch, leaf))) for leaf in leaves]

    def match(self, method: StepMethod, batch: Batch, options: Options) -> list[Tensor] | None:
        """Return the leaves of `batch` that the graph reads, or None if the graph is for another kind of step."""
        fields = batch._fields
        if self.method != method or self.options != options or self.fields != tuple(fields):
            return None
        updates = self.learner.updates
        for guard in self.guards:
            if not guard.holds(updates):
                return None
        leaves = []
        for leaf, input_spec in self.input_specs:
            value = fields[leaf.field]  # nearly always a tensor; attribute access of a batch takes longer
            if type(value) is not Tensor:
                value = _leaf(batch, leaf)
            if _input_spec(value) != input_spec:
                return None
            leaves.append(value)
        return leaves

    def run(self, leaves: list[Tensor]) -> Update:
        learner, inputs = self.learner, self.inputs
        for optimizer in self.optimizers:
            optimizer.update_lr_tensor()
        for i, leaf in zip(self.leaf_positions, leaves, strict=True):
            inputs[i] = leaf
        for i, name in self.attributes:
            inputs[i] = getattr(learner, name)
        for i, sample in self.samplers:
            inputs[i] = sample()
        metrics, *outputs = self.call(inputs)
        priority = outputs.pop(0) if self.has_priority else None
        for name, value in zip(self.assigned, outputs, strict=True):
            setattr(learner, name, value)
        learner.updates += 1
        return Update(LazyMetrics(self.metrics, metrics), priority)


class UpdateCountGuard(NamedTuple):
    """A branch that a step took: the result of `(updates + offset) % divisor == remainder`."""

    offset: int
    divisor: int
    remainder: int
    result: bool

    def holds(self, updates: int) -> bool:
        return ((updates + self.offset) % self.divisor == self.remainder) is self.result


class TracedCount(int):
    """`learner.updates` during tracing. Records a guard for each comparison, and rejects what no guard can check."""

    offset: int
    divisor: int  # this is the remainder of a division by it; 0 for the count itself
    guards: list[UpdateCountGuard]

    @staticmethod
    def of(value: int, guards: list[UpdateCountGuard], offset: int = 0, divisor: int = 0) -> TracedCount:
        count = TracedCount(value)
        count.guards, count.offset, count.divisor = guards, offset, divisor
        return count

    def __add__(self, n: int) -> TracedCount:
        return TracedCount.of(int(self) + n, self.guards, self.offset + n) if not self.divisor else self._reject(n)

    def __mod__(self, n: int) -> TracedCount:
        return TracedCount.of(int(self) % n, self.guards, self.offset, n) if not self.divisor else self._reject(n)

    def __eq__(self, value: object) -> bool:
        if not self.divisor or not isinstance(value, int):
            self._reject(value)
        result = int(self) == value
        self.guards.append(UpdateCountGuard(self.offset, self.divisor, int(value), result))  # type: ignore[call-overload]
        return result

    def __ne__(self, value: object) -> bool:
        return not self == value

    def __bool__(self) -> bool:
        return self != 0

    def _reject(self, value: object) -> Any:
        raise NotTraceableError("it uses the number of updates in another way than `updates % n == m`")

    __hash__ = int.__hash__
    __lt__ = __le__ = __gt__ = __ge__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __floordiv__ = _reject


def _trace(
    learner: Learner, method: StepMethod, batch: Batch, options: Options, guards: list[UpdateCountGuard]
) -> tuple[Tracer, Update, dict[str, Tensor]]:
    """Run a step without any effect. Return the recorded operations, its result and the attributes that it assigns."""
    leaves = {
        id(leaf): Leaf(name, i)
        for name in batch.fields
        for i, leaf in enumerate(tree_leaves(getattr(batch, name)))
        if isinstance(leaf, Tensor)
    }
    before, rng_state = dict(vars(learner)), learner.rng.get_state()
    tracer = Tracer(leaves, {id(part): name for name, part in before.items() if type(part) is Tensor})
    learner.updates = TracedCount.of(learner.updates, guards)
    try:
        for optimizer in learner.optimizers().values():
            optimizer.tracing = True
        with ForbidHostSync(), tracer:
            update = learner.run_step(method, batch, options)
        after = dict(vars(learner))
    finally:
        for optimizer in learner.optimizers().values():
            optimizer.tracing = False
        vars(learner).update(before)
        learner.rng.set_state(rng_state)
    del after["updates"]
    assigned = {name: value for name, value in after.items() if value is not before.get(name)}
    for name, value in assigned.items():
        if not isinstance(value, Tensor):
            raise NotTraceableError(f"it assigns {name!r}, which isn't a tensor")
    return tracer, update, assigned


def _build_module(tracer: Tracer, update: Update, assigned: dict[str, Tensor]) -> fx.GraphModule:
    """Add the outputs. Metrics become one vector: separate outputs cost as much as a small operation each."""
    graph, node = tracer.graph, tracer.node
    nodes = [node(value) for value in update.metrics.values()]
    metrics = [graph.call_function(aten._to_copy.default, (number,), {"dtype": torch.float32}) for number in nodes]
    outputs = [graph.call_function(aten.stack.default, (metrics,))]
    # copies, since an output that is an input or a view of one would change with it
    tensors = [*([] if update.priority is None else [update.priority]), *assigned.values()]
    outputs += [graph.call_function(aten.clone.default, (node(tensor),)) for tensor in tensors]
    graph.output(tuple(outputs))
    return fx.GraphModule({}, graph)


def _leaf(batch: Batch, leaf: Leaf) -> Tensor:
    value = getattr(batch, leaf.field)
    return value if isinstance(value, Tensor) else tree_leaves(value)[leaf.position]


def _input_spec(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    """Return what a compiled graph assumes about an input."""
    return tensor.dtype, tensor.shape, tensor.stride()
