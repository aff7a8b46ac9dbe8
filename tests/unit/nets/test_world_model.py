"""World models: state resets, gradients, imagination, images of any size, observations, actions and heads."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from zhixing.config import NetConfig
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.nets.obs_encoder import ImageDecoder, ImageEncoder, ObsDecoder, ObsEncoder, ObsPreprocessor
from zhixing.nets.rssm import RSSM, LayerNormMLP
from zhixing.nets.world_model import TwoHotHead, WorldModel, WorldModelActor, encode_action
from zhixing.ops.distributions import Categorical, Gaussian, MultiCategorical
from zhixing.ops.symlog import symlog, two_hot, two_hot_loss

NET = NetConfig(hidden_sizes=[16], activation="silu")
VECTOR = Box(-9.0, 9.0, (3,), np.float32)


def rssm() -> RSSM:
    torch.manual_seed(0)
    return RSSM(embedding=5, actions=2, hidden_size=12, variables=3, classes=4, uniform_mix=0.01, activation="silu")


def world(obs: gym.Space = VECTOR, action: gym.Space | None = None, mask: int | None = None) -> WorldModel:
    torch.manual_seed(0)
    spaces = Spaces(obs, Discrete(2) if action is None else action, mask=mask)
    return WorldModel(spaces, NET, hidden_size=12, variables=3, classes=4, uniform_mix=0.01, depth=4, bins=31)


def inputs(length: int, num: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return embeddings, actions and uniform noise."""
    rng = torch.Generator().manual_seed(seed)
    embedded = torch.randn(length, num, 5, generator=rng)
    return embedded, torch.randn(length, num, 2, generator=rng), torch.rand(length, num, 3, generator=rng)


# --- states


@torch.no_grad()
def test_episode_start_within_a_sequence_resets_the_state() -> None:
    model = rssm()
    embedded, action, uniform_noise = inputs(7, 2)
    is_first = torch.zeros(7, 2, dtype=torch.bool)
    is_first[4, 0] = True  # only the first sequence has a boundary
    whole = model.observe(embedded, action, is_first, uniform_noise)
    alone = model.observe(embedded[4:, :1], action[4:, :1], is_first[4:, :1], uniform_noise[4:, :1])
    for actual, expected in zip((*whole.state, *whole[1:]), (*alone.state, *alone[1:]), strict=True):
        assert torch.allclose(actual[4:, :1], expected, atol=1e-6)
    second = model.observe(embedded[4:, 1:], action[4:, 1:], is_first[4:, 1:], uniform_noise[4:, 1:])
    assert not torch.allclose(whole.state.h[4:, 1:], second.state.h)  # the second sequence isn't reset


@torch.no_grad()
def test_sequence_starts_from_the_initial_state() -> None:
    model = rssm()
    embedded, action, uniform_noise = inputs(3, 2)
    not_first = torch.zeros(3, 2, dtype=torch.bool)
    is_first = not_first.clone()
    is_first[0] = True
    marked, unmarked = (model.observe(embedded, action, flags, uniform_noise) for flags in (is_first, not_first))
    assert torch.equal(marked.state.h, unmarked.state.h)
    assert torch.equal(marked.state.h[0], model.advance(*model.initial_state(2, torch.device("cpu"))))


@torch.no_grad()
def test_next_h_is_the_h_of_the_next_state() -> None:
    """At the end of an episode, it is the state after its last action, not the reset one."""
    model = rssm()
    embedded, action, uniform_noise = inputs(5, 1)
    is_first = torch.tensor([[True], [False], [False], [True], [False]])
    output = model.observe(embedded, action, is_first, uniform_noise)
    assert torch.allclose(output.next_h[:2], output.state.h[1:3])
    assert torch.allclose(output.next_h[2], model.advance(output.state.h[2], output.state.z[2], action[2]))
    assert not torch.allclose(output.next_h[2], output.state.h[3])


@torch.no_grad()
def test_infer_state_equals_observe() -> None:
    model = world()
    obs, action = torch.randn(4, 2, 3), torch.randint(2, (4, 2))
    embedded = model.encoder(model.preprocessor(obs.flatten(0, 1))).unflatten(0, (4, 2))
    is_first = torch.zeros(4, 2, dtype=torch.bool)
    output = model.rssm.observe(
        embedded, encode_action(action, model.spaces), is_first, None
    )  # without noise: the mode
    hidden = model.rssm.initial_state(2, torch.device("cpu"))
    for t in range(4):
        state = model.infer_state(obs[t], hidden, None)
        assert torch.allclose(state.h, output.state.h[t], atol=1e-6)
        assert torch.equal(state.z, output.state.z[t])
        hidden = (*state, encode_action(action[t], model.spaces))


def test_z_is_one_hot_with_straight_through_gradients() -> None:
    model = rssm()
    embedded, action, uniform_noise = inputs(3, 2)
    embedded.requires_grad_()
    output = model.observe(embedded, action, torch.zeros(3, 2, dtype=torch.bool), uniform_noise)
    z = output.state.z.unflatten(-1, (3, 4))
    assert ((z == 0) | (z == 1)).all()
    assert (z.sum(-1) == 1).all()
    output.next_h[-1].sum().backward()  # depends on observations only through z
    assert embedded.grad is not None
    assert (embedded.grad.abs().sum((1, 2)) > 0).all()


def test_uniform_mix_bounds_probabilities() -> None:
    model = rssm()
    probability = model.prior(torch.full((1, 12), 1e4))
    assert probability.sum(-1).tolist() == [pytest.approx([1.0] * 3)]
    assert probability.min() >= 0.01 / 4 * 0.999


@torch.no_grad()
def test_advance_by_hand() -> None:
    """With zero weights the gates equal their biases: update σ(-1), candidate tanh(σ(0) · 0) = 0."""
    model = rssm()
    model.gates.weight.zero_()
    h = torch.randn(2, 12)
    next_h = model.advance(h, torch.zeros(2, 12), torch.zeros(2, 2))
    assert torch.allclose(next_h, h * (1 - torch.sigmoid(torch.tensor(-1.0))))


# --- imagination


def always(model: WorldModel, action: int) -> Any:
    """Return an actor that always takes the same action."""
    logits = torch.full((int(model.spaces.action.n),), -1e9)  # type: ignore[attr-defined]
    logits[action] = 0.0
    return lambda features, mask: Categorical(logits.expand(len(features), -1))


def test_imagine_samples_the_prior_and_predicts_from_next_h() -> None:
    model = world()
    state = model.infer_state(torch.randn(5, 3), model.rssm.initial_state(5, torch.device("cpu")), None)
    imagined = model.imagine(state, always(model, 1), 3, torch.Generator().manual_seed(0))
    assert imagined.features.shape == (4, 5, 24)
    assert not imagined.features.requires_grad
    assert (imagined.action == 1).all()
    h = state.h
    features = state.features
    for t in range(3):
        assert torch.allclose(imagined.features[t], features)
        h = model.rssm.advance(h, features[:, 12:], torch.tensor([[0.0, 1.0]]).expand(5, 2))
        assert torch.allclose(imagined.features[t + 1, :, :12], h, atol=1e-6)
        assert torch.allclose(imagined.continue_prob[t], model.continue_logits(h).sigmoid(), atol=1e-6)
        features = imagined.features[t + 1]
    assert (imagined.reward == 0).all()  # the initial prediction


def test_imagination_respects_predicted_masks() -> None:
    model = world(action=Discrete(3), mask=3)
    assert model.mask_head is not None
    last = model.mask_head.last
    assert last is not None
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.tensor([-1.0, 1.0, -1.0]))  # only the second action is valid
    actor = WorldModelActor(24, model.spaces, NET, 0.01)
    state = model.infer_state(torch.randn(50, 3), model.rssm.initial_state(50, torch.device("cpu")), None)
    imagined = model.imagine(state, actor, 4, torch.Generator().manual_seed(0))
    assert (imagined.action == 1).all()
    assert imagined.mask is not None
    assert imagined.mask.shape == (4, 50, 3)


# --- observations

EVERYTHING = Dict(
    {
        "cue": Discrete(3, start=1),
        "noise": Box(-5.0, 5.0, (2, 2), np.float32),
        "nested": Dict({"image": Box(0, 255, (12, 13, 1), np.uint8), "bits": MultiDiscrete([2, 3])}),
    }
)


def test_preprocessor_splits_obs_into_vector_and_images() -> None:
    obs = {
        "cue": torch.tensor([2]),
        "noise": torch.tensor([[[1.0, -2.0], [3.0, 0.0]]]),
        "nested": {"image": torch.full((1, 12, 13, 1), 51, dtype=torch.uint8), "bits": torch.tensor([[1, 2]])},
    }
    tensors = ObsPreprocessor(EVERYTHING)(obs)
    # one-hot: the second cue of three; bits 1 of 2 and 2 of 3; then the noise (a Dict sorts its keys)
    expected = symlog(torch.tensor([0, 1, 0, 0, 1, 0, 0, 1, 1.0, -2.0, 3.0, 0.0]))
    assert tensors.vector.tolist() == [pytest.approx(expected.tolist())]
    assert [tuple(image.shape) for image in tensors.images] == [(1, 1, 12, 13)]
    assert torch.allclose(tensors.images[0], torch.tensor(0.2))


@pytest.mark.parametrize(
    "shape", [(1, 32, 32), (3, 64, 64), (1, 12, 13), (4, 84, 84), (3, 7, 50), (1, 2, 2), (2, 5, 3)]
)
def test_decoder_restores_any_image_shape(shape: tuple[int, int, int]) -> None:
    encoder = ImageEncoder(shape, 4, "silu")
    features = encoder(torch.rand(2, *shape))
    assert features.shape == (2, encoder.outputs)
    assert ImageDecoder(10, encoder, "silu")(torch.randn(2, 10)).shape == (2, *shape)


def test_too_small_images_are_rejected() -> None:
    with pytest.raises(UserError, match="too small"):
        ImageEncoder((3, 1, 8), 4, "silu")


def test_decoder_doubles_the_resolution() -> None:
    """Without norm and with weights of 1, each pixel becomes 2 x 2 pixels with its value plus a bias."""
    decoder = ImageDecoder(4, ImageEncoder((1, 4, 4), 1, "silu"), "relu")
    decoder.norms[0] = torch.nn.Identity()
    with torch.no_grad():
        decoder.input_layer.weight.copy_(torch.eye(4))
        decoder.doublings[0].weight.copy_(torch.ones(4, 1))  # type: ignore[operator,union-attr]
        decoder.doublings[0].bias.copy_(torch.tensor([0.0, 0.1, 0.2, 0.3]))  # type: ignore[operator,union-attr]
        image = decoder(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))[0, 0]
    rows = [[1.0, 1.1, 2.0, 2.1], [1.2, 1.3, 2.2, 2.3], [3.0, 3.1, 4.0, 4.1], [3.2, 3.3, 4.2, 4.3]]
    assert image.tolist() == [pytest.approx(row) for row in rows]


def test_decoder_loss_sums_squared_errors() -> None:
    preprocessor = ObsPreprocessor(Dict({"n": VECTOR, "p": Box(0, 255, (8, 8, 1), np.uint8)}))
    encoder = ObsEncoder(preprocessor, NET, 2)
    decoder = ObsDecoder(6, preprocessor, encoder, NET)
    obs = preprocessor({"n": torch.randn(5, 3), "p": torch.randint(0, 256, (5, 8, 8, 1), dtype=torch.uint8)})
    features = torch.randn(5, 6)
    decoded = decoder(features)
    expected = (decoded.vector - obs.vector).square().sum(1)
    expected += (decoded.images[0] - obs.images[0]).square().sum((1, 2, 3))
    assert torch.allclose(decoder.loss(features, obs), expected)
    assert encoder(obs).shape == (5, encoder.outputs)


def test_predict_video_uses_only_the_first_steps_of_each_episode() -> None:
    model = world(Box(0, 255, (8, 8, 1), np.uint8))
    obs = torch.randint(0, 256, (9, 2, 8, 8, 1), dtype=torch.uint8)
    action = torch.randint(2, (9, 2))
    is_first = torch.zeros(9, 2, dtype=torch.bool)
    is_first[6, 1] = True

    def predict(obs: torch.Tensor) -> torch.Tensor:
        real, predicted = model.predict_video(obs, action, is_first, 2, torch.Generator().manual_seed(0))
        assert torch.allclose(real[..., 0, :, :], obs[..., 0] / 255)
        return predicted

    before = predict(obs)
    modified = obs.clone()
    modified[2:6] = 255 - modified[2:6]  # predicted in both sequences
    modified[8] = 0
    assert torch.equal(predict(modified), before)
    modified[6] = 255 - modified[6]  # predicted in the first sequence, given in the second, where an episode starts
    changed = predict(modified)
    assert torch.equal(changed[:, 0], before[:, 0])
    assert torch.equal(changed[:6, 1], before[:6, 1])
    assert not torch.allclose(changed[6:, 1], before[6:, 1])


# --- actions and heads


def test_encode_action() -> None:
    discrete = Spaces(VECTOR, Discrete(3, start=5))
    assert encode_action(torch.tensor([[0, 2]]), discrete).tolist() == [[[1, 0, 0], [0, 0, 1]]]
    multi_discrete = Spaces(VECTOR, MultiDiscrete([2, 3]))
    assert encode_action(torch.tensor([[1, 0]]), multi_discrete).tolist() == [[0, 1, 1, 0, 0]]
    box = Spaces(VECTOR, Box(-2.0, 4.0, (2,)))
    assert encode_action(torch.tensor([[0.3, -7.0]]), box).tolist() == [pytest.approx([0.3, -1.0])]


def test_actor_mixes_with_uniform_and_respects_masks() -> None:
    spaces = Spaces(VECTOR, Discrete(4), mask=4)
    actor = WorldModelActor(6, spaces, NET, uniform_mix=0.2)
    assert actor.net.last is not None
    with torch.no_grad():
        actor.net.last.bias.copy_(torch.tensor([100.0, 0.0, 0.0, 0.0]))
    unmasked = actor(torch.zeros(1, 6))
    assert isinstance(unmasked, Categorical)
    assert unmasked.logp.exp().tolist() == [pytest.approx([0.85, 0.05, 0.05, 0.05])]
    masked = actor(torch.zeros(1, 6), torch.tensor([[False, True, True, False]]))
    assert isinstance(masked, Categorical)
    assert masked.logp.exp().tolist() == [pytest.approx([0.0, 0.5, 0.5, 0.0])]


def test_actor_distributions_of_multi_discrete_and_continuous_actions() -> None:
    assert isinstance(
        WorldModelActor(6, Spaces(VECTOR, MultiDiscrete([2, 3])), NET, 0.01)(torch.zeros(5, 6)), MultiCategorical
    )
    actor = WorldModelActor(6, Spaces(VECTOR, Box(-1.0, 1.0, (2,))), NET, 0.01)
    gaussian = actor(100 * torch.randn(50, 6))
    assert isinstance(gaussian, Gaussian)
    assert gaussian.mean.abs().max() <= 1.0
    assert gaussian.log_std.exp().min() >= 0.1
    assert gaussian.log_std.exp().max() <= 1.0
    assert actor(torch.zeros(1, 6)).log_std.exp().min() > 0.85  # 0.1 + 0.9 σ(2) = 0.893 at first


def test_two_hot_head_learns_a_linear_function() -> None:
    torch.manual_seed(0)
    head = TwoHotHead(4, NET, 63)
    x = torch.randn(64, 4)
    y = 30.0 * x[:, 0]
    optimizer = torch.optim.Adam(head.parameters(), 0.02)
    assert (head.mean(head(x)) == 0).all()
    for _ in range(200):
        optimizer.zero_grad()
        two_hot_loss(head(x), two_hot(y, head.bins)).mean().backward()
        optimizer.step()
    assert (head.mean(head(x)) - y).abs().mean() < 5.0  # the mean |y| is 24


def test_scale_zero_gives_zero_outputs() -> None:
    assert (LayerNormMLP(3, [8], "silu", 2, scale=0.0)(torch.randn(5, 3)) == 0).all()
