"""DreamerV3: what each loss moves, ends of episodes, scales by hand, refusals, pictures, and that it learns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
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


def sequences(num: int = 4, length: int = 6, seed: int = 0, **more: Tensor) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    none = torch.zeros(num, length, dtype=torch.bool)
    fields = {
        "obs": torch.randn(num, length, 3, generator=rng),
        "action": torch.randint(2, (num, length), generator=rng),
        "reward": torch.randn(num, length, generator=rng),
        "terminated": none,
        "truncated": none,
        "is_first": none,
    }
    return Batch(**fields | more)


def moved(dreamer: Dreamer, optimizer: str, gradients: dict[str, list[Tensor]]) -> set[str]:
    """Return the parts whose weights a step of one optimizer changes."""
    parts = {"world": dreamer.world, "actor": dreamer.actor, "critic": dreamer.critic}
    before = {name: [p.detach().clone() for p in part.parameters()] for name, part in parts.items()}
    dreamer.optimizers()[optimizer].apply(gradients[optimizer])
    return {
        name
        for name, part in parts.items()
        if any(not torch.equal(a, b) for a, b in zip(before[name], part.parameters(), strict=True))
    }


def imagined(dreamer: Dreamer, num: int = 5) -> ImaginedRollout:
    with torch.no_grad():
        state = dreamer.world.infer_state(torch.randn(num, 3), dreamer.policy.initial_hidden(num), None)
    return dreamer.world.imagine(state, dreamer.actor, dreamer.cfg.horizon, dreamer.rng)


# --- what moves what


@pytest.mark.parametrize("part", ["world", "actor", "critic"])
def test_each_loss_moves_its_own_part_only(part: str) -> None:
    dreamer = make_learner()
    gradients = probe(dreamer, sequences()).gradients
    assert set(gradients) == {"world_optimizer", "actor_optimizer", "critic_optimizer"}
    assert all(g.isfinite().all() for tensors in gradients.values() for g in tensors)
    assert moved(dreamer, f"{part}_optimizer", gradients) == {part}


def test_behaviour_reaches_neither_model_nor_each_other() -> None:
    dreamer = make_learner()
    dream = imagined(dreamer)
    actor_loss, _ = dreamer.actor_loss(dream, torch.ones(4, 5))
    critic_loss, _, _ = dreamer.critic_loss(dream)
    for loss, mine in ((actor_loss, dreamer.actor), (critic_loss, dreamer.critic)):
        loss.backward()
        for part in (dreamer.world, dreamer.actor, dreamer.critic, dreamer.slow_critic):
            touched = [p for p in part.parameters() if p.grad is not None and p.grad.any()]
            assert bool(touched) == (part is mine)
            part.zero_grad()


def test_gradients_change_nothing() -> None:
    dreamer = make_learner()
    before = dreamer.state_dict()
    probe(dreamer, sequences())
    after = dreamer.state_dict()
    assert torch.equal(before["tensors"]["return_range"], after["tensors"]["return_range"])
    for name, part in before["parts"].items():
        for key, value in part.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, after["parts"][name][key]), (name, key)


def test_a_better_action_becomes_likelier() -> None:
    dreamer = make_learner(actor_lr=1e-2)
    dream = imagined(dreamer, 50)
    good = torch.where(dream.action == 1, 1.0, -1.0)
    first = dreamer.actor(dream.features[:-1]).logp.exp()[..., 1].mean().item()
    for _ in range(20):
        loss, _ = dreamer.actor_loss(dream, good)
        dreamer.actor_optimizer.step(loss)
    assert first == pytest.approx(0.5, abs=0.1)
    assert dreamer.actor(dream.features[:-1]).logp.exp()[..., 1].mean() > 0.9


# --- by hand


def test_actor_loss_by_hand() -> None:
    dreamer = make_learner(gamma=0.5, entropy_coef=0.1, uniform_mix=0.0, horizon=2)
    last = dreamer.actor.net.last
    assert last is not None
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.tensor([math.log(3), 0.0]))  # probabilities 3/4 and 1/4
    dream = ImaginedRollout(
        torch.zeros(3, 1, 28), torch.tensor([[0], [1]]), None, torch.zeros(2, 1), torch.full((2, 1), 0.8)
    )
    loss, entropy = dreamer.actor_loss(dream, torch.tensor([[2.0], [-1.0]]))
    # the second step counts 0.5 · 0.8; gains 2 log 3/4 + 0.1 H and -log 1/4 + 0.1 H; their mean, turned round
    H = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    expected = -(2 * math.log(0.75) + 0.1 * H + 0.4 * (-math.log(0.25) + 0.1 * H)) / 2
    assert entropy.item() == pytest.approx(H)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_critic_loss_by_hand() -> None:
    """Neither critic has an opinion: values 0, returns r + γ c r' = 1 + 0.5 · 0.8 · 1, and 1."""
    dreamer = make_learner(gamma=0.5, horizon=2, td_lambda=1.0)
    dream = ImaginedRollout(
        torch.zeros(3, 1, 28), torch.zeros(2, 1, dtype=torch.long), None, torch.ones(2, 1), torch.full((2, 1), 0.8)
    )
    loss, returns, value = dreamer.critic_loss(dream)
    assert returns.flatten().tolist() == pytest.approx([1.4, 1.0])
    assert value.tolist() == [[0], [0]]
    # all 31 bins are as likely: each of the two targets (return, slow critic) costs log 31; steps count 1 and 0.4
    assert loss.item() == pytest.approx(2 * math.log(31) * (1 + 0.4) / 2, rel=1e-4)


def test_the_scale_of_returns_is_a_slow_average_of_their_range() -> None:
    dreamer = make_learner()
    assert dreamer.return_range.item() == 0.0
    ranges = []
    scale = 0.0
    for i in range(3):
        dream_rng = dreamer.rng.get_state()
        metrics = probe(dreamer, sequences(seed=i)).metrics
        state = dreamer.world_loss(sequences(seed=i))[1]
        dream = dreamer.world.imagine(state, dreamer.actor, dreamer.cfg.horizon, dreamer.rng)
        dreamer.rng.set_state(dream_rng)  # the same imagination again
        ranges.append(percentile_range(dreamer.critic_loss(dream)[1]).item())
        scale = (1 - RETURN_RANGE_RATE) * scale + RETURN_RANGE_RATE * ranges[-1]
        assert metrics["return_range"].item() == pytest.approx(scale, rel=1e-4)
        dreamer.update(sequences(seed=i))
        assert dreamer.return_range.item() == pytest.approx(scale, rel=1e-4)
    assert max(ranges) > 0


def test_the_slow_critic_follows() -> None:
    dreamer = make_learner(tau=0.25)
    with torch.no_grad():
        for p in dreamer.critic.parameters():
            p.fill_(1.0)
        for p in dreamer.slow_critic.parameters():
            p.fill_(0.0)
    dreamer.target_updater.polyak_update(dreamer.cfg.tau)
    assert all((p == 0.25).all() for p in dreamer.slow_critic.parameters())


# --- sequences


def test_burn_in_rows_have_no_loss_but_warm_the_memory() -> None:
    dreamer = make_learner(replay__burn_in=2, replay__sequence_length=4)
    last = dreamer.world.reward_head.net.last
    assert last is not None
    torch.nn.init.normal_(last.weight, generator=torch.Generator().manual_seed(0))  # an opinion of rewards
    batch = sequences()
    start = dreamer.rng.get_state()

    def loss(**fields: Tensor) -> float:
        dreamer.rng.set_state(start)
        return dreamer.world_loss(batch.replace(**fields))[0].item()

    reward, obs = batch.reward.clone(), batch.obs.clone()
    reward[:, :2] += 100.0
    assert loss(reward=reward) == loss()
    obs[:, :2] += 1.0
    assert loss(obs=obs) != loss()
    assert len(dreamer.world_loss(batch)[1].h) == 4 * 4
    reward[:, 2] += 100.0
    assert loss(reward=reward) != loss()


def test_only_termination_ends_the_world() -> None:
    dreamer = make_learner()
    flags = torch.zeros(4, 6, dtype=torch.bool)
    flags[:, 2] = True
    start = dreamer.rng.get_state()
    told = []
    for fields in ({}, {"truncated": flags}, {"terminated": flags}):
        dreamer.rng.set_state(start)
        told.append(dreamer.world_loss(sequences(**fields))[2]["continue_loss"].item())
    assert told[0] == told[1]
    assert told[2] != told[0]


def test_masks_are_learned_and_kept_to() -> None:
    spaces = Spaces(VECTOR, Discrete(3), mask=3)
    dreamer = make_learner(spaces, lr=1e-2)
    mask = torch.ones(4, 6, 3, dtype=torch.bool)
    mask[..., 2] = False
    for i in range(60):
        dreamer.update(sequences(seed=i, mask=mask))
    dream = dreamer.world.imagine(
        dreamer.world_loss(sequences(mask=mask))[1], dreamer.actor, dreamer.cfg.horizon, dreamer.rng
    )
    assert dream.mask is not None
    assert not dream.mask[..., 2].any()
    assert (dream.action != 2).all()


# --- the policy


def test_a_cleared_memory_is_that_of_an_episodes_start() -> None:
    dreamer = make_learner()
    policy, rng = dreamer.policy, torch.Generator().manual_seed(0)
    obs = torch.randn(2, 3)
    with torch.no_grad():
        hidden = policy.initial_hidden(2)
        assert all(not part.any() for part in hidden)
        first = policy.act(obs, hidden, None, zx.Phase.EVAL, rng, 0)
        later = policy.act(obs, first.hidden, None, zx.Phase.EVAL, rng, 0)
        assert not torch.allclose(later.hidden[0], first.hidden[0])
        cleared = tuple(part.index_fill(0, torch.tensor([1]), 0.0) for part in first.hidden)
        half = policy.act(obs, cleared, None, zx.Phase.EVAL, rng, 0)
    assert torch.allclose(half.hidden[0][0], later.hidden[0][0])
    assert torch.allclose(half.hidden[0][1], first.hidden[0][1])
    assert first.hidden[2].tolist() == [[1 - a, a] for a in first.action.tolist()]  # what was done, one-hot


# --- refusals


@pytest.mark.parametrize(
    ("settings", "words"),
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
def test_unsupported_settings_and_spaces_are_rejected(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(zx.UserError, match=words):
        make_learner(**settings)


def test_actions_without_bounds_are_refused() -> None:
    with pytest.raises(zx.UserError, match="dreamer needs continuous actions in a bounded one-dimensional Box"):
        make_learner(Spaces(VECTOR, Box(-np.inf, np.inf, (2,), np.float32)))


# --- pictures


def test_strips_by_hand() -> None:
    frames = np.zeros((2, 3, 5, 32, 32, 1), np.uint8)
    frames[1, 2, 4] = 7  # second sequence, third strip, fifth step
    picture = strip(frames)
    # frames are doubled to 64 and a white line follows each; 8 lines separate sequences
    assert picture.shape == (2 * (3 * 65 + 8), 5 * 65, 3)
    ys, xs, _ = np.nonzero(picture == 7)
    assert (ys.min(), ys.max()) == (203 + 130, 203 + 193)
    assert (xs.min(), xs.max()) == (260, 323)


def test_pictures_of_dreams_are_written_and_change_nothing(tmp_path: Path) -> None:
    settings = {
        "env_steps": 160,
        "learning_starts": 80,
        "updates_per_step": 0.05,
        "train_every": 20,
        "num_threads": 1,
    }
    settings |= {"eval_every_steps": 80, "eval_episodes": 1, "tensorboard": False, "cnn_depth": 2, "num_envs": 2}
    cfg = zx.config.load(algorithm="dreamer", env="toy/pixel-catch", **(SMALL | settings))
    ends = []
    for name, callbacks in (("plain", []), ("pictured", [ImaginedFrames(tmp_path / "pictured")])):
        session = zx.Session(cfg, tmp_path / name, callbacks, quiet=True)
        session.run()
        ends.append(session.learner.state_dict())
    assert torch.equal(ends[0]["rng"], ends[1]["rng"])
    for key, value in ends[0]["parts"]["world"].items():
        assert torch.equal(value, ends[1]["parts"]["world"][key])
    files = sorted(file.name for file in (tmp_path / "pictured" / "imagined").iterdir())
    assert files == ["000000000080.png", "000000000160.png"]
    length = cfg.replay.sequence_length
    picture = matplotlib.image.imread(tmp_path / "pictured" / "imagined" / files[0])
    assert picture.shape[:2] == (4 * (3 * 65 + 8), length * 65)


def test_a_task_without_pictures_has_none(tmp_path: Path) -> None:
    assert make_learner().dream_frames(sequences()) is None


def test_dreams_tell_real_frames_and_the_difference() -> None:
    spaces = Spaces(Box(0, 255, (8, 8, 3), np.uint8), Discrete(2))
    dreamer = make_learner(spaces, cnn_depth=2)
    obs = torch.randint(0, 256, (4, 6, 8, 8, 3), dtype=torch.uint8)
    frames = dreamer.dream_frames(sequences(obs=obs))
    assert frames is not None
    assert frames.shape == (4, 3, 6, 8, 8, 3)
    assert torch.equal(frames[:, 0], obs)
    grey = 127.5 + 0.5 * (frames[:, 1].float() - frames[:, 0].float())
    assert (frames[:, 2].float() - grey).abs().max() <= 1.5


# --- it learns


def test_the_model_learns_to_foresee() -> None:
    """A number counts up to 3 and starts again, where the episode ends; the reward is the action, the third step pays
    ten. After some updates the model, data the first step only, knows the rewards to come and the end."""
    dreamer = make_learner(lr=1e-2, net__hidden_sizes=[32], memory_size=32)
    rng = torch.Generator().manual_seed(0)

    def counted(num: int) -> Batch:
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
        dreamer.update(counted(16))
    with torch.no_grad():
        state = dreamer.world.infer_state(torch.eye(3)[:1], dreamer.policy.initial_hidden(1), None)
        h, z = state
        rewards, going = [], []
        for action in (1, 0, 1):
            h = dreamer.world.rssm.advance(h, z, torch.eye(2)[[action]])
            rewards.append(dreamer.world.reward_head.mean(dreamer.world.reward_head(h)).item())
            going.append(dreamer.world.continue_logits(h).sigmoid().item())
            z = dreamer.world.rssm.sample(dreamer.world.rssm.prior(h), None)
    assert rewards == pytest.approx([1.0, 0.0, 11.0], abs=0.7)
    assert going[0] > 0.9
    assert going[1] > 0.9
    assert going[2] < 0.1
