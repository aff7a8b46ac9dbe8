"""Batch renormalization, and networks that use it, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zhixing.nets.batch_norm import EPSILON, BatchNormTowers, BatchRenorm
from zhixing.nets.mlp import MLP
from zhixing.nets.simba import SimBa


def column(*values: float) -> Tensor:
    """Return inputs of one network with one unit, `[1,B,1]`."""
    return torch.tensor(values)[None, :, None]


def test_training_normalizes_by_the_batch_and_updates_running_statistics() -> None:
    norm = BatchRenorm(1, 1, warmup=10)
    # mean 4, variance 4
    y = norm(column(2.0, 6.0), train=True)
    expected = 2 / (4 + EPSILON) ** 0.5
    assert y.flatten().tolist() == pytest.approx([-expected, expected])
    # one hundredth of the way from 0 and 1 to 4 and 4
    assert norm.mean.item() == pytest.approx(0.04)
    assert norm.var.item() == pytest.approx(1.03)
    assert norm.batches.item() == 1


def test_evaluation_normalizes_by_running_statistics_and_changes_nothing() -> None:
    norm = BatchRenorm(1, 1, warmup=10)
    with torch.no_grad():
        norm.mean.fill_(1.0)
        norm.var.fill_(4.0)
        norm.scale.fill_(3.0)
        norm.shift.fill_(0.5)
    before = [tensor.clone() for tensor in norm.state_dict().values()]
    # (5 - 1) / 2 * 3 + 0.5
    assert norm(column(5.0), train=False).item() == pytest.approx(6.5, abs=2e-3)
    assert all(torch.equal(a, b) for a, b in zip(before, norm.state_dict().values(), strict=True))


def test_after_the_warmup_outputs_refer_to_the_running_statistics() -> None:
    norm = BatchRenorm(1, 1, warmup=2)
    with torch.no_grad():
        norm.mean.fill_(3.0)
        norm.var.fill_(1.0)
    x = column(2.0, 6.0)
    outputs = [norm(x, train=True) for _ in range(2)]
    assert [round(y.mean().item(), 6) for y in outputs] == [0.0, 0.0]  # plain batch normalization
    mean, std = norm.mean.item(), (norm.var.item() + EPSILON) ** 0.5
    # within the bounds, r and d undo the normalization by the batch: (x - μ) / σ
    assert norm(x, train=True).flatten().tolist() == pytest.approx([(2 - mean) / std, (6 - mean) / std], rel=1e-4)


def test_corrections_are_bounded_and_have_no_gradient() -> None:
    norm = BatchRenorm(1, 1, warmup=0)
    x = column(1000.0, 1200.0).requires_grad_()
    y = norm(x, train=True)
    # normalized by the batch -1 and 1; r = 100 is clipped to 3, d = 1100 to 5
    assert y.flatten().tolist() == pytest.approx([2.0, 8.0], rel=1e-4)
    # 3 (x - μ_B) / σ_B of two values is -3 and 3 for any x: its gradient vanishes
    (gradient,) = torch.autograd.grad(y[0, 1, 0], [x])
    assert gradient.abs().max().item() < 1e-5


def test_networks_have_separate_statistics() -> None:
    norm = BatchRenorm(2, 1, warmup=10)
    norm(torch.stack([column(1.0, 3.0)[0], column(10.0, 30.0)[0]]), train=True)
    assert norm.mean.flatten().tolist() == pytest.approx([0.02, 0.2])


def test_mlp_by_hand() -> None:
    towers = BatchNormTowers([MLP(1, [1], "relu", outputs=1)], warmup=10)
    with torch.no_grad():
        for weight, bias, value in zip(towers.weights, towers.biases, (2.0, 5.0), strict=True):
            weight.fill_(value)
            bias.fill_(1.0)
    # inputs 1, 3, normalized -1, 1; first layer -1, 3; relu 0, 3, normalized -1, 1; second layer -4, 6
    y = towers(torch.tensor([[1.0], [3.0]]), train=True)
    assert y.flatten().tolist() == pytest.approx([-4.0, 6.0], abs=1e-2)


@pytest.mark.parametrize("kind", [MLP, SimBa])
def test_towers_equal_separate_networks(kind: Any) -> None:
    networks = [kind(3, [8, 8], "relu", outputs=2) for _ in range(2)]
    towers, x = BatchNormTowers(networks, warmup=10), torch.randn(16, 3)
    for k, network in enumerate(networks):
        torch.testing.assert_close(towers(x, train=True)[k], forward_separately(network, x), rtol=1e-4, atol=1e-4)


def forward_separately(network: MLP | SimBa, x: Tensor) -> Tensor:
    """Return the outputs of a network with torch's batch normalization."""

    def normalize(h: Tensor) -> Tensor:
        return nn.functional.batch_norm(h, None, None, training=True, eps=EPSILON)

    first, *others = network.linears
    h = first(normalize(x))
    if isinstance(network, MLP):
        for linear in others:
            h = linear(normalize(h.relu()))
        return h
    *blocks, last = others
    for i in range(0, len(blocks), 2):
        h = h + blocks[i + 1](blocks[i](normalize(h)).relu())
    return last(normalize(h))
