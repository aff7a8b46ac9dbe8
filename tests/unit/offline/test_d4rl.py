"""D4RL files: episode ends and final observations, with and without timeouts and next observations."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_streams import assert_same
from gymnasium.spaces import Box, Discrete

from zhixing import offline
from zhixing.errors import UserError
from zhixing.offline import Dataset
from zhixing.utils.extras import install_hint

h5py = pytest.importorskip("h5py")


def write(path: Path, leave_out: tuple[str, ...] = (), **changes: Any) -> Path:
    """Write nine rows: three steps up to a terminal, four up to a timeout, two up to the end of the file."""
    arrays = {
        "observations": np.array([[0], [1], [2], [10], [11], [12], [13], [20], [21]], np.float64),
        "next_observations": np.array([[1], [2], [3], [11], [12], [13], [14], [21], [22]], np.float64),
        "actions": np.linspace(-1, 1, 9, dtype=np.float32)[:, None],
        "rewards": np.arange(9, dtype=np.float32),
        "terminals": np.arange(9) == 2,
        "timeouts": np.arange(9) == 6,
    }
    with h5py.File(path, "w") as file:
        for name, array in (arrays | changes).items():
            if name not in leave_out:
                file.create_dataset(name, data=array, compression="gzip", chunks=True)
        file["metadata/algorithm"] = "by hand"  # is ignored
    return path


def episode_table(data: Dataset) -> list[tuple[list[float], list[float], bool, bool]]:
    """Return the observations, next observations, and whether it terminated and truncated, of each episode."""
    rows = []
    for i in range(data.num_episodes):
        batch = data.episode(i)
        ended = bool(batch.terminated[-1]), bool(batch.truncated[-1])
        assert not (batch.terminated[:-1] | batch.truncated[:-1]).any()
        rows.append((batch.obs[:, 0].tolist(), batch.next_obs[:, 0].tolist(), *ended))
    return rows


def test_next_observations_give_all_successors(tmp_path: Path) -> None:
    data = offline.open(write(tmp_path / "a.hdf5"))
    assert episode_table(data) == [
        ([0, 1, 2], [1, 2, 3], True, False),
        ([10, 11, 12, 13], [11, 12, 13, 14], False, True),
        ([20, 21], [21, 22], False, False),
    ]
    assert data.returns().tolist() == [3.0, 18.0, 15.0]  # 0 + 1 + 2, 3 + 4 + 5 + 6, 7 + 8
    assert data.arrays["action"][:, 0].tolist() == np.linspace(-1, 1, 9, dtype=np.float32).tolist()
    assert (data.env, data.options, data.references) == (None, {}, {})
    assert data.spaces.obs == Box(-np.inf, np.inf, (1,), np.float32)
    assert data.spaces.action == Box(-1.0, 1.0, (1,), np.float32)
    assert data.arrays["obs"].dtype == np.float32


def test_without_next_observations_timed_out_steps_are_dropped(tmp_path: Path) -> None:
    data = offline.open(write(tmp_path / "a.hdf5", leave_out=("next_observations",)))
    assert episode_table(data) == [
        ([0, 1, 2], [1, 2, 0], True, False),  # zeros after the terminal, where nothing bootstraps
        ([10, 11, 12], [11, 12, 13], False, True),  # the step from 13 is dropped
        ([20], [21], False, False),  # and so is the last step of the file
    ]
    assert data.arrays["reward"].tolist() == [0, 1, 2, 3, 4, 5, 7]


def test_without_timeouts_next_observations_give_the_ends(tmp_path: Path) -> None:
    data = offline.open(write(tmp_path / "a.h5", leave_out=("timeouts",)))
    assert episode_table(data) == [
        ([0, 1, 2], [1, 2, 3], True, False),
        ([10, 11, 12, 13], [11, 12, 13, 14], False, False),  # the reason for its end is unknown
        ([20, 21], [21, 22], False, False),
    ]


def test_without_both_only_terminals_end_episodes(tmp_path: Path) -> None:
    data = offline.open(write(tmp_path / "a.h5", leave_out=("timeouts", "next_observations")))
    assert episode_table(data) == [
        ([0, 1, 2], [1, 2, 0], True, False),
        ([10, 11, 12, 13, 20], [11, 12, 13, 20, 21], False, False),
    ]


def test_without_both_the_time_limit_of_the_env_ends_episodes(tmp_path: Path) -> None:
    arrays = {"observations": np.arange(9 * 3, dtype=np.float32).reshape(9, 3)}
    path = write(tmp_path / "a.h5", leave_out=("timeouts", "next_observations"), **arrays)
    data = offline.open(path, env="Pendulum-v1", options={"max_episode_steps": 4})
    # rows 0 to 2 end with a terminal; rows 3 to 6 are four steps, whose last is dropped; so is the last of 7 and 8
    assert [(batch.obs[:, 0] / 3).tolist() for batch in map(data.episode, range(3))] == [[0, 1, 2], [3, 4, 5], [7]]
    assert data.final_fields["obs"][:, 0].tolist() == [0, 18, 24]
    assert data.arrays["truncated"].tolist() == [False] * 5 + [True, False]


def test_terminal_that_timed_out_is_terminated_and_truncated(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", leave_out=("next_observations",), timeouts=np.isin(np.arange(9), [2, 6]))
    assert episode_table(offline.open(path))[0] == ([0, 1, 2], [1, 2, 0], True, True)


def test_episodes_of_one_step_that_timed_out_are_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", leave_out=("next_observations",), timeouts=np.isin(np.arange(9), [3, 6]))
    assert episode_table(offline.open(path))[1] == ([11, 12], [12, 13], False, True)  # row 3, obs 10, is gone
    path = write(
        tmp_path / "b.h5", leave_out=("next_observations", "terminals"), timeouts=np.ones(9, bool), terminals=0
    )
    with h5py.File(path, "a") as file:
        file["terminals"] = np.zeros(9, bool)
    with pytest.raises(UserError, match="has no step with a known successor"):
        offline.open(path)


@pytest.mark.parametrize("leave_out", [(), ("next_observations",), ("timeouts",), ("next_observations", "timeouts")])
@pytest.mark.parametrize("chunk_bytes", [1, 40, 60])
def test_result_does_not_depend_on_chunk_size(
    leave_out: tuple[str, ...], chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.hdf5", leave_out)
    whole = offline.open(path)
    monkeypatch.setattr("zhixing.offline.chunks.CHUNK_BYTES", chunk_bytes)
    assert_same(offline.open(path), whole)
    offline.convert(path, tmp_path / "converted")
    converted = offline.open(tmp_path / "converted")
    assert_same(converted, whole)
    assert converted.spaces == whole.spaces


def test_actions_of_a_named_env_are_scaled(tmp_path: Path) -> None:
    arrays = {"observations": np.zeros((9, 3)), "next_observations": np.zeros((9, 3))}
    path = write(tmp_path / "a.hdf5", actions=np.full((9, 1), 1.5, np.float32), **arrays)
    with pytest.raises(UserError, match=r"field 'action' is \[1\.5\] at row 0; the action space is Box\(-1"):
        offline.open(path)
    data = offline.open(path, env="Pendulum-v1", options={"g": 5.0})
    assert data.arrays["action"][0].tolist() == [0.75]  # of [-2, 2]
    assert (data.env, data.options) == ("Pendulum-v1", {"g": 5.0})


def test_discrete_actions_need_a_named_env(tmp_path: Path) -> None:
    arrays = {"observations": np.zeros((9, 4)), "next_observations": np.zeros((9, 4))}
    path = write(tmp_path / "a.hdf5", actions=np.arange(9) % 2, **arrays)
    with pytest.raises(UserError, match="field 'actions' holds int64, not floats from -1 to 1: name the environment"):
        offline.open(path)
    data = offline.open(path, env="CartPole-v1")
    assert data.spaces.action == Discrete(2)
    assert data.arrays["action"].tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]


def test_images_keep_their_bytes(tmp_path: Path) -> None:
    images = np.arange(9 * 4, dtype=np.uint8).reshape(9, 2, 2, 1)
    data = offline.open(write(tmp_path / "a.h5", ("next_observations",), observations=images))
    assert data.spaces.obs == Box(0, 255, (2, 2, 1), np.uint8)
    assert np.array_equal(data.arrays["obs"][:6], images[:6])


INVALID: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "no rewards": ({"leave_out": ("rewards",)}, None, "lacks the field 'rewards' of D4RL's files; it has actions, "),
    "no terminals": ({"leave_out": ("terminals",)}, None, "lacks the field 'terminals'"),
    "fewer actions": ({"actions": np.zeros((8, 1))}, None, r"field 'actions' has shape \[8, 1\], expected \[9, ...\]"),
    "two-dimensional rewards": ({"rewards": np.zeros((9, 1))}, None, r"'rewards' has shape \[9, 1\], expected \[9\]"),
    "strings": ({"rewards": [b"a"] * 9}, None, "field 'rewards' is not an array of numbers"),
    "other shape of next observations": (
        {"next_observations": np.zeros((9, 2))},
        None,
        r"'next_observations' has shape \[9, 2\], exp",
    ),
    "nan": ({"rewards": np.where(np.arange(9) == 5, np.nan, 0)}, None, "a.hdf5: field 'reward' is nan at row 5"),
    "nan in observations": ({"observations": np.full((9, 1), np.nan)}, None, r"field 'obs' is \[nan\] at row 0"),
    "flags": ({"terminals": np.arange(9) / 2}, None, "field 'terminals' is 0.5 at row 1, expected 0 or 1"),
    "large integers": (
        {"observations": np.zeros((9, 16), np.int64) + 300, "next_observations": np.zeros((9, 16), np.int64)},
        "dataset_envs:Bytes",
        r"field 'observations' is 300 at row 0, outside of the range of uint8",
    ),
    "another env": ({}, "Pendulum-v1", r"field 'observations' has shape \[9, 1\], expected \[9, 3\]"),
    "env of several agents": (
        {},
        "toy/team-match",
        "D4RL's files hold steps of one agent without masks, which toy/team-match isn't",
    ),
    "env with dict observations": (
        {},
        "toy/bit-flip-3",
        "field 'observations' is one array, but the environment's has the parts",
    ),
    "unknown env": ({}, "Pendulun-v1", "unknown environment 'Pendulun-v1': did you mean 'Pendulum-v1'"),
}


@pytest.mark.parametrize(("changes", "env", "message"), INVALID.values(), ids=INVALID.keys())
def test_invalid_files_are_rejected(changes: dict[str, Any], env: str | None, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.hdf5", **changes)
    for call in (lambda: offline.open(path, env), lambda: offline.convert(path, tmp_path / "to", env)):
        with pytest.raises(UserError, match=message):
            call()
    assert not (tmp_path / "to").exists()


def test_an_empty_file_is_rejected(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name in ("observations", "actions", "rewards", "terminals"):
            file[name] = np.zeros((0, 1)) if name in ("observations", "actions") else np.zeros(0)
    with pytest.raises(UserError, match=r"a.hdf5 has no steps"):
        offline.open(tmp_path / "a.hdf5")


def test_a_group_instead_of_an_array_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "a.hdf5", leave_out=("rewards",))
    with h5py.File(path, "a") as file:
        file["rewards/all"] = np.zeros(9)
    with pytest.raises(UserError, match="field 'rewards' is not an array of numbers"):
        offline.open(path)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "cut": lambda whole: whole[:-100],
    "text": lambda whole: b"hello",
    "overwritten": lambda whole: whole[:8] + bytes(200) + whole[208:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_files_are_rejected(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = write(tmp_path / "a.hdf5")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"a.hdf5 is damaged or not an HDF5 file"):
        offline.open(path)


def test_damaged_chunks_are_rejected(tmp_path: Path) -> None:
    """The structure is intact, but the compressed numbers are damaged."""
    path = write(tmp_path / "a.hdf5")
    with h5py.File(path, "r") as file:
        chunk = file["rewards"].id.get_chunk_info(0)
    whole = bytearray(path.read_bytes())
    whole[chunk.byte_offset : chunk.byte_offset + chunk.size] = b"\7" * chunk.size
    path.write_bytes(whole)
    for call in (lambda: offline.open(path), lambda: offline.convert(path, tmp_path / "to")):
        with pytest.raises(UserError, match=r"a.hdf5 is damaged or not an HDF5 file"):
            call()
    assert not (tmp_path / "to").exists()


def test_error_without_h5py_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.hdf5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match="a.hdf5 needs the extra 'offline': " + re.escape(install_hint("offline"))):
        offline.open(path)
