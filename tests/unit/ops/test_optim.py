"""The optimizers against torch's own, in both layouts, and what they do with a gradient that isn't finite."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zhixing.core.optimizer import Average, Optimizer, _share, can_flatten


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def tied() -> nn.Module:
    """Two parameters on the same memory."""
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = nn.Parameter(net[0].weight.data)
    return net


def frozen() -> nn.Module:
    net = plain()
    net[0].weight.requires_grad_(False)
    return net


def mixed() -> nn.Module:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).double()).float()

    torch.manual_seed(0)
    return Mixed()


LAYOUTS = {"plain": plain, "tied": tied, "frozen": frozen, "mixed": mixed}


def losses(net: nn.Module, steps: int) -> list[Callable[[], Tensor]]:
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(16, 3, generator=g), 10 * torch.randn(16, 1, generator=g)) for _ in range(steps)]
    return [lambda x=x, y=y: (net(x) - y).square().mean() for x, y in data]


def by_torch(net: nn.Module, kind: str, clip: float | None, steps: int = 20) -> list[float]:
    parameters = [p for p in net.parameters() if p.requires_grad]
    maker = torch.optim.Adam if kind == "adam" else torch.optim.RMSprop
    optimizer = maker(parameters, lr=0.01, eps=1e-5)
    norms = []
    for loss in losses(net, steps):
        optimizer.zero_grad()
        loss().backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, clip if clip is not None else 1e9)))
        optimizer.step()
    return norms


def by_ours(net: nn.Module, kind: str, clip: float | None, steps: int = 20, on_device: bool = False) -> list[float]:
    optimizer = Optimizer(net.parameters(), 0.01, kind=kind, epsilon=1e-5, max_grad_norm=clip)
    optimizer.on_device = on_device
    return [float(optimizer.step(optimizer.gradient(loss()))) for loss in losses(net, steps)]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_equal_torchs(layout: str, kind: str, clip: float | None) -> None:
    net = LAYOUTS[layout]()
    # a deep copy would keep tied memory apart or not as it likes: build it twice from the same weights
    theirs = LAYOUTS[layout]()
    theirs.load_state_dict(copy.deepcopy(net.state_dict()))
    norms, expected = by_ours(net, kind, clip), by_torch(theirs, kind, clip)
    assert norms == pytest.approx(expected, rel=1e-5)
    for (name, mine), other in zip(net.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6), name


@pytest.mark.parametrize("clip", [None, 0.5, 8.0])
@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_decisions_on_the_device_give_the_same_bits(kind: str, clip: float | None) -> None:
    nets = [plain(), plain()]
    norms = [by_ours(net, kind, clip, on_device=on_device) for net, on_device in zip(nets, (False, True), strict=True)]
    assert norms[0] == norms[1]
    assert clip != 8.0 or min(norms[0]) < clip < max(norms[0])  # some are clipped and some are not
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


def test_only_safe_layouts_are_flattened() -> None:
    assert can_flatten(list(plain().parameters()))
    assert not can_flatten(list(tied().parameters()))
    assert not can_flatten(list(frozen().parameters()))
    assert not can_flatten(list(mixed().parameters()))
    weight = nn.Parameter(torch.zeros(4, 6).T)  # a layout with strides of its own
    assert not can_flatten([weight, nn.Parameter(torch.zeros(2))])


def test_flat_parameters_are_views_of_one_tensor_with_the_old_values() -> None:
    net = plain()
    before = [p.detach().clone() for p in net.parameters()]
    Optimizer(net.parameters(), 0.1)
    assert len({p.untyped_storage().data_ptr() for p in net.parameters()}) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_convolutions_keep_their_strides_and_train_as_with_torch() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 1))
        return net.to(memory_format=torch.channels_last)

    net, theirs = make(), make()
    strides = net[0].weight.stride()
    optimizer = Optimizer(net.parameters(), 0.01)
    assert net[0].weight.stride() == strides
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert net[0].weight.untyped_storage().data_ptr() == net[2].weight.untyped_storage().data_ptr()
    other = torch.optim.Adam(theirs.parameters(), lr=0.01)
    x = torch.randn(8, 3, 5, 5)
    for _ in range(5):
        optimizer.step(optimizer.gradient(net(x).square().mean()))
        other.zero_grad()
        theirs(x).square().mean().backward()
        other.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(net.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
@pytest.mark.parametrize("layout", ["plain", "tied"])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    on_device: bool, layout: str, kind: str, clip: float | None, bad: float
) -> None:
    net = LAYOUTS[layout]()
    optimizer = Optimizer(net.parameters(), 0.01, kind=kind, max_grad_norm=clip)
    optimizer.on_device = on_device
    first, second = losses(net, 2)
    optimizer.step(optimizer.gradient(first()))
    weights = [p.detach().clone() for p in net.parameters()]
    state = optimizer.state_dict()
    gradient = optimizer.gradient(second())
    gradient[0].view(-1)[0] = bad
    optimizer.step(gradient)
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))
    after = optimizer.state_dict()
    assert after.pop("skipped") == 1.0
    assert state.pop("skipped") == 0.0
    assert all(torch.equal(a, b) for name in state for a, b in zip(state[name], after[name], strict=True))
    optimizer.step(optimizer.gradient(second()))
    assert not torch.equal(weights[0], next(net.parameters()))
    assert optimizer.skipped == 1.0


@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
@pytest.mark.parametrize("layout", ["plain", "tied"])
def test_a_restored_optimizer_goes_on_as_the_one_before(layout: str, kind: str) -> None:
    net = LAYOUTS[layout]()
    optimizer = Optimizer(net.parameters(), 0.01, kind=kind)
    for loss in losses(net, 3):
        optimizer.step(optimizer.gradient(loss()))
    weights, state = copy.deepcopy(net.state_dict()), optimizer.state_dict()
    for loss in losses(net, 5):
        optimizer.step(optimizer.gradient(loss()))
    again = LAYOUTS[layout]()
    restored = Optimizer(again.parameters(), 0.01, kind=kind)
    again.load_state_dict(weights)
    restored.load_state_dict(state)
    for loss in losses(again, 5):
        restored.step(restored.gradient(loss()))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_gradient_reaches_only_its_own_parameters() -> None:
    net = plain()
    optimizer = Optimizer(net[2].parameters(), 0.1)
    first = net[0].weight.detach().clone()
    optimizer.step(optimizer.gradient(losses(net, 1)[0]()))
    assert torch.equal(net[0].weight, first)
    assert net[0].weight.grad is None


def test_parameters_that_a_loss_does_not_use_have_zero_gradients() -> None:
    net = plain()
    optimizer = Optimizer(net.parameters(), 0.1)
    optimizer.gradient(losses(net, 1)[0]())  # leaves other numbers behind
    before = net[2].weight.detach().clone()
    norm = optimizer.step(optimizer.gradient(net[0].weight.sum()))
    assert norm.item() == pytest.approx(24**0.5)  # 8 x 3 ones
    assert torch.equal(net[2].weight, before)


@pytest.mark.parametrize("flat", [True, False])
def test_a_target_follows_in_both_layouts(flat: bool) -> None:
    source = plain()
    if flat:
        Optimizer(source.parameters(), 0.1)
    target = copy.deepcopy(source)
    follow = Average(target, source)
    start = [p.detach().clone() for p in source.parameters()]
    with torch.no_grad():
        for p in source.parameters():
            p.add_(8.0)
    assert torch.equal(target[0].weight, start[0])  # they share no memory
    follow.move(0.25)  # 0 + 0.25 * 8 = 2
    assert all(torch.allclose(p, s + 2.0) for p, s in zip(target.parameters(), start, strict=True))
    follow.move(0.5)  # 2 + 0.5 * 6 = 5
    assert all(torch.allclose(p, s + 5.0, atol=1e-6) for p, s in zip(target.parameters(), start, strict=True))
    follow.move()
    assert all(torch.equal(p, q) for p, q in zip(target.parameters(), source.parameters(), strict=True))
    assert not any(p.requires_grad for p in target.parameters())
    assert all(p.requires_grad for p in source.parameters())


def test_a_target_takes_over_statistics_whole() -> None:
    source = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    target = copy.deepcopy(source)
    follow = Average(target, source)
    source(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    follow.move(0.01)
    assert torch.equal(target[0].running_mean, source[0].running_mean)


def test_a_target_of_channels_last_convolutions_has_their_values() -> None:
    source = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3)).to(memory_format=torch.channels_last)
    Optimizer(source.parameters(), 0.1)
    target = copy.deepcopy(source)
    Average(target, source).move()
    x = torch.randn(1, 2, 7, 7)
    assert torch.allclose(target(x), source(x), atol=1e-6)


def test_scaled_losses_keep_what_half_precision_would_lose() -> None:
    """A gradient of 1e-8 is nothing in half precision, whose least number is 6e-8. Times 65,536 it isn't."""
    weight = nn.Parameter(torch.tensor([1.0]))
    for scaled, expected in ((False, 0.0), (True, 1e-8)):
        optimizer = Optimizer([weight], 1e-3, scaled=scaled)
        (found,) = optimizer.gradient((weight.half() * 1.0).sum().float() * 1e-8)
        assert found[0].item() == pytest.approx(expected, rel=1e-2)


def test_a_factor_that_overflows_is_halved_and_one_that_does_not_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """65,536 x 3 is more than half precision's 65,504, and so is 32,768 x 3; 16,384 x 3 isn't."""
    monkeypatch.setattr("zhixing.core.optimizer.GROWTH_STEPS", 2)
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = Optimizer([weight], 0.1, scaled=True)
    scales = []
    for _ in range(4):
        before = weight.item()
        norm = optimizer.step(optimizer.gradient((weight.half() * 3.0).sum()))
        scales.append((optimizer.scale.item(), weight.item() != before, norm.item()))
    assert scales == [
        (2.0**15, False, 0.0),
        (2.0**14, False, 0.0),
        (2.0**14, True, 3.0),
        (2.0**15, True, 3.0),  # two good steps: it tries more again
    ]
    assert optimizer.skipped == 0
    again = Optimizer([nn.Parameter(torch.tensor([1.0]))], 0.1, scaled=True)
    again.load_state_dict(optimizer.state_dict())
    assert again.scale == 2.0**15


def test_what_is_not_finite_without_a_factor_is_broken() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = Optimizer([weight], 0.1, scaled=True)
    for _ in range(17):  # from 65,536 to 1, and once more
        optimizer.step(optimizer.gradient((weight * torch.nan).sum()))
    assert optimizer.scale == 1.0
    assert optimizer.skipped == 1
    assert weight.item() == 1.0


@pytest.mark.parametrize("decay", [0.9, 0.999])
@pytest.mark.parametrize("steps", [1, 2, 10, 1_000, 1_000_000])
def test_a_graphs_share_of_a_moment_keeps_its_digits(decay: float, steps: int) -> None:
    # 1 - 0.999^1 = 0.001 in double precision; by floats it would be wrong from the fifth digit on
    exact = -math.expm1(steps * math.log(decay))
    assert float(_share(decay, torch.tensor(float(steps)))) == pytest.approx(exact, rel=3e-7)
