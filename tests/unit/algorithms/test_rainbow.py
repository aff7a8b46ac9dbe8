"""Rainbow uses each of its six parts."""

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
SURE = 50.0  # a logit whose probability, next to logits of 0, is 1 in float32


def make_learner(**settings: Any) -> C51:
    settings = {"net__hidden_sizes": [8], "atoms": 3, "v_min": 0.0, "v_max": 10.0} | settings
    learner = zx.algorithms.get("rainbow").make(
        zx.config.load(algorithm="rainbow", env="Acrobot-v1", **settings), SPACES
    )
    assert isinstance(learner, C51)
    return learner


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


def set_advantages(net: Any, logits: list[list[float]]) -> None:
    """Make a network return these advantages `[n,atoms]` and a value of 0 for any observation, without noise."""
    with torch.no_grad():
        for stream in (net.head.value, net.head.advantage):
            for parameter in stream.parameters():
                parameter.zero_()
        net.head.advantage[-1].bias.copy_(torch.tensor(logits).flatten())


def test_target_network_evaluates_the_networks_choice() -> None:
    rainbow = make_learner()
    # the network prefers the first action (10 to 0), whose return is 5 in the target network (10 for the second).
    # The head subtracts the mean over the two actions, so logits are doubled
    set_advantages(rainbow.net, [[0.0, 0.0, 2 * SURE], [2 * SURE, 0.0, 0.0]])
    set_advantages(rainbow.target_net, [[0.0, 2 * SURE, 0.0], [0.0, 0.0, 2 * SURE]])
    assert torch.allclose(rainbow.target_distribution(batch(), batch())[0], torch.tensor([0.0, 1.0, 0.0]), atol=1e-6)


def test_head_is_dueling_with_noisy_layers() -> None:
    rainbow = make_learner()
    assert isinstance(rainbow.net.head, DuelingHead)
    layers = [type(module) for module in rainbow.net.head.modules() if hasattr(module, "weight")]
    assert layers == [NoisyLinear] * 4
    # dueling: the mean of the logits over actions is the output of the value stream
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


def test_noise_replaces_epsilon_and_is_off_in_evaluations() -> None:
    rainbow = make_learner(noise=1.0, net__hidden_sizes=[32])
    assert epsilon_at(rainbow.cfg, 0) == epsilon_at(rainbow.cfg, 10**6) == 0.0
    obs, rng = torch.randn(256, 3, generator=torch.Generator().manual_seed(1)), torch.Generator().manual_seed(0)

    def act(phase: Phase) -> torch.Tensor:
        return rainbow.policy.act(obs, None, None, phase, rng, 0).action

    with torch.no_grad():
        assert len({tuple(act(Phase.COLLECT).tolist()) for _ in range(8)}) > 1
        greedy = act(Phase.EVAL)
        for _ in range(3):
            act(Phase.COLLECT)
            assert torch.equal(act(Phase.EVAL), greedy)
        assert torch.equal(rainbow.policy.net(obs)[0].argmax(-1), greedy)


def test_each_update_resamples_the_noise_of_both_networks() -> None:
    rainbow = make_learner()
    noises = set()
    for _ in range(3):
        rainbow.update(batch())
        for net in (rainbow.net, rainbow.target_net):
            noises.add(tuple(next(net.head.value[0].buffers()).tolist()))
    assert len(noises) == 6
    before = rainbow.net.head.value[0].weight_sigma.clone()
    rainbow.update(batch())
    assert not torch.equal(rainbow.net.head.value[0].weight_sigma, before)  # the scale of the noise is learned


def test_value_is_computed_without_noise() -> None:
    rainbow = make_learner()
    x = torch.randn(4, 3)
    first = rainbow.value(x)
    probe(rainbow, batch())
    assert torch.equal(rainbow.value(x), first)


def test_restored_learner_continues_identically_without_saved_noise() -> None:
    rainbow, other = make_learner(), make_learner(seed=9)
    rainbow.update(batch())
    other.load_state_dict(rainbow.state_dict())
    for _ in range(2):
        rainbow.update(batch())
        other.update(batch())
    assert all(torch.equal(p, q) for p, q in zip(rainbow.net.parameters(), other.net.parameters(), strict=True))
    assert not any("noise" in name for name in rainbow.policy.state_dict())


def test_noise_is_a_setting() -> None:
    rainbow = make_learner(noise=0.0)
    assert not any(isinstance(module, NoisyLinear) for module in rainbow.net.modules())
    noisy_c51 = zx.algorithms.get("c51").make(zx.config.load(algorithm="c51", env="Acrobot-v1", noise=0.5), SPACES)
    assert sum(isinstance(module, NoisyLinear) for module in noisy_c51.policy.modules()) == 1


def test_recurrent_network_requires_one_step_returns() -> None:
    with pytest.raises(UserError, match=r"rainbow with a recurrent network .* set replay.n_step=1"):
        make_learner(net__recurrent="gru")
    assert make_learner(net__recurrent="gru", replay__n_step=1).sample_type == "sequences"
