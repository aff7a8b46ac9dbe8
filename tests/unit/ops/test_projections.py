"""Categorical projection: by hand, conservation of probability and mean, and against the paper's formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zhixing.ops.projections import categorical_projection

SUPPORT = torch.tensor([-1.0, 0.0, 1.0, 2.0])  # spacing 1


def project(values: list[float], probability: list[float], support: Tensor = SUPPORT) -> list[float]:
    return categorical_projection(torch.tensor([values]), torch.tensor([probability]), support)[0].tolist()


def test_values_on_atoms_are_unchanged() -> None:
    assert project([-1.0, 0.0, 1.0, 2.0], [0.125, 0.25, 0.5, 0.125]) == [0.125, 0.25, 0.5, 0.125]
    support = torch.linspace(-10.0, 10.0, 51)  # spacing 0.4, which is not exact in floating point
    probability = torch.arange(51.0).softmax(-1)
    assert project(support.tolist(), probability.tolist(), support) == pytest.approx(probability.tolist(), abs=1e-5)


def test_values_between_atoms_are_split_by_distance() -> None:
    # 0.25: ¾ of its probability ½ to 0 and ¼ to 1;  1.5: half of its probability ½ each to 1 and 2
    assert project([0.25, 1.5], [0.5, 0.5]) == [0.0, 0.375, 0.125 + 0.25, 0.25]


def test_values_beyond_the_support_are_clipped() -> None:
    assert project([-7.0, -1.0, 2.0, 1e38], [0.1, 0.2, 0.3, 0.4]) == pytest.approx([0.3, 0.0, 0.0, 0.7])
    assert project([-torch.inf, torch.inf], [0.25, 0.75]) == [0.25, 0.0, 0.0, 0.75]


def test_probabilities_on_one_atom_add_up() -> None:
    assert project([1.0, 1.0, 1.0, 1.0], [0.1, 0.2, 0.3, 0.4]) == pytest.approx([0.0, 0.0, 1.0, 0.0])


def test_c51_target_by_hand() -> None:
    # r + γ z with r = 1, γ = ½: z = -1, 0, 1, 2 becomes ½, 1, 1½, 2. Of ¼ each, ½ gives ⅛ to 0 and 1, 1 gives ¼ to 1,
    # 1½ gives ⅛ to 1 and 2, and 2 gives ¼ to 2
    assert project([0.5, 1.0, 1.5, 2.0], [0.25] * 4) == [0.0, 0.125, 0.5, 0.375]
    # terminated, γ = 0: all probability is on the reward
    assert project([1.0] * 4, [0.25] * 4) == [0.0, 0.0, 1.0, 0.0]


def brute_force(values: Tensor, probability: Tensor, support: Tensor) -> Tensor:
    """Equation 7: Σ_j [1 - |clip(value_j) - z_i| / Δz] p_j, with the bracket clipped at 0."""
    out, gap = torch.zeros(len(values), len(support)), float(support[1] - support[0])
    for b in range(len(values)):
        for value, p in zip(values[b].tolist(), probability[b].tolist(), strict=True):
            clipped = min(max(value, float(support[0])), float(support[-1]))
            for i, z in enumerate(support.tolist()):
                out[b, i] += max(0.0, 1.0 - abs(clipped - z) / gap) * p
    return out


@pytest.mark.parametrize(("low", "high", "atoms"), [(-10.0, 10.0, 51), (0.0, 100.0, 51), (-3.0, 0.1, 7), (0.0, 1.0, 2)])
def test_projection_equals_the_papers_formula_and_sums_to_1(low: float, high: float, atoms: int) -> None:
    rng = torch.Generator().manual_seed(0)
    support = torch.linspace(low, high, atoms)
    probability = torch.rand(8, atoms, generator=rng).softmax(-1)
    reward = torch.randn(8, 1, generator=rng) * (high - low) / 4
    discount = torch.tensor([0.0, 0.5, 0.9, 0.99, 1.0, 1.0, 0.99**3, 0.0])[:, None]
    values = reward + discount * support
    projected = categorical_projection(values, probability, support)
    assert torch.allclose(projected, brute_force(values, probability, support), atol=2e-5)
    assert torch.allclose(projected.sum(-1), torch.ones(8), atol=1e-6)
    assert (projected >= 0).all()


def test_mean_is_preserved_inside_the_support() -> None:
    support = torch.linspace(-10.0, 10.0, 51)
    probability = torch.rand(5, 51, generator=torch.Generator().manual_seed(1)).softmax(-1)
    values = 0.7 + 0.8 * support.expand(5, 51)
    mean = categorical_projection(values, probability, support) @ support
    assert torch.allclose(mean, 0.7 + 0.8 * (probability @ support), atol=1e-5)


def test_nan_values_give_nan_without_an_error() -> None:
    assert categorical_projection(torch.tensor([[torch.nan, 1.0]]), torch.tensor([[0.5, 0.5]]), SUPPORT).isnan().any()
