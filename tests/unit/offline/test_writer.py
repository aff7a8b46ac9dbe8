"""Interleaved streams become the episodes of a naive reference recorder; failures leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_streams import KINDS, Naive, Stream, assert_episode, block
from gymnasium.spaces import Box, Dict, Discrete

import zhixing as zx
from zhixing import offline
from zhixing.collectors.actor import Actor
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.offline import Writer


def assert_recorded(folder: Path, naive: Naive, spaces: Spaces, ordered: bool = True) -> None:
    data = offline.open(folder)
    assert len(data) == sum(len(steps) for steps in naive.episodes)
    actual = [data.episode(i) for i in range(data.num_episodes)]
    expected = list(naive.episodes)
    if not ordered:
        actual.sort(key=lambda batch: batch.reward.ravel()[0])
        expected.sort(key=lambda steps: np.ravel(steps[0]["reward"])[0])
    assert len(actual) == len(expected)
    for batch, steps in zip(actual, expected, strict=True):
        assert_episode(batch, steps, spaces)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_streams_become_episodes(kind: str, seed: int, tmp_path: Path) -> None:
    spaces, rng = KINDS[kind], np.random.default_rng(seed)
    streams = [Stream(spaces, 10 * seed + i) for i in range(int(rng.integers(1, 6)))]
    naive = Naive()
    with Writer(tmp_path / "data", spaces) as writer:
        for _ in range(12):
            # some of the streams, in any order
            columns = rng.permutation(len(streams))[: rng.integers(1, len(streams) + 1)].tolist()
            batch, rows = block([streams[c] for c in columns], int(rng.integers(1, 9)))
            naive.add(rows, columns)
            writer.add(batch, columns)
            assert len(writer) == sum(map(len, naive.episodes)) + sum(map(len, naive.unfinished.values()))
    naive.finish()
    assert_recorded(tmp_path / "data", naive, spaces)


@pytest.mark.parametrize("seed", range(4))
def test_interrupted_streams_become_incomplete_episodes(seed: int, tmp_path: Path) -> None:
    """A stream may continue elsewhere without an end, such as that of a restarted environment."""
    spaces, rng = KINDS["team"], np.random.default_rng(seed)
    streams = [Stream(spaces, 10 * seed + i, jump=0.2) for i in range(4)]
    naive = Naive()
    with Writer(tmp_path / "data", spaces) as writer:
        for _ in range(10):
            batch, rows = block(streams, int(rng.integers(1, 6)))
            naive.add(rows, [0, 1, 2, 3])
            writer.add(batch)
    naive.finish()
    incomplete = [steps for steps in naive.episodes if not (steps[-1]["terminated"] or steps[-1]["truncated"])]
    assert len(incomplete) > 10  # many more than the four that were unfinished
    assert_recorded(tmp_path / "data", naive, spaces, ordered=False)


@pytest.mark.parametrize("max_steps", [1, 2, 3, 31, 89, 90])
def test_exactly_max_steps_are_recorded(max_steps: int, tmp_path: Path) -> None:
    streams = [Stream(KINDS["box"], i) for i in range(3)]
    naive = Naive(max_steps)
    with Writer(tmp_path / "data", KINDS["box"], max_steps=max_steps) as writer:
        for _ in range(6):
            assert writer.full == (len(writer) == max_steps)
            batch, rows = block(streams, 5)
            naive.add(rows, [0, 1, 2])
            writer.add(batch)
        assert writer.full
    naive.finish()
    assert sum(map(len, naive.episodes)) == max_steps
    assert_recorded(tmp_path / "data", naive, KINDS["box"])


def test_unfinished_episodes_can_be_left_out(tmp_path: Path) -> None:
    streams = [Stream(KINDS["box"], i, end=0.1) for i in range(3)]
    naive, writer = Naive(), Writer(tmp_path / "data", KINDS["box"])
    for _ in range(6):
        batch, rows = block(streams, 5)
        naive.add(rows, [0, 1, 2])
        writer.add(batch)
    assert naive.unfinished
    writer.close(keep_unfinished=False)
    writer.close()  # a second time does nothing
    assert_recorded(tmp_path / "data", naive, KINDS["box"])
    data = offline.open(tmp_path / "data")
    assert (data.arrays["terminated"] | data.arrays["truncated"])[data.ends].all()


@pytest.mark.parametrize("name", ["Pendulum-v1", "CartPole-v1", "toy/team-match"])
def test_collected_experience_is_recorded(name: str, tmp_path: Path) -> None:
    algorithm = {"Pendulum-v1": "sac", "CartPole-v1": "ppo"}.get(name, "mappo")
    env = zx.envs.make_vector(name, 3, backend="serial")
    learner = zx.algorithms.get(algorithm).make(zx.config.load(algorithm=algorithm, env=name), env.spaces)
    actor = Actor(learner.policy, env, learner.extra_fields)
    episodes, rewards = [], []
    with Writer(tmp_path / "data", env.spaces, env=name, options={"a": 1}, note="random") as writer:
        for _ in range(10):
            experience = actor.collect(steps=50, phase=Phase.RANDOM)
            writer.add(experience.batch)  # the next collect overwrites its arrays
            episodes += experience.episodes
            rewards.append(experience.batch.reward.astype(np.float64).sum())
    env.close()
    data = offline.open(tmp_path / "data")
    assert (len(data), data.env, data.options, data.note) == (1500, name, {"a": 1}, "random")
    assert data.spaces == env.spaces
    ended = (data.arrays["terminated"] | data.arrays["truncated"])[data.ends]
    assert np.allclose(data.returns()[ended], [episode.episode_return for episode in episodes], rtol=1e-5)
    assert (data.ends - data.starts + 1)[ended].tolist() == [episode.length for episode in episodes]
    assert np.isclose(data.arrays["reward"].sum(dtype=np.float64), sum(rewards))
    assert np.abs(data.arrays["action"]).max() > 0


def test_actions_on_disk_have_the_scale_of_the_env(tmp_path: Path) -> None:
    spaces = Spaces(Box(-1.0, 1.0, (1,), np.float32), Box(np.float32([-2.0]), np.float32([6.0])))
    obs = np.zeros((4, 1, 1), np.float32)
    flags = np.zeros((3, 1), bool)
    action = np.float32([[[-1.0]], [[0.5]], [[7.0]]])
    with Writer(tmp_path / "data", spaces) as writer:
        writer.add(
            Batch(
                obs=obs[:3],
                action=action,
                reward=flags * np.float32(1),
                terminated=flags,
                truncated=flags,
                next_obs=obs[1:],
            )
        )
    # -2 + (a + 1) / 2 * 8: -2, 4 and, clipped to 1, 6
    assert np.load(tmp_path / "data" / "action.npy").tolist() == [[-2.0], [4.0], [6.0]]
    assert offline.open(tmp_path / "data").arrays["action"].tolist() == [[-1.0], [0.5], [1.0]]


def test_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    streams = [Stream(KINDS["dict"], i) for i in range(3)]

    def record(folder: Path) -> None:
        with Writer(folder, KINDS["dict"]) as writer:
            writer.add(block(streams, 50)[0])
            assert (folder / "reward.npy").is_file()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "new" / "data")
    assert not (tmp_path / "new" / "data").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "empty")
    assert os.listdir(tmp_path / "empty") == []  # it existed before, so it stays


def test_a_dataset_can_be_opened_only_when_closed(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "data", KINDS["box"])
    writer.add(block([Stream(KINDS["box"], 0)], 100)[0])
    with pytest.raises(UserError, match=r"it has no manifest.json"):
        offline.open(tmp_path / "data")
    writer.close()
    assert len(offline.open(tmp_path / "data")) == 100
    with pytest.raises(UserError, match="is closed; add steps before close"):
        writer.add(block([Stream(KINDS["box"], 0)], 1)[0])


def test_an_empty_recording_is_rejected_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing was recorded"), Writer(tmp_path / "data", KINDS["box"]):
        pass
    assert not (tmp_path / "data").exists()


def test_folders_that_are_not_empty_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="full is not empty; name a new folder"):
        Writer(tmp_path / "full", KINDS["box"])
    with pytest.raises(UserError, match=r"thesis.txt is a file; name a new folder"):
        Writer(tmp_path / "full" / "thesis.txt", KINDS["box"])
    with pytest.raises(UserError, match="can't be written: Not a directory"):
        Writer(tmp_path / "full" / "thesis.txt" / "data", KINDS["box"])
    assert os.listdir(tmp_path / "full") == ["thesis.txt"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("buffering", [0, -1], ids=["at once", "at the end"])
def test_a_full_disk_is_reported(buffering: int, tmp_path: Path) -> None:
    def record(full: Any) -> None:
        with Writer(tmp_path / "data", KINDS["box"]) as writer:
            ((file, stream),) = writer._files._files["reward"]
            stream.close()
            writer._files._files["reward"] = [(file, full)]
            writer.add(block([Stream(KINDS["box"], 0)], 100)[0])

    message = "can't be written: No space left on device"
    with Path("/dev/full").open("wb", buffering=buffering) as full, pytest.raises(UserError, match=message):
        record(full)
    assert not (tmp_path / "data").exists()


def _changed_batch(change: Any) -> Batch:
    batch = block([Stream(KINDS["box"], 0), Stream(KINDS["box"], 1)], 6)[0]
    fields = {name: getattr(batch, name) for name in batch.fields}
    change(fields)
    return Batch(**fields)


@pytest.mark.parametrize(
    ("change", "columns", "message"),
    [
        (lambda f: f.pop("next_obs"), None, "the batch lacks the field 'next_obs'"),
        (lambda f: f.pop("reward"), None, "the batch lacks the field 'reward'"),
        (lambda f: f.update(obs=f["obs"][..., :2]), None, r"field 'obs' has shape \[6, 2, 2\], expected \[6, 2, 3\]"),
        (
            lambda f: [f.update({k: v[0] for k, v in f.items()})],
            None,
            r"shape \[2\], expected steps of streams \[T, N\]",
        ),
        (lambda f: None, [0], r"columns \[0\] must be 2 distinct numbers"),
        (lambda f: None, [3, 3], r"columns \[3, 3\] must be 2 distinct numbers"),
        (
            lambda f: f["obs"].__setitem__((2, 0), np.nan),
            None,
            r"field 'obs' is \[nan, nan, nan\] at row 2; numbers must",
        ),
        (lambda f: f["action"].__setitem__((1, 0), np.nan), None, r"field 'action' is \[nan, nan\] at row 1; numbers"),
    ],
)
def test_invalid_steps_are_rejected(change: Any, columns: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message), Writer(tmp_path / "data", KINDS["box"]) as writer:
        writer.add(_changed_batch(change), columns)
    assert not (tmp_path / "data").exists()


def test_invalid_headers_are_rejected_before_anything_is_written(tmp_path: Path) -> None:
    spaces = KINDS["box"]
    for changes, message in (
        ({"options": {"f": print}}, "must be plain values"),
        ({"references": {"mean": 1.0}}, "unknown reference"),
        ({"max_steps": 0}, "max_steps is 0; it must be at least 1"),
        ({"spaces": Spaces(Dict({1: Discrete(2)}), Discrete(2))}, "need strings as names, not 1"),
        ({"spaces": Spaces(Box(0, 255, (2**13, 2**12), np.uint8), Discrete(2))}, "too large to be recorded"),
    ):
        with pytest.raises(UserError, match=message):
            Writer(tmp_path / "data", **({"spaces": spaces} | changes))
        assert not (tmp_path / "data").exists()
