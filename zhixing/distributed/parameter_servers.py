"""Parameter servers: Ray actors, each with a slice of the weights and of the optimizer's moments.

Workers pull weights from the servers and push gradients to them (Dean et al., 2012). Neither passes through the run's
main process, which fetches the weights only for evaluations and checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zhixing.config import RunConfig
from zhixing.core.learner import Gradients, LearnsOnWorkers, Update
from zhixing.core.optimizer import ALIGN, Optimizer
from zhixing.distributed.cluster import Cluster, import_ray
from zhixing.errors import UserError

MOMENTS = ("first_moment", "second_moment")  # keys of an optimizer's state that are sliced


class WeightSlice(NamedTuple):
    """A slice of an optimizer's weights and state."""

    weights: Tensor
    state: dict[str, Any]
    settings: dict[str, Any]  # arguments of `Optimizer`


class GradientSlice(NamedTuple):
    gradient: Tensor
    divisor: Tensor | None  # clips the norm of the whole gradient; None if nothing is clipped
    lr: float


class ParameterServer:
    """Ray actor that holds one slice of the weights and updates it."""

    def __init__(self) -> None:
        self.optimizer: Optimizer | None = None
        self.last_rollout: dict[int, int] = {}  # by worker: the rollout whose gradient was applied last

    def load(self, part: WeightSlice) -> None:
        self.last_rollout.clear()
        self.optimizer = Optimizer([nn.Parameter(part.weights.clone())], **part.settings)
        self.optimizer.load_state_dict(part.state)

    def apply(self, worker: int, rollout_id: int, part: GradientSlice) -> None:
        """Apply the gradient of a rollout.

        A restarted worker repeats the rollout in which its predecessor died. If the predecessor already sent the
        gradient, the second one is ignored.
        """
        if self.last_rollout.get(worker) == rollout_id:
            return
        self.last_rollout[worker] = rollout_id
        assert self.optimizer is not None
        self.optimizer.lr = part.lr
        self.optimizer.move([part.gradient.clone()], part.divisor)

    def weights(self) -> Tensor:
        assert self.optimizer is not None
        return self.optimizer.flat.clone()

    def state(self) -> tuple[Tensor, dict[str, Any]]:
        assert self.optimizer is not None
        return self.optimizer.flat.clone(), self.optimizer.state_dict()


class ParameterServers:
    """Client of all parameter servers, for workers and for the main process."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = list(handles)
        self.ray = import_ray()

    @staticmethod
    def start(cluster: Cluster, num: int) -> ParameterServers:
        remote = cluster.ray.remote(num_cpus=0)(ParameterServer)
        return ParameterServers([remote.remote() for _ in range(num)])

    def load(self, optimizer: Optimizer) -> None:
        """Send the weights and the optimizer's state to the servers."""
        state = optimizer.state_dict()
        parts = []
        for rows in self._slices(optimizer):
            moments = {key: [m[rows] for m in state[key]] for key in MOMENTS}
            parts.append(WeightSlice(optimizer.flat[rows].clone(), {**state, **moments}, optimizer.settings))
        self._call_all("load", [(part,) for part in parts])

    def pull(self, optimizer: Optimizer) -> None:
        """Fetch the weights. Other workers may push meanwhile, so slices may be some updates apart."""
        optimizer.flat.copy_(torch.cat(self._call_all("weights", [()] * len(self.handles))))

    def push(
        self, optimizer: Optimizer, gradients: Gradients, lr: float, worker: int, rollout_id: int
    ) -> Update | None:
        """Send gradients to the servers, which apply them. If they aren't finite, send nothing and return None."""
        (gradient,) = gradients.tensors
        norm = torch.linalg.vector_norm(gradient)
        if not math.isfinite(norm.item()):
            return None
        divisor = optimizer.clip_divisor(norm)
        parts = [GradientSlice(gradient[rows].clone(), divisor, lr) for rows in self._slices(optimizer)]
        self._call_all("apply", [(worker, rollout_id, part) for part in parts])
        return Update({**gradients.metrics, "grad_norm": norm})

    def fetch(self, optimizer: Optimizer) -> None:
        """Fetch the weights and the optimizer's state."""
        weights, states = zip(*self._call_all("state", [()] * len(self.handles)), strict=True)
        optimizer.flat.copy_(torch.cat(weights))
        moments = {
            key: [torch.cat(parts) for parts in zip(*(state[key] for state in states), strict=True)] for key in MOMENTS
        }
        optimizer.load_state_dict({**states[0], **moments})

    def _slices(self, optimizer: Optimizer) -> list[slice]:
        """Return nearly equal slices of whole cache lines, so vectorized arithmetic rounds as without servers."""
        lines, num = len(optimizer.flat) // ALIGN, len(self.handles)
        bounds = [lines * k // num * ALIGN for k in range(num + 1)]
        return [slice(bounds[k], bounds[k + 1]) for k in range(num)]

    def _call_all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = [getattr(server, method).remote(*args) for server, args in zip(self.handles, arguments, strict=True)]
        try:
            return list(self.ray.get(calls))
        except self.ray.exceptions.RayActorError:
            raise UserError(
                f"one of the {len(self.handles)} parameter servers died (continue with `zhixing resume`)"
            ) from None


def check_servers(cfg: RunConfig, learner: object) -> None:
    """Raise `UserError` if the weights of this run can't be sliced over parameter servers."""
    num = cfg.distributed.servers
    if not cfg.distributed.workers or not cfg.gradients_on_workers:
        raise UserError(
            f"distributed.servers={num} is for workers that compute gradients: use a3c and set distributed.workers, "
            f"or set distributed.servers=0"
        )
    assert isinstance(learner, LearnsOnWorkers)
    if learner.optimizer.custom is not None:
        raise UserError(
            f"distributed.servers={num} moves slices of the weights, which optimizer={learner.optimizer.kind} may not "
            f"allow: use adam, adamw, rmsprop or sgd, or set distributed.servers=0"
        )
    if not learner.optimizer.is_flat or len(learner.optimizer.flat) < num * ALIGN:
        raise UserError(
            f"distributed.servers={num} can't slice these weights: none may be tied or frozen, and there must be at "
            f"least {ALIGN} per server"
        )
