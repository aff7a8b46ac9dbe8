"""Rainbow: each of its six parts is really in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from probe import probe

import zhixing as zx
from zhixing.algorithms.c51 import C51, RainbowConfig
from zhixing.buffers import NStep, Prioritized
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.nets.heads import DuelingHead
from zhixing.nets.noisy import NoisyLinear, zero_noise
from zhixing.nets.qnet import epsilon_at

SPACES = Spaces(Box(-9.0, 9.0, (3,), np.float32), Discrete(2))
SURE = 50.0  # a logit beside zeros whose probability is 1 in 32 bits


def learner(**settings: Any) -> C51:
    settings = {"net__hidden_sizes": [8], "atoms": 3, "v_min": 0.0, "v_max": 10.0} | settings
    made = zx.algorithms.get("rainbow").make(zx.config.load(algorithm="rainbow", env="Acrobot-v1", **settings), SPACES)
    assert isinstance(made, C51)
    return made


def batch(num: int = 3) -> Batch:
    return Batch(
        obs=torch.zeros(num, 3),
        next_obs=torch.zeros(num, 3),
        action=torch.zeros(num, dtype=torch.long),
        reward=torch.zeros(num),
        terminated=torch.zeros(num, dtype=torch.bool),
        truncated=torch.zeros(num, dtype=torch.bool),
        discount=torch.full((num,), 1.0),
        index=torch.arange(num),
    )


def advantages(net: Any, logits: list[list[float]]) -> None:
    """Silent, with the same value for everything and these advantages [n,atoms]."""
    with torch.no_grad():
        for stream in (net.head.value, net.head.advantage):
            for parameter in stream.parameters():
                parameter.zero_()
        net.head.advantage[-1].bias.copy_(torch.tensor(logits).flatten())


def test_the_network_chooses_and_its_target_values() -> None:
    rainbow = learner()
    # the network prefers the first action (10 against 0), which its target holds for surely 5, the second for 10.
    # the mean over actions is taken off, so each side needs the double
    advantages(rainbow.net, [[0.0, 0.0, 2 * SURE], [2 * SURE, 0.0, 0.0]])
    advantages(rainbow.target_net, [[0.0, 2 * SURE, 0.0], [0.0, 0.0, 2 * SURE]])
    assert torch.allclose(rainbow.target_distribution(batch(), batch())[0], torch.tensor([0.0, 1.0, 0.0]), atol=1e-6)


def test_streams_are_dueling_and_their_layers_noisy() -> None:
    rainbow = learner()
    assert isinstance(rainbow.net.head, DuelingHead)
    layers = [type(module) for module in rainbow.net.head.modules() if hasattr(module, "weight")]
    assert layers == [NoisyLinear] * 4
    # dueling: the mean over actions of the logits is the value stream's
    zero_noise(rainbow.net)
    x = torch.randn(5, 3)
    logits = rainbow.net(x)[0]
    assert logits.shape == (5, 2, 3)
    assert torch.allclose(logits.mean(1), rainbow.net.head.value(rainbow.net.torso(x)), atol=1e-6)


def test_replay_is_prioritized_with_n_step_returns(tmp_path: Path) -> None:
    cfg = zx.config.load(algorithm="rainbow", env="CartPole-v1")
    session = zx.Session(cfg, tmp_path / "run", quiet=True)
    try:
        replay = session.loop.buffer
        assert replay is not None
        assert isinstance(replay.sampler, Prioritized)
        assert isinstance(replay.view, NStep)
        assert replay.view.n == 3
    finally:
        session.close()
    defaults = RainbowConfig(algorithm="rainbow", env={"name": "Acrobot-v1"})
    assert (defaults.replay.prioritized, defaults.replay.n_step) == (True, 3)


def test_noise_explores_instead_of_epsilon_and_is_silent_in_evaluations() -> None:
    rainbow = learner(noise=1.0, net__hidden_sizes=[32])
    assert epsilon_at(rainbow.cfg, 0) == epsilon_at(rainbow.cfg, 10**6) == 0.0
    obs, rng = torch.randn(256, 3, generator=torch.Generator().manual_seed(1)), torch.Generator().manual_seed(0)

    def act(phase: Phase) -> torch.Tensor:
        return rainbow.policy.act(obs, None, None, phase, rng, 0).action

    with torch.no_grad():
        assert len({tuple(act(Phase.COLLECT).tolist()) for _ in range(8)}) > 1
        best = act(Phase.EVAL)
        for _ in range(3):
            act(Phase.COLLECT)
            assert torch.equal(act(Phase.EVAL), best)
        assert torch.equal(rainbow.policy.net(obs)[0].argmax(-1), best)


def test_each_gradient_has_noise_of_its_own_and_the_target_another() -> None:
    rainbow = learner()
    seen = set()
    for _ in range(3):
        rainbow.update(batch())
        for net in (rainbow.net, rainbow.target_net):
            seen.add(tuple(next(net.head.value[0].buffers()).tolist()))
    assert len(seen) == 6
    before = rainbow.net.head.value[0].weight_sigma.clone()
    rainbow.update(batch())
    assert not torch.equal(rainbow.net.head.value[0].weight_sigma, before)  # how much to explore is learned


def test_values_are_without_noise() -> None:
    rainbow = learner()
    x = torch.randn(4, 3)
    first = rainbow.value(x)
    probe(rainbow, batch())
    assert torch.equal(rainbow.value(x), first)


def test_what_was_drawn_before_saving_does_not_matter_afterwards() -> None:
    rainbow, other = learner(), learner(seed=9)
    rainbow.update(batch())
    other.load_state_dict(rainbow.state_dict())
    for _ in range(2):
        rainbow.update(batch())
        other.update(batch())
    assert all(
        torch.equal(mine, theirs) for mine, theirs in zip(rainbow.net.parameters(), other.net.parameters(), strict=True)
    )
    assert not any("noise" in name for name in rainbow.policy.state_dict())


def test_noise_can_be_left_out() -> None:
    rainbow = learner(noise=0.0)
    assert not any(isinstance(module, NoisyLinear) for module in rainbow.net.modules())
    noisy_c51 = zx.algorithms.get("c51").make(zx.config.load(algorithm="c51", env="Acrobot-v1", noise=0.5), SPACES)
    assert sum(isinstance(module, NoisyLinear) for module in noisy_c51.policy.modules()) == 1


def test_memory_needs_single_steps() -> None:
    with pytest.raises(UserError, match=r"rainbow with a recurrent network .* set replay.n_step=1"):
        learner(net__recurrent="gru")
    assert learner(net__recurrent="gru", replay__n_step=1).sample_type == "sequences"
