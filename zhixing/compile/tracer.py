"""Traces what a function does with tensors, as a graph of operations.

The tracer records each operation below autograd, so forward and backward passes, optimizers and target updates become
one list. Everything is computed on copies: tracing changes nothing. The graph has these inputs:

- leaves of its batch, a different tensor at each call;
- storages of tensors that live longer: weights, moments, targets. All views of one storage are one input, and writes to
  any of them are writes to it;
- random numbers: whatever a generator draws is drawn before the graph runs, in the same order.

Python runs only during tracing. A function that branches on the values of tensors can't be traced and is rejected.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from zhixing.errors import UserError

aten = torch.ops.aten


class Leaf(NamedTuple):
    """A tensor of a batch: its field, and its position among the leaves of that field."""

    field: str
    position: int


# source of a graph's input: a leaf of the batch, an attribute by name, a fixed tensor, or a function that samples
Source = Leaf | str | Tensor | Callable[[], Tensor]


class NotTraceableError(UserError):
    """The traced function does something that depends on the values of tensors."""


class Tracer(TorchDispatchMode):
    def __init__(self, leaves: dict[int, Leaf], attributes: dict[int, str]) -> None:
        """`leaves` and `attributes` map ids of tensors to the leaf of the batch or the attribute that holds them."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.sources: list[Source] = []
        self.examples: list[Tensor] = []  # one tensor per input
        self._replaceable: dict[int, Leaf | str] = {**leaves, **attributes}  # inputs that differ from call to call
        self._traced: dict[int, tuple[Tensor, fx.Node]] = {}  # id of a tensor: its copy and its node
        self._storages: dict[int, tuple[Tensor, fx.Node]] = {}
        self._alive: list[Tensor] = []  # keeps ids unique

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # importing dynamo, to tell it to skip this, takes seconds

    def node(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor."""
        return self._lookup(tensor)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        if any(isinstance(value, torch.Generator) for value in leaves):
            return self._sample(func, args, kwargs or {}, leaves)
        _check_traceable(func, args)
        pairs = [self._lookup(value) if isinstance(value, Tensor) else (value, value) for value in leaves]
        copies, named_copies = tree_unflatten([copy for copy, _ in pairs], spec)
        nodes, named_nodes = tree_unflatten([node for _, node in pairs], spec)
        out = func(*copies, **named_copies)
        node = self.graph.call_function(func, nodes, named_nodes)
        if func._schema.is_mutable:
            return args[0] if func._schema.returns else None
        self._register_outputs(out, node)
        return out

    def _register_outputs(self, out: Any, node: fx.Node) -> None:
        if isinstance(out, Tensor):
            self._register(out, out, node)
        elif isinstance(out, (tuple, list)):
            for i, part in enumerate(out):
                self._register(part, part, self.graph.call_function(operator.getitem, (node, i)))

    def _register(self, tensor: Tensor, copy: Tensor, node: fx.Node) -> None:
        self._traced[id(tensor)] = self._traced[id(copy)] = copy, node
        self._alive += [tensor, copy]

    def _add_input(self, source: Source, example: Tensor) -> fx.Node:
        self.sources.append(source)
        self.examples.append(example)
        return self.graph.placeholder(f"input_{len(self.sources)}")

    def _lookup(self, tensor: Tensor) -> tuple[Tensor, fx.Node]:
        """Return the copy and the node of a tensor. A tensor that is new becomes an input, or a view of one."""
        key = id(tensor)
        if key not in self._traced and key in self._replaceable:
            example = tensor.detach()
            self._register(tensor, _copy(example), self._add_input(self._replaceable[key], example))
        elif key not in self._traced:
            storage, node = self._storage(tensor)
            view = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
            view_node = self.graph.call_function(aten.as_strided.default, (node, *view))
            self._register(tensor, storage.as_strided(*view), view_node)
        return self._traced[key]

    def _storage(self, tensor: Tensor) -> tuple[Tensor, fx.Node]:
        """Return the whole storage of a tensor, as one input."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._storages:
            flat = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            self._storages[key] = flat.clone(), self._add_input(flat, flat)
        return self._storages[key]

    def _sample(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Tensor:
        """Make random numbers an input that is sampled before each run."""
        in_place = func._schema.is_mutable
        if sum(isinstance(value, Tensor) for value in leaves) > in_place:
            raise NotTraceableError(f"its random numbers depend on tensors ({func})")
        if not in_place:
            sample = func(*args, **kwargs)
            self._register(sample, sample, self._add_input(lambda: func(*args, **kwargs), sample))
            return sample
        filled, node = self._lookup(args[0])
        sample = func(torch.empty_like(filled), *args[1:], **kwargs)
        source = self._add_input(lambda: func(sample, *args[1:], **kwargs), sample)
        self.graph.call_function(aten.copy_.default, (node, source))
        filled.copy_(sample)
        return args[0]


class ForbidHostSync(TorchFunctionMode):
    """Rejects reads of tensors' values, which the tracer can't see, and traces `one_hot` without such a read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS:
            raise NotTraceableError(f"it reads values of tensors ({func.__name__})")
        if func is F.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _one_hot(index: Tensor, num_classes: int) -> Tensor:
    return (index.unsqueeze(-1) == torch.arange(num_classes, device=index.device)).long()


_HOST_READS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.item}


def _check_traceable(func: Any, args: Any) -> None:
    if func is aten.index.Tensor:  # the result's size is known unless the index is a mask
        data_dependent = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    else:
        data_dependent = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    if data_dependent:
        raise NotTraceableError(f"it depends on the values of tensors ({func})")


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
