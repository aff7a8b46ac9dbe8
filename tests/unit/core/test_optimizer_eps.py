"""`optimizer_eps` reaches every optimizer of every algorithm, and presets that follow a paper have its value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import zhixing as zx

# as in the published programs; Adam's own 1e-8 elsewhere
LARGER = {"ppo", "ppg", "gail", "a2c", "ac", "a3c", "impala", "mappo", "ippo"}
ELSEWHERE = {  # optimizers with a fixed value, or a setting of their own
    "gail": {"discriminator_optimizer": 1e-8},
    "dreamer": {"actor_optimizer": 1e-5, "critic_optimizer": 1e-5},
}


def epsilons(learner: zx.Learner) -> dict[str, float]:
    inner = getattr(learner, "learner", None)  # gail's policy
    found = {} if inner is None else epsilons(inner)
    return found | {name: optimizer.epsilon for name, optimizer in learner.optimizers().items()}


def test_every_optimizer_takes_it(algorithm: str, short_config: Callable, tmp_path: Path) -> None:
    model = zx.algorithms.get(algorithm).settings
    if "optimizer_eps" not in model.model_fields:
        assert model.scheme == "play"  # searches without learning
        return
    expected = 1e-5 if algorithm in LARGER else 1e-8
    assert model.model_fields["optimizer_eps"].default == expected
    for settings, value in (({}, expected), ({"optimizer_eps": 1e-3}, 1e-3)):
        session = zx.Session(short_config(algorithm, **settings), tmp_path / str(value), quiet=True)
        found = epsilons(session.learner)
        session.close()
        assert found == dict.fromkeys(found, value) | ELSEWHERE.get(algorithm, {})


def test_dreamers_actor_and_critic_have_a_setting_of_their_own(short_config: Callable, tmp_path: Path) -> None:
    session = zx.Session(short_config("dreamer", behavior_optimizer_eps=1e-3), tmp_path / "run", quiet=True)
    assert epsilons(session.learner) == {
        "world_optimizer": 1e-8,
        "actor_optimizer": 1e-3,
        "critic_optimizer": 1e-3,
    }
    session.close()


@pytest.mark.parametrize(
    ("name", "env", "settings"),
    [
        # Hessel et al. (2018), table 1: 80,000 frames are 20,000 steps of 4, 32,000 are 2,000 updates every 4 steps
        (
            "rainbow",
            "ALE/Pong-v5",
            {
                "lr": 6.25e-5,
                "optimizer_eps": 1.5e-4,
                "learning_starts": 20_000,
                "target_update_interval": 2_000,
                "noise": 0.5,
                "epsilon_start": 0.0,
                "atoms": 51,
                "v_min": -10.0,
                "v_max": 10.0,
            },
        ),
        (
            "ddpg",
            "HalfCheetah-v5",
            {"noise_kind": "gaussian", "exploration_noise": 0.1, "critics": 1, "target_policy_noise": 0.0, "tau": 5e-3},
        ),
    ],
)
def test_presets_have_the_values_that_they_claim(name: str, env: str, settings: dict) -> None:
    cfg = zx.config.load(algorithm=name, env=env)
    assert {key: getattr(cfg, key) for key in settings} == settings
