"""Workers in this process: shares, seeds, turns, and what is refused. Needs no Ray."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import differing_tensors, metrics_rows
from probe import probe

import zhixing as zx
from zhixing.buffers.rollout import Rollout
from zhixing.config import RunConfig
from zhixing.distributed.cluster import Cluster
from zhixing.distributed.collector import DistributedCollector, spread
from zhixing.distributed.worker import SPREAD, packed
from zhixing.distributed.worker_pool import LocalCrew
from zhixing.utils.extras import install_hint

Small = Callable[..., RunConfig]


def make(cfg: RunConfig, folder: Path) -> tuple[DistributedCollector, zx.Learner]:
    env = zx.envs.make_vector(cfg.env.name, 1, backend="serial")
    learner = zx.algorithms.get(cfg.algorithm).make(cfg, env.spaces)
    actor = spread(cfg.model_copy(update={"num_threads": 1}), learner, env.spaces, env.logged_info_keys, folder)
    env.close()
    return actor, learner


def serial(cfg: RunConfig) -> RunConfig:
    return cfg.model_copy(update={"vector": cfg.vector.model_copy(update={"backend": "serial"})})


def test_shares_are_as_equal_as_can_be_and_seeds_differ(short_config: Small, tmp_path: Path) -> None:
    actor, _ = make(serial(short_config("impala", num_envs=7, actors=3, seed=11)), tmp_path)
    setups = actor.crew.setups
    assert [(setup.first, setup.last) for setup in setups] == [(0, 2), (2, 4), (4, 7)]
    assert setups[0].seed == 11  # alone it would be the run without workers
    seeds = [replace(setup, incarnation=incarnation).seed for setup in setups for incarnation in range(3)]
    assert len(set(seeds)) == 9
    actor.close()


def test_a_turn_is_taken_with_the_weights_of_its_start(short_config: Small, tmp_path: Path) -> None:
    """Two actors, started again when their rollout is taken, before it is learned from: from the third on, rollouts
    are by weights of two updates ago. The first weight of the network tells which update it is from."""
    cfg = serial(short_config("impala", num_envs=2, actors=2, rollout_steps=4))
    actor, learner = make(cfg, tmp_path)
    assert isinstance(actor.crew, LocalCrew)
    workers = actor.crew.workers
    mark = next(learner.policy.parameters()).detach().view(-1)
    found = []
    for update in range(6):
        mark[0], learner.updates = update, update
        held = [next(worker.begin()[1].policy.parameters()).view(-1)[0].item() for worker in workers]
        envs = actor.collect_from_worker(4).envs
        found.append((int(envs[0]), held[int(envs[0])]))
    # the first was started, with the present weights, only by the turn itself
    assert found[1:] == [(1, 0.0), (0, 0.0), (1, 1.0), (0, 2.0), (1, 3.0)]
    assert found[0][0] == 0
    assert actor.env_steps == 6 * 4
    actor.close()


def test_a3c_with_one_actor_is_a2c(short_config: Small, tmp_path: Path) -> None:
    """Nothing is old then: the same gradients at the same weights, bit for bit."""
    same = {"vector__backend": "serial", "seed": 2, "rollout_steps": 5, "lr": 7e-4, "gae_lambda": 0.95}
    for name, further in (("a2c", {}), ("a3c", {"actors": 1})):
        zx.Session(short_config(name, **same, **further), tmp_path / name, quiet=True).run()
    assert differing_tensors(tmp_path / "a2c", tmp_path / "a3c") == []
    assert metrics_rows(tmp_path / "a2c") == metrics_rows(tmp_path / "a3c")


def test_parts_side_by_side_are_one_rollout(short_config: Small, tmp_path: Path) -> None:
    """With the true last observations of each, at their columns."""
    actor, _ = make(serial(short_config("impala", "CartPole-v1", num_envs=5, actors=2)), tmp_path)
    assert isinstance(actor.crew, LocalCrew)
    alone = [worker.collect(40, "random", 0) for worker in actor.crew.workers]
    parts = [turn.part for turn in alone]
    joined = Rollout.join([part for part in parts if part is not None])
    assert joined.obs.shape == (40, 5, 4)
    first = 0
    for part in parts:
        assert part is not None
        one = Rollout.join([part])
        columns = slice(first, first + one.terminated.shape[1])
        for name in ("obs", "action", "reward", "terminated", "next_obs", "logp"):
            assert np.array_equal(getattr(joined, name)[:, columns], getattr(one, name)), name
        first = columns.stop
    ended = joined.terminated[:-1]
    assert ended.any()
    assert not np.array_equal(joined.next_obs[:-1][ended], joined.obs[1:][ended])  # the last one, not the next first
    assert np.array_equal(joined.next_obs[:-1][~ended], joined.obs[1:][~ended])
    actor.close()


def test_later_workers_explore_less(short_config: Small, tmp_path: Path) -> None:
    """Of three: epsilon to the powers 1, 1 + 7/2 and 1 + 7."""
    cfg = serial(short_config("dqn", num_envs=3, epsilon_start=0.5, epsilon_end=0.5))
    env = zx.envs.make_vector(cfg.env.name, 1, backend="serial")
    learner = zx.algorithms.get("dqn").make(cfg, env.spaces)
    setups = spread(cfg.model_copy(update={"num_threads": 1}), learner, env.spaces, (), tmp_path).crew.setups
    env.close()
    assert len(setups) == 1
    crew = LocalCrew([replace(setups[0], number=k, workers=3, first=k, last=k + 1) for k in range(3)])
    chances = [worker.begin()[1].policy.epsilon(0) for worker in crew.workers]
    assert chances == pytest.approx([0.5, 0.5 ** (1 + SPREAD / 2), 0.5 ** (1 + SPREAD)])
    crew.close()


@pytest.mark.parametrize("name", ["dqn", "sac", "qrdqn"])
def test_a_worker_rates_its_steps_as_the_learner_would(name: str, short_config: Small, tmp_path: Path) -> None:
    cfg = serial(short_config(name, num_envs=2, replay__prioritized=True, gamma=0.9))
    actor, learner = make(cfg, tmp_path)
    assert isinstance(actor.crew, LocalCrew)
    (worker,) = actor.crew.workers
    worker.load(packed(learner, whole=True))
    turn = worker.collect(6, "random", 0, True)
    assert turn.part is not None
    assert turn.priority is not None
    assert turn.priority.shape == (6, 2)
    batch = Rollout.join([turn.part]).to("cpu").flatten()
    steps = {name: getattr(batch, name) for name in ("obs", "action", "reward", "terminated", "next_obs")}
    full = zx.Batch(**steps, discount=torch.full((12,), 0.9), weight=torch.ones(12), index=torch.arange(12))
    learner.rng = torch.Generator().manual_seed(0)
    worker.begin()[1].rng.manual_seed(0)
    told = worker.begin()[1].priority(full.select([*steps, "discount"]))
    expected = probe(learner, full).priority
    assert told is not None
    assert expected is not None
    assert torch.allclose(told, expected, atol=1e-6)
    actor.close()


REFUSED = {
    "more workers than environments": ({"num_envs": 2, "distributed__workers": 3}, "at most the 2 environments"),
    "an address for nobody": ({"distributed__address": "auto"}, "distributed.address is for distributed.workers"),
    "ray on ray": ({"distributed__workers": 2, "vector__backend": "ray"}, "vector.backend=ray goes without"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_makes_no_sense_is_refused(settings: dict, message: str, short_config: Small, tmp_path: Path) -> None:
    with pytest.raises(zx.UserError, match=message):
        zx.Session(short_config("ppo", **settings), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_those_that_act_by_themselves_take_no_workers(
    short_config: Small, random_dataset: Callable, tmp_path: Path
) -> None:
    with pytest.raises(zx.UserError, match="alphazero acts in one process"):
        zx.Session(short_config("alphazero", distributed__workers=2), tmp_path / "run", quiet=True)
    cfg = short_config("dqn", distributed__workers=1).model_copy(update={"dataset": random_dataset("CartPole-v1")})
    with pytest.raises(zx.UserError, match="nobody acts"):
        zx.Session(cfg, tmp_path / "run", quiet=True)
    with pytest.raises(zx.UserError, match="normalize_obs"):
        short_config("a3c", normalize_obs=True)


@pytest.mark.parametrize("settings", [{"distributed__workers": 1}, {"vector__backend": "ray"}])
def test_a_missing_ray_is_named_with_its_command(
    settings: dict, short_config: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it isn't installed
    with pytest.raises(zx.UserError, match=re.escape(install_hint("ray"))):
        zx.Session(short_config("ppo", **settings), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "elsewhere", "ray://127.0.0.1:1"])
def test_an_address_where_no_ray_is_is_told_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    not_begun = SimpleNamespace(is_initialized=lambda: False)  # it comes to no more than this question
    monkeypatch.setitem(sys.modules, "ray", not_begun)
    with pytest.raises(zx.UserError, match=r"no Ray cluster answers at distributed\.address"):
        Cluster(address)


def test_another_number_of_workers_goes_on_with_new_episodes(short_config: Small, tmp_path: Path) -> None:
    cfg = serial(short_config("impala", num_envs=4, actors=2))
    actor, _ = make(cfg, tmp_path)
    actor.collect_from_worker(8)
    state = actor.state_dict()
    actor.close()
    more, _ = make(serial(short_config("impala", num_envs=4, actors=4)), tmp_path)
    assert more.load_state_dict(state) == [0, 1, 2, 3]
    assert more.env_steps == 16  # 8 steps of 2 environments
    assert more.crew.incarnations == [1] * 4
    more.close()
