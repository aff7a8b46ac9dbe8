"""Crash capsules: what failed once fails again from the file alone, and no file does more than be refused."""

from __future__ import annotations

import copy
import json
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import cli_exit_code
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zhixing.envs import FailurePolicy, RegisteredEnv, VectorEnv, make_vector
from zhixing.envs.crash.crash_report import FORMAT, MAX_BYTES, MAX_FILES, read, replay
from zhixing.errors import EnvCrashError, UserError

FAILS = "broken_tasks:Fails"
EXAMPLES = int(os.environ.get("ZHIXING_EXAMPLES", "300"))  # more for a soak


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)


def act(env: VectorEnv, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(1000):
        env.step(rng.integers(0, 3, 3))


def crashed(folder: Path, backend: str = "serial", limit: float | None = None, how: str = "raise") -> Path:
    """The capsule of a run of random actions up to its crash, some episodes after the first."""
    words = crash(folder, backend, limit, how)
    assert "repeat it with: zhixing replay" in words
    return max(folder.glob("crash-*.json"))


def crash(folder: Path, backend: str = "serial", limit: float | None = None, how: str = "raise") -> str:
    faults, workers = FailurePolicy("stop", limit, folder), None if backend == "serial" else 2
    env = make_vector(FAILS, 3, backend, workers, {"how": how, "chance": 0.004}, faults=faults)
    env.reset(seed=5)
    with pytest.raises(EnvCrashError) as caught:
        act(env, seed=5)
    env.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("backend", "how"),
    [("serial", "raise"), ("process", "raise"), ("mixed", "raise"), ("serial", "nan"), ("process", "die")],
)
def test_what_failed_once_fails_again(backend: str, how: str, tmp_path: Path) -> None:
    """The failure hangs on the task's chance, of some episode after the first, and on its actions."""
    file = crashed(tmp_path / "crash", backend, how=how)
    told = read(file)
    assert (told.env.name, told.env.options, told.backend) == (FAILS, {"how": how, "chance": 0.004}, backend)
    assert told.origin.rng is not None  # not the first episode, or the seed alone would do
    assert told.versions["numpy"] == np.__version__
    again = replay(file, FAILS)
    assert again.same, again.words
    assert f"the same error came out at step {len(told.actions or [])}: {told.error.type}" in again.words
    if how == "raise":
        assert 'raise ZeroDivisionError(f"threw' in again.traceback
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # nothing half-written beside it


def test_a_step_that_hung_hangs_again(tmp_path: Path) -> None:
    file = crashed(tmp_path, "process", limit=0.2, how="hang")
    again = replay(file, FAILS)
    assert again.same, again.words
    assert "StepTimeLimit: took longer than 0.2 s" in again.words


def test_another_outcome_is_told(tmp_path: Path) -> None:
    file = crashed(tmp_path)
    whole = json.loads(file.read_text())

    def changed(**parts: Any) -> Any:
        file.write_text(json.dumps(whole | parts))
        return replay(file, FAILS)

    assert (
        "another error than KeyError: x came out"
        in changed(error={**whole["error"], "type": "KeyError", "message": "x"}).words
    )
    assert not changed(actions=whole["actions"][:-1]).same
    assert f"no error came out in {len(whole['actions']) - 1} steps" in changed(actions=whole["actions"][:-1]).words
    words = changed(actions=[0] * 25).words
    assert "the episode ended by itself at step 20" in words


def test_the_command_says_what_came_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(crashed(tmp_path))
    assert cli_exit_code(monkeypatch, "replay", file, "--env", FAILS) == 0
    out = capsys.readouterr().out
    assert "Traceback" in out
    assert "the same error came out at step" in out
    monkeypatch.setattr("zhixing.utils.importing.approved", set())  # as in a process that hasn't imported it yet
    assert cli_exit_code(monkeypatch, "replay", file) == 2  # whose code that is must be said by whoever asks
    assert f"if you trust it, say so with --trust, or with --env {FAILS}" in capsys.readouterr().err
    assert cli_exit_code(monkeypatch, "replay", file, "--env", "CartPole-v1") == 2
    whole = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps(whole | {"actions": [0, 0]}))
    assert cli_exit_code(monkeypatch, "replay", file, "--env", FAILS) == 1
    assert cli_exit_code(monkeypatch, "replay", "nowhere.json") == 2
    assert "there is no capsule nowhere.json" in capsys.readouterr().err


def test_a_folder_of_capsules_has_an_end_and_a_full_disk_hides_no_crash(tmp_path: Path) -> None:
    first = crashed(tmp_path / "crash")
    for number in range(2, MAX_FILES + 1):
        first.with_name(f"crash-{number:03d}.json").write_text("")
    assert "holds 100 capsules already" in crash(tmp_path / "crash")
    (tmp_path / "file").write_text("")
    words = crash(tmp_path / "file")
    assert "ZeroDivisionError: threw" in words
    assert "its capsule can't be written to" in words


# --- files that are none ---


def sample() -> dict[str, Any]:
    rng = dict(np.random.default_rng(0).bit_generator.state)
    return {
        "format": FORMAT,
        "kind": "crash",
        "versions": {"zhixing": "0.1.0"},
        "env": {"name": "toy/match", "options": {}},
        "backend": "serial",
        "step_timeout": None,
        "index": 0,
        "seed": 5,
        "origin": {"seed": None, "rng": rng, "options": None},
        "actions": [0, 1],
        "error": {"type": "ValueError", "message": "no", "traceback": ""},
    }


def test_the_sample_is_right(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(sample()))
    assert "no error came out in 2 steps" in replay(tmp_path / "a.json").words


DAMAGE: dict[str, Any] = {
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "no JSON": b"{",
    "a pickle": pickle.dumps(partial(Path.touch, Path("sprung"))),
    "a list": b"[]",
    "a number": b"3",
    "deep": b"[" * 200_000,
    "deep inside": json.dumps(sample())
    .replace('"options": {}', '"options": ' + '{"a":' * 5000 + "1" + "}" * 5000)
    .encode(),
    "a very long number": b'{"format": ' + b"9" * 10_000 + b"}",
    "NaN": json.dumps(sample() | {"index": float("nan")}).encode(),
    "large": b" " * (MAX_BYTES + 1),
    "without a seed": json.dumps({key: value for key, value in sample().items() if key != "seed"}).encode(),
    "with more": json.dumps(sample() | {"code": "import os"}).encode(),
    "another kind": json.dumps(sample() | {"kind": "agent"}).encode(),
    "a seed below zero": json.dumps(sample() | {"seed": -1}).encode(),
    "another generator": json.dumps(
        sample() | {"origin": {"seed": 1, "options": None, "rng": {"bit_generator": "os"}}}
    ).encode(),
    "no state of it": json.dumps(
        sample() | {"origin": {"seed": 1, "options": None, "rng": {"bit_generator": "PCG64", "state": {"state": -1}}}}
    ).encode(),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_told_with_the_name_of_the_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / "crash-001.json"
    file.write_bytes(DAMAGE[name])
    with pytest.raises(UserError, match=r"crash-001.json is damaged or no crash capsule"):
        read(file)
    assert not Path("sprung").exists()


def test_a_newer_format_and_a_folder_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(sample() | {"format": FORMAT + 1}))
    with pytest.raises(UserError, match=f"has format {FORMAT + 1}; this version reads up to {FORMAT}"):
        read(tmp_path / "a.json")
    with pytest.raises(UserError, match="damaged or no crash capsule"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"env": {"name": "os:system", "options": {"command": "touch sprung"}}}, "if you trust it, say so"),
        ({"env": {"name": "pathlib:Path.touch", "options": {}}}, "if you trust it, say so"),
        ({"env": {"name": "../../toy/match", "options": {}}}, "unknown environment"),
        ({"env": {"name": "toy/match", "options": {"command": "touch sprung"}}}, "no option 'command'"),
        ({"actions": ["touch sprung"]}, "actions: toy/match takes Discrete"),
        ({"actions": [[0], [1]]}, "actions: toy/match takes Discrete"),
        ({"actions": [[0], 1]}, "actions: toy/match takes Discrete"),
        ({"actions": [0.5]}, "actions: toy/match takes Discrete"),
        ({"actions": [{"a": 1}]}, "actions: toy/match takes Discrete"),
        ({"actions": [10**30]}, "actions: toy/match takes Discrete"),
        ({"actions": None}, "too many actions"),
    ],
)
def test_a_capsule_starts_nothing_but_a_known_task(parts: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(sample() | parts))
    with pytest.raises(UserError, match=words):
        replay(tmp_path / "a.json")
    assert not Path("sprung").exists()


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_change_is_read_or_refused_in_our_own_words(tmp_path: Path, data: st.DataObject) -> None:
    """One part of a right capsule is anything at all, or some of its bytes are."""
    whole = copy.deepcopy(sample())
    place = data.draw(st.sampled_from(places(whole)))
    value = data.draw(ANY)
    if place:
        target: Any = whole
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = value
    text = bytearray(json.dumps(whole if place else value).encode())
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, len(text) - 1), st.integers(0, 255)), max_size=2)):
        text[at] = byte
    file = tmp_path / "a.json"
    file.write_bytes(text)
    try:
        told = read(file)
    except UserError as error:
        assert "a.json" in str(error)
        return
    assert told.format <= FORMAT
    assert isinstance(RegisteredEnv(told.env.name, told.env.options), RegisteredEnv)
