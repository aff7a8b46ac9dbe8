"""The collector for environments written in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zhixing as zx
from zhixing.collectors.actor import Actor
from zhixing.collectors.torch_collector import TorchActor
from zhixing.core.tree import tree_leaves
from zhixing.envs.torch_native import TorchVectorEnv
from zhixing.experiments.profiler import profile

ON_POLICY = [name for name in zx.algorithms.names() if zx.algorithms.get(name).settings.scheme == "on_policy"]


def make_actor(
    kind: type[Any], env: str, limit: int = 200, seed: int = 0, algorithm: str = "ppo", **settings: Any
) -> Any:
    settings["env"] = {"name": env, "episode_limit" if env.startswith("skirmish") else "max_episode_steps": limit}
    cfg = zx.config.load(algorithm=algorithm, num_envs=5, minibatch_size=5, **settings)
    vector = zx.envs.make_vector(env, 5, "torch", options=cfg.env.options)
    learner = zx.algorithms.get(algorithm).make(cfg, vector.spaces, torch.device("cpu"))
    return kind(learner.policy, vector, learner.extra_fields, seed=seed)


TEAM = {"algorithm": "mappo", "last_action": True}


@pytest.mark.parametrize(
    ("env", "recurrent", "settings"),
    [
        ("CartPole-v1", "none", {}),
        ("CartPole-v1", "lstm", {}),
        ("Pendulum-v1", "gru", {}),
        ("skirmish/3m", "none", {"algorithm": "mappo"}),
        ("skirmish/2s3z", "gru", TEAM),
        ("skirmish/2m_vs_1z", "lstm", {**TEAM, "share_weights": False}),
        ("skirmish/5m_vs_6m", "gru", {**TEAM, "algorithm": "coma"}),
    ],
)
def test_collects_the_same_steps_as_actor(env: str, recurrent: str, settings: dict[str, Any]) -> None:
    """Both use the same random numbers, so all fields and episodes are equal bit for bit."""
    net = {"recurrent": recurrent, "recurrent_size": 8}
    torch_actor, numpy_actor = (make_actor(kind, env, limit=13, net=net, **settings) for kind in (TorchActor, Actor))
    assert torch_actor.logged_info_keys == numpy_actor.logged_info_keys
    ends = 0
    for steps in (20, 20, 7):
        actual, expected = torch_actor.collect(steps=steps), numpy_actor.collect(steps=steps)
        assert {*actual.batch.fields} == {*expected.batch.fields}
        for name in actual.batch.fields:
            pairs = zip(
                tree_leaves(getattr(actual.batch, name)), tree_leaves(getattr(expected.batch, name)), strict=True
            )
            for leaf, array in pairs:
                assert isinstance(leaf, torch.Tensor)
                np.testing.assert_array_equal(leaf.numpy(), array, err_msg=name)
        assert [(e.length, pytest.approx(e.episode_return, rel=1e-5), e.info) for e in actual.episodes] == [
            (e.length, e.episode_return, e.info) for e in expected.episodes
        ]
        ends += len(actual.episodes)
    assert ends >= 15  # 47 steps of 5 environments, episodes of 13 at most
    assert torch_actor.env_steps == numpy_actor.env_steps == 47 * 5


@pytest.mark.parametrize(
    ("env", "name", "obs_shape"), [("Pendulum-v1", "ppo", (3,)), ("skirmish/3m", "mappo", (3, 30))]
)
def test_collect_never_converts_to_numpy(env: str, name: str, obs_shape: tuple[int, ...]) -> None:
    actor = make_actor(TorchActor, env, algorithm=name)

    def fail(*_: object) -> None:
        raise AssertionError("`step` and `reset` convert to NumPy")

    actor.env.step = actor.env.reset = fail
    assert actor.collect(3).batch.obs.shape == (3, 5, *obs_shape)


def test_next_obs_of_a_truncated_step_is_the_final_observation() -> None:
    actor = make_actor(TorchActor, "Pendulum-v1", limit=4)
    batch = actor.collect(9).batch
    assert batch.truncated[:, 0].tolist() == [False, False, False, True] * 2 + [False]
    inside = ~batch.truncated[:-1]
    assert torch.equal(batch.next_obs[:-1][inside], batch.obs[1:][inside])
    # the angular velocity changes by at most (15 + 6) * 0.05 per step; a reset changes it arbitrarily
    assert ((batch.next_obs - batch.obs)[..., 2].abs() <= 1.05 + 1e-4).all()
    assert not torch.isclose(batch.next_obs[3], batch.obs[4]).all(-1).any()


@pytest.mark.parametrize(("env", "settings"), [("CartPole-v1", {}), ("skirmish/3m", TEAM)])
def test_restored_actor_continues_exactly(env: str, settings: dict[str, Any], tmp_path: Path) -> None:
    first = make_actor(TorchActor, env, limit=40, net={"recurrent": "gru"}, **settings)
    first.collect(30)
    restored = make_actor(TorchActor, env, limit=40, seed=9, net={"recurrent": "gru"}, **settings)
    torch.save(first.state_dict(), tmp_path / "state")
    restored.policy.load_state_dict(first.policy.state_dict())
    assert restored.load_state_dict(torch.load(tmp_path / "state", weights_only=False)) == []
    expected, actual = first.collect(30), restored.collect(30)
    assert actual.episodes == expected.episodes != []
    for name in expected.batch.fields:
        for a, b in zip(*(tree_leaves(getattr(e.batch, name)) for e in (actual, expected)), strict=True):
            assert torch.equal(a, b), name
    assert first.env_steps == restored.env_steps == 300


@pytest.mark.parametrize("name", ON_POLICY)
def test_every_on_policy_algorithm_trains_with_it(name: str, short_config: Any, tmp_path: Path) -> None:
    env = "skirmish/3m" if zx.algorithms.get(name).multi_agent else "CartPole-v1"
    cfg = short_config(name, env=env, env_steps=200, vector__backend="torch")
    session = zx.Session(cfg, tmp_path / "run", quiet=True)
    assert isinstance(session.collector, TorchActor)
    assert session.run()["updates"] > 0


@pytest.mark.parametrize(("name", "env"), [("dqn", "CartPole-v1"), ("qmix", "skirmish/3m")])
def test_off_policy_algorithms_use_the_numpy_actor(name: str, env: str, short_config: Any, tmp_path: Path) -> None:
    cfg = short_config(name, env=env, vector__backend="torch", env_steps=300)
    session = zx.Session(cfg, tmp_path / "run", quiet=True)
    assert isinstance(session.env, TorchVectorEnv)
    assert isinstance(session.collector, Actor)
    assert session.run()["updates"] > 0


def test_ppo_reaches_150_in_256_cartpoles(tmp_path: Path) -> None:
    result = zx.train(
        "ppo",
        env="CartPole-v1",
        num_envs=256,
        vector={"backend": "torch"},
        rollout_steps=16,
        minibatch_size=512,
        epochs=4,
        lr=3e-3,
        env_steps=120_000,
        eval_every=40_000,
        stop_return=150,
        out=tmp_path / "run",
        quiet=True,
    )
    assert result["reached"]


def test_win_rate_is_logged(short_config: Any, tmp_path: Path) -> None:
    """Episodes of two steps are too short to win."""
    env = {"name": "skirmish/3m", "episode_limit": 2}
    zx.Session(
        short_config("mappo", env=env, vector__backend="torch", env_steps=200), tmp_path / "run", quiet=True
    ).run()
    rows = [line.split(",") for line in (tmp_path / "run" / "metrics.csv").read_text().splitlines()]
    assert {row[rows[0].index("win_rate")] for row in rows[1:]} <= {"0.0", "0"}
    assert len(rows) > 1


def test_profile_measures_environment_and_policy_separately(short_config: Any) -> None:
    result = profile(short_config("ppo", env="CartPole-v1", vector__backend="torch"), 0.1)
    assert result.parts["environment"] > 0
    assert result.parts["policy"] > 0
