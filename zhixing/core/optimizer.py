"""Optimizers that keep their parameters, gradients and moments in one flat tensor each.

Adam, clipping and target averaging are then one call each, whatever the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

_ENGINE: Any = torch.autograd.Variable._execution_engine
OptimizerKind = Literal["adam", "rmsprop"]
ALIGN = 16  # floats: every parameter starts on a 64-byte line
FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2_000  # of losses whose gradients pass through half precision


def flatten_parameters(parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Move parameters into one flat tensor, of which they become views that keep their strides.

    Returns that tensor, a second one of the same layout for gradients, and the views on the second.
    """
    offsets, total = [], 0
    for parameter in parameters:
        offsets.append(total)
        total += -(-parameter.numel() // ALIGN) * ALIGN
    flat = parameters[0].new_zeros(total, requires_grad=False)
    gradient = torch.zeros_like(flat)
    places = []
    for parameter, offset in zip(parameters, offsets, strict=True):
        view = torch.as_strided(flat, parameter.shape, parameter.stride(), offset)
        view.copy_(parameter.data)
        parameter.data = view
        places.append(torch.as_strided(gradient, parameter.shape, parameter.stride(), offset))
    return flat, gradient, places


def can_flatten(parameters: list[nn.Parameter]) -> bool:
    """Not when a weight is tied or frozen, types or devices are mixed, or a layout has holes."""
    first = parameters[0]
    return (
        len({id(p) for p in parameters}) == len(parameters) == len({p.data_ptr() for p in parameters})
        and all(p.requires_grad and p.dtype == first.dtype and p.device == first.device for p in parameters)
        and all(p.is_contiguous() or _is_channels_last(p) for p in parameters)
    )


def _is_channels_last(parameter: Tensor) -> bool:
    return parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)


class Optimizer:
    """Adam or RMSProp over one group of parameters: `step(gradient(loss))`.

    A gradient that isn't finite makes the step a no-op and is counted in `skipped`. Elsewhere than on the CPU this is
    decided on the device, and `skipped` is a tensor that nobody needs to read more than once per iteration.

    With `scaled`, for losses in half precision, gradients are those of the loss times a factor, and then divided by
    it, so that small ones don't vanish. Where that overflows, the step is left out, not counted, and the factor halved;
    after many good steps it doubles. Only what isn't finite at a factor of 1 is taken for broken.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        *,
        kind: OptimizerKind = "adam",
        epsilon: float = 1e-8,
        max_grad_norm: float | None = None,
        scaled: bool = False,
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.lr, self.kind, self.epsilon, self.max_grad_norm = lr, kind, epsilon, max_grad_norm
        self.is_flat = can_flatten(self.parameters)
        if self.is_flat:
            flat, gradient, self._places = flatten_parameters(self.parameters)
            self._weights, self._gradients = [flat], [gradient]
        else:
            self._weights = [p.data for p in self.parameters]
            self._gradients = self._places = [torch.zeros_like(p.data) for p in self.parameters]
        device = self._weights[0].device
        self.first_moment = [torch.zeros_like(w) for w in self._weights] if kind == "adam" else []
        self.second_moment = [torch.zeros_like(w) for w in self._weights]
        self.steps = [torch.zeros((), device=device) for _ in self._weights]
        # the same numbers, where they are here: counting in NumPy takes a tenth of the time
        self._counts = [count.numpy() for count in self.steps] if device.type == "cpu" else []
        self.skipped = torch.zeros((), device=device)
        self.broken: list[nn.Parameter] = []  # on the CPU: those whose gradients made the first skipped step one
        self.on_device = device.type != "cpu"  # where what is computed is better not waited for
        self.in_graph = False  # while a graph is recorded: no number may be read, and no call be left out
        self.rate = torch.tensor(lr, device=device)  # for graphs, in which a number would stay as it is
        self._told_rate = lr
        self.scale = torch.full((), FIRST_SCALE if scaled else 1.0, device=device)
        self.good_steps = 0  # since the factor was changed
        self.scaled, self._inputs = scaled, tuple(self.parameters)

    @property
    def flat(self) -> Tensor:
        """All weights in one tensor, where `is_flat`."""
        return self._weights[0]

    def gradient(self, loss: Tensor) -> list[Tensor]:
        """Gradients of `loss` by this group's parameters only, in the flat layout. Overwritten by the next call."""
        # what torch.autograd.grad ends in, without its checks per call (50 µs, a twentieth of a small update)
        if loss.dtype != torch.float32:
            loss = loss.float()
        found = _ENGINE.run_backward(
            (loss,), (self.scale,), False, False, self._inputs, allow_unreachable=True, accumulate_grad=False
        )
        if [g for g in found if g is None]:  # a list: half of the time of any()
            found = [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, found, strict=True)]
        if self.in_graph:
            return [self._joined(found)] if self.is_flat else list(found)
        torch._foreach_copy_(self._places, found)
        if self.scaled:
            torch._foreach_div_(self._gradients, self.scale)
        return self._gradients

    def _joined(self, found: Sequence[Tensor]) -> Tensor:
        """Gradients in the flat layout, as a new tensor: what a compiler likes better than writing to views."""
        rows = []
        for place, g in zip(self._places, found, strict=True):
            rows.append((g if place.is_contiguous() else g.permute(0, 2, 3, 1)).reshape(-1))  # in order of memory
            if place.numel() % ALIGN:
                rows.append(g.new_zeros(-place.numel() % ALIGN))
        return torch.cat(rows)

    def tell_rate(self) -> None:
        """Before a graph runs."""
        if self.lr != self._told_rate:
            self.rate.fill_(self.lr)
            self._told_rate = self.lr

    def step(self, gradient: list[Tensor]) -> Tensor:
        """Clip, move the weights, and return the gradient's norm before clipping."""
        flat = gradient[0] if len(gradient) == 1 else torch.stack([n.float() for n in torch._foreach_norm(gradient)])
        norm = torch.linalg.vector_norm(flat)
        if self.in_graph:
            self._step_in_graph(gradient, norm)
            return norm
        if self.scaled and self._overflows(norm):
            return torch.zeros_like(norm)
        bad: Tensor | None = None
        scale: Tensor | None = None
        if not self.on_device:  # here reading a number costs nothing, and calls that turn out unneeded do
            length = norm.item()
            if not math.isfinite(length):
                self.skipped += 1.0
                pairs = zip(self.parameters, self._places, strict=True)
                self.broken = self.broken or [p for p, place in pairs if not bool(place.isfinite().all())]
                return norm
            scale = self.divisor(norm)
        else:
            bad = norm.mul(0.0).ne_(0.0)  # 1 where it isn't finite, for then 0 times it is NaN
            self.skipped += bad
            scale = None if self.max_grad_norm is None else (norm / self.max_grad_norm).clamp_(min=1.0)
        self.move(gradient, bad, scale)
        return norm

    def divisor(self, norm: Tensor) -> Tensor | None:
        """What makes a gradient of this norm no longer than it may be; None where it isn't. Waits for the device."""
        return None if self.max_grad_norm is None or norm.item() <= self.max_grad_norm else norm / self.max_grad_norm

    def move(self, gradient: list[Tensor], bad: Tensor | None, divisor: Tensor | None) -> None:
        """Along a gradient whose length is known already; nowhere where `bad` is 1."""
        move = self._adam if self.kind == "adam" else self._rmsprop
        for i, g in enumerate(gradient):
            move(i, g, bad, divisor)

    def _overflows(self, norm: Tensor) -> bool:
        """Whether the factor was too large; then, or after many steps when it wasn't, it is another. Waits for the
        device."""
        if math.isfinite(norm.item()):
            self.good_steps += 1
            if self.good_steps == GROWTH_STEPS:
                self.scale *= 2.0
                self.good_steps = 0
            return False
        if self.scale <= 1.0:
            return False
        self.scale *= 0.5
        self.good_steps = 0
        return True

    def _adam(self, i: int, gradient: Tensor, bad: Tensor | None, scale: Tensor | None) -> None:
        if bad is None:
            self._counts[i] += 1.0
        else:
            self.steps[i] += 1.0 - bad
        # the one kernel that torch.optim.Adam(fused=True) ends in, without its bookkeeping per step (60 µs);
        # where `bad` is 1 it leaves weights and moments alone
        torch._fused_adam_(
            [self._weights[i]],
            [gradient],
            [self.first_moment[i]],
            [self.second_moment[i]],
            [],
            [self.steps[i]],
            lr=self.lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=self.epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=bad,
        )

    def _rmsprop(self, i: int, gradient: Tensor, bad: Tensor | None, scale: Tensor | None) -> None:
        clipped = gradient if scale is None else gradient / scale
        moment = self.second_moment[i]
        square = clipped.square()
        if bad is not None:
            clipped, square = torch.where(bad.bool(), 0.0, clipped), torch.where(bad.bool(), moment, square)
        moment.lerp_(square, 0.01)
        self._weights[i].addcdiv_(clipped, moment.sqrt().add_(self.epsilon), value=-self.lr)

    def _step_in_graph(self, gradient: list[Tensor], norm: Tensor) -> None:
        """The same in plain operations, which a compiler makes one loop of."""
        good = norm.isfinite()
        self.skipped += (~good).float()
        scale = None if self.max_grad_norm is None else (self.max_grad_norm / norm).clamp(max=1.0)
        for i, g in enumerate(gradient):
            clipped = g if scale is None else g * scale
            weights, second, steps = self._weights[i], self.second_moment[i], self.steps[i]
            if self.kind == "adam":
                first = self.first_moment[i]
                steps += good.float()
                new_first = first + (clipped - first) * (1 - 0.9)
                new_second = second + (clipped.square() - second) * (1 - 0.999)
                spread = (new_second / _share(0.999, steps)).sqrt() + self.epsilon
                move = self.rate / _share(0.9, steps) * new_first / spread
                first.copy_(torch.where(good, new_first, first))
            else:
                new_second = second + (clipped.square() - second) * 0.01
                move = self.rate * clipped / (new_second.sqrt() + self.epsilon)
            second.copy_(torch.where(good, new_second, second))
            weights.copy_(torch.where(good, weights - move, weights))

    def state_dict(self) -> dict[str, Any]:
        return {
            "first_moment": [m.clone() for m in self.first_moment],
            "second_moment": [m.clone() for m in self.second_moment],
            "steps": [s.clone() for s in self.steps],
            "skipped": self.skipped.clone(),
            **({"scale": self.scale.clone(), "good_steps": self.good_steps} if self.scaled else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("first_moment", "second_moment", "steps"):
            for mine, theirs in zip(getattr(self, name), state[name], strict=True):
                mine.copy_(theirs)
        self.skipped.copy_(state["skipped"])
        if self.scaled and "scale" in state:  # a run may be resumed with another precision
            self.scale.copy_(state["scale"])
            self.good_steps = state["good_steps"]


def _share(decay: float, steps: Tensor) -> Tensor:
    """1 - decay^n, which as it stands would lose half of its digits in the first steps. A compiler makes it anew for
    each weight, and finds vector instructions for tanh, but none for expm1: the whole step takes half the time so."""
    half = torch.tanh(steps * (0.5 * math.log(decay)))
    return 2.0 * half / (half - 1.0)


class Average:
    """A target network's weights follow another's: `w' += rate (w - w')`, in one call where both are flat."""

    def __init__(self, target: nn.Module, source: nn.Module) -> None:
        self.target, self.source = list(target.parameters()), list(source.parameters())
        self._buffers = list(zip(target.buffers(), source.buffers(), strict=True))
        for parameter in self.target:
            parameter.requires_grad_(False)
        flat = _common_base(self.source)
        if flat is not None:
            target_flat = torch.zeros_like(flat)
            for theirs, mine in zip(self.source, self.target, strict=True):
                view = torch.as_strided(target_flat, theirs.shape, theirs.stride(), theirs.storage_offset())
                view.copy_(mine.data)
                mine.data = view
            self._pairs = ([target_flat], [flat])
        else:
            self._pairs = ([p.data for p in self.target], [p.data for p in self.source])

    @torch.no_grad()
    def move(self, rate: float = 1.0) -> None:
        target, source = self._pairs
        if rate == 1.0:
            torch._foreach_copy_(target, source)
        else:
            torch._foreach_lerp_(target, source, rate)
        for mine, theirs in self._buffers:  # normalisers: statistics are shared, not averaged
            mine.copy_(theirs)


def _common_base(parameters: list[nn.Parameter]) -> Tensor | None:
    """The flat tensor that these parameters share, when nothing else lives in it."""
    first = parameters[0].data
    storage = first.untyped_storage()
    used = sum(-(-p.numel() // ALIGN) * ALIGN for p in parameters)
    shared = all(p.untyped_storage().data_ptr() == storage.data_ptr() for p in parameters)
    if len(parameters) < 2 or not shared or used * first.element_size() != storage.nbytes():
        return None
    return torch.as_strided(first, (used,), (1,), 0)
