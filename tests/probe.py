"""Gradients and metrics of an update, computed without changing the learner."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

import zhixing as zx
from zhixing.core.batch import Batch
from zhixing.core.optimizer import Optimizer


class Probe(NamedTuple):
    gradients: dict[str, list[Tensor]]  # by name of the optimizer
    metrics: dict[str, Tensor]
    priority: Tensor | None


def probe(learner: zx.Learner, batch: Batch, step: str = "update", **options: Any) -> Probe:
    """Run a train step of `learner` without moving weights, and restore its state afterwards.

    Losses that the step computes after a step of another optimizer use the unchanged weights, too.
    """
    names = {id(optimizer): name for name, optimizer in learner.optimizers().items()}
    gradients: dict[str, list[Tensor]] = {}

    def record(self: Optimizer, tensors: list[Tensor]) -> Tensor:
        gradients[names[id(self)]] = [tensor.clone() for tensor in tensors]
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]))

    state = copy.deepcopy(learner.state_dict())
    with patch.object(Optimizer, "apply", record):
        update = getattr(learner, step)(batch, **options)
    learner.load_state_dict(state)
    return Probe(gradients, dict(update.metrics), update.priority)


def last_gradients(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return the gradients that an optimizer has computed last, by parameter."""
    return dict(zip(optimizer.parameters, optimizer._gradient_views, strict=True))


def named_gradients(net: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the gradients that an optimizer has computed last, by the name of the parameter in `net`."""
    gradients = last_gradients(optimizer)
    return {name: gradients[parameter].clone() for name, parameter in net.named_parameters()}


def gradient_step_data(learner: Any, rollout: Batch) -> Batch:
    """Update `learner` from a rollout, and return the data that `update` passes to `gradient_step`."""
    with patch.object(learner, "gradient_step", wraps=learner.gradient_step) as gradient_step:
        learner.update(rollout)
    return gradient_step.call_args.args[0]
