"""Natural gradients: steps measured by how far the policy moves, not by how far its weights do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn


def flatten_tensors(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@torch.no_grad()
def assign_flat(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Write a vector in the order of `flatten` back into the parameters, in place."""
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.copy_(part.view_as(parameter))


def flat_gradient(of: Tensor, parameters: Sequence[nn.Parameter], differentiable: bool = False) -> Tensor:
    """The gradient as one vector; its graph stays, since a natural gradient differentiates it again and again."""
    return flatten_tensors(
        torch.autograd.grad(
            of, parameters, retain_graph=True, create_graph=differentiable, allow_unused=True, materialize_grads=True
        )
    )


def fisher_vector_product(
    kl: Tensor, parameters: Sequence[nn.Parameter], damping: float = 0.0
) -> Callable[[Tensor], Tensor]:
    """`v -> (F + damping) v`, where F is the Hessian of `kl`, by differentiating twice instead of building F."""
    gradient = flat_gradient(kl, parameters, differentiable=True)

    def product(v: Tensor) -> Tensor:
        return flat_gradient(gradient @ v, parameters) + damping * v

    return product


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], b: Tensor, iterations: int, tolerance: float = 1e-10
) -> Tensor:
    """Solve `A x = b` for a positive A of which only `product(v) = A v` is known (Hestenes & Stiefel, 1952)."""
    x = torch.zeros_like(b)
    residual = direction = b
    size = residual @ residual
    for _ in range(iterations):
        if size <= tolerance:  # solved; another step would divide by zero
            break
        along = product(direction)
        length = size / (direction @ along)
        x = x + length * direction
        residual = residual - length * along
        size, before = residual @ residual, size
        direction = residual + size / before * direction
    return x


def natural_step(product: Callable[[Tensor], Tensor], gradient: Tensor, max_kl: float, iterations: int) -> Tensor:
    """The step uphill `s ∝ F⁻¹ g` whose divergence, `½ sᵀF s` to second order, is `max_kl`."""
    direction = conjugate_gradient(product, gradient, iterations)
    divergence = 0.5 * direction @ product(direction)
    return direction * (max_kl / divergence.clamp_min(1e-12)).sqrt()  # no gradient, no step


def line_search(
    accepts: Callable[[Tensor], bool], start: Tensor, step: Tensor, shrink: float, tries: int
) -> tuple[Tensor, float]:
    """The first accepted of `start + step`, `start + shrink · step`, `start + shrink² · step`, ... and its fraction.

    If none of them is, `start` itself and 0.
    """
    fraction = 1.0
    for _ in range(tries):
        point = start + fraction * step
        if accepts(point):
            return point, fraction
        fraction *= shrink
    return start, 0.0
