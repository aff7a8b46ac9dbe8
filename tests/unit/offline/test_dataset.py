"""Datasets: arrays, episodes, batches, scores, and the rejection of invalid ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dataset_streams import KINDS, assert_same, small_dataset
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text

from zhixing.buffers import Buffer
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.offline import Dataset


def test_episodes_have_their_final_observation() -> None:
    data = Dataset(**small_dataset())
    assert (len(data), data.num_episodes, data.starts.tolist()) == (5, 2, [0, 3])
    first, second = data.episode(0), data.episode(1)
    assert first.obs.tolist() == [[0], [1], [2]]
    assert first.next_obs.tolist() == [[1], [2], [3]]  # not 10, the next row
    assert second.next_obs.tolist() == [[11], [12]]
    assert second.terminated.tolist() == second.truncated.tolist() == [False, False]  # incomplete
    assert first.fields == ("obs", "action", "reward", "terminated", "truncated", "next_obs")
    with pytest.raises(UserError, match="small has the episodes 0 to 1, but no episode 2"):
        data.episode(2)


def test_returns_are_sums_in_double_precision() -> None:
    assert Dataset(**small_dataset()).returns().tolist() == [6.0, 30.0]  # 1 + 2 + 3, 10 + 20
    parts = small_dataset()
    parts["arrays"]["reward"] = np.float32([1, 2**24, 1, 0, 0])
    # in single precision 2^24 + 1 is 2^24
    assert Dataset(**parts).returns().tolist() == [2**24 + 2, 0.0]


def test_return_of_several_agents_is_their_mean() -> None:
    spaces = Spaces(Box(-1.0, 1.0, (1,), np.float32), Discrete(2), num_agents=2)
    arrays = {
        "obs": np.zeros((3, 2, 1), np.float32),
        "action": np.zeros((3, 2), np.int64),
        "reward": np.float32([[1, 3], [1, 5], [4, 4]]),
        "terminated": np.array([False, True, True]),
        "truncated": np.zeros(3, bool),
    }
    data = Dataset(
        spaces=spaces, arrays=arrays, final_fields={"obs": np.zeros((2, 2, 1), np.float32)}, ends=np.array([1, 2])
    )
    assert data.returns().tolist() == [5.0, 4.0]  # (1 + 1 + 3 + 5) / 2, (4 + 4) / 2


def test_score_is_normalized_by_random_and_expert() -> None:
    data = Dataset(**small_dataset(references={"random": 20.0, "expert": 120.0}))
    assert data.score(45.0) == 25.0  # 100 (45 - 20) / (120 - 20)
    assert data.score(170.0) == 150.0
    assert data.score(20.0) == 0.0
    for references in ({}, {"random": 1.0}):
        with pytest.raises(UserError, match=r"small has no score: it has the references .*both 'random' and 'expert'"):
            Dataset(**small_dataset(references=references)).score(1.0)
    with pytest.raises(UserError, match=r"'random' and 'expert' are both 3\.0"):
        Dataset(**small_dataset(references={"random": 3.0, "expert": 3.0})).score(1.0)
    assert dataclasses.replace(data, references={"random": 0.0, "expert": 10.0}).score(5.0) == 50.0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
def test_batches_fill_a_buffer_with_all_successors(size: int) -> None:
    data = Dataset(**small_dataset())
    buffer = Buffer(data.spaces.fields(), 10)
    batches = list(data.batches(size))
    assert [len(batch) for batch in batches] == [size] * (5 // size) + ([5 % size] if 5 % size else [])
    for batch in batches:
        assert batch.obs.shape == (len(batch), 1, 1)
        buffer.add(batch)
    sample = buffer.sample(200, np.random.default_rng(0))
    after = dict(zip(sample.obs[:, 0].tolist(), sample.next_obs[:, 0].tolist(), strict=True))
    assert after == {0.0: 1.0, 1.0: 2.0, 2.0: 3.0, 10.0: 11.0, 11.0: 12.0}
    with pytest.raises(UserError, match="the batch size is 0"):
        next(data.batches(0))


def test_batches_are_views() -> None:
    data = Dataset(**small_dataset())
    batch: Batch = next(data.batches(3))
    assert np.shares_memory(batch.obs, data.arrays["obs"])
    assert "next_obs=<not read yet>" in repr(batch)


def test_selected_episodes_are_copies_in_the_given_order() -> None:
    data = Dataset(**small_dataset(references={"random": 0.0, "expert": 1.0}, env="CartPole-v1", note="n"))
    chosen = data.select([1, 0, 1])
    assert chosen.ends.tolist() == [1, 4, 6]  # lengths 2, 3, 2
    assert chosen.arrays["obs"][:, 0].tolist() == [10, 11, 0, 1, 2, 10, 11]
    assert chosen.final_fields["obs"][:, 0].tolist() == [12, 3, 12]
    assert chosen.returns().tolist() == [30.0, 6.0, 30.0]
    assert not np.shares_memory(chosen.arrays["obs"], data.arrays["obs"])
    assert (chosen.env, chosen.note, chosen.references, chosen.name) == ("CartPole-v1", "n", data.references, "small")
    assert_same(data.select(np.arange(2)), data)
    for episodes in ([], [[0]], [0.5], [True], 1):
        with pytest.raises(UserError, match="must be a list of at least one integer"):
            data.select(episodes)
    for episodes in ([0, 2], [-1]):
        with pytest.raises(UserError, match="small has the episodes 0 to 1, but no episode"):
            data.select(episodes)


def test_datasets_are_read_only() -> None:
    parts = small_dataset()
    data = Dataset(**parts)
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.env = "other"  # type: ignore[misc]
    for array in (data.arrays["obs"], data.final_fields["obs"], data.ends):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    parts["arrays"]["obs"][0] = 7  # the caller's array stays writable


def test_parts_have_the_order_of_the_space() -> None:
    spaces = Spaces(Dict([("b", Discrete(9)), ("a", Discrete(9))]), Discrete(2))
    parts = small_dataset(spaces=spaces)
    parts["arrays"]["obs"] = {"a": np.arange(5), "b": np.arange(5) + 1}
    parts["final_fields"]["obs"] = {"a": np.arange(2), "b": np.arange(2) + 1}
    data = Dataset(**parts)
    assert list(data.arrays["obs"]) == list(data.final_fields["obs"]) == list(spaces.fields()["obs"]) == ["b", "a"]
    assert data.arrays["obs"]["a"].tolist() == [0, 1, 2, 3, 4]


# --- rejected datasets ---


def _set(part: str, name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda parts: parts[part].__setitem__(name, value)


def _at(part: str, name: str, row: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda parts: parts[part][name].__setitem__(row, value)


def _replace(part: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda parts: parts.__setitem__(part, value)


INVALID: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no reward": (lambda p: p["arrays"].pop("reward"), "small lacks the field 'reward'; it has obs, action,"),
    "no flags": (lambda p: p["arrays"].pop("terminated"), "small needs the field 'terminated'"),
    "no final fields": (
        lambda p: p["final_fields"].clear(),
        r"small \(final fields\) lacks the field 'obs'; it has none",
    ),
    "more fields": (_set("arrays", "rewards", np.zeros(5)), "unknown field in small: 'rewards': did you mean 'reward'"),
    "no steps": (_set("arrays", "terminated", np.zeros(0, bool)), "small has no steps"),
    "shape": (
        _set("arrays", "obs", np.zeros((5, 2), np.float32)),
        r"field 'obs' has shape \[5, 2\], expected \[5, 1\]",
    ),
    "length": (_set("arrays", "action", np.zeros(4, np.int64)), r"field 'action' has shape \[4\], expected \[5\]"),
    "type": (_set("arrays", "reward", np.zeros(5)), "field 'reward' has dtype float64, expected float32"),
    "parts": (_set("arrays", "obs", {"a": np.zeros(5)}), r"field 'obs' has the parts \['obs.a'\], expected \['obs'\]"),
    "no array": (_set("arrays", "reward", [1.0] * 5), "field 'reward' is a list, expected a NumPy array"),
    "final shape": (_set("final_fields", "obs", np.zeros((3, 1), np.float32)), r"shape \[3, 1\], expected \[2, 1\]"),
    "nan": (_at("arrays", "obs", 3, np.nan), r"small: field 'obs' is \[nan\] at row 3; numbers must be finite"),
    "infinite": (_at("arrays", "reward", 4, -np.inf), "small: field 'reward' is -inf at row 4; numbers must be finite"),
    "nan in final fields": (
        _at("final_fields", "obs", 1, np.nan),
        r"field 'obs' is \[nan\] at the end of episode 1; numbers",
    ),
    "action": (_at("arrays", "action", 2, 2), r"field 'action' is 2 at row 2; the action space is Discrete\(2\)"),
    "negative": (_at("arrays", "action", 0, -1), "field 'action' is -1 at row 0; the action space"),
    "flag inside": (
        _at("arrays", "truncated", 1, True),
        "field 'truncated' is true at row 1, but the episode continues",
    ),
    "terminated inside": (_at("arrays", "terminated", 0, True), "field 'terminated' is true at row 0, but the episode"),
    "unordered ends": (
        _replace("ends", np.array([2, 2, 4])),
        "ends must increase, but after row 2 comes row 2 .episode 1",
    ),
    "ends early": (_replace("ends", np.array([2, 3])), "ends go from 2 to 3, expected the last row 4"),
    "ends late": (_replace("ends", np.array([2, 5])), "ends go from 2 to 5, expected the last row 4"),
    "negative end": (_replace("ends", np.array([-1, 4])), "ends go from -1 to 4"),
    "ends of floats": (_replace("ends", np.array([2.0, 4.0])), "ends must be an int64 array"),
    "no ends": (_replace("ends", np.array([], np.int64)), "ends must be an int64 array of the rows .* at least one"),
    "reference": (_replace("references", {"best": 1.0}), "unknown reference of small 'best'"),
    "reference nan": (
        _replace("references", {"random": np.nan}),
        "reference 'random' is nan, expected a finite number",
    ),
    "options": (_replace("options", {"key": object()}), "small: options .* must be plain values"),
    "space": (_replace("spaces", Spaces(Text(3), Discrete(2))), "can't be stored as arrays"),
    "text actions": (_replace("spaces", Spaces(Discrete(2), Dict(a=Text(2)))), "small: the action space is Dict"),
    "bytes as actions": (
        _replace("spaces", Spaces(Discrete(2), Box(0, 9, (1,), np.uint8))),
        "MultiBinary, Box of floats, and Dict and Tuple of these",
    ),
}


@pytest.mark.parametrize(("change", "message"), INVALID.values(), ids=INVALID.keys())
def test_invalid_datasets_are_rejected(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    parts = small_dataset()
    Dataset(**parts)
    change(parts)
    with pytest.raises(UserError, match=message):
        Dataset(**parts)


def _with_actions(space: Any, actions: Any) -> dict[str, Any]:
    parts = small_dataset(spaces=Spaces(Box(-np.inf, np.inf, (1,), np.float32), space))
    parts["arrays"]["action"] = actions
    return parts


def test_actions_out_of_bounds_are_reported_in_the_scale_of_the_env() -> None:
    actions = np.zeros((5, 2), np.float32)
    actions[3] = [0.0, 1.5]
    # in the policy's scale: 1.5 is 0 + (1.5 + 1) / 2 * 10 = 12.5
    with pytest.raises(UserError, match=r"field 'action' is \[1\.0, 12\.5\] at row 3; the action space is Box"):
        Dataset(**_with_actions(KINDS["box"].action, actions))
    actions[3] = [0.0, 1.0005]  # rounding
    Dataset(**_with_actions(KINDS["box"].action, actions))


@pytest.mark.parametrize(
    ("space", "valid", "invalid"),
    [
        (MultiDiscrete([2, 3], start=[5, 5]), np.zeros((5, 2), np.int64), [0, 3]),
        (MultiBinary(2), np.ones((5, 2), np.int8), [0, 2]),
        (Box(np.float32([0.0, -np.inf]), np.float32([np.inf, 1.0])), np.full((5, 2), 0.5, np.float32), [-0.1, 0.0]),
        (Box(np.float32([0.0, -np.inf]), np.float32([np.inf, 1.0])), np.full((5, 2), 0.5, np.float32), [9.0, 1.1]),
    ],
)
def test_actions_outside_of_other_spaces_are_rejected(space: Any, valid: Any, invalid: Any) -> None:
    Dataset(**_with_actions(space, valid.copy()))
    valid[1] = invalid
    with pytest.raises(UserError, match=r"field 'action' is \[.*\] at row 1; the action space is"):
        Dataset(**_with_actions(space, valid))


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (Discrete(3, start=2), [2, 4, 1]),
        (MultiDiscrete([3], start=[2]), [[2], [4], [5]]),
        (MultiBinary(1), [[0], [1], [2]]),
    ],
)
def test_invalid_discrete_observations_are_rejected(space: Any, values: Any) -> None:
    parts = small_dataset(spaces=Spaces(Dict(x=space), Discrete(2)))
    obs = np.array(values, space.dtype)
    parts["arrays"]["obs"] = {"x": obs[[0, 1, 0, 1, 0]]}
    parts["final_fields"]["obs"] = {"x": obs[[0, 1]]}
    Dataset(**parts)
    parts["arrays"]["obs"] = {"x": obs[[0, 1, 0, 1, 2]]}
    with pytest.raises(UserError, match=r"field 'obs.x' is .* at row 4; its space is"):
        Dataset(**parts)


def test_chunks_count_rows_from_the_start_of_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zhixing.offline.chunks.CHUNK_BYTES", 40)  # one or two steps of 4 + 8 + 4 + 1 + 1 bytes
    parts = small_dataset()
    parts["arrays"]["obs"][4] = np.inf
    with pytest.raises(UserError, match=r"field 'obs' is \[inf\] at row 4"):
        Dataset(**parts)
    data = Dataset(**small_dataset())
    chunks = list(data.chunks())
    assert len(chunks) == 3
    assert [chunk.ends.tolist() for chunk in chunks] == [[], [0], [0]]  # row 2 is the first of the second
    assert_same(Dataset.from_chunks(data.header, chunks), data)
