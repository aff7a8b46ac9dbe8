"""Writes down, as a graph of tensor operations, what a function does with tensors.

It sees each operation below autograd, so that forward and backward passes, optimizers and targets become one list.
Everything is done on copies: what is recorded changes nothing. The inputs of the graph are what the function reads:

- leaves of its batches, another tensor at each call;
- storages of tensors that live longer: weights, moments, targets. Whatever views there are on one of them, it is one
  input, and what is written to any of them is written to it;
- random numbers: whatever is drawn with a generator is drawn before the graph runs, in the same order.

Python runs only while recording. What it decides by the numbers in a tensor can't be in a graph and is refused.
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
    """A tensor of a batch: which of the leaves of a field."""

    field: str
    place: int


# where an input of the graph comes from: a batch, an attribute by its name, itself, or what is drawn
Source = Leaf | str | Tensor | Callable[[], Tensor]


class NoGraphError(UserError):
    """What was recorded does something that depends on the numbers in tensors."""


class Recorder(TorchDispatchMode):
    def __init__(self, leaves: dict[int, Leaf], attributes: dict[int, str]) -> None:
        """By the ids of tensors: which are leaves of a batch, and which are attributes that may be others later."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.sources: list[Source] = []
        self.examples: list[Tensor] = []  # of the inputs
        self._changing: dict[int, Leaf | str] = {**leaves, **attributes}
        self._known: dict[int, tuple[Tensor, fx.Node]] = {}  # by id: the copy that stands for a tensor, and its node
        self._storages: dict[int, tuple[Tensor, fx.Node]] = {}
        self._alive: list[Tensor] = []  # ids are given again when their owners are gone

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's own recorder isn't used, and telling it so takes seconds of imports

    def node(self, tensor: Tensor) -> fx.Node:
        """What stands for a tensor in the graph."""
        return self._stand_in(tensor)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, spec = tree_flatten((args, kwargs or {}))
        if any(isinstance(value, torch.Generator) for value in given):
            return self._draw(func, args, kwargs or {}, given)
        _check(func, args)
        pairs = [self._stand_in(value) if isinstance(value, Tensor) else (value, value) for value in given]
        values, named = tree_unflatten([pair[0] for pair in pairs], spec)
        out = func(*values, **named)
        nodes, named_nodes = tree_unflatten([pair[1] for pair in pairs], spec)
        node = self.graph.call_function(func, nodes, named_nodes)
        if func._schema.is_mutable:
            return args[0] if func._schema.returns else None
        if isinstance(out, Tensor):
            self._know(out, out, node)
        elif isinstance(out, (tuple, list)):
            for i, part in enumerate(out):
                self._know(part, part, self.graph.call_function(operator.getitem, (node, i)))
        return out

    def _know(self, tensor: Tensor, value: Tensor, node: fx.Node) -> None:
        self._known[id(tensor)] = self._known[id(value)] = value, node
        self._alive += [tensor, value]

    def _input(self, source: Source, example: Tensor) -> fx.Node:
        self.sources.append(source)
        self.examples.append(example)
        return self.graph.placeholder(f"input_{len(self.sources)}")

    def _stand_in(self, tensor: Tensor) -> tuple[Tensor, fx.Node]:
        key = id(tensor)
        if key not in self._known and key in self._changing:
            example = tensor.detach()
            self._know(tensor, _copy(example), self._input(self._changing[key], example))
        elif key not in self._known:
            whole, node = self._storage(tensor)
            place = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
            self._know(
                tensor, whole.as_strided(*place), self.graph.call_function(aten.as_strided.default, (node, *place))
            )
        return self._known[key]

    def _storage(self, tensor: Tensor) -> tuple[Tensor, fx.Node]:
        """All that the tensor is a view of, as one input."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._storages:
            whole = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            self._storages[key] = whole.clone(), self._input(whole, whole)
        return self._storages[key]

    def _draw(self, func: Any, args: Any, kwargs: Any, given: list[Any]) -> Tensor:
        """Random numbers: an input, drawn anew before each run."""
        fills = func._schema.is_mutable
        if sum(isinstance(value, Tensor) for value in given) > fills:
            raise NoGraphError(f"what it draws at random depends on tensors ({func})")
        if not fills:
            drawn = func(*args, **kwargs)
            self._know(drawn, drawn, self._input(lambda: func(*args, **kwargs), drawn))
            return drawn
        filled, node = self._stand_in(args[0])
        drawn = func(torch.empty_like(filled), *args[1:], **kwargs)
        source = self._input(lambda: func(drawn, *args[1:], **kwargs), drawn)
        self.graph.call_function(aten.copy_.default, (node, source))
        filled.copy_(drawn)
        return args[0]


class ForbidHostSync(TorchFunctionMode):
    """Refuses what leaves torch unseen by the recorder, and makes vectors of choices without looking at these."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LEAVES:
            raise NoGraphError(f"it takes numbers out of tensors ({func.__name__})")
        if func is F.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _one_hot(choice: Tensor, num_classes: int) -> Tensor:
    return (choice.unsqueeze(-1) == torch.arange(num_classes, device=choice.device)).long()


_LEAVES = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.item}


def _check(func: Any, args: Any) -> None:
    if func is aten.index.Tensor:  # of a size that is known, but for masks
        unknown = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    else:
        unknown = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    if unknown:
        raise NoGraphError(f"what it does next depends on the numbers in tensors ({func})")


def _copy(tensor: Tensor) -> Tensor:
    """With the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
