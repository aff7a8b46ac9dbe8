"""Natural gradients: steps whose size is measured by the change of the policy (KL), not of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn


def flatten_tensors(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@torch.no_grad()
def assign_flat(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Write a flat vector, in the order of `flatten_tensors`, into the parameters."""
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.copy_(part.view_as(parameter))


def flat_gradient(loss: Tensor, parameters: Sequence[nn.Parameter], differentiable: bool = False) -> Tensor:
    """Return the gradient as one vector. The graph is kept, because conjugate gradients differentiate repeatedly."""
    return flatten_tensors(
        torch.autograd.grad(
            loss, parameters, retain_graph=True, create_graph=differentiable, allow_unused=True, materialize_grads=True
        )
    )


def fisher_vector_product(
    kl: Tensor, parameters: Sequence[nn.Parameter], damping: float = 0.0
) -> Callable[[Tensor], Tensor]:
    """Return `v -> (F + damping I) v`, where F is the Hessian of `kl`. F itself is never built."""
    gradient = flat_gradient(kl, parameters, differentiable=True)

    def product(v: Tensor) -> Tensor:
        return flat_gradient(gradient @ v, parameters) + damping * v

    return product


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], b: Tensor, iterations: int, tolerance: float = 1e-10
) -> Tensor:
    """Solve `A x = b` for a positive definite A, given only `product(v) = A v` (Hestenes & Stiefel, 1952)."""
    x = torch.zeros_like(b)
    residual = direction = b
    squared_norm = residual @ residual
    for _ in range(iterations):
        if squared_norm <= tolerance:  # solved; another step would divide by zero
            break
        product_direction = product(direction)
        step_size = squared_norm / (direction @ product_direction)
        x = x + step_size * direction
        residual = residual - step_size * product_direction
        squared_norm, previous = residual @ residual, squared_norm
        direction = residual + squared_norm / previous * direction
    return x


def natural_step(product: Callable[[Tensor], Tensor], gradient: Tensor, max_kl: float, iterations: int) -> Tensor:
    """Return the ascent step `s ∝ F⁻¹ g` whose KL, `½ sᵀF s` to second order, is `max_kl`."""
    direction = conjugate_gradient(product, gradient, iterations)
    kl = 0.5 * direction @ product(direction)
    return direction * (max_kl / kl.clamp_min(1e-12)).sqrt()  # clamped: a zero gradient gives a zero step


def line_search(
    accepts: Callable[[Tensor], bool], start: Tensor, step: Tensor, shrink: float, tries: int
) -> tuple[Tensor, float]:
    """Return the first accepted point of `start + shrink^k · step`, k = 0, 1, ..., and the fraction `shrink^k`.

    Returns `start` and 0 if none of `tries` points is accepted.
    """
    fraction = 1.0
    for _ in range(tries):
        point = start + fraction * step
        if accepts(point):
            return point, fraction
        fraction *= shrink
    return start, 0.0
