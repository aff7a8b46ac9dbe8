"""The distributed collector with workers in this process, and the settings it rejects. Needs no Ray."""

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
from zhixing.distributed.collector import DistributedCollector, make_distributed_collector
from zhixing.distributed.worker import EPSILON_ALPHA, network_weights
from zhixing.distributed.worker_pool import LocalWorkerPool
from zhixing.utils.extras import install_hint

ShortConfig = Callable[..., RunConfig]


def make(cfg: RunConfig, folder: Path) -> tuple[DistributedCollector, zx.Learner]:
    env = zx.envs.make_vector(cfg.env.name, 1, backend="serial")
    learner = zx.algorithms.get(cfg.algorithm).make(cfg, env.spaces)
    cfg = cfg.model_copy(update={"num_threads": 1})
    collector = make_distributed_collector(cfg, learner, env.spaces, env.logged_info_keys, folder)
    env.close()
    return collector, learner


def serial(cfg: RunConfig) -> RunConfig:
    return cfg.model_copy(update={"vector": cfg.vector.model_copy(update={"backend": "serial"})})


def test_workers_have_nearly_equal_numbers_of_envs_and_different_seeds(
    short_config: ShortConfig, tmp_path: Path
) -> None:
    collector, _ = make(serial(short_config("impala", num_envs=7, actors=3, seed=11)), tmp_path)
    specs = collector.pool.specs
    assert [(spec.first, spec.last) for spec in specs] == [(0, 2), (2, 4), (4, 7)]
    assert specs[0].seed == 11  # the seed of a run without workers
    seeds = [replace(spec, incarnation=incarnation).seed for spec in specs for incarnation in range(3)]
    assert len(set(seeds)) == 9
    collector.close()


def test_worker_acts_with_the_weights_from_the_time_of_submit(short_config: ShortConfig, tmp_path: Path) -> None:
    """Two workers are restarted when their rollout is returned, before the update from it.

    From the third rollout on, the weights are therefore two updates old. The first weight of the network counts the
    updates.
    """
    cfg = serial(short_config("impala", num_envs=2, actors=2, rollout_steps=4))
    collector, learner = make(cfg, tmp_path)
    assert isinstance(collector.pool, LocalWorkerPool)
    workers = collector.pool.workers
    first_weight = next(learner.policy.parameters()).detach().view(-1)
    rollouts = []  # (worker, update count of its weights)
    for update in range(6):
        first_weight[0], learner.updates = update, update
        weights = [next(worker.build()[1].policy.parameters()).view(-1)[0].item() for worker in workers]
        worker = int(collector.collect_from_worker(4).envs[0])  # each worker has one env
        rollouts.append((worker, weights[worker]))
    # the first call of `collect_from_worker` starts worker 0, so its weights weren't loaded before
    assert rollouts[1:] == [(1, 0.0), (0, 0.0), (1, 1.0), (0, 2.0), (1, 3.0)]
    assert rollouts[0][0] == 0
    assert collector.env_steps == 6 * 4
    collector.close()


def test_a3c_with_one_actor_equals_a2c(short_config: ShortConfig, tmp_path: Path) -> None:
    """The weights of a single actor are never old, so the runs are identical."""
    same = {"vector__backend": "serial", "seed": 2, "rollout_steps": 5, "lr": 7e-4, "gae_lambda": 0.95}
    for name, settings in (("a2c", {}), ("a3c", {"actors": 1})):
        zx.Session(short_config(name, **same, **settings), tmp_path / name, quiet=True).run()
    assert differing_tensors(tmp_path / "a2c", tmp_path / "a3c") == []
    assert metrics_rows(tmp_path / "a2c") == metrics_rows(tmp_path / "a3c")


def test_joined_parts_keep_their_final_observations(short_config: ShortConfig, tmp_path: Path) -> None:
    collector, _ = make(serial(short_config("impala", "CartPole-v1", num_envs=5, actors=2)), tmp_path)
    assert isinstance(collector.pool, LocalWorkerPool)
    results = [worker.collect(40, "random", 0) for worker in collector.pool.workers]
    parts = [result.rollout for result in results if result.rollout is not None]
    joined = Rollout.join(parts)
    assert joined.obs.shape == (40, 5, 4)
    first = 0
    for part in parts:
        alone = Rollout.join([part])
        columns = slice(first, first + alone.terminated.shape[1])
        for name in ("obs", "action", "reward", "terminated", "next_obs", "logp"):
            assert np.array_equal(getattr(joined, name)[:, columns], getattr(alone, name)), name
        first = columns.stop
    assert first == 5
    ended = joined.terminated[:-1]
    assert ended.any()
    assert not np.array_equal(joined.next_obs[:-1][ended], joined.obs[1:][ended])  # the final obs, not the next first
    assert np.array_equal(joined.next_obs[:-1][~ended], joined.obs[1:][~ended])
    collector.close()


def test_later_workers_explore_less(short_config: ShortConfig, tmp_path: Path) -> None:
    """Three workers have epsilon to the powers 1, 1 + 7/2 and 1 + 7."""
    cfg = serial(short_config("dqn", num_envs=3, epsilon_start=0.5, epsilon_end=0.5))
    collector, _ = make(cfg, tmp_path)
    (spec,) = collector.pool.specs
    pool = LocalWorkerPool([replace(spec, index=k, num_workers=3, first=k, last=k + 1) for k in range(3)])
    epsilons = [worker.build()[1].policy.epsilon(0) for worker in pool.workers]
    assert epsilons == pytest.approx([0.5, 0.5 ** (1 + EPSILON_ALPHA / 2), 0.5 ** (1 + EPSILON_ALPHA)])
    pool.close()


@pytest.mark.parametrize("name", ["dqn", "sac", "qrdqn"])
def test_priorities_of_a_worker_equal_those_of_the_learner(
    name: str, short_config: ShortConfig, tmp_path: Path
) -> None:
    cfg = serial(short_config(name, num_envs=2, replay__prioritized=True, gamma=0.9))
    collector, learner = make(cfg, tmp_path)
    assert isinstance(collector.pool, LocalWorkerPool)
    (worker,) = collector.pool.workers
    worker.load_weights(network_weights(learner))
    result = worker.collect(6, "random", 0, True)
    assert result.rollout is not None
    assert result.priority is not None
    assert result.priority.shape == (6, 2)
    batch = Rollout.join([result.rollout]).to("cpu").flatten()
    steps = {name: getattr(batch, name) for name in ("obs", "action", "reward", "terminated", "next_obs")}
    full = zx.Batch(**steps, discount=torch.full((12,), 0.9), weight=torch.ones(12), index=torch.arange(12))
    learner.rng = torch.Generator().manual_seed(0)
    worker.build()[1].rng.manual_seed(0)
    priority = worker.build()[1].priority(full.select([*steps, "discount"]))
    expected = probe(learner, full).priority
    assert priority is not None
    assert expected is not None
    assert torch.allclose(priority, expected, atol=1e-6)
    collector.close()


REJECTED = {
    "more workers than environments": ({"num_envs": 2, "distributed__workers": 3}, "is more than num_envs=2"),
    "an unused address": ({"distributed__address": "auto"}, r"distributed\.address='auto' has no effect without Ray"),
    "two kinds of Ray workers": ({"distributed__workers": 2, "vector__backend": "ray"}, r"vector\.backend=ray"),
}


@pytest.mark.parametrize(("settings", "message"), REJECTED.values(), ids=REJECTED.keys())
def test_contradictory_settings_are_rejected(
    settings: dict, message: str, short_config: ShortConfig, tmp_path: Path
) -> None:
    with pytest.raises(zx.UserError, match=message):
        zx.Session(short_config("ppo", **settings), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_workers_are_rejected_for_self_play_and_datasets(
    short_config: ShortConfig, random_dataset: Callable, tmp_path: Path
) -> None:
    with pytest.raises(zx.UserError, match=r"alphazero .*distributed\.workers"):
        zx.Session(short_config("alphazero", distributed__workers=2), tmp_path / "run", quiet=True)
    cfg = short_config("dqn", distributed__workers=1).model_copy(update={"dataset": random_dataset("CartPole-v1")})
    with pytest.raises(zx.UserError, match=r"dataset.*distributed\.workers"):
        zx.Session(cfg, tmp_path / "run", quiet=True)


def test_a3c_rejects_normalized_observations(short_config: ShortConfig) -> None:
    with pytest.raises(zx.UserError, match="normalize_obs"):
        short_config("a3c", normalize_obs=True)


@pytest.mark.parametrize("settings", [{"distributed__workers": 1}, {"vector__backend": "ray"}])
def test_error_without_ray_names_the_install_command(
    settings: dict, short_config: ShortConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails
    with pytest.raises(zx.UserError, match=re.escape(install_hint("ray"))):
        zx.Session(short_config("ppo", **settings), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "elsewhere", "ray://127.0.0.1:1"])
def test_unreachable_address_raises_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ray = SimpleNamespace(is_initialized=lambda: False)  # nothing else of Ray is called before the error
    monkeypatch.setitem(sys.modules, "ray", fake_ray)
    with pytest.raises(zx.UserError, match=r"no Ray cluster answers at distributed\.address"):
        Cluster(address)


def test_changed_number_of_workers_starts_new_episodes(short_config: ShortConfig, tmp_path: Path) -> None:
    two, _ = make(serial(short_config("impala", num_envs=4, actors=2)), tmp_path)
    two.collect_from_worker(8)
    state = two.state_dict()
    two.close()
    four, _ = make(serial(short_config("impala", num_envs=4, actors=4)), tmp_path)
    assert four.load_state_dict(state) == [0, 1, 2, 3]
    assert four.env_steps == 16  # 8 steps of 2 environments
    assert four.pool.incarnations == [1] * 4
    four.close()
