"""Noisy layers: linear without noise; the noise is factorized, drawn from the given generator, and not saved."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zhixing.nets.noisy import NoisyLinear, is_noisy, resample, zero_noise


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def effective_weights(layer: NoisyLinear) -> tuple[Tensor, Tensor]:
    """Return weights and biases including noise, computed from the outputs for unit vectors and zero."""
    inputs = layer.weight.shape[1]
    bias = layer(torch.zeros(1, inputs))[0]
    return (layer(torch.eye(inputs)) - bias).T, bias


def test_without_noise_it_is_a_linear_layer() -> None:
    layer, x = NoisyLinear(3, 2), torch.randn(5, 3)
    expected = F.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), expected)  # no initial noise
    resample(layer, rng())
    assert not torch.allclose(layer(x), expected)
    zero_noise(layer)
    assert torch.equal(layer(x), expected)


def test_noisy_weights_by_hand() -> None:
    layer = NoisyLinear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.weight_sigma.copy_(torch.tensor([[0.5, 0.25]]))
        layer.bias.fill_(3.0)
        layer.bias_sigma.fill_(0.1)
        layer.noise_in.copy_(torch.tensor([2.0, -4.0]))
        layer.noise_out.fill_(3.0)
    # weights 1 + 0.5 * 3 * 2 = 4 and 2 + 0.25 * 3 * -4 = -1, bias 3 + 0.1 * 3: 4 * 10 - 1 * 100 + 3.3
    assert layer(torch.tensor([[10.0, 100.0]])).item() == pytest.approx(-56.7)


def test_noise_depends_only_on_the_generator() -> None:
    layer, x = NoisyLinear(4, 3), torch.randn(2, 4)
    generator = rng(1)
    outs = []
    for _ in range(2):
        resample(layer, generator)
        outs.append(layer(x))
    assert not torch.allclose(outs[0], outs[1])
    resample(layer, rng(1))
    assert torch.equal(layer(x), outs[0])


def test_noise_is_factorized() -> None:
    layer = NoisyLinear(6, 5)
    resample(layer, rng(2))
    weight, bias = effective_weights(layer)
    noise = (weight - layer.weight) / layer.weight_sigma
    assert torch.linalg.matrix_rank(noise, rtol=1e-3) == 1
    # the bias has the noise f(ε_out), which is proportional to every column of the weights' noise
    column = (bias - layer.bias) / layer.bias_sigma
    assert torch.allclose(noise, torch.outer(column, layer.noise_in), atol=1e-4)


def test_noise_is_the_signed_root_of_a_normal() -> None:
    # f(ε) = sign(ε) √|ε| has mean 0 and variance E|ε| = √(2/π) = 0.798, its square is half-normal with E ε² = 1
    layer = NoisyLinear(200_000, 1)
    resample(layer, rng(3))
    noise = layer.noise_in
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(noise.var()) == pytest.approx((2 / torch.pi) ** 0.5, abs=0.01)
    assert float(noise.pow(4).mean()) == pytest.approx(1.0, abs=0.02)


def test_initial_weights_are_those_of_the_paper() -> None:
    layer = NoisyLinear(16, 8, sigma_init=0.4)
    # μ uniform in ±1/√16, σ = 0.4/√16
    assert layer.weight.abs().max() <= 0.25
    assert layer.weight.abs().max() > 0.2
    assert torch.allclose(layer.weight_sigma, torch.full((8, 16), 0.1))
    assert torch.allclose(layer.bias_sigma, torch.full((8,), 0.1))


def test_layers_get_different_noise() -> None:
    net = nn.Sequential(NoisyLinear(4, 4), nn.ReLU(), nn.Sequential(NoisyLinear(4, 4)))
    assert is_noisy(net)
    assert not is_noisy(nn.Sequential(nn.Linear(4, 4)))
    resample(net, rng())
    noises = list(net.buffers())
    assert len(noises) == 4
    assert len({tuple(noise.tolist()) for noise in noises}) == 4
    zero_noise(net)
    assert not any(noise.any() for noise in net.buffers())


def test_modules_without_noisy_layers_draw_nothing() -> None:
    net, generator = nn.Linear(3, 2), rng()
    before = generator.get_state()
    resample(net, generator)
    zero_noise(net)
    assert torch.equal(generator.get_state(), before)


def test_sigmas_have_gradients_only_with_noise() -> None:
    layer = NoisyLinear(3, 2)
    x = torch.ones(4, 3)
    without_noise = torch.autograd.grad(layer(x).sum(), [layer.weight_sigma, layer.bias_sigma])
    assert not any(g.any() for g in without_noise)
    resample(layer, rng())
    weight, bias = torch.autograd.grad(layer(x).sum(), [layer.weight_sigma, layer.bias_sigma])
    # by the chain rule: the noise of each weight, times the sum of its inputs
    assert torch.allclose(weight, 4.0 * torch.outer(layer.noise_out, layer.noise_in))
    assert torch.allclose(bias, 4.0 * layer.noise_out)


def test_noise_is_not_saved_and_not_shared_by_copies() -> None:
    layer = NoisyLinear(3, 2)
    assert set(layer.state_dict()) == {"weight", "bias", "weight_sigma", "bias_sigma"}
    clone = copy.deepcopy(layer)
    resample(layer, rng())
    assert not clone.noise_in.any()
