"""Losses, sequences, policy and predicted videos of DreamerV3, with numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from by_hand import all_equal, copy_weights
from gymnasium.spaces import Box, Discrete
from probe import probe
from torch import Tensor

import zhixing as zx
from zhixing.algorithms.dreamer import RETURN_RANGE_RATE, Dreamer
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.nets.world_model import ImaginedRollout
from zhixing.ops.imagination import percentile_range
from zhixing.training.callbacks.imagined_frames import ImaginedFrames, strip

VECTOR = Box(-9.0, 9.0, (3,), np.float32)
SPACES = Spaces(VECTOR, Discrete(2))
SMALL = {"net__hidden_sizes": [16], "memory_size": 16, "variables": 3, "classes": 4, "horizon": 4, "bins": 31}


def make_learner(spaces: Spaces = SPACES, **settings: Any) -> Dreamer:
    cfg = zx.config.load(algorithm="dreamer", env="toy/match", **(SMALL | {"replay__sequence_length": 6} | settings))
    learner = zx.algorithms.get("dreamer").make(cfg, spaces)
    assert isinstance(learner, Dreamer)
    return learner


def sequences(num: int = 4, length: int = 6, seed: int = 0, **extra_fields: Tensor) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    never = torch.zeros(num, length, dtype=torch.bool)
    fields = {
        "obs": torch.randn(num, length, 3, generator=rng),
        "action": torch.randint(2, (num, length), generator=rng),
        "reward": torch.randn(num, length, generator=rng),
        "terminated": never,
        "truncated": never,
        "is_first": never,
    }
    return Batch(**fields | extra_fields)


def changed_networks(dreamer: Dreamer, optimizer: str, gradients: dict[str, list[Tensor]]) -> set[str]:
    """Return the networks whose weights a step of one optimizer changes."""
    nets = {"world": dreamer.world, "actor": dreamer.actor, "critic": dreamer.critic}
    before = {name: copy_weights(net) for name, net in nets.items()}
    dreamer.optimizers()[optimizer].apply(gradients[optimizer])
    return {name for name, net in nets.items() if not all_equal(before[name], copy_weights(net))}


def imagine(dreamer: Dreamer, num: int = 5) -> ImaginedRollout:
    with torch.no_grad():
        state = dreamer.world.infer_state(torch.randn(num, 3), dreamer.policy.initial_hidden(num), None)
    return dreamer.world.imagine(state, dreamer.actor, dreamer.cfg.horizon, dreamer.rng)


# --- gradients


@pytest.mark.parametrize("part", ["world", "actor", "critic"])
def test_each_optimizer_changes_only_its_network(part: str) -> None:
    dreamer = make_learner()
    gradients = probe(dreamer, sequences()).gradients
    assert set(gradients) == {"world_optimizer", "actor_optimizer", "critic_optimizer"}
    assert all(g.isfinite().all() for tensors in gradients.values() for g in tensors)
    assert changed_networks(dreamer, f"{part}_optimizer", gradients) == {part}


def test_actor_and_critic_losses_have_gradients_of_their_own_network_only() -> None:
    dreamer = make_learner()
    rollout = imagine(dreamer)
    actor_loss, _ = dreamer.actor_loss(rollout, torch.ones(4, 5))
    critic_loss, _, _ = dreamer.critic_loss(rollout)
    for loss, own_net in ((actor_loss, dreamer.actor), (critic_loss, dreamer.critic)):
        loss.backward()
        for net in (dreamer.world, dreamer.actor, dreamer.critic, dreamer.slow_critic):
            has_gradient = any(p.grad is not None and p.grad.any() for p in net.parameters())
            assert has_gradient == (net is own_net)
            net.zero_grad()


def test_actions_with_positive_advantage_become_more_likely() -> None:
    dreamer = make_learner(actor_lr=1e-2)
    rollout = imagine(dreamer, 50)
    advantage = torch.where(rollout.action == 1, 1.0, -1.0)
    initial = dreamer.actor(rollout.features[:-1]).logp.exp()[..., 1].mean().item()
    for _ in range(20):
        loss, _ = dreamer.actor_loss(rollout, advantage)
        dreamer.actor_optimizer.step(loss)
    assert initial == pytest.approx(0.5, abs=0.1)
    assert dreamer.actor(rollout.features[:-1]).logp.exp()[..., 1].mean() > 0.9


# --- losses by hand


def test_actor_loss_by_hand() -> None:
    dreamer = make_learner(gamma=0.5, entropy_coef=0.1, uniform_mix=0.0, horizon=2)
    last = dreamer.actor.net.last
    assert last is not None
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.tensor([math.log(3), 0.0]))  # probabilities 3/4 and 1/4
    rollout = ImaginedRollout(
        torch.zeros(3, 1, 28), torch.tensor([[0], [1]]), None, torch.zeros(2, 1), torch.full((2, 1), 0.8)
    )
    loss, entropy = dreamer.actor_loss(rollout, torch.tensor([[2.0], [-1.0]]))
    # objectives 2 log 3/4 + 0.1 H and -log 1/4 + 0.1 H, with weights 1 and 0.5 · 0.8; the loss is minus their mean
    H = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    expected = -(2 * math.log(0.75) + 0.1 * H + 0.4 * (-math.log(0.25) + 0.1 * H)) / 2
    assert entropy.item() == pytest.approx(H)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_critic_loss_by_hand() -> None:
    # both critics are uniform, so values are 0 and returns r + γ c r' = 1 + 0.5 · 0.8 · 1, and 1
    dreamer = make_learner(gamma=0.5, horizon=2, td_lambda=1.0)
    rollout = ImaginedRollout(
        torch.zeros(3, 1, 28), torch.zeros(2, 1, dtype=torch.long), None, torch.ones(2, 1), torch.full((2, 1), 0.8)
    )
    loss, returns, value = dreamer.critic_loss(rollout)
    assert returns.flatten().tolist() == pytest.approx([1.4, 1.0])
    assert value.tolist() == [[0], [0]]
    # the cross-entropy of a uniform prediction is log 31, for both targets (return, slow critic); weights 1 and 0.4
    assert loss.item() == pytest.approx(2 * math.log(31) * (1 + 0.4) / 2, rel=1e-4)


def test_return_range_is_a_moving_average() -> None:
    dreamer = make_learner()
    assert dreamer.return_range.item() == 0.0
    ranges = []
    expected = 0.0
    for i in range(3):
        rng_state = dreamer.rng.get_state()
        metrics = probe(dreamer, sequences(seed=i)).metrics
        state = dreamer.world_loss(sequences(seed=i))[1]
        rollout = dreamer.world.imagine(state, dreamer.actor, dreamer.cfg.horizon, dreamer.rng)
        dreamer.rng.set_state(rng_state)  # the update imagines the same rollout
        ranges.append(percentile_range(dreamer.critic_loss(rollout)[1]).item())
        expected = (1 - RETURN_RANGE_RATE) * expected + RETURN_RANGE_RATE * ranges[-1]
        assert metrics["return_range"].item() == pytest.approx(expected, rel=1e-4)
        dreamer.update(sequences(seed=i))
        assert dreamer.return_range.item() == pytest.approx(expected, rel=1e-4)
    assert max(ranges) > 0


def test_slow_critic_is_polyak_averaged() -> None:
    dreamer = make_learner(tau=0.25)
    with torch.no_grad():
        for p in dreamer.critic.parameters():
            p.fill_(1.0)
        for p in dreamer.slow_critic.parameters():
            p.fill_(0.0)
    dreamer.target_updater.polyak_update(dreamer.cfg.tau)
    assert all((p == 0.25).all() for p in dreamer.slow_critic.parameters())


# --- sequences


def test_burn_in_steps_have_no_loss_but_warm_up_the_recurrent_state() -> None:
    dreamer = make_learner(replay__burn_in=2, replay__sequence_length=4)
    last = dreamer.world.reward_head.net.last
    assert last is not None
    torch.nn.init.normal_(last.weight, generator=torch.Generator().manual_seed(0))  # initially zero
    batch = sequences()
    rng_state = dreamer.rng.get_state()

    def loss(**fields: Tensor) -> float:
        dreamer.rng.set_state(rng_state)
        return dreamer.world_loss(batch.replace(**fields))[0].item()

    reward, obs = batch.reward.clone(), batch.obs.clone()
    reward[:, :2] += 100.0
    assert loss(reward=reward) == loss()
    obs[:, :2] += 1.0
    assert loss(obs=obs) != loss()
    assert len(dreamer.world_loss(batch)[1].h) == 4 * 4
    reward[:, 2] += 100.0
    assert loss(reward=reward) != loss()


def test_continuation_target_depends_on_termination_not_truncation() -> None:
    dreamer = make_learner()
    flags = torch.zeros(4, 6, dtype=torch.bool)
    flags[:, 2] = True
    rng_state = dreamer.rng.get_state()
    losses = []
    for fields in ({}, {"truncated": flags}, {"terminated": flags}):
        dreamer.rng.set_state(rng_state)
        losses.append(dreamer.world_loss(sequences(**fields))[2]["continue_loss"].item())
    assert losses[0] == losses[1]
    assert losses[2] != losses[0]


def test_masks_are_predicted_and_obeyed_in_imagination() -> None:
    spaces = Spaces(VECTOR, Discrete(3), mask=3)
    dreamer = make_learner(spaces, lr=1e-2)
    mask = torch.ones(4, 6, 3, dtype=torch.bool)
    mask[..., 2] = False
    for i in range(60):
        dreamer.update(sequences(seed=i, mask=mask))
    rollout = dreamer.world.imagine(
        dreamer.world_loss(sequences(mask=mask))[1], dreamer.actor, dreamer.cfg.horizon, dreamer.rng
    )
    assert rollout.mask is not None
    assert not rollout.mask[..., 2].any()
    assert (rollout.action != 2).all()


# --- the policy


def test_zero_hidden_state_starts_an_episode() -> None:
    dreamer = make_learner()
    policy, rng = dreamer.policy, torch.Generator().manual_seed(0)
    obs = torch.randn(2, 3)
    with torch.no_grad():
        hidden = policy.initial_hidden(2)
        assert all(not part.any() for part in hidden)
        first = policy.act(obs, hidden, None, zx.Phase.EVAL, rng, 0)
        second = policy.act(obs, first.hidden, None, zx.Phase.EVAL, rng, 0)
        assert not torch.allclose(second.hidden[0], first.hidden[0])
        partly_reset = tuple(part.index_fill(0, torch.tensor([1]), 0.0) for part in first.hidden)
        mixed = policy.act(obs, partly_reset, None, zx.Phase.EVAL, rng, 0)
    assert torch.allclose(mixed.hidden[0][0], second.hidden[0][0])
    assert torch.allclose(mixed.hidden[0][1], first.hidden[0][1])
    assert first.hidden[2].tolist() == [[1 - a, a] for a in first.action.tolist()]  # one-hot actions


# --- rejected settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"net__recurrent": "gru"}, "net.recurrent=none"),
        ({"net__kind": "my.module:Net"}, "net.kind=auto"),
        ({"net__cnn": "nature"}, "net.cnn=simple"),
        ({"normalize_obs": True}, "normalize_obs=false"),
        ({"replay__prioritized": True}, "replay.prioritized=false"),
        ({"replay__n_step": 3}, "replay.n_step=1"),
        ({"bins": 32}, "must be odd"),
    ],
)
def test_unsupported_settings_and_spaces_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(zx.UserError, match=message):
        make_learner(**settings)


def test_unbounded_actions_are_rejected() -> None:
    with pytest.raises(zx.UserError, match="dreamer needs continuous actions in a bounded one-dimensional Box"):
        make_learner(Spaces(VECTOR, Box(-np.inf, np.inf, (2,), np.float32)))


# --- predicted videos


def test_strip_image_by_hand() -> None:
    frames = np.zeros((2, 3, 5, 32, 32, 1), np.uint8)
    frames[1, 2, 4] = 7  # second sequence, third strip, fifth step
    image = strip(frames)
    # frames are enlarged to 64 pixels and followed by a white line; 8 lines separate sequences
    assert image.shape == (2 * (3 * 65 + 8), 5 * 65, 3)
    ys, xs, _ = np.nonzero(image == 7)
    assert (ys.min(), ys.max()) == (203 + 130, 203 + 193)
    assert (xs.min(), xs.max()) == (260, 323)


def test_imagined_frames_callback_writes_images_without_changing_the_run(tmp_path: Path) -> None:
    settings = {
        "env_steps": 160,
        "learning_starts": 80,
        "updates_per_step": 0.05,
        "train_every": 20,
        "num_threads": 1,
    }
    settings |= {"eval_every": 80, "eval_episodes": 1, "tensorboard": False, "cnn_depth": 2, "num_envs": 2}
    cfg = zx.config.load(algorithm="dreamer", env="toy/pixel-catch", **(SMALL | settings))
    states = []
    for name, callbacks in (("without", []), ("with", [ImaginedFrames(tmp_path / "with")])):
        session = zx.Session(cfg, tmp_path / name, callbacks, quiet=True)
        session.run()
        states.append(session.learner.state_dict())
    assert torch.equal(states[0]["rng"], states[1]["rng"])
    for key, value in states[0]["parts"]["world"].items():
        assert torch.equal(value, states[1]["parts"]["world"][key])
    files = sorted(file.name for file in (tmp_path / "with" / "imagined").iterdir())
    assert files == ["000000000080.png", "000000000160.png"]
    length = cfg.replay.sequence_length
    image = matplotlib.image.imread(tmp_path / "with" / "imagined" / files[0])
    assert image.shape[:2] == (4 * (3 * 65 + 8), length * 65)


def test_dream_frames_is_none_without_image_observations() -> None:
    assert make_learner().dream_frames(sequences()) is None


def test_dream_frames_are_observed_predicted_and_difference() -> None:
    spaces = Spaces(Box(0, 255, (8, 8, 3), np.uint8), Discrete(2))
    dreamer = make_learner(spaces, cnn_depth=2)
    obs = torch.randint(0, 256, (4, 6, 8, 8, 3), dtype=torch.uint8)
    frames = dreamer.dream_frames(sequences(obs=obs))
    assert frames is not None
    assert frames.shape == (4, 3, 6, 8, 8, 3)
    assert torch.equal(frames[:, 0], obs)
    difference = 127.5 + 0.5 * (frames[:, 1].float() - frames[:, 0].float())
    assert (frames[:, 2].float() - difference).abs().max() <= 1.5


# --- training


def test_model_learns_to_predict_rewards_and_termination() -> None:
    # episodes have three steps; the reward is the action, plus ten in the third step. After training, the model
    # predicts rewards and termination from the first observation only
    dreamer = make_learner(lr=1e-2, net__hidden_sizes=[32], memory_size=32)
    rng = torch.Generator().manual_seed(0)

    def counting_sequences(num: int) -> Batch:
        count = torch.arange(6).remainder(3).expand(num, 6)
        action = torch.randint(2, (num, 6), generator=rng)
        return sequences(
            num,
            obs=torch.nn.functional.one_hot(count, 3).float(),
            action=action,
            reward=action + 10.0 * (count == 2),
            terminated=count == 2,
            is_first=count == 0,
        )

    for _ in range(150):
        dreamer.update(counting_sequences(16))
    with torch.no_grad():
        state = dreamer.world.infer_state(torch.eye(3)[:1], dreamer.policy.initial_hidden(1), None)
        h, z = state
        rewards, continue_probs = [], []
        for action in (1, 0, 1):
            h = dreamer.world.rssm.advance(h, z, torch.eye(2)[[action]])
            rewards.append(dreamer.world.reward_head.mean(dreamer.world.reward_head(h)).item())
            continue_probs.append(dreamer.world.continue_logits(h).sigmoid().item())
            z = dreamer.world.rssm.sample(dreamer.world.rssm.prior(h), None)
    assert rewards == pytest.approx([1.0, 0.0, 11.0], abs=0.7)
    assert min(continue_probs[:2]) > 0.9
    assert continue_probs[2] < 0.1
