"""Vector environments: all back ends return the same results, and saved states continue identically."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, OneOf, Sequence, Text, Tuple
from sample_envs import (
    Continuous,
    Counter,
    InfoMask,
    MixedObs,
    PettingZooStyle,
    Stateful,
    TextObs,
    TupleObs,
    Unrestorable,
    WrongShape,
)

from zhixing.core.tree import tree_leaves, tree_map
from zhixing.envs import ProcessVectorEnv, SerialVectorEnv, VectorEnv, make_vector
from zhixing.envs.vector import action_log
from zhixing.errors import UserError


def record(env: VectorEnv, steps: int, seed: int) -> list[Any]:
    """Take random steps. Return for each step a list of copied arrays and the final info."""
    rng = np.random.default_rng(seed)
    space = env.single_action_space
    records: list[Any] = []
    for _ in range(steps):
        if hasattr(space, "n"):
            actions = rng.integers(0, space.n, env.num_envs)
        else:
            actions = rng.uniform(space.low, space.high, (env.num_envs, *space.shape))
        obs, reward, terminated, truncated, info = env.step(actions)
        ended = terminated | truncated
        final = tree_leaves(info["final_obs"]) if ended.any() else []
        mask = [info["action_mask"]] if env.spaces.mask else []
        final_mask = [info["final_mask"][ended]] if env.spaces.mask and ended.any() else []
        arrays = [
            *tree_leaves(obs),
            reward,
            terminated,
            truncated,
            *(leaf[ended] for leaf in final),
            *mask,
            *final_mask,
        ]
        records.append(([np.copy(array) for array in arrays], info.get("final_info", {})))
    return records


def assert_same(left: list[Any], right: list[Any]) -> None:
    for (arrays, infos), (others, other_infos) in zip(left, right, strict=True):
        assert infos == other_infos
        for one, other in zip(arrays, others, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("factory", "all_workers"), [(MixedObs, (1, 2, 3)), (Continuous, (3,))])
def test_process_backends_equal_serial_bitwise(factory: Any, all_workers: tuple[int, ...]) -> None:
    serial = SerialVectorEnv(factory, 4)
    first, _ = serial.reset(seed=3)
    first = tree_map(np.copy, first)
    expected = record(serial, 500, seed=1)
    assert any(infos for _, infos in expected)
    for workers, mixed in itertools.product(all_workers, (False, True)):
        env = ProcessVectorEnv(factory, 4, workers, mixed=mixed)
        obs, _ = env.reset(seed=3)
        assert_same([(tree_leaves(first), {})], [(tree_leaves(obs), {})])
        assert_same(expected, record(env, 500, seed=1))
        env.close()


def test_random_stream_of_an_env_is_independent_of_num_envs() -> None:
    few, many = SerialVectorEnv(Continuous, 2), SerialVectorEnv(Continuous, 3)
    small, large = few.reset(seed=5)[0], many.reset(seed=5)[0]
    np.testing.assert_array_equal(small, large[:2])
    assert len(np.unique(large[:, 0])) == 3
    assert not np.array_equal(large, SerialVectorEnv(Continuous, 3).reset(seed=6)[0])


@pytest.mark.parametrize(
    "backend", [SerialVectorEnv, partial(ProcessVectorEnv, workers=2), partial(ProcessVectorEnv, workers=2, mixed=True)]
)
@pytest.mark.parametrize("end", ["death", "limit"])
def test_episode_end_returns_next_first_and_true_final_observation(backend: Any, end: str) -> None:
    env = backend(lambda: Counter(**{end: 3}), 2)
    obs, info = env.reset(seed=0)
    assert obs.dtype == np.float32
    assert info == {}
    for _ in range(2):
        obs, reward, terminated, truncated, info = env.step(np.array([1, 2]))
        assert info == {}
    assert obs.tolist() == [[0, 2], [0, 2]]
    obs, reward, terminated, truncated, info = env.step(np.array([1, 2]))
    assert obs.tolist() == [[1, 0], [1, 0]]
    assert info["final_obs"].tolist() == [[0, 3], [0, 3]]
    assert info["final_info"] == {index: {"length": 3, "score": 0.5, "won": True} for index in (0, 1)}
    assert reward.tolist() == [1, 2]
    assert (terminated.all(), truncated.any()) == ((True, False) if end == "death" else (False, True))
    assert terminated.dtype == truncated.dtype == bool
    env.close()


def test_only_ended_episodes_are_reset() -> None:
    lengths = iter([9, 9, 2, 9, 9])  # the first instance only determines the spaces
    env = SerialVectorEnv(lambda: Counter(death=next(lengths)), 3)
    env.reset(seed=0)
    env.step(np.zeros(3, int))
    obs, _, terminated, _, info = env.step(np.zeros(3, int))
    assert terminated.tolist() == [False, True, False]
    assert obs.tolist() == [[0, 2], [1, 0], [0, 2]]
    assert info["final_obs"][1].tolist() == [0, 2]
    assert list(info["final_info"]) == [1]


def test_mask_in_observation_is_moved_to_info() -> None:
    env = SerialVectorEnv(PettingZooStyle, 2)
    assert env.spaces.mask == 3
    assert env.single_observation_space == PettingZooStyle.observation_space["observation"]
    obs, info = env.reset(seed=0)
    assert obs.tolist() == [[1, 2], [1, 2]]
    assert info["action_mask"].tolist() == [[True, False, True]] * 2
    obs, _, _, _, info = env.step(np.array([0, 2]))
    assert info["action_mask"].tolist() == [[False, True, False], [True, False, True]]
    assert info["final_mask"][1].tolist() == [False, True, False]
    assert obs.tolist() == [[3, 4], [1, 2]]
    assert info["final_obs"][1].tolist() == [3, 4]


def test_missing_mask_at_episode_end_allows_all_actions() -> None:
    env = SerialVectorEnv(lambda: InfoMask(death=2), 1)
    assert env.reset(seed=0)[1]["action_mask"].tolist() == [[True, True, False]]
    assert env.step(np.array([0]))[4]["action_mask"].tolist() == [[False, False, True]]
    info = env.step(np.array([0]))[4]
    assert info["final_mask"].tolist() == [[True, True, True]]
    assert info["action_mask"].tolist() == [[True, True, False]]


def test_mask_is_removed_from_dict_observations() -> None:
    env = SerialVectorEnv(MixedObs, 2)
    assert set(env.reset(seed=0)[0]) == {"image", "position", "kind"}


def test_tuple_observations_become_dicts() -> None:
    env = SerialVectorEnv(TupleObs, 2)
    obs, _ = env.reset(seed=0)
    assert obs["0"].tolist() == [4, 4]
    assert obs["1"]["deep"]["0"].tolist() == [[0.5], [0.5]]
    assert obs["1"]["deep"]["1"].tolist() == [1, 1]
    assert env.observation_space.contains(obs)


def test_unsupported_space_and_wrong_shape_are_rejected() -> None:
    with pytest.raises(UserError, match="Text"):
        SerialVectorEnv(TextObs, 2)
    with pytest.raises(UserError, match="nothing but text"):
        SerialVectorEnv(partial(Described, Dict({"mission": Text(5)})), 2)
    with pytest.raises(UserError, match=r"shape \(2,\); its observation space has shape \(3,\)"):
        SerialVectorEnv(WrongShape, 2)


class Described(Counter):
    """Has another observation space."""

    def __init__(self, space: gym.Space) -> None:
        super().__init__()
        self.observation_space = space


@pytest.mark.parametrize(
    ("space", "advice"),
    [
        (Graph(Box(0, 1, (2,)), None), "to pad nodes and edges to fixed numbers"),
        (Sequence(Discrete(3)), "to pad it to a fixed length"),
        (Text(5), "to encode it as numbers"),
        (OneOf((Discrete(3), Box(0, 1, (2,)))), "to return a Dict with one part per alternative"),
    ],
)
def test_spaces_without_a_fixed_size_are_rejected_with_advice(space: gym.Space, advice: str) -> None:
    with pytest.raises(UserError, match=f"Described.*: .* can't be stored as arrays; allowed are Box.*{advice}"):
        SerialVectorEnv(partial(Described, space), 1)
    if not isinstance(space, Text):  # text as a part is dropped
        nested = Dict({"a": Tuple((Discrete(2), space))})
        with pytest.raises(UserError, match=f" at a.1: .* can't be stored as arrays.*{advice}"):
            SerialVectorEnv(partial(Described, nested), 1)


def factories() -> dict[str, Any]:
    return {
        "serial-mixed": lambda: SerialVectorEnv(MixedObs, 3),
        "serial-continuous": lambda: SerialVectorEnv(Continuous, 3),
        "process-mixed": lambda: ProcessVectorEnv(MixedObs, 3, 2),
        "mixed-mixed": lambda: ProcessVectorEnv(MixedObs, 3, 2, mixed=True),
        "process-toy": lambda: make_vector("toy/reach", 3, "process", 2),
        "serial-gymnasium": lambda: make_vector("Acrobot-v1", 3, "serial"),
        "native": lambda: make_vector("CartPole-v1", 3, "native"),
    }


@pytest.mark.parametrize("kind", list(factories()))
@pytest.mark.parametrize("before", [7, 150])
def test_restored_state_continues_identically(kind: str, before: int) -> None:
    """After 7 steps, environments are in the first, seeded episode; after 150 steps, most are in later ones."""
    env = factories()[kind]()
    env.reset(seed=2)
    record(env, before, seed=0)
    state = env.state_dict()
    assert_plain(state)
    expected = record(env, 300, seed=9)
    env.close()
    env = factories()[kind]()
    if before == 7:  # load into a used vector environment, else into a new one
        env.reset(seed=77)
    obs, info = env.load_state_dict(state)
    assert env.inexact == []
    assert ("action_mask" in info) == (env.spaces.mask is not None)
    first_obs = tree_map(np.copy, obs)
    assert_same(expected, record(env, 300, seed=9))
    obs, _ = env.load_state_dict(state)
    tree_map(np.testing.assert_array_equal, first_obs, obs)
    env.close()


def assert_plain(value: Any) -> None:
    """Assert that a state consists of plain types that a checkpoint can store."""
    if isinstance(value, dict):
        for key, part in value.items():
            assert isinstance(key, str)
            assert_plain(part)
    elif isinstance(value, list):
        for part in value:
            assert_plain(part)
    else:
        assert value is None or isinstance(value, (np.ndarray, int, float, str))


def test_saved_state_contains_reset_options() -> None:
    env = SerialVectorEnv(Continuous, 1)
    env.reset(seed=0, options={"shift": 100.0})
    env.step(np.zeros((1, 2)))
    other = SerialVectorEnv(Continuous, 1)
    obs, _ = other.load_state_dict(env.state_dict())
    assert obs[0, 0] > 50
    assert other.inexact == []


def test_serial_state_continues_in_worker_processes() -> None:
    for mixed in (False, True):
        serial, process = SerialVectorEnv(MixedObs, 4), ProcessVectorEnv(MixedObs, 4, 3, mixed=mixed)
        serial.reset(seed=1)
        record(serial, 60, seed=0)
        process.load_state_dict(serial.state_dict())
        assert_same(record(serial, 100, seed=4), record(process, 100, seed=4))
        process.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_unrestorable_envs_start_new_episodes_and_are_listed(workers: int) -> None:
    def make() -> VectorEnv:
        return ProcessVectorEnv(Unrestorable, 3, workers) if workers else SerialVectorEnv(Unrestorable, 3)

    env = make()
    env.reset(seed=0)
    record(env, 5, seed=0)
    state = env.state_dict()
    env.close()
    env = make()
    obs, _ = env.load_state_dict(state)
    assert env.inexact == [0, 1, 2]
    assert (obs[:, 1] == 0).all()
    env.close()


def test_recorded_actions_are_cleared_at_episode_end() -> None:
    env = SerialVectorEnv(lambda: Counter(limit=10), 1)
    env.reset(seed=0)
    record(env, 1004, seed=0)
    assert len(env.state_dict()["envs"][0]["actions"]) == 4


def test_recorded_actions_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory and checkpoints don't grow with long episodes, which are restarted on resume instead."""
    monkeypatch.setattr(action_log, "ACTION_BYTES", 16 * 8)  # 16 actions of 8 bytes
    env = SerialVectorEnv(lambda: Counter(limit=10**9), 1)
    env.reset(seed=0)
    (sub_env,) = env.group.sub_envs
    record(env, 16, seed=0)
    assert len(env.state_dict()["envs"][0]["actions"]) == 16
    restored = SerialVectorEnv(lambda: Counter(limit=10**9), 1)
    restored.load_state_dict(env.state_dict())
    assert restored.inexact == []
    record(env, 1, seed=0)
    state = env.state_dict()
    assert (state["envs"][0]["actions"], sub_env.actions, sub_env.num_actions) == (None, [], 17)
    restored.load_state_dict(state)
    assert restored.inexact == [0]
    record(restored, 5, seed=0)  # the new episode is recorded
    assert len(restored.state_dict()["envs"][0]["actions"]) == 5


def test_long_episode_of_env_with_state_dict_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_log, "ACTION_BYTES", 16 * 8)
    env, restored = (SerialVectorEnv(Stateful, 1) for _ in "ab")
    env.reset(seed=0)
    record(env, 40, seed=0)
    restored.load_state_dict(env.state_dict())
    assert restored.inexact == []
    assert restored.state_dict()["envs"][0]["actions"] is None  # not only those after the resume
    assert_same(record(env, 20, seed=4), record(restored, 20, seed=4))


def test_state_with_other_num_envs_is_rejected() -> None:
    env = SerialVectorEnv(Counter, 2)
    env.reset(seed=0)
    with pytest.raises(UserError, match="saved state has num_envs 2; this vector environment has num_envs 3"):
        SerialVectorEnv(Counter, 3).load_state_dict(env.state_dict())


def test_serial_receives_results_of_sent_actions() -> None:
    env = SerialVectorEnv(lambda: Counter(death=2), 4)
    env.reset(seed=0)
    env.send(np.array([5, 6]), np.array([3, 1]))
    ids, _, reward, _, _, info = env.recv(min_ready=2)
    assert ids.tolist() == [1, 3]
    assert reward.tolist() == [6, 5]
    env.send(np.array([1]), np.array([3]))
    ids, _, _, terminated, _, info = env.recv()
    assert terminated.tolist() == [True]
    assert info["final_obs"].tolist() == [[0, 2]]
    assert list(info["final_info"]) == [0]
    with pytest.raises(ValueError, match="actions were sent to 0"):
        env.recv()
