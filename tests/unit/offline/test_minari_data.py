"""Minari datasets are read and written; nothing is downloaded, and no environment of a file is created."""

from __future__ import annotations

import json
import re
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_streams import KINDS, assert_same, equal, record_dataset, small_dataset
from gymnasium.spaces import Box, Dict, Discrete

from zhixing import offline
from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_map
from zhixing.errors import UserError
from zhixing.offline import Dataset, minari_data
from zhixing.utils.extras import install_hint

h5py = pytest.importorskip("h5py")
minari = pytest.importorskip("minari")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of Minari's datasets, and block the network."""

    def refuse(*_: Any) -> None:
        raise AssertionError("used the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


SINGLE_AGENT = [kind for kind in KINDS if kind not in ("dict", "team")]  # without masks


def image_dataset() -> Dataset:
    """Return random images of a size that Minari stores as JPEG, in dicts, and actions that don't start at 0."""
    spaces = Spaces(Dict(image=Box(0, 255, (32, 40, 3), np.uint8), at=Box(-1, 1, (2,))), Discrete(3, start=5))
    rng = np.random.default_rng(0)
    parts = small_dataset(spaces=spaces, note="images")

    def observe(n: int) -> dict[str, Any]:
        image = rng.integers(0, 256, (n, 32, 40, 3), np.uint8)
        return {"at": rng.random((n, 2), np.float32), "image": image}

    parts["arrays"]["obs"], parts["final_fields"]["obs"] = observe(5), observe(2)
    return Dataset(**parts)


@pytest.mark.parametrize("kind", [*SINGLE_AGENT, "images"])
def test_minari_reads_written_datasets(kind: str, tmp_path: Path) -> None:
    data = image_dataset() if kind == "images" else offline.open(record_dataset(tmp_path / "a", kind))
    minari_data.write(data, "ours/test/things-v0")
    loaded = minari.load_dataset("ours/test/things-v0")
    assert (loaded.total_episodes, loaded.total_steps) == (data.num_episodes, len(data))
    assert loaded.observation_space == data.spaces.obs
    assert loaded.action_space == data.spaces.action
    for i, episode in enumerate(loaded.iterate_episodes()):
        batch = data.episode(i)
        obs = tree_map(lambda obs, next_obs: np.concatenate([obs[:1], next_obs]), batch.obs, batch.next_obs)
        assert equal(obs, episode.observations)  # one more than steps
        assert np.array_equal(batch.reward, episode.rewards)
        assert np.array_equal(batch.terminated, episode.terminations)
        assert np.array_equal(batch.truncated, episode.truncations)
        for action in episode.actions:
            assert loaded.action_space.contains(action)
        assert np.allclose(data.spaces.from_env(episode.actions), batch.action, atol=1e-6)


@pytest.mark.parametrize("kind", [*SINGLE_AGENT, "images"])
def test_written_datasets_are_read_back(kind: str, tmp_path: Path, home: Path) -> None:
    data = image_dataset() if kind == "images" else offline.open(record_dataset(tmp_path / "a", kind))
    minari_data.write(data, "minari:things-v3")
    restored = offline.open("minari:things-v3")
    assert_same(restored, data, action_tolerance=1e-6)
    assert (restored.spaces, restored.note, restored.env, restored.name) == (
        data.spaces,
        data.note,
        None,
        "minari:things-v3",
    )
    for path in (home / "things-v3", home / "things-v3" / "data"):
        assert_same(offline.open(path), restored)
    offline.convert("minari:things-v3", tmp_path / "copy")
    assert_same(offline.open(tmp_path / "copy"), restored, action_tolerance=1e-6)
    assert len(offline.open("minari:things-v3", env="my:Env").references) == 0
    assert offline.open("minari:things-v3", env="my:Env").env == "my:Env"


def test_env_references_and_note_are_read_back(tmp_path: Path) -> None:
    header = {
        "env": "Pendulum-v1",
        "options": {"g": 9.0, "max_episode_steps": 50},
        "references": {"random": -1200.0, "expert": -150.5},
        "note": "by hand",
    }
    data = offline.open(record_dataset(tmp_path / "a", "box", **header))
    minari_data.write(data, "pendulum/test-v0")
    loaded = minari.load_dataset("pendulum/test-v0")
    assert (loaded.env_spec.id, loaded.env_spec.kwargs, loaded.env_spec.max_episode_steps) == (
        "Pendulum-v1",
        {"g": 9.0},
        50,
    )
    assert float(minari.get_normalized_score(loaded, np.array(-675.25))) == 0.5  # half way, by hand
    restored = offline.open("minari:pendulum/test-v0")
    assert {name: getattr(restored, name) for name in header} == header
    assert restored.score(-675.25) == 50.0


@pytest.mark.parametrize("name", ["toy/match", "my.module:Env"])
def test_envs_unknown_to_gymnasium_are_read_back(name: str, tmp_path: Path) -> None:
    minari_data.write(offline.open(record_dataset(tmp_path / "a", "box", env=name, options={"a": 1})), "other-v0")
    restored = offline.open("minari:other-v0")
    assert (restored.env, restored.options) == (name, {"a": 1})


def create_with_minari() -> None:
    """Create a dataset of CartPole with Minari, with episodes of four and two steps."""
    buffers = []
    for length, terminated in ((4, True), (2, False)):
        flags = np.zeros(length, bool)
        ends = flags.copy()
        ends[-1] = True
        buffers.append(
            minari.data_collector.EpisodeBuffer(
                observations=np.arange(4 * (length + 1), dtype=np.float64).reshape(-1, 4) / 8,
                actions=np.arange(length) % 2,
                rewards=[1.0] * length,
                terminations=ends if terminated else flags,
                truncations=flags if terminated else ends,
                infos={},
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing author and code links
        minari.create_dataset_from_buffers("cartpole/theirs-v1", buffers, env="CartPole-v1")


def test_datasets_of_minari_are_read() -> None:
    create_with_minari()
    data = offline.open("minari:cartpole/theirs-v1")
    assert (data.env, data.options, data.references, data.note) == ("CartPole-v1", {}, {}, "")
    assert data.ends.tolist() == [3, 5]
    assert data.arrays["obs"].dtype == np.float32
    assert data.arrays["obs"][:, 0].tolist() == [0.0, 0.5, 1.0, 1.5, 0.0, 0.5]
    assert data.final_fields["obs"][:, 0].tolist() == [2.0, 1.0]
    assert data.arrays["terminated"].tolist() == [False] * 3 + [True, False, False]
    assert data.arrays["truncated"].tolist() == [False] * 5 + [True]
    assert data.arrays["action"].tolist() == [0, 1, 0, 1, 0, 1]


def test_the_env_of_a_file_is_never_created(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point is code: Minari creates the environment of a dataset that lists no spaces."""
    create_with_minari()
    (tmp_path / "trap_module.py").write_text(f"open({str(tmp_path / 'trap')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def set_trap(metadata: dict[str, Any]) -> None:
        metadata["env_spec"] = metadata["env_spec"].replace(
            "gymnasium.envs.classic_control.cartpole:CartPoleEnv", "trap_module:Env"
        )
        assert "trap_module" in metadata["env_spec"]

    edit(home, set_trap)
    assert offline.open("minari:cartpole/theirs-v1").env == "CartPole-v1"
    edit(home, lambda metadata: (metadata.pop("observation_space"), metadata.pop("action_space")))
    with pytest.raises(UserError, match="theirs-v1 lists no spaces"):
        offline.open("minari:cartpole/theirs-v1")
    assert not (tmp_path / "trap").exists()
    assert "trap_module" not in sys.modules


def edit(home: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = home / "cartpole" / "theirs-v1" / "data" / "metadata.json"
    metadata = json.loads(path.read_text())
    change(metadata)
    path.write_text(json.dumps(metadata))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda data: _cut(data / "main_data.hdf5"), "is damaged or not a Minari dataset"),
    "no arrays": (lambda data: (data / "main_data.hdf5").unlink(), "is damaged or not a Minari dataset: No data found"),
    "no json": (lambda data: (data / "metadata.json").write_text("{"), "is damaged or not a Minari dataset"),
    "a list": (lambda data: (data / "metadata.json").write_text("[]"), "metadata.json is not what Minari writes"),
    "fewer observations": (
        lambda data: _replace(data, "episode_1/observations", np.zeros((2, 4))),
        r"episode 1: field 'obs' has shape \[2, 4\], expected \[3, 4\]",
    ),
    "no rewards": (
        lambda data: _replace(data, "episode_1/rewards", None),
        "is damaged or not a Minari dataset: episode 1",
    ),
    "strings": (lambda data: _replace(data, "episode_0/rewards", ["a"] * 4), "field 'reward' has dtype object"),
    "actions of floats": (
        lambda data: _replace(data, "episode_0/actions", np.zeros(4)),
        "episode 0: field 'action' has dtype float64, expected int64",
    ),
    "not a number": (
        lambda data: _replace(data, "episode_1/rewards", np.array([0, np.nan])),
        "theirs-v1: field 'reward' is nan at row 5",
    ),
    "flags": (
        lambda data: _replace(data, "episode_0/terminations", np.array([0, 2, 0, 0])),
        "field 'terminated' is 2 at row 1, outside of the range of bool",
    ),
    "end within an episode": (
        lambda data: _replace(data, "episode_0/terminations", np.array([0, 1, 0, 1])),
        "field 'terminated' is true at row 1, but the episode continues",
    ),
    "too large": (
        lambda data: _replace(data, "episode_0/observations", np.full((5, 4), 1e300)),
        r"field 'obs' is \[inf, inf, inf, inf\] at row 0",
    ),
}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3000])


def _replace(data: Path, name: str, value: Any) -> None:
    with h5py.File(data / "main_data.hdf5", "a") as file:
        del file[name]
        if value is not None:
            file[name] = value


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_datasets_are_rejected(damage: Callable[[Path], Any], message: str, home: Path, tmp_path: Path) -> None:
    create_with_minari()
    damage(home / "cartpole" / "theirs-v1" / "data")
    name = "minari:cartpole/theirs-v1"
    for call in (lambda: offline.open(name), lambda: offline.convert(name, tmp_path / "to")):
        with pytest.raises(UserError, match=message):
            call()
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"total_episodes": 3}, "damaged or not a Minari dataset: episode 2"),
        ({"total_episodes": "many"}, "damaged or not a Minari dataset"),
        ({"data_format": "arrow"}, "is stored as arrow: pyarrow is not installed"),
        ({"data_format": "tar"}, "damaged or not a Minari dataset: 'tar'"),
        ({"observation_space": json.dumps({"type": "Sound"})}, "damaged or not a Minari dataset"),
        ({"observation_space": json.dumps({"type": "Tuple", "subspaces": []})}, "can't be stored as arrays"),
    ],
)
def test_invalid_metadata_is_rejected(
    metadata: dict[str, Any], message: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_with_minari()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    edit(home, lambda content: content.update(metadata))
    with pytest.raises(UserError, match=message):
        offline.open("minari:cartpole/theirs-v1")


def test_missing_datasets_are_reported_and_not_downloaded() -> None:
    create_with_minari()
    with pytest.raises(UserError, match=r"did you mean 'cartpole/theirs-v1'\?.*`minari download cartpole/their-v1`"):
        offline.open("minari:cartpole/their-v1")
    for name in ("../../secret-v0", "/etc-v0", "cartpole/theirs", ""):
        with pytest.raises(UserError, match="is not a Minari dataset; their names look like minari:NAMESPACE/NAME-v0"):
            offline.open(f"minari:{name}")
    with pytest.raises(UserError, match="is not the folder of a Minari dataset"):
        minari_data.read_chunks("/nowhere")


def test_invalid_writes_are_rejected(tmp_path: Path, home: Path) -> None:
    data = Dataset(**small_dataset())
    minari_data.write(data, "ours/one-v0")
    with pytest.raises(UserError, match="the Minari dataset ours/one-v0 exists already"):
        minari_data.write(data, "ours/one-v0")
    for name in ("../one-v0", "ours/one", "ours/one v0"):
        with pytest.raises(UserError, match="is not a valid name for a Minari dataset"):
            minari_data.write(data, name)
    for kind, extras in (("dict", "mask"), ("team", "mask, state, alive")):
        with pytest.raises(UserError, match=f"Minari can't store the {extras} of"):
            minari_data.write(offline.open(record_dataset(tmp_path / kind, kind)), "ours/two-v0")
    assert not (home / "ours" / "two-v0").exists()


def test_failed_write_leaves_nothing_behind(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("zhixing.offline.minari_data._episode", fail)
    with pytest.raises(OSError, match="the disk is full"):
        minari_data.write(Dataset(**small_dataset()), "ours/one-v0")
    assert not (home / "ours" / "one-v0").exists()


@pytest.mark.parametrize("missing", ["minari", "h5py"])
def test_error_without_a_package_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create_with_minari()
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    for call in (
        lambda: offline.open("minari:cartpole/theirs-v1"),
        lambda: minari_data.write(Dataset(**small_dataset()), "ours/one-v0"),
    ):
        with pytest.raises(UserError, match="needs the extra 'offline': " + re.escape(install_hint("offline"))):
            call()
