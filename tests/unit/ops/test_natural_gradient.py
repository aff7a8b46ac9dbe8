"""Conjugate gradient, Fisher-vector products and the line search, on systems small enough to solve by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from zhixing.ops.distributions import Categorical, Gaussian, MultiCategorical, SquashedGaussian
from zhixing.ops.natural_gradient import (
    assign_flat,
    conjugate_gradient,
    fisher_vector_product,
    flat_gradient,
    flatten_tensors,
    line_search,
    natural_step,
)

A = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
B = torch.tensor([1.0, 2.0])


# --- conjugate gradient ---


def test_conjugate_gradient_by_hand() -> None:
    # 4x + y = 1 and x + 3y = 2:  x = 1/11, y = 7/11
    x = conjugate_gradient(lambda v: A @ v, B, iterations=10)
    assert x.tolist() == pytest.approx([1 / 11, 7 / 11], rel=1e-5)


def test_first_iteration_is_steepest_descent() -> None:
    # step size bᵀb / bᵀAb = 5 / (1·6 + 2·7) = 1/4
    assert conjugate_gradient(lambda v: A @ v, B, iterations=1).tolist() == pytest.approx([0.25, 0.5])


def test_conjugate_gradient_stops_when_solved() -> None:
    calls = []

    def product(v: Tensor) -> Tensor:
        calls.append(v)
        return A @ v

    x = conjugate_gradient(product, B, iterations=50)
    assert len(calls) == 2  # one per unknown
    assert torch.isfinite(x).all()
    assert conjugate_gradient(product, torch.zeros(2), iterations=50).tolist() == [0.0, 0.0]
    assert len(calls) == 2


# --- Fisher-vector products ---


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()


def explicit_hessian(kl: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    gradient = flat_gradient(kl, parameters, differentiable=True)
    return torch.stack([flat_gradient(element, parameters) for element in gradient])


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_fisher_vector_product_is_the_hessian_of_the_kl(kind: str) -> None:
    model, x = net(), torch.randn(5, 2, generator=torch.Generator().manual_seed(1)).double()
    log_std = nn.Parameter(torch.tensor([0.1, -0.3, 0.2], dtype=torch.float64))
    parameters = [*model.parameters(), *([log_std] if kind == "gaussian" else [])]
    out = model(x)
    if kind == "categorical":
        kl = Categorical(out.detach()).kl(Categorical(out)).mean()
    else:
        kl = Gaussian(out.detach(), log_std.detach().clone()).kl(Gaussian(out, log_std)).mean()
    hessian = explicit_hessian(kl, parameters)
    product = fisher_vector_product(kl, parameters, damping=0.1)
    for v in torch.eye(len(hessian), dtype=torch.float64):
        assert torch.allclose(product(v), hessian @ v + 0.1 * v, atol=1e-10)
    assert torch.linalg.eigvalsh(hessian).min() > -1e-10  # the KL is at its minimum


def test_fisher_information_of_a_coin_by_hand() -> None:
    logit = nn.Parameter(torch.tensor([math.log(3.0)]))  # p = 3/4; the other logit is 0
    new = Categorical(torch.cat([logit, torch.zeros(1)]))
    old = Categorical(torch.tensor([math.log(3.0), 0.0]))
    product = fisher_vector_product(old.kl(new), [logit])
    assert product(torch.ones(1)).item() == pytest.approx(3 / 16, rel=1e-5)  # p (1 - p)


def test_natural_step_has_the_given_kl() -> None:
    step = natural_step(lambda v: A @ v, B, max_kl=0.01, iterations=10)
    assert 0.5 * (step @ A @ step).item() == pytest.approx(0.01, rel=1e-5)
    direction = torch.tensor([1.0, 7.0])  # direction of A⁻¹ b
    assert torch.allclose(step / step.norm(), direction / direction.norm(), atol=1e-6)
    assert natural_step(lambda v: A @ v, torch.zeros(2), 0.01, 10).tolist() == [0.0, 0.0]


# --- line search ---


def test_line_search_backtracks() -> None:
    points: list[float] = []

    def accepts(point: Tensor) -> bool:
        points.append(point.item())
        return point.item() <= 3.0

    # 1 + 8, 1 + 4, 1 + 2
    point, fraction = line_search(accepts, torch.tensor([1.0]), torch.tensor([8.0]), shrink=0.5, tries=10)
    assert points == [9.0, 5.0, 3.0]
    assert (point.item(), fraction) == (3.0, 0.25)


def test_line_search_accepts_the_full_step() -> None:
    point, fraction = line_search(lambda _: True, torch.tensor([1.0]), torch.tensor([8.0]), shrink=0.5, tries=10)
    assert (point.item(), fraction) == (9.0, 1.0)


def test_line_search_returns_the_start_if_nothing_is_accepted() -> None:
    calls = []
    point, fraction = line_search(
        lambda point: bool(calls.append(point)), torch.tensor([1.0]), torch.tensor([8.0]), shrink=0.5, tries=4
    )
    assert (point.item(), fraction, len(calls)) == (1.0, 0.0, 4)


# --- parameters as one vector ---


def test_assign_flat_writes_in_place() -> None:
    model = net()
    parameters = list(model.parameters())
    before = flatten_tensors(parameters).detach()
    assert before.shape == (2 * 3 + 3 + 3 * 3 + 3,)
    pointers = [p.data_ptr() for p in parameters]
    assign_flat(parameters, before + torch.arange(21.0))
    assert model[0].bias.tolist() == pytest.approx((before[6:9] + torch.tensor([6.0, 7.0, 8.0])).tolist())
    assert pointers == [p.data_ptr() for p in parameters]


def test_unused_parameters_have_zero_gradient() -> None:
    used, unused = nn.Parameter(torch.tensor([3.0])), nn.Parameter(torch.ones(2))
    assert flat_gradient(used.square().sum(), [used, unused]).tolist() == [6.0, 0.0, 0.0]


# --- KL ---


def test_categorical_kl_by_hand() -> None:
    old, new = Categorical(torch.tensor([0.5, 0.5]).log()), Categorical(torch.tensor([0.25, 0.75]).log())
    # 0.5 ln(0.5 / 0.25) + 0.5 ln(0.5 / 0.75) = 0.5 ln(4/3)
    assert old.kl(new).item() == pytest.approx(0.5 * math.log(4 / 3), rel=1e-5)
    # 0.25 ln(1/2) + 0.75 ln(3/2)
    assert new.kl(old).item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-5)
    assert old.kl(old).item() == 0.0


def test_masked_actions_do_not_contribute_to_the_kl() -> None:
    mask = torch.tensor([True, True, False])
    logits = torch.tensor([0.25, 0.75, 5.0]).log().requires_grad_()
    old, new = Categorical(torch.tensor([0.5, 0.5, 1.0]).log(), mask), Categorical(logits, mask)
    kl = old.kl(new)
    assert kl.item() == pytest.approx(0.5 * math.log(4 / 3), rel=1e-5)
    (gradient,) = torch.autograd.grad(kl, logits)
    # d/dlogit of the KL is new - old
    assert gradient.tolist() == pytest.approx([-0.25, 0.25, 0.0], abs=1e-6)


def test_multi_categorical_kl_sums_over_dimensions() -> None:
    old = MultiCategorical(torch.tensor([0.5, 0.5, 0.5, 0.5]).log(), [2, 2])
    new = MultiCategorical(torch.tensor([0.25, 0.75, 0.5, 0.5]).log(), [2, 2])
    assert old.kl(new).item() == pytest.approx(0.5 * math.log(4 / 3), rel=1e-5)


def test_gaussian_kl_by_hand() -> None:
    old = Gaussian(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0]))
    new = Gaussian(torch.tensor([1.0, 1.0]), torch.tensor([math.log(2.0), 0.0]))
    # ln(2 / 1) + (1² + 1²) / (2 · 2²) - 1/2 = ln 2 - 1/4; the second dimension is equal
    assert old.kl(new).item() == pytest.approx(math.log(2) - 0.25, rel=1e-5)
    assert old.kl(old).item() == 0.0
    squashed = (SquashedGaussian(d.mean, d.log_std) for d in (old, new))
    assert next(squashed).kl(next(squashed)).item() == pytest.approx(math.log(2) - 0.25, rel=1e-5)
