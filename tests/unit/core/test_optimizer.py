"""The optimizer gives torch's results in both layouts, skips non-finite steps and scales losses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zhixing.core.optimizer import Optimizer, TargetUpdater, _bias_correction, can_flatten
from zhixing.errors import UserError


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def tied() -> nn.Module:
    """Return a network in which two parameters share memory."""
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = nn.Parameter(net[0].weight.data)
    return net


def frozen() -> nn.Module:
    net = plain()
    net[0].weight.requires_grad_(False)
    return net


def mixed() -> nn.Module:
    """Return a network with parameters of two dtypes."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).double()).float()

    torch.manual_seed(0)
    return Mixed()


# arguments of the optimizer, and the optimizer of torch that must give the same weights
KINDS: dict[str, dict[str, Any]] = {
    "adam": {"kind": "adam"},
    "adam with L2": {"kind": "adam", "weight_decay": 0.1, "betas": (0.8, 0.99)},
    "adamw": {"kind": "adamw", "weight_decay": 0.1, "betas": (0.8, 0.99)},
    "rmsprop": {"kind": "rmsprop"},
    "rmsprop with L2": {"kind": "rmsprop", "weight_decay": 0.1},
    "sgd": {"kind": "sgd"},
    "sgd with momentum": {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.1},
    "custom": {"kind": "torch.optim:NAdam"},
}
TORCH: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-5),
    "adam with L2": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-5, weight_decay=0.1, betas=(0.8, 0.99)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-5, weight_decay=0.1, betas=(0.8, 0.99)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-5),
    "rmsprop with L2": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-5, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "custom": lambda p: torch.optim.NAdam(p, lr=0.01),
}
LAYOUTS = {"plain": plain, "tied": tied, "frozen": frozen, "mixed": mixed}


def losses(net: nn.Module, steps: int) -> list[Callable[[], Tensor]]:
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(16, 3, generator=g), 10 * torch.randn(16, 1, generator=g)) for _ in range(steps)]
    return [lambda x=x, y=y: (net(x) - y).square().mean() for x, y in data]


def train_with_torch(net: nn.Module, kind: str, clip: float | None, steps: int = 20) -> list[float]:
    """Train and return the norms of the gradients."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = TORCH[kind](parameters)
    norms = []
    for loss in losses(net, steps):
        optimizer.zero_grad()
        loss().backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, clip if clip is not None else 1e9)))
        optimizer.step()
    return norms


def train(net: nn.Module, kind: str, clip: float | None, steps: int = 20, on_cpu: bool = True) -> list[float]:
    """Like `train_with_torch`, with zhixing's optimizer. `on_cpu=False` takes the code path of accelerators."""
    optimizer = Optimizer(net.parameters(), 0.01, **KINDS[kind], epsilon=1e-5, max_grad_norm=clip)
    optimizer.on_cpu = on_cpu
    return [float(optimizer.step(loss())) for loss in losses(net, steps)]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_equal_those_of_torch(layout: str, kind: str, clip: float | None) -> None:
    # each network is built separately, because copy.deepcopy would untie tied weights
    net, reference = LAYOUTS[layout](), LAYOUTS[layout]()
    reference.load_state_dict(copy.deepcopy(net.state_dict()))
    norms, expected = train(net, kind, clip), train_with_torch(reference, kind, clip)
    assert norms == pytest.approx(expected, rel=1e-5)
    for (name, p), q in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6), name


@pytest.mark.parametrize("clip", [None, 0.5, 8.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_code_path_of_accelerators_gives_the_same_bits(kind: str, clip: float | None) -> None:
    nets = [plain(), plain()]
    norms = [train(net, kind, clip, on_cpu=on_cpu) for net, on_cpu in zip(nets, (True, False), strict=True)]
    assert norms[0] == norms[1]
    assert clip != 8.0 or min(norms[0]) < clip < max(norms[0])  # some steps are clipped and some are not
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


def first_steps(**settings: Any) -> list[float]:
    """Return the weight, 2 at first, after steps with the gradients 3 and 1 and a learning rate of 0.1."""
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = Optimizer([weight], 0.1, **settings)
    weights = []
    for gradient in (3.0, 1.0):
        optimizer.step((gradient * weight).sum())
        weights.append(weight.item())
    return weights


def test_steps_of_sgd_by_hand() -> None:
    assert first_steps(kind="sgd") == pytest.approx([2 - 0.3, 1.7 - 0.1])
    # the second direction is 0.5 * 3 + 1 = 2.5
    assert first_steps(kind="sgd", momentum=0.5) == pytest.approx([1.7, 1.7 - 0.25])
    # the directions are 3 + 0.5 * 2 = 4 and 1 + 0.5 * 1.6 = 1.8
    assert first_steps(kind="sgd", weight_decay=0.5) == pytest.approx([1.6, 1.6 - 0.18])


def test_adamw_shrinks_the_weights_apart_from_the_step() -> None:
    # Adam's first step is lr for any gradient; decay first multiplies the weight by 1 - 0.1 * 0.5
    assert first_steps(kind="adamw", weight_decay=0.5)[0] == pytest.approx(2 * 0.95 - 0.1)
    assert first_steps(kind="adam", weight_decay=0.5)[0] == pytest.approx(2 - 0.1)
    assert first_steps(kind="adamw") == first_steps(kind="adam")


def test_schedule_scales_the_learning_rate() -> None:
    optimizer = Optimizer([nn.Parameter(torch.ones(1))], 0.4, schedule="cosine")
    for fraction, lr in ((0.0, 0.4), (0.5, 0.2), (2 / 3, 0.1), (1.0, 0.0)):  # cos(2/3 pi) = -1/2
        optimizer.set_progress(fraction)
        assert optimizer.lr == pytest.approx(lr)


def two_groups(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return SGD with a tenth of the learning rate for the biases."""
    biases = [p for p in parameters if p.ndim == 1]
    weights = [p for p in parameters if p.ndim > 1]
    return torch.optim.SGD([{"params": weights}, {"params": biases, "lr": 0.1 * lr}], lr=lr)


def test_custom_optimizer_keeps_the_ratio_of_its_learning_rates_and_those_that_it_sets() -> None:
    optimizer = Optimizer(plain().parameters(), 0.4, kind=f"{__name__}:two_groups", schedule="linear")
    assert optimizer.custom is not None
    groups = optimizer.custom.optimizer.param_groups
    optimizer.set_progress(0.75)
    optimizer.step(sum(p.sum() for p in optimizer.parameters))
    assert [group["lr"] for group in groups] == pytest.approx([0.1, 0.01])
    groups[0]["lr"] = 7.0  # as an optimizer that adapts its learning rate would
    optimizer.step(sum(p.sum() for p in optimizer.parameters))
    restored = Optimizer(plain().parameters(), 0.4, kind=f"{__name__}:two_groups", schedule="linear")
    restored.load_state_dict(optimizer.state_dict())
    assert restored.custom is not None
    restored.set_progress(0.75)
    restored.step(sum(p.sum() for p in restored.parameters))
    assert restored.custom.optimizer.param_groups[0]["lr"] == 7.0


def no_optimizer(parameters: list[nn.Parameter], lr: float) -> None:
    return None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("torch.optim:LBFGS", "needs a closure"),
        ("torch:zeros", "can't be called with"),
        (f"{__name__}:no_optimizer", "not an optimizer of torch"),
        ("torch.optim:Adagrd", "did you mean 'Adagrad'"),
    ],
)
def test_unusable_optimizers_are_rejected(kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Optimizer(plain().parameters(), 0.1, kind=kind)


def test_only_safe_layouts_are_flattened() -> None:
    assert can_flatten(list(plain().parameters()))
    assert not can_flatten(list(tied().parameters()))
    assert not can_flatten(list(frozen().parameters()))
    assert not can_flatten(list(mixed().parameters()))
    transposed = nn.Parameter(torch.zeros(4, 6).T)
    assert not can_flatten([transposed, nn.Parameter(torch.zeros(2))])


def test_flat_parameters_are_views_of_one_tensor_and_keep_their_values() -> None:
    net = plain()
    before = [p.detach().clone() for p in net.parameters()]
    Optimizer(net.parameters(), 0.1)
    assert len({p.untyped_storage().data_ptr() for p in net.parameters()}) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_channels_last_convolutions_keep_their_strides_and_train_as_with_torch() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 1))
        return net.to(memory_format=torch.channels_last)

    net, reference = make(), make()
    strides = net[0].weight.stride()
    optimizer = Optimizer(net.parameters(), 0.01)
    assert net[0].weight.stride() == strides
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert net[0].weight.untyped_storage().data_ptr() == net[2].weight.untyped_storage().data_ptr()
    reference_optimizer = torch.optim.Adam(reference.parameters(), lr=0.01)
    x = torch.randn(8, 3, 5, 5)
    for _ in range(5):
        optimizer.step(net(x).square().mean())
        reference_optimizer.zero_grad()
        reference(x).square().mean().backward()
        reference_optimizer.step()
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(net.parameters(), reference.parameters(), strict=True))


def tensors(state: dict[str, Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["plain", "tied"])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_step_with_nonfinite_gradients_is_skipped_and_counted(
    on_cpu: bool, layout: str, kind: str, clip: float | None, bad: float
) -> None:
    net = LAYOUTS[layout]()
    optimizer = Optimizer(net.parameters(), 0.01, **KINDS[kind], max_grad_norm=clip)
    optimizer.on_cpu = on_cpu
    first, second = losses(net, 2)
    optimizer.step(first())
    weights = [p.detach().clone() for p in net.parameters()]
    before = optimizer.state_dict()
    gradients = optimizer.compute_gradients(second())
    gradients[0].view(-1)[0] = bad
    optimizer.apply(gradients)
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))
    after = optimizer.state_dict()
    assert after.pop("skipped") == 1.0
    assert before.pop("skipped") == 0.0
    assert all(torch.equal(a, b) for a, b in zip(tensors(before), tensors(after), strict=True))
    optimizer.step(second())
    assert not torch.equal(weights[0], next(net.parameters()))
    assert optimizer.skipped == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["plain", "tied"])
def test_restored_optimizer_continues_identically(layout: str, kind: str) -> None:
    net = LAYOUTS[layout]()
    optimizer = Optimizer(net.parameters(), 0.01, **KINDS[kind])
    for loss in losses(net, 3):
        optimizer.step(loss())
    weights, state = copy.deepcopy(net.state_dict()), optimizer.state_dict()
    for loss in losses(net, 5):
        optimizer.step(loss())
    restored_net = LAYOUTS[layout]()
    restored = Optimizer(restored_net.parameters(), 0.01, **KINDS[kind])
    restored_net.load_state_dict(weights)
    restored.load_state_dict(state)
    for loss in losses(restored_net, 5):
        restored.step(loss())
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), restored_net.parameters(), strict=True))


def test_step_moves_only_the_parameters_of_its_group() -> None:
    net = plain()
    optimizer = Optimizer(net[2].parameters(), 0.1)
    first = net[0].weight.detach().clone()
    optimizer.step(losses(net, 1)[0]())
    assert torch.equal(net[0].weight, first)
    assert net[0].weight.grad is None


def test_parameters_that_the_loss_does_not_use_get_zero_gradients() -> None:
    net = plain()
    optimizer = Optimizer(net.parameters(), 0.1)
    optimizer.compute_gradients(losses(net, 1)[0]())  # leaves nonzero gradients in the buffer
    before = net[2].weight.detach().clone()
    norm = optimizer.step(net[0].weight.sum())
    assert norm.item() == pytest.approx(24**0.5)  # 8 x 3 ones
    assert torch.equal(net[2].weight, before)


@pytest.mark.parametrize("flat", [True, False])
def test_polyak_update_moves_targets_in_both_layouts(flat: bool) -> None:
    source = plain()
    if flat:
        Optimizer(source.parameters(), 0.1)
    target = copy.deepcopy(source)
    target_updater = TargetUpdater((target, source))
    start = [p.detach().clone() for p in source.parameters()]
    with torch.no_grad():
        for p in source.parameters():
            p.add_(8.0)
    assert torch.equal(target[0].weight, start[0])  # target and source share no memory
    target_updater.polyak_update(0.25)  # 0 + 0.25 * 8 = 2
    assert all(torch.allclose(p, s + 2.0) for p, s in zip(target.parameters(), start, strict=True))
    target_updater.polyak_update(0.5)  # 2 + 0.5 * 6 = 5
    assert all(torch.allclose(p, s + 5.0, atol=1e-6) for p, s in zip(target.parameters(), start, strict=True))
    target_updater.polyak_update()
    assert all(torch.equal(p, q) for p, q in zip(target.parameters(), source.parameters(), strict=True))
    assert not any(p.requires_grad for p in target.parameters())
    assert all(p.requires_grad for p in source.parameters())


def test_polyak_update_copies_buffers() -> None:
    source = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    target = copy.deepcopy(source)
    target_updater = TargetUpdater((target, source))
    source(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    target_updater.polyak_update(0.01)
    assert torch.equal(target[0].running_mean, source[0].running_mean)


def test_target_of_channels_last_convolutions_computes_the_same() -> None:
    source = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3)).to(memory_format=torch.channels_last)
    Optimizer(source.parameters(), 0.1)
    target = copy.deepcopy(source)
    TargetUpdater((target, source)).polyak_update()
    x = torch.randn(1, 2, 7, 7)
    assert torch.allclose(target(x), source(x), atol=1e-6)


def test_loss_scaling_preserves_small_half_precision_gradients() -> None:
    # 1e-8 is zero in half precision, whose smallest positive number is 6e-8; 65,536 times as much is not
    weight = nn.Parameter(torch.tensor([1.0]))
    for loss_scaling, expected in ((False, 0.0), (True, 1e-8)):
        optimizer = Optimizer([weight], 1e-3, loss_scaling=loss_scaling)
        (gradient,) = optimizer.compute_gradients((weight.half() * 1.0).sum().float() * 1e-8)
        assert gradient[0].item() == pytest.approx(expected, rel=1e-2)


def test_loss_scale_is_halved_at_an_overflow_and_doubled_after_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # the maximum of half precision is 65,504: less than 65,536 x 3 and 32,768 x 3, more than 16,384 x 3
    monkeypatch.setattr("zhixing.core.optimizer.GROWTH_STEPS", 2)
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = Optimizer([weight], 0.1, loss_scaling=True)
    steps = []
    for _ in range(4):
        before = weight.item()
        norm = optimizer.step((weight.half() * 3.0).sum())
        steps.append((optimizer.loss_scale.item(), weight.item() != before, norm.item()))
    assert steps == [
        (2.0**15, False, 0.0),
        (2.0**14, False, 0.0),
        (2.0**14, True, 3.0),
        (2.0**15, True, 3.0),  # doubled after two good steps
    ]
    assert optimizer.skipped == 0
    restored = Optimizer([nn.Parameter(torch.tensor([1.0]))], 0.1, loss_scaling=True)
    restored.load_state_dict(optimizer.state_dict())
    assert restored.loss_scale == 2.0**15


def test_nonfinite_gradients_at_a_loss_scale_of_one_count_as_skipped() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = Optimizer([weight], 0.1, loss_scaling=True)
    for _ in range(17):  # 16 steps halve the scale from 65,536 to 1
        optimizer.step((weight * torch.nan).sum())
    assert optimizer.loss_scale == 1.0
    assert optimizer.skipped == 1
    assert weight.item() == 1.0


@pytest.mark.parametrize("decay", [0.9, 0.999])
@pytest.mark.parametrize("steps", [1, 2, 10, 1_000, 1_000_000])
def test_bias_correction_is_accurate(decay: float, steps: int) -> None:
    # for example 1 - 0.999^1 = 0.001; computed as written, float32 is wrong from the fifth digit on
    exact = -math.expm1(steps * math.log(decay))
    assert float(_bias_correction(decay, torch.tensor(float(steps)))) == pytest.approx(exact, rel=3e-7)
