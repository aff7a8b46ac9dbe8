"""Optimizers and target networks with flat storage.

Parameters, gradients and moments of a group are one flat tensor each, so Adam, clipping and Polyak averaging are one
call each, for any number of layers.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zhixing.core.schedule import make_schedule
from zhixing.errors import UserError
from zhixing.utils.importing import import_object

_ENGINE: Any = torch.autograd.Variable._execution_engine
ALIGN = 16  # floats: every parameter starts on a 64-byte line
FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2_000  # of the loss scale for fp16


def flatten_parameters(parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Move parameters into one flat tensor; they become views of it that keep their strides.

    Returns this tensor, a second one of the same layout for gradients, and the views of the second.
    """
    offsets, total = [], 0
    for parameter in parameters:
        offsets.append(total)
        total += -(-parameter.numel() // ALIGN) * ALIGN
    flat = parameters[0].new_zeros(total, requires_grad=False)
    gradient = torch.zeros_like(flat)
    gradient_views = []
    for parameter, offset in zip(parameters, offsets, strict=True):
        view = torch.as_strided(flat, parameter.shape, parameter.stride(), offset)
        view.copy_(parameter.data)
        parameter.data = view
        gradient_views.append(torch.as_strided(gradient, parameter.shape, parameter.stride(), offset))
    return flat, gradient, gradient_views


def can_flatten(parameters: list[nn.Parameter]) -> bool:
    """Return False if a weight is tied or frozen, dtypes or devices are mixed, or a layout has holes."""
    first = parameters[0]
    return (
        len({id(p) for p in parameters}) == len(parameters) == len({p.data_ptr() for p in parameters})
        and all(p.requires_grad and p.dtype == first.dtype and p.device == first.device for p in parameters)
        and all(p.is_contiguous() or _is_channels_last(p) for p in parameters)
    )


def _is_channels_last(parameter: Tensor) -> bool:
    return parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)


class Optimizer:
    """Adam, AdamW, RMSProp, SGD or an optimizer of torch's kind over one group of parameters: `step(loss)`.

    `kind` is one of these names, or `your.module:MyOptimizer` for a class of torch.optim's interface, or a function
    that returns one. It is called with the parameters and `lr`. The other arguments mean the same as in torch.optim.

    A step whose gradients aren't finite is skipped and counted in `skipped`. On devices other than the CPU this is
    decided on the device, and `skipped` is a tensor that should be read once per iteration at most.

    With `loss_scaling`, for fp16, the loss is multiplied by `loss_scale` and the gradients are divided by it, so small
    gradients don't vanish. If they overflow, the step is skipped without being counted and the scale is halved; after
    `GROWTH_STEPS` good steps it doubles. Only gradients that aren't finite at a scale of 1 count as skipped.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        *,
        kind: str = "adam",
        schedule: str = "constant",
        epsilon: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        loss_scaling: bool = False,
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.lr, self.kind, self.epsilon, self.max_grad_norm = lr, kind, epsilon, max_grad_norm
        self.betas, self.momentum, self.weight_decay = betas, momentum, weight_decay
        self._initial_lr, self._schedule = lr, make_schedule("lr_schedule", schedule)
        self.is_flat = can_flatten(self.parameters)
        if self.is_flat:
            flat, gradient, self._gradient_views = flatten_parameters(self.parameters)
            self._weights, self._gradients = [flat], [gradient]
        else:
            self._weights = [p.data for p in self.parameters]
            self._gradients = self._gradient_views = [torch.zeros_like(p.data) for p in self.parameters]
        device = self._weights[0].device
        has_first = kind in ("adam", "adamw") or (kind == "sgd" and momentum > 0.0)
        has_second = kind in ("adam", "adamw", "rmsprop")
        self.first_moment = [torch.zeros_like(w) for w in self._weights] if has_first else []
        self.second_moment = [torch.zeros_like(w) for w in self._weights] if has_second else []
        self.steps = [torch.zeros((), device=device) for _ in self._weights]
        # NumPy views of `steps` on the CPU: incrementing them takes a tenth of the time
        self._step_counts = [count.numpy() for count in self.steps] if device.type == "cpu" else []
        self.skipped = torch.zeros((), device=device)
        self.nonfinite_parameters: list[nn.Parameter] = []  # on the CPU: the culprits of the first skipped step
        self.on_cpu = device.type == "cpu"
        self.version = 0  # changes whenever the optimizer's state does
        self.tracing = False  # while a graph is traced: no host synchronization, no data-dependent branch
        self.average: Callable[[list[Tensor]], None] | None = None  # averages gradients over several learners in place
        self.lr_tensor = torch.tensor(lr, device=device)  # read by compiled graphs, in which a float is a constant
        self._traced_lr = lr
        self.loss_scale = torch.full((), FIRST_SCALE if loss_scaling else 1.0, device=device)
        self.steps_since_overflow = 0
        self.loss_scaling, self._inputs = loss_scaling, tuple(self.parameters)
        self.custom = CustomOptimizer(kind, self.parameters, lr) if ":" in kind else None

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that another optimizer needs to move weights in the same way."""
        names = ("lr", "kind", "epsilon", "betas", "momentum", "weight_decay")
        return {name: getattr(self, name) for name in names}

    @property
    def flat(self) -> Tensor:
        """All weights in one tensor, if `is_flat`."""
        return self._weights[0]

    def step(self, loss: Tensor) -> Tensor:
        """Move the weights to minimize `loss`. Return the norm of the gradients before clipping.

        Only this group's parameters get gradients. With several learners the gradients are averaged over them.
        """
        gradients = self.compute_gradients(loss)
        if self.average is not None:
            self.average(gradients)
        norm = self.apply(gradients)
        if torch.is_autocast_enabled(norm.device.type):
            torch.clear_autocast_cache()  # it holds casts of the weights before this step
        return norm

    def compute_gradients(self, loss: Tensor) -> list[Tensor]:
        """Return the gradients of `loss` in the flat layout. The next call overwrites them."""
        # calls the engine as torch.autograd.grad does, without its checks (50 µs, a twentieth of a small update)
        if loss.dtype != torch.float32:
            loss = loss.float()
        gradients = _ENGINE.run_backward(
            (loss,), (self.loss_scale,), False, False, self._inputs, allow_unreachable=True, accumulate_grad=False
        )
        if [g for g in gradients if g is None]:  # a list: half of the time of any()
            pairs = zip(self.parameters, gradients, strict=True)
            gradients = [torch.zeros_like(p) if g is None else g for p, g in pairs]
        if self.tracing:
            return [self._concatenate(gradients)] if self.is_flat else list(gradients)
        torch._foreach_copy_(self._gradient_views, gradients)
        if self.loss_scaling:
            torch._foreach_div_(self._gradients, self.loss_scale)
        return self._gradients

    def _concatenate(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return gradients in the flat layout as a new tensor, which compiles better than writes to views."""
        rows = []
        for view, g in zip(self._gradient_views, gradients, strict=True):
            rows.append((g if view.is_contiguous() else g.permute(0, 2, 3, 1)).reshape(-1))  # in memory order
            if view.numel() % ALIGN:
                rows.append(g.new_zeros(-view.numel() % ALIGN))
        return torch.cat(rows)

    def apply(self, gradients: list[Tensor]) -> Tensor:
        """Clip `gradients` and move the weights along them. Return their norm before clipping."""
        self.version += 1
        norms = (
            gradients[0] if len(gradients) == 1 else torch.stack([n.float() for n in torch._foreach_norm(gradients)])
        )
        norm = torch.linalg.vector_norm(norms)
        if self.tracing:
            self._apply_traced(gradients, norm)
        elif self.loss_scaling and self._overflows(norm):
            return torch.zeros_like(norm)
        elif self.on_cpu:  # reading a number is free here, additional calls are not
            self._apply_on_cpu(gradients, norm)
        else:
            nonfinite = norm.mul(0.0).ne_(0.0)  # 1 if the norm isn't finite: 0 times it is NaN then
            self.skipped += nonfinite
            divisor = None if self.max_grad_norm is None else (norm / self.max_grad_norm).clamp_(min=1.0)
            self.move(gradients, divisor, nonfinite)
        return norm

    def _apply_on_cpu(self, gradients: list[Tensor], norm: Tensor) -> None:
        if math.isfinite(norm.item()):
            self.move(gradients, self.clip_divisor(norm))
            return
        self.skipped += 1.0
        if not self.nonfinite_parameters:
            pairs = zip(self.parameters, self._gradient_views, strict=True)
            self.nonfinite_parameters = [p for p, view in pairs if not bool(view.isfinite().all())]

    def clip_divisor(self, norm: Tensor) -> Tensor | None:
        """Return the divisor that clips gradients of this norm, or None for no clipping. Waits for the device."""
        return None if self.max_grad_norm is None or norm.item() <= self.max_grad_norm else norm / self.max_grad_norm

    def move(self, gradients: list[Tensor], divisor: Tensor | None, nonfinite: Tensor | None = None) -> None:
        """Move the weights to follow gradients divided by `divisor`, unless `nonfinite` is 1."""
        if self.custom is not None:
            self._move_custom(self.custom, gradients, divisor, nonfinite)
            return
        rule = {"rmsprop": self._rmsprop, "sgd": self._sgd}.get(self.kind, self._adam)
        for i, gradient in enumerate(gradients):
            rule(i, gradient, divisor, nonfinite)

    def _overflows(self, norm: Tensor) -> bool:
        """Return whether the loss scale was too large, and adapt it. Waits for the device."""
        if math.isfinite(norm.item()):
            self.steps_since_overflow += 1
            if self.steps_since_overflow == GROWTH_STEPS:
                self.loss_scale *= 2.0
                self.steps_since_overflow = 0
            return False
        if self.loss_scale <= 1.0:
            return False
        self.loss_scale *= 0.5
        self.steps_since_overflow = 0
        return True

    def _adam(self, i: int, gradient: Tensor, divisor: Tensor | None, nonfinite: Tensor | None) -> None:
        if nonfinite is None:
            self._step_counts[i] += 1.0
        else:
            self.steps[i] += 1.0 - nonfinite
        # the kernel of torch.optim.Adam(fused=True), without its bookkeeping per step (60 µs); it doesn't change
        # weights and moments if `found_inf` is 1
        kernel = torch._fused_adamw_ if self.kind == "adamw" else torch._fused_adam_
        kernel(
            [self._weights[i]],
            [gradient],
            [self.first_moment[i]],
            [self.second_moment[i]],
            [],
            [self.steps[i]],
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=nonfinite,
        )

    def _rmsprop(self, i: int, gradient: Tensor, divisor: Tensor | None, nonfinite: Tensor | None) -> None:
        clipped = gradient if divisor is None else gradient / divisor
        if self.weight_decay:
            clipped = clipped.add(self._weights[i], alpha=self.weight_decay)
        moment = self.second_moment[i]
        square = clipped.square()
        if nonfinite is not None:
            skip = nonfinite.bool()
            clipped, square = torch.where(skip, 0.0, clipped), torch.where(skip, moment, square)
        moment.lerp_(square, 0.01)
        self._weights[i].addcdiv_(clipped, moment.sqrt().add_(self.epsilon), value=-self.lr)

    def _sgd(self, i: int, gradient: Tensor, divisor: Tensor | None, nonfinite: Tensor | None) -> None:
        torch._fused_sgd_(
            [self._weights[i]],
            [gradient],
            self.first_moment[i : i + 1],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=divisor,
            found_inf=nonfinite,
        )

    def _move_custom(
        self, custom: CustomOptimizer, gradients: list[Tensor], divisor: Tensor | None, nonfinite: Tensor | None
    ) -> None:
        if nonfinite is not None and bool(nonfinite):  # waits for the device: these optimizers can't skip on it
            return
        if gradients is not self._gradients:  # those of another process
            torch._foreach_copy_(self._gradients, gradients)
        if divisor is not None:
            torch._foreach_div_(self._gradients, divisor)
        custom.step(self._gradient_views, self.lr)

    def _apply_traced(self, gradients: list[Tensor], norm: Tensor) -> None:
        """Clip and apply in plain operations, which a compiler fuses into one loop."""
        finite = norm.isfinite()
        self.skipped += (~finite).float()
        factor = None if self.max_grad_norm is None else (self.max_grad_norm / norm).clamp(max=1.0)
        for i, g in enumerate(gradients):
            clipped = g if factor is None else g * factor
            weights = self._weights[i]
            if self.weight_decay and self.kind != "adamw":
                clipped = clipped + self.weight_decay * weights
            change = self._traced_change(i, clipped, finite)
            if self.weight_decay and self.kind == "adamw":
                change = change + self.lr_tensor * self.weight_decay * weights
            weights.copy_(torch.where(finite, weights - change, weights))

    def _traced_change(self, i: int, clipped: Tensor, finite: Tensor) -> Tensor:
        """Update the moments, if `finite`, and return the change of the weights."""
        if self.kind == "sgd":
            if not self.momentum:
                return self.lr_tensor * clipped
            first = self.first_moment[i]
            new_first = self.momentum * first + clipped
            first.copy_(torch.where(finite, new_first, first))
            return self.lr_tensor * new_first
        second = self.second_moment[i]
        if self.kind == "rmsprop":
            new_second = second + (clipped.square() - second) * 0.01
            change = self.lr_tensor * clipped / (new_second.sqrt() + self.epsilon)
        else:
            (beta1, beta2), first, steps = self.betas, self.first_moment[i], self.steps[i]
            steps += finite.float()
            new_first = first + (clipped - first) * (1 - beta1)
            new_second = second + (clipped.square() - second) * (1 - beta2)
            denominator = (new_second / _bias_correction(beta2, steps)).sqrt() + self.epsilon
            change = self.lr_tensor / _bias_correction(beta1, steps) * new_first / denominator
            first.copy_(torch.where(finite, new_first, first))
        second.copy_(torch.where(finite, new_second, second))
        return change

    def set_progress(self, fraction: float) -> None:
        """Set the learning rate by the schedule, to its value at this fraction of the budget."""
        if self._schedule is not None:
            self.lr = self._initial_lr * self._schedule(fraction)

    def update_lr_tensor(self) -> None:
        """Copy `lr` to the tensor that compiled graphs read. Called before a graph runs."""
        if self.lr != self._traced_lr:
            self.lr_tensor.fill_(self.lr)
            self._traced_lr = self.lr

    def state_dict(self) -> dict[str, Any]:
        scaling = {"loss_scale": self.loss_scale.clone(), "steps_since_overflow": self.steps_since_overflow}
        return {
            "first_moment": [m.clone() for m in self.first_moment],
            "second_moment": [m.clone() for m in self.second_moment],
            "steps": [s.clone() for s in self.steps],
            "skipped": self.skipped.clone(),
            **(scaling if self.loss_scaling else {}),
            **({} if self.custom is None else {"custom": self.custom.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version += 1
        for name in ("first_moment", "second_moment", "steps"):
            for current, saved in zip(getattr(self, name), state[name], strict=True):
                current.copy_(saved)
        self.skipped.copy_(state["skipped"])
        if self.custom is not None:
            self.custom.load_state_dict(state["custom"])
        if self.loss_scaling and "loss_scale" in state:  # a run may be resumed with another precision
            self.loss_scale.copy_(state["loss_scale"])
            self.steps_since_overflow = state["steps_since_overflow"]


class CustomOptimizer:
    """A user's optimizer of torch's kind, on the parameters of an `Optimizer`."""

    def __init__(self, name: str, parameters: list[nn.Parameter], lr: float) -> None:
        self.parameters, self._lr = parameters, lr
        make = import_object(name)
        try:
            self.optimizer = make(parameters, lr=lr)
        except TypeError as error:
            raise UserError(
                f"optimizer={name} can't be called with (parameters, lr={lr:g}): {error}; for other arguments, name a "
                f"function of parameters and lr that returns the optimizer"
            ) from error
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise UserError(
                f"optimizer={name} is not an optimizer of torch: use a class derived from torch.optim.Optimizer, or a "
                f"function of parameters and lr that returns an object of one"
            )
        arguments = inspect.signature(self.optimizer.step).parameters.values()
        if any(a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD for a in arguments):
            raise UserError(f"optimizer={name} needs a closure that computes the loss: use one with step()")
        self._initial_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._initial_lr = lr

    def step(self, gradients: list[Tensor], lr: float) -> None:
        """Move the parameters. `lr` scales the learning rates of all parameter groups."""
        if lr != self._lr:  # otherwise left alone: an optimizer may change its learning rates itself
            for group, initial in zip(self.optimizer.param_groups, self._initial_lrs, strict=True):
                group["lr"] = initial * (lr / self._initial_lr)
            self._lr = lr
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.autocast(self.parameters[0].device.type, enabled=False):
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self._lr, "state": copy.deepcopy(self.optimizer.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lr = state["lr"]
        self.optimizer.load_state_dict(copy.deepcopy(state["state"]))


def _bias_correction(decay: float, steps: Tensor) -> Tensor:
    """Return 1 - decay^steps. Computed as written, half of the digits would be lost in the first steps.

    Compilers evaluate it for each weight. They vectorize tanh but not expm1, so the whole step takes half the time.
    """
    half = torch.tanh(steps * (0.5 * math.log(decay)))
    return 2.0 * half / (half - 1.0)


class TargetUpdater:
    """Moves target networks towards their sources, in one call for all weights that are flat."""

    def __init__(self, *pairs: tuple[nn.Module, nn.Module]) -> None:
        """`pairs` are (target, source). The targets' parameters lose their gradients."""
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._buffers = [
            pair for target, source in pairs for pair in zip(target.buffers(), source.buffers(), strict=True)
        ]
        for target, source in pairs:
            self._add(list(target.parameters()), list(source.parameters()))

    def _add(self, target: list[nn.Parameter], source: list[nn.Parameter]) -> None:
        for parameter in target:
            parameter.requires_grad_(False)
        flat = _common_base(source)
        if flat is None:
            self._targets += [p.data for p in target]
            self._sources += [p.data for p in source]
            return
        target_flat = torch.zeros_like(flat)
        for source_parameter, parameter in zip(source, target, strict=True):
            shape, stride, offset = source_parameter.shape, source_parameter.stride(), source_parameter.storage_offset()
            view = torch.as_strided(target_flat, shape, stride, offset)
            view.copy_(parameter.data)
            parameter.data = view
        self._targets.append(target_flat)
        self._sources.append(flat)

    @torch.no_grad()
    def polyak_update(self, tau: float = 1.0) -> None:
        """Move the targets: w' ← (1 - tau) w' + tau w. Buffers, such as statistics of normalizers, are copied."""
        if tau == 1.0:
            torch._foreach_copy_(self._targets, self._sources)
        else:
            torch._foreach_lerp_(self._targets, self._sources, tau)
        for target, source in self._buffers:
            target.copy_(source)


def _common_base(parameters: list[nn.Parameter]) -> Tensor | None:
    """Return the flat tensor that these parameters share, or None if it holds anything else."""
    first = parameters[0].data
    storage = first.untyped_storage()
    used = sum(-(-p.numel() // ALIGN) * ALIGN for p in parameters)
    shared = all(p.untyped_storage().data_ptr() == storage.data_ptr() for p in parameters)
    if len(parameters) < 2 or not shared or used * first.element_size() != storage.nbytes():
        return None
    return torch.as_strided(first, (used,), (1,), 0)
