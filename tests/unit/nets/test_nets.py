"""Networks: batched ensembles, encoders of every space, recurrent torsos, actor-critics and custom networks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text
from torch import Tensor, nn

import zhixing as zx
from zhixing.algorithms.ppo import PPO
from zhixing.config import NetConfig
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_leaves
from zhixing.errors import UserError
from zhixing.nets.actor_critic import ActorCritic
from zhixing.nets.cnn import CNN, CnnKind
from zhixing.nets.heads import ActionDistribution, PolicyHead
from zhixing.nets.mlp import FAST_TANH_MIN_SIZE, MLP, EnsembleMLP, tanh_
from zhixing.nets.torso import Encoder, RecurrentTorso, make_torso, num_features, unroll
from zhixing.ops.distributions import Bernoulli, Categorical, Composite, Gaussian, MultiCategorical

VECTOR = Box(-1.0, 1.0, (3,), np.float32)


def spaces(obs: gym.Space[Any] = VECTOR, action: gym.Space[Any] | None = None, **kwargs: Any) -> Spaces:
    return Spaces(obs, action or Discrete(4), **kwargs)


# --- fully connected ---


@pytest.mark.parametrize("activation", ["tanh", "relu", "silu", "elu", "gelu"])
def test_ensemble_equals_its_networks(activation: str) -> None:
    networks = [MLP(5, [16, 8], activation, orthogonal_init=True) for _ in range(3)]
    x = torch.randn(7, 5)
    actual = EnsembleMLP(networks)(x)
    assert actual.shape == (3, 7, 8)
    for k, network in enumerate(networks):
        assert torch.allclose(actual[k], network(x), atol=1e-6)


def test_ensemble_has_the_separate_gradients_of_its_networks() -> None:
    networks = [MLP(4, [6], "tanh", orthogonal_init=False) for _ in range(2)]
    ensemble, x = EnsembleMLP(networks), torch.randn(9, 4)
    networks[0](x).square().sum().backward()
    ensemble(x)[0].square().sum().backward()
    assert torch.allclose(ensemble.weights[0].grad[0], networks[0].linears[0].weight.grad.T, atol=1e-5)
    assert not ensemble.weights[0].grad[1].any()


def test_orthogonal_layers_preserve_norms() -> None:
    weight = MLP(8, [8], "tanh", orthogonal_init=True).linears[0].weight
    assert torch.allclose(weight @ weight.T, 2.0 * torch.eye(8), atol=1e-5)  # the gain √2, squared


# --- encoders ---


def test_discrete_obs_are_one_hot() -> None:
    assert Encoder(Discrete(3), "nature", False)(torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]


def test_discrete_obs_with_a_start_offset_are_one_hot() -> None:
    assert Encoder(Discrete(3, start=5), "nature", False)(torch.tensor([5, 7])).tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("start", [1, -2])
def test_num_features_of_discrete_obs_with_a_start_offset(start: int) -> None:
    assert num_features(Encoder(Discrete(3, start=start), "nature", False), Discrete(3, start=start)) == 3


def test_multi_discrete_obs_are_concatenated_one_hot() -> None:
    encoder = Encoder(MultiDiscrete([2, 3]), "nature", False)
    assert encoder(torch.tensor([[1, 2]])).tolist() == [[0, 1, 0, 0, 1]]


def test_multi_discrete_obs_with_start_offsets_are_one_hot() -> None:
    space = MultiDiscrete([2, 3], start=[1, 10])
    assert Encoder(space, "nature", False)(torch.tensor([[2, 12]])).tolist() == [[0, 1, 0, 0, 1]]


def test_multi_binary_and_box_obs_are_flattened() -> None:
    assert Encoder(MultiBinary(3), "nature", False)(torch.tensor([[1, 0, 1]], dtype=torch.int8)).tolist() == [[1, 0, 1]]
    matrix = Encoder(Box(-1, 1, (2, 2), np.float32), "nature", False)
    assert matrix(torch.arange(8.0).view(2, 2, 2)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_dict_obs_are_concatenated_in_the_order_of_the_space() -> None:
    space = Dict({"b": Discrete(2), "a": Box(-1, 1, (2,), np.float32), "c": Dict({"d": Discrete(2)})})
    obs = {"a": torch.tensor([[5.0, 6.0]]), "b": torch.tensor([1]), "c": {"d": torch.tensor([0])}}
    by_key = {"a": [5, 6], "b": [0, 1], "c": [1, 0]}
    expected = [number for key in space.spaces for number in by_key[key]]
    assert Encoder(space, "nature", False)(obs).tolist() == [expected]


@pytest.mark.parametrize("key", ["arm.joint", "type", "keys", "values", "train"])
def test_any_dict_key_is_allowed(key: str) -> None:
    space = Dict({key: VECTOR})
    encoder = Encoder(space, "nature", True)
    encoder.update_norm({key: torch.ones(4, 2, 3)})
    assert encoder({key: torch.ones(1, 3)}).abs().max() < 1e-3  # the mean is 1


def test_only_box_parts_of_dict_obs_are_normalized() -> None:
    space = Dict({"cue": Discrete(2), "x": Box(-9, 9, (1,), np.float32)})
    encoder = Encoder(space, "nature", True)
    encoder.update_norm({"cue": torch.zeros(2, 1, dtype=torch.long), "x": torch.tensor([[[2.0]], [[6.0]]])})
    # mean 4, std 2: (6 - 4) / 2 = 1
    assert encoder({"cue": torch.tensor([1]), "x": torch.tensor([[6.0]])})[0].tolist() == pytest.approx([0, 1, 1])


# --- images ---


@pytest.mark.parametrize(("kind", "features"), [("nature", 512), ("small", 256), ("simple", 512)])
def test_channels_first_and_last_images_give_the_same_features(kind: CnnKind, features: int) -> None:
    first, last = CNN((3, 40, 48), kind), CNN((40, 48, 3), kind)
    last.load_state_dict(first.state_dict())
    x = torch.randint(0, 256, (2, 3, 40, 48), dtype=torch.uint8)
    assert first(x).shape == (2, features)
    assert torch.allclose(first(x), last(x.permute(0, 2, 3, 1)), atol=1e-5)


def test_bytes_are_scaled_to_0_to_1() -> None:
    net = CNN((1, 36, 36))
    inputs: list[Tensor] = []
    net.layers.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    net(torch.full((1, 1, 36, 36), 255, dtype=torch.uint8))
    assert torch.allclose(inputs[0], torch.ones(1, 1, 36, 36))
    assert inputs[0].is_contiguous(memory_format=torch.channels_last)


def test_too_small_images_are_rejected() -> None:
    with pytest.raises(UserError, match=r"images of shape \(12, 12, 1\) are too small for net.cnn=nature"):
        CNN((12, 12, 1), "nature")
    assert CNN((7, 7, 3))(torch.zeros(2, 7, 7, 3)).shape == (2, 512)  # "auto" selects "simple"
    assert CNN((12, 12, 1), "simple")(torch.zeros(2, 12, 12, 1)).shape == (2, 512)


# --- layer norm ---


def test_layer_norm_makes_outputs_invariant_to_the_scale_of_weights() -> None:
    net = EnsembleMLP([MLP(3, [8, 8], "relu", outputs=1) for _ in range(2)], layer_norm=True)
    x = torch.randn(5, 3)
    before = net(x)
    with torch.no_grad():
        for part in (net.weights, net.biases):
            part[0].mul_(10.0)
            part[1].mul_(5.0)
    torch.testing.assert_close(net(x), before, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(net.forward_first(x), net(x)[0])


def test_layer_norm_by_hand() -> None:
    net = EnsembleMLP([MLP(1, [2], "relu", outputs=1)], layer_norm=True)
    with torch.no_grad():
        net.weights[0].copy_(torch.tensor([[[1.0, 3.0]]]))
        net.biases[0].zero_()
        net.weights[1].copy_(torch.tensor([[[5.0], [7.0]]]))
        net.biases[1].fill_(0.5)
    # input 2 gives [2, 6]: mean 4, std 2, normalized [-1, 1], after relu [0, 1]: 7 + 0.5
    assert net(torch.tensor([[2.0]])).item() == pytest.approx(7.5, abs=1e-4)


# --- recurrent torsos ---


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_unroll_equals_stepping_with_resets(kind: str) -> None:
    torso = RecurrentTorso(VECTOR, NetConfig(hidden_sizes=[8], recurrent=kind, recurrent_size=5), False, True)
    obs = torch.randn(6, 2, 3)
    is_first = torch.zeros(6, 2, dtype=torch.bool)
    is_first[3, 0] = is_first[5, 1] = True
    _, start = torso(torch.randn(2, 3), None)
    unrolled, hiddens = unroll(torso, obs, start, is_first)
    for n, ends in enumerate([[3], [5]]):
        hidden = tuple(leaf[n : n + 1] for leaf in start) if kind == "lstm" else start[n : n + 1]
        for t in range(6):
            features, hidden = torso(obs[t, n : n + 1], None if t in ends else hidden)
            assert torch.allclose(unrolled[t, n], features[0], atol=1e-6)
            for actual, expected in zip(tree_leaves(hiddens), tree_leaves(hidden), strict=True):
                assert torch.allclose(actual[t, n], expected[0], atol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_actor_and_critic_use_the_hidden_state(kind: str, shared: bool) -> None:
    net = ActorCritic(spaces(), NetConfig(hidden_sizes=[8], recurrent=kind, recurrent_size=5), shared=shared)
    x = torch.randn(2, 3)
    first = net(x)
    again = net(x, first.hidden)
    assert not torch.allclose(first.value, again.value)
    assert not torch.allclose(first.distribution.logp, again.distribution.logp)


# --- actor and critic ---


def test_batched_torsos_equal_separate_torsos() -> None:
    cfg = NetConfig(hidden_sizes=[16, 16])
    torch.manual_seed(3)
    batched = ActorCritic(spaces(), cfg, batched=True)
    torch.manual_seed(3)
    separate = ActorCritic(spaces(), cfg, batched=False)
    x = torch.randn(5, 3)
    assert torch.allclose(batched(x).value, separate(x).value, atol=1e-6)
    assert torch.allclose(batched(x).distribution.logp, separate(x).distribution.logp, atol=1e-6)
    assert hasattr(batched, "towers")
    assert not hasattr(separate, "towers")


def test_action_space_selects_the_distribution() -> None:
    features = torch.zeros(2, 8)
    assert isinstance(PolicyHead(8, spaces(action=Discrete(3, start=4)))(features), Categorical)
    assert isinstance(PolicyHead(8, spaces(action=MultiDiscrete([2, 3])))(features), MultiCategorical)
    head = PolicyHead(8, spaces(action=Box(-1, 1, (2,), np.float32)), log_std=-0.5)
    gaussian = head(features)
    assert isinstance(gaussian, Gaussian)
    assert gaussian.log_std.tolist() == [[-0.5, -0.5]] * 2
    assert isinstance(PolicyHead(8, spaces(action=MultiBinary(3)))(features), Bernoulli)
    assert isinstance(PolicyHead(8, spaces(action=Box(-1, 1, (2, 2), np.float32)))(features), Composite)
    with pytest.raises(UserError, match=r"the action space is Text.*; allowed are Discrete, MultiDiscrete, MultiB"):
        PolicyHead(8, spaces(action=Text(3)))


def test_composite_distribution_has_the_parts_of_the_space() -> None:
    space = Dict({"a": Box(-1, 1, (2,)), "b": Discrete(2), "c": MultiBinary(1), "d": MultiDiscrete([3])})
    distribution = ActionDistribution(spaces(action=space, mask=5), log_std=-1.0)
    assert distribution.outputs == 2 + 3 + 1 + 2
    # the columns of an action are b, d, c, a; their outputs are those of 2 + 3 values, 1 bit and 2 means
    out = torch.tensor([[0.0, 9.0, 0.0, 0.0, 9.0, -9.0, 0.3, -0.3]])
    policy = distribution(out)
    assert isinstance(policy, Composite)
    assert policy.mode().tolist() == [pytest.approx([1.0, 2.0, 0.0, 0.3, -0.3])]
    mask = torch.tensor([[True, False, True, False, False]])
    assert distribution(out, mask).mode().tolist() == [pytest.approx([0.0, 0.0, 0.0, 0.3, -0.3])]
    assert distribution.log_std.tolist() == [-1.0, -1.0]


def test_masks_of_multi_discrete_actions() -> None:
    # dimensions of size 2 and 3: the mask has 5 entries; only the last of each dimension is valid
    head = PolicyHead(8, spaces(action=MultiDiscrete([2, 3]), mask=5))
    mask = torch.tensor([[False, True, False, False, True]]).expand(500, 5)
    actions = head(torch.zeros(500, 8), mask).sample(torch.Generator().manual_seed(0))
    assert (actions == torch.tensor([1, 2])).all()


# --- custom networks ---


class CustomNet(nn.Module):
    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(space.shape[0], 6)

    def forward(self, obs: Tensor) -> Tensor:
        return self.linear(obs).relu()


class CustomRecurrentNet(nn.Module):
    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        self.cell = nn.GRUCell(space.shape[0], 6)

    def forward(self, obs: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = self.cell(obs, hidden)
        return hidden, hidden


class FlatOutput(CustomNet):
    def forward(self, obs: Tensor) -> Tensor:
        return super().forward(obs).flatten()


class TupleOutput(CustomNet):
    def forward(self, obs: Tensor) -> Any:
        return super().forward(obs), None


@pytest.mark.parametrize(("name", "num_torsos"), [("ppo", 2), ("dqn", 1)])  # ppo's actor and critic have one each
def test_custom_network_is_used(name: str, num_torsos: int) -> None:
    learner: Any = zx.algorithms.get(name).make(
        zx.config.load(algorithm=name, env="CartPole-v1"), spaces(), net=CustomNet
    )
    assert sum(isinstance(module, CustomNet) for module in learner.net.modules()) == num_torsos
    assert learner.value(torch.zeros(5, 3)).shape == (5,)


def test_custom_recurrent_network_is_recognized() -> None:
    learner = PPO(zx.config.load(algorithm="ppo", env="CartPole-v1"), spaces(), net=CustomRecurrentNet)
    assert learner.net.recurrent
    assert "hidden" in learner.extra_fields


def test_custom_network_from_settings() -> None:
    assert isinstance(make_torso(VECTOR, NetConfig(kind=f"{__name__}:CustomNet")), CustomNet)


def test_custom_network_in_the_current_folder_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console script doesn't have the current folder on its path, so the import must add it."""
    (tmp_path / "custom_net_module.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self, space):\n"
        "        super().__init__(nn.Linear(space.shape[0], 4))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    torso = make_torso(VECTOR, NetConfig(kind="custom_net_module:Net"))
    assert num_features(torso, VECTOR) == 4


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("big", "use 'auto', 'simba' or 'your.module:Net'"),
        ("no_such_module:Net", "no_such_module"),
        ("torch.nn:Nothing", "Nothing"),
        (":Net", ":Net"),
        (".here:Net", ".here:Net"),
    ],
)
def test_invalid_net_kinds_are_rejected(kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_torso(Discrete(3), NetConfig(kind=kind))


@pytest.mark.parametrize(("net", "returned"), [(FlatOutput, r"\[12\]"), (TupleOutput, "tuple")])
def test_outputs_of_the_wrong_shape_are_rejected(net: type[nn.Module], returned: str) -> None:
    cfg = zx.config.load(algorithm="ppo", env="CartPole-v1")
    with pytest.raises(UserError, match=f"a network must return features \\[B,n\\] .* for B=2 it returned {returned}"):
        PPO(cfg, spaces(), net=net)


def test_net_that_is_not_a_module_is_rejected() -> None:
    with pytest.raises(UserError, match=r"net must return a torch.nn.Module for the observation space, not int"):
        make_torso(VECTOR, NetConfig(), lambda space: 3)


def test_custom_network_with_normalize_obs_is_rejected() -> None:
    cfg = zx.config.load(algorithm="ppo", env="CartPole-v1", normalize_obs=True)
    with pytest.raises(UserError, match="normalize_obs=true needs a built-in network"):
        PPO(cfg, spaces(), net=CustomNet)


def test_by_default_only_built_in_networks_normalize_observations() -> None:
    cfg = zx.config.load(algorithm="ppo", env="Acrobot-v1")
    assert cfg.normalize_obs == "auto"
    assert [name for name, _ in PPO(cfg, spaces()).net.named_buffers() if name.endswith("mean")]
    assert not list(PPO(cfg, spaces(), net=CustomNet).net.named_buffers())


@pytest.mark.parametrize(("name", "num_hidden"), [("ppo", 2), ("dqn", 1)])  # ppo's actor and critic have one each
@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_initial_hidden_is_on_the_device_of_the_network(name: str, num_hidden: int, recurrent: str) -> None:
    """`meta` stands for an accelerator: networks there don't accept tensors on the CPU."""
    cfg = zx.config.load(algorithm=name, env="CartPole-v1", net__recurrent=recurrent)
    hidden = zx.algorithms.get(name).make(cfg, spaces()).policy.to("meta").initial_hidden(4)
    leaves = [] if hidden is None else tree_leaves(hidden)
    expected = [("meta", (4, 64))] * num_hidden if recurrent == "gru" else []
    assert [(leaf.device.type, tuple(leaf.shape)) for leaf in leaves] == expected


def test_fast_tanh_equals_torch_tanh_with_both_derivatives() -> None:
    x = torch.linspace(-12.0, 12.0, FAST_TANH_MIN_SIZE, dtype=torch.float32)
    results = []
    for tanh in (torch.tanh, tanh_):
        leaf = x.clone().requires_grad_()
        y = tanh(leaf + 0.0)  # a copy, because tanh_ works in place
        (first,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), leaf)
        results.append((y.detach(), first.detach(), second))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)
    assert torch.isnan(tanh_(torch.full((FAST_TANH_MIN_SIZE,), torch.nan))).all()
    assert tanh_(torch.tensor([-torch.inf, torch.inf]).repeat(FAST_TANH_MIN_SIZE)).unique().tolist() == [-1.0, 1.0]
    half = torch.randn(FAST_TANH_MIN_SIZE, dtype=torch.bfloat16)
    assert torch.equal(tanh_(half.clone()), half.tanh())
