"""Weights that are spread over servers: each holds a slice of them with the optimizer's moments, and moves it.

Workers take the slices from the servers and give them the gradients' (Dean et al., 2012), so neither passes through the
run's own process, which fetches them only to evaluate and to save.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zhixing.config import RunConfig
from zhixing.core.learner import Gradients, Learner, Update
from zhixing.core.optimizer import ALIGN, Optimizer
from zhixing.distributed.cluster import Cluster, imported
from zhixing.errors import UserError


class Slice(NamedTuple):
    """Of one optimizer's weights, and what moves them."""

    weights: Tensor
    state: dict[str, Any]
    settings: dict[str, Any]


class Move(NamedTuple):
    gradient: Tensor
    divisor: Tensor | None  # that makes the whole gradient no longer than it may be
    lr: float


class Server:
    """Has a slice of each optimizer's weights, by name."""

    def __init__(self) -> None:
        self.optimizers: dict[str, Optimizer] = {}
        self.heard: dict[int, int] = {}  # the last turn of each worker

    def load(self, slices: Mapping[str, Slice]) -> None:
        self.heard.clear()
        for name, part in slices.items():
            optimizer = Optimizer([nn.Parameter(part.weights.clone())], **part.settings)
            optimizer.load_state_dict(part.state)
            self.optimizers[name] = optimizer

    def move(self, worker: int, turn: int, moves: Mapping[str, Move]) -> None:
        """Once per turn, also when the worker died before it could tell, and another did the same turn again."""
        if self.heard.get(worker) == turn:
            return
        self.heard[worker] = turn
        for name, move in moves.items():
            optimizer = self.optimizers[name]
            optimizer.lr = move.lr
            optimizer.move([move.gradient.clone()], None, move.divisor)

    def weights(self) -> dict[str, Tensor]:
        return {name: optimizer.flat.clone() for name, optimizer in self.optimizers.items()}

    def state(self) -> dict[str, tuple[Tensor, dict[str, Any]]]:
        return {name: (each.flat.clone(), each.state_dict()) for name, each in self.optimizers.items()}


class ParameterServers:
    """All of them, as a worker or the run's own process sees them."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = list(handles)
        self.ray = imported()

    @staticmethod
    def start(cluster: Cluster, num: int) -> ParameterServers:
        remote = cluster.ray.remote(num_cpus=0)(Server)
        return ParameterServers([remote.remote() for _ in range(num)])

    def load(self, learner: Learner) -> None:
        """Give them the weights, and the moments of a run that is resumed."""
        parts: list[dict[str, Slice]] = [{} for _ in self.handles]
        for name, optimizer in learner.optimizers().items():
            state = optimizer.state_dict()
            settings = {"lr": optimizer.lr, "kind": optimizer.kind, "epsilon": optimizer.epsilon}
            for part, where in zip(parts, self._slices(optimizer), strict=True):
                own = {key: [m[where] for m in state[key]] for key in ("first_moment", "second_moment")}
                part[name] = Slice(optimizer.flat[where].clone(), {**state, **own}, settings)
        self._all("load", [(part,) for part in parts])

    def pull(self, learner: Learner) -> None:
        """Take the weights. Others may move those of one server while those of the next are taken."""
        found = self._all("weights", [()] * len(self.handles))
        for name, optimizer in learner.optimizers().items():
            optimizer.flat.copy_(torch.cat([part[name] for part in found]))

    def push(
        self, learner: Learner, found: Gradients, rates: Mapping[str, float], worker: int, turn: int
    ) -> Update | None:
        """Let them move the weights; None, and nothing is moved, where a gradient isn't finite."""
        moves: list[dict[str, Move]] = [{} for _ in self.handles]
        norms = []
        for name, gradient in found.by_optimizer.items():
            optimizer: Optimizer = getattr(learner, name)
            norm = torch.linalg.vector_norm(gradient[0])
            if not math.isfinite(norm.item()):
                return None
            norms.append(norm)
            divisor = optimizer.divisor(norm)
            for own, where in zip(moves, self._slices(optimizer), strict=True):
                own[name] = Move(gradient[0][where].clone(), divisor, rates[name])
        self._all("move", [(worker, turn, own) for own in moves])
        return Update({**found.metrics, "grad_norm": torch.linalg.vector_norm(torch.stack(norms))})

    def fetch(self, learner: Learner) -> None:
        """Weights and moments, into the learner whose state is saved."""
        found = self._all("state", [()] * len(self.handles))
        for name, optimizer in learner.optimizers().items():
            weights, states = zip(*(part[name] for part in found), strict=True)
            optimizer.flat.copy_(torch.cat(weights))
            whole = {
                key: [torch.cat(parts) for parts in zip(*(state[key] for state in states), strict=True)]
                for key in ("first_moment", "second_moment")
            }
            optimizer.load_state_dict({**states[0], **whole})

    def _slices(self, optimizer: Optimizer) -> list[slice]:
        """As equal as can be, in whole lines, so that what moves them rounds as over all at once."""
        lines, num = len(optimizer.flat) // ALIGN, len(self.handles)
        bounds = [lines * k // num * ALIGN for k in range(num + 1)]
        return [slice(bounds[k], bounds[k + 1]) for k in range(num)]

    def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = [getattr(server, method).remote(*own) for server, own in zip(self.handles, arguments, strict=True)]
        try:
            return list(self.ray.get(calls))
        except self.ray.exceptions.RayActorError:
            raise UserError(
                f"one of the {len(self.handles)} servers of the weights died (`zhixing resume` goes on)"
            ) from None


def check_servers(cfg: RunConfig, learner: Learner) -> None:
    """Refuse what can't be spread over servers."""
    num = cfg.distributed.servers
    if not cfg.distributed.workers or not learner.gradients_on_workers:
        raise UserError(
            f"distributed.servers={num} is for workers that take gradients by themselves: use a3c and set "
            f"distributed.workers, or leave the servers out"
        )
    for optimizer in learner.optimizers().values():
        if not optimizer.is_flat or len(optimizer.flat) < num * ALIGN:
            raise UserError(
                f"distributed.servers={num} can't have a slice each of these weights: none may be tied or frozen, and "
                f"there must be at least {ALIGN} per server"
            )
