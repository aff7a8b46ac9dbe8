"""Write the network of an agent to a file that runs without zhixing: ONNX, or a program of `torch.export`.

The inputs are observations, then the action mask if the environment has one, then the hidden state of a recurrent
agent. The outputs are greedy actions in the environment's range, one for each part of a Dict or Tuple, then the next
hidden state. All have a leading dimension of any size. Normalization of observations and the scaling of actions are
part of the network.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor, nn

from zhixing.core.action_layout import ActionPart
from zhixing.core.policy import Phase, Policy
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree, tree_map
from zhixing.errors import UserError
from zhixing.nets.joint_policy import JointPolicy
from zhixing.nets.mlp import tanh_
from zhixing.nets.noisy import zero_noise
from zhixing.nets.policies import GreedyPolicy
from zhixing.search.policy import SearchPolicy
from zhixing.utils.extras import require_extra

ROWS = 2  # of the example inputs; a single row would be taken for a constant


class Port(NamedTuple):
    """An input or output: its name and an example."""

    name: str
    example: Tensor


class ActionModule(nn.Module):
    """`module(*inputs)` returns the actions and the next hidden state as a flat tuple of tensors."""

    def __init__(self, policy: Policy, spaces: Spaces) -> None:
        super().__init__()
        if isinstance(policy, SearchPolicy):
            raise UserError("agents that plan by tree search can't be exported as one network; use --format folder")
        if isinstance(policy, JointPolicy):
            raise UserError("several policies can't be exported as one network; export the network of one of them")
        # a copy, because tracing leaves tensors without values in it
        self.policy, self.spaces = copy.deepcopy(policy).cpu().eval().requires_grad_(False), spaces
        for module in self.policy.modules():
            if vars(module).get("activation") is tanh_:  # chooses its code by the number of rows
                module.__dict__["activation"] = torch.tanh
        zero_noise(self.policy)
        if isinstance(self.policy, GreedyPolicy):
            self.policy.noisy = False  # the noise is zero already
        self.rng = torch.Generator()  # unused: greedy actions aren't random
        fields = spaces.fields()
        self.obs: Tree = tree_map(lambda field: torch.zeros(ROWS, *field.shape, dtype=_dtype(field)), fields["obs"])
        self.hidden: Tree = self._changing_hidden()
        self.inputs = [Port(".".join(("obs", *path)), leaf) for path, leaf in _named_leaves(self.obs)]
        if "mask" in fields:
            self.inputs.append(Port("mask", torch.ones(ROWS, *fields["mask"].shape, dtype=torch.bool)))
        hidden = [(".".join(("hidden", *path)), leaf) for path, leaf in _named_leaves(self.hidden)]
        self.inputs += [Port(name, leaf.clone()) for name, leaf in hidden]
        parts = _named_leaves(spaces.layout.tree if spaces.composite else spaces.action)
        self.outputs = [".".join(("action", *path)) for path, _ in parts] + [f"next_{name}" for name, _ in hidden]
        space, layout = spaces.action, spaces.layout
        if spaces.composite:
            for name in ("low", "shift", "scale", "minimum", "maximum"):
                self.register_buffer(name, torch.as_tensor(getattr(layout, name)))
        elif isinstance(space, Box) and space.is_bounded():
            self.register_buffer("low", torch.as_tensor(space.low))
            self.register_buffer("half_range", torch.as_tensor(0.5 * (space.high - space.low)))

    @torch.no_grad()
    def _changing_hidden(self) -> Tree:
        """Return the initial hidden state, or None if greedy actions never change it, such as that of noise."""
        before = self.policy.initial_hidden(ROWS)
        mask = None if self.spaces.mask is None else torch.ones(ROWS, *self.spaces.agents, self.spaces.mask) > 0
        after = self.policy.act(self.obs, before, mask, Phase.EVAL, self.rng, 0).hidden
        return None if after is before else before

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = iter(inputs)
        obs = tree_map(lambda _: next(leaves), self.obs)
        mask = next(leaves) if self.spaces.mask is not None else None
        hidden = None if self.hidden is None else tree_map(lambda _: next(leaves), self.hidden)
        decision = self.policy.act(obs, hidden, mask, Phase.EVAL, self.rng, 0)
        return *self.to_env(decision.action), *(leaf for _, leaf in _named_leaves(decision.hidden))

    def to_env(self, action: Tensor) -> list[Tensor]:
        """Convert actions to the environment's range, as `Spaces.to_env` does. Return the parts of composite ones."""
        space: Any = self.spaces.action
        buffers: Any = self
        if self.spaces.composite:
            scaled = buffers.low + (action.clamp(buffers.minimum, buffers.maximum) + buffers.shift) * buffers.scale
            return [self.take(part, scaled) for _, part in _named_leaves(self.spaces.layout.tree)]
        if isinstance(space, Discrete):
            return [action + int(space.start)]
        if isinstance(space, MultiDiscrete):
            return [action + torch.as_tensor(space.start)]
        if "low" not in self._buffers:
            return [action]
        return [buffers.low + (action.clamp(-1.0, 1.0) + 1.0) * buffers.half_range]

    def take(self, part: ActionPart, scaled: Tensor) -> Tensor:
        """Return the elements of one part of composite actions."""
        columns = scaled[..., part.start : part.start + part.size]
        dtype = torch.from_numpy(np.zeros(1, part.space.dtype)).dtype
        return columns.reshape((*scaled.shape[:-1], *part.space.shape)).to(dtype)

    def interface(self) -> dict[str, Any]:
        """Return names, shapes and dtypes of inputs and the names of outputs. The first dimension is N everywhere."""
        inputs = [
            {"name": name, "shape": ["N", *example.shape[1:]], "dtype": str(example.dtype).removeprefix("torch.")}
            for name, example in self.inputs
        ]
        return {"inputs": inputs, "outputs": self.outputs}

    @torch.no_grad()
    def export(self) -> torch.export.ExportedProgram:
        """Trace the module, with any number of rows."""
        rows = torch.export.Dim("batch")
        examples = tuple(port.example for port in self.inputs)
        try:
            return torch.export.export(self, examples, dynamic_shapes=(tuple({0: rows} for _ in examples),))
        except Exception as error:
            reason = str(error).strip().split("\n")[0][:300]
            raise UserError(f"torch can't trace this network ({reason}); use --format folder") from error


def write_onnx(module: ActionModule, file: Path, about: dict[str, Any]) -> None:
    """Write the module as an ONNX file, with `about` in its metadata."""
    with require_extra("format onnx", "onnx"):
        import onnx
        import onnxscript  # noqa: F401  (needed by torch)
    names = [port.name for port in module.inputs]
    with _quiet():
        program: Any = torch.onnx.export(
            module.export(), (), input_names=names, output_names=module.outputs, dynamo=True, verbose=False
        )
    model = program.model_proto
    for part in (model.graph, *model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output):
        del part.metadata_props[:]  # paths and source lines of this machine
    for key, value in about.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = f"zhixing.{key}", value if isinstance(value, str) else json.dumps(value)
    onnx.save(model, str(file))


def write_torch(module: ActionModule, file: Path) -> None:
    """Write the module as a program: `torch.export.load(file).module()(obs)`."""
    torch.export.save(module.export(), file)


def _dtype(field: Any) -> torch.dtype:
    return torch.from_numpy(np.zeros(1, field.dtype)).dtype


def _named_leaves(tree: Tree, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return the leaves of a tree with the keys that lead to them, depth first, as `tree_leaves` does."""
    if tree is None:
        return []
    if isinstance(tree, dict):
        return [leaf for key, part in tree.items() for leaf in _named_leaves(part, (*path, str(key)))]
    if isinstance(tree, tuple):
        return [leaf for i, part in enumerate(tree) for leaf in _named_leaves(part, (*path, str(i)))]
    return [(path, tree)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress and the warnings of the exporter."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
