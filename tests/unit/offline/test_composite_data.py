"""Datasets of Dict actions: recording, reading, conversion to Minari, and invalid vectors."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dummy_envs import HYBRID

import zhixing as zx
from zhixing import offline
from zhixing.collectors.actor import Actor
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.tree import tree_leaves, tree_map
from zhixing.offline import Dataset, minari_data
from zhixing.training.collect_data import NoisyPolicy, collect_from_actor


def record(folder: Path) -> tuple[Dataset, Batch]:
    """Record random actions, and return the dataset and the same steps as they were collected."""
    env = zx.envs.make_vector("dummy_envs:DictObsEnv", 1, "serial", options={"kind": "hybrid"})
    policy = zx.algorithms.get("ppo").make(zx.config.load(algorithm="ppo", env="toy/match"), env.spaces).policy
    data = collect_from_actor(Actor(policy, env, seed=3), str(folder), 40, env="any", note="", phase=Phase.RANDOM)
    steps = Actor(policy, env, seed=3).collect(steps=40, phase=Phase.RANDOM).batch
    return data, steps


def test_recorded_actions_are_those_of_the_policy(tmp_path: Path) -> None:
    data, steps = record(tmp_path / "data")
    assert data.arrays["action"].shape == (40, 10)
    np.testing.assert_allclose(data.arrays["action"], steps.action[:, 0], atol=1e-6)
    stored = np.load(tmp_path / "data" / "action.npy")  # in the environment's scale
    actions = iterate_rows(data.spaces.unflatten_action(stored))
    collected = iterate_rows(data.spaces.to_env(steps.action[:, 0]))
    for element, expected in zip(actions, collected, strict=True):
        assert HYBRID.contains(element)
        for leaf, other in zip(tree_leaves(element), tree_leaves(expected), strict=True):
            np.testing.assert_allclose(leaf, other, atol=1e-6)
    converted = Dataset.from_chunks(data.header, data.chunks())
    np.testing.assert_allclose(converted.arrays["action"], data.arrays["action"], atol=1e-6)


def iterate_rows(actions: Any) -> list[Any]:
    rows = len(tree_leaves(actions)[0])
    return [tree_map(lambda leaf, i=i: leaf[i, ...], actions) for i in range(rows)]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [(0, 3.0, r"4\.0.*at row 2; the action space is Dict"), (0, 0.5, r"1\.5.*at row 2"), (9, 1.1, r"2\.2.*at row 2")],
)
def test_invalid_vectors_are_rejected(column: int, value: float, message: str, tmp_path: Path) -> None:
    data, _ = record(tmp_path / "data")
    action = np.array(data.arrays["action"])
    action[2, column] = value  # part is from 1 to 3; the last column is turn, from -2 to 2
    with pytest.raises(zx.UserError, match=message):
        dataclasses.replace(data, arrays={**data.arrays, "action": action})


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Minari needs Python 3.11")
def test_minari_stores_elements_of_the_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    data, _ = record(tmp_path / "data")
    minari_data.write(data, "ours/hybrid-v0")
    loaded = minari.load_dataset("ours/hybrid-v0")
    assert loaded.action_space == HYBRID
    restored = offline.open("minari:ours/hybrid-v0")
    np.testing.assert_allclose(restored.arrays["action"], data.arrays["action"], atol=1e-6)


def test_noise_changes_numbers_a_little_and_choices_rarely() -> None:
    env = zx.envs.make_vector("dummy_envs:DictObsEnv", 50, "serial", options={"kind": "hybrid"})
    policy = zx.algorithms.get("ppo").make(zx.config.load(algorithm="ppo", env="toy/match"), env.spaces).policy
    plain, noisy = (
        Actor(NoisyPolicy(policy, noise, False, 0), env, seed=0).collect(steps=20).batch.action.reshape(-1, 10)
        for noise in (0.0, 0.1)
    )
    assert env.spaces.layout.sizes == [3, 2, 3]
    assert np.abs(noisy[:, 5:] - plain[:, 5:]).mean() == pytest.approx(0.08, abs=0.01)  # 0.1 √(2/π)
    # initial policies hardly depend on the observation: a tenth of the rows is replaced by random choices and bits
    assert 0.05 < (noisy[:, :5] != plain[:, :5]).any(-1).mean() < 0.15
