"""`optimizer_eps` sets epsilon of every optimizer of every algorithm, and presets have the values of their papers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import zhixing as zx

# algorithms whose published code uses 1e-5; all others use 1e-8, the default of Adam
USES_1E_5 = {"ppo", "ppg", "gail", "a2c", "ac", "a3c", "impala", "mappo", "ippo"}
NOT_OPTIMIZER_EPS = {  # optimizers with a fixed value or a separate setting
    "gail": {"discriminator_optimizer": 1e-8},
    "dreamer": {"actor_optimizer": 1e-5, "critic_optimizer": 1e-5},
}


def epsilons(learner: zx.Learner) -> dict[str, float]:
    """Return epsilon of every optimizer by name, including those of the PPO inside gail."""
    inner = getattr(learner, "learner", None)
    inner_epsilons = {} if inner is None else epsilons(inner)
    return inner_epsilons | {name: optimizer.epsilon for name, optimizer in learner.optimizers().items()}


def test_optimizer_eps_sets_every_optimizer(algorithm: str, short_config: Callable, tmp_path: Path) -> None:
    config_class = zx.algorithms.get(algorithm).settings
    if "optimizer_eps" not in config_class.model_fields:
        assert config_class.scheme in ("play", "multi_policy")  # search without learning, settings of policies
        return
    default = 1e-5 if algorithm in USES_1E_5 else 1e-8
    assert config_class.model_fields["optimizer_eps"].default == default
    for settings, value in (({}, default), ({"optimizer_eps": 1e-3}, 1e-3)):
        session = zx.Session(short_config(algorithm, **settings), tmp_path / str(value), quiet=True)
        actual = epsilons(session.learner)
        session.close()
        assert actual == dict.fromkeys(actual, value) | NOT_OPTIMIZER_EPS.get(algorithm, {})


def test_behavior_optimizer_eps_sets_dreamers_actor_and_critic(short_config: Callable, tmp_path: Path) -> None:
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
        # Hessel et al. (2018), table 1: 80,000 frames are 20,000 steps of 4 frames; 32,000 frames are 2,000 updates
        # of 4 steps each
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
def test_presets_have_the_values_of_their_papers(name: str, env: str, settings: dict) -> None:
    cfg = zx.config.load(algorithm=name, env=env)
    assert {key: getattr(cfg, key) for key in settings} == settings
