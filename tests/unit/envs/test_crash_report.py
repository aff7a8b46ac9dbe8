"""Crash reports reproduce the crash from the file alone, and invalid files are rejected without side effects."""

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
from zhixing.envs.crash.crash_report import FORMAT, MAX_BYTES, MAX_FILES, Reproduction, read, reproduce
from zhixing.errors import EnvCrashError, UserError

FAILS = "broken_envs:Failing"
EXAMPLES = int(os.environ.get("ZHIXING_EXAMPLES", "300"))  # more for a soak


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)


def act(env: VectorEnv, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(1000):
        env.step(rng.integers(0, 3, 3))


def make_report(folder: Path, backend: str = "serial", timeout: float | None = None, how: str = "raise") -> Path:
    """Take random actions until an environment crashes, some episodes after the first. Return the crash report."""
    message = crash(folder, backend, timeout, how)
    assert "reproduce it with: zhixing reproduce" in message
    return max(folder.glob("crash-*.json"))


def crash(folder: Path, backend: str = "serial", timeout: float | None = None, how: str = "raise") -> str:
    """Take random actions until an environment crashes. Return the message of the error."""
    failure_policy, workers = FailurePolicy("stop", timeout, folder), None if backend == "serial" else 2
    env = make_vector(FAILS, 3, backend, workers, {"how": how, "probability": 0.004}, failure_policy=failure_policy)
    env.reset(seed=5)
    with pytest.raises(EnvCrashError) as caught:
        act(env, seed=5)
    env.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("backend", "how"),
    [("serial", "raise"), ("process", "raise"), ("mixed", "raise"), ("serial", "nan"), ("process", "die")],
)
def test_crash_is_reproduced(backend: str, how: str, tmp_path: Path) -> None:
    """The failure depends on the random state of an episode after the first, and on the actions."""
    file = make_report(tmp_path / "crash", backend, how=how)
    report = read(file)
    assert (report.env.name, report.env.options, report.backend) == (FAILS, {"how": how, "probability": 0.004}, backend)
    assert report.origin.rng is not None  # not the first episode, which the seed alone would reproduce
    assert report.versions["numpy"] == np.__version__
    reproduction = reproduce(file, FAILS)
    assert reproduction.same, reproduction.message
    assert f"reproduced the same error at step {len(report.actions or [])}: {report.error.type}" in reproduction.message
    if how == "raise":
        assert 'raise ZeroDivisionError(f"sampled' in reproduction.traceback
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # and no temporary file


def test_hanging_step_is_reproduced(tmp_path: Path) -> None:
    file = make_report(tmp_path, "process", timeout=0.2, how="hang")
    reproduction = reproduce(file, FAILS)
    assert reproduction.same, reproduction.message
    assert "Timeout: took longer than 0.2 s" in reproduction.message


def test_different_outcome_is_reported(tmp_path: Path) -> None:
    file = make_report(tmp_path)
    report = json.loads(file.read_text())
    actions = report["actions"]

    def reproduce_with(**changes: Any) -> Reproduction:
        file.write_text(json.dumps(report | changes))
        return reproduce(file, FAILS)

    reproduction = reproduce_with(error={**report["error"], "type": "KeyError", "message": "x"})
    assert "got another error than KeyError: x at step" in reproduction.message
    reproduction = reproduce_with(actions=actions[:-1])
    assert not reproduction.same
    assert f"no error was raised in {len(actions) - 1} steps" in reproduction.message
    reproduction = reproduce_with(actions=[0] * 25)
    assert "the episode ended without an error at step 20" in reproduction.message


def test_command_prints_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(make_report(tmp_path))
    assert cli_exit_code(monkeypatch, "reproduce", file, "--env", FAILS) == 0
    out = capsys.readouterr().out
    assert "Traceback" in out
    assert "reproduced the same error at step" in out
    monkeypatch.setattr("zhixing.utils.importing.approved", set())  # as in a process that has imported nothing yet
    assert cli_exit_code(monkeypatch, "reproduce", file) == 2  # the code isn't confirmed
    assert f"to import this, add --trust or --env {FAILS}" in capsys.readouterr().err
    assert cli_exit_code(monkeypatch, "reproduce", file, "--env", "CartPole-v1") == 2
    report = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps(report | {"actions": [0, 0]}))
    assert cli_exit_code(monkeypatch, "reproduce", file, "--env", FAILS) == 1
    assert cli_exit_code(monkeypatch, "reproduce", "nowhere.json") == 2
    assert "crash report nowhere.json doesn't exist" in capsys.readouterr().err


def test_full_folder_and_unwritable_folder_dont_hide_the_crash(tmp_path: Path) -> None:
    first = make_report(tmp_path / "crash")
    for number in range(2, MAX_FILES + 1):
        first.with_name(f"crash-{number:03d}.json").write_text("")
    assert "already contains 100 crash reports" in crash(tmp_path / "crash")
    (tmp_path / "file").write_text("")
    message = crash(tmp_path / "file")
    assert "ZeroDivisionError: sampled" in message
    assert "the crash report can't be written to" in message


# --- invalid files ---


def valid_report() -> dict[str, Any]:
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


def test_valid_report_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(valid_report()))
    assert "no error was raised in 2 steps" in reproduce(tmp_path / "a.json").message


INVALID: dict[str, Any] = {
    "empty": b"",
    "not text": b"\xff\xfe\x00",
    "not JSON": b"{",
    "a pickle": pickle.dumps(partial(Path.touch, Path("sprung"))),
    "a list": b"[]",
    "a number": b"3",
    "deep": b"[" * 200_000,
    "deep inside": json.dumps(valid_report())
    .replace('"options": {}', '"options": ' + '{"a":' * 5000 + "1" + "}" * 5000)
    .encode(),
    "a huge number": b'{"format": ' + b"9" * 10_000 + b"}",
    "NaN": json.dumps(valid_report() | {"index": float("nan")}).encode(),
    "large": b" " * (MAX_BYTES + 1),
    "without a seed": json.dumps({key: value for key, value in valid_report().items() if key != "seed"}).encode(),
    "with an extra key": json.dumps(valid_report() | {"code": "import os"}).encode(),
    "another kind": json.dumps(valid_report() | {"kind": "agent"}).encode(),
    "a negative seed": json.dumps(valid_report() | {"seed": -1}).encode(),
    "another generator": json.dumps(
        valid_report() | {"origin": {"seed": 1, "options": None, "rng": {"bit_generator": "os"}}}
    ).encode(),
    "an invalid state": json.dumps(
        valid_report()
        | {"origin": {"seed": 1, "options": None, "rng": {"bit_generator": "PCG64", "state": {"state": -1}}}}
    ).encode(),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_file_is_rejected_by_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / "crash-001.json"
    file.write_bytes(INVALID[name])
    with pytest.raises(UserError, match=r"crash-001.json is damaged or not a crash report"):
        read(file)
    assert not Path("sprung").exists()


def test_newer_format_and_folder_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(valid_report() | {"format": FORMAT + 1}))
    with pytest.raises(
        UserError, match=f"has format {FORMAT + 1}; this version of zhixing reads formats up to {FORMAT}"
    ):
        read(tmp_path / "a.json")
    with pytest.raises(UserError, match="damaged or not a crash report"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": {"name": "os:system", "options": {"command": "touch sprung"}}}, "to import this, add --trust"),
        ({"env": {"name": "pathlib:Path.touch", "options": {}}}, "to import this, add --trust"),
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
def test_report_runs_nothing_but_a_known_env(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(valid_report() | changes))
    with pytest.raises(UserError, match=message):
        reproduce(tmp_path / "a.json")
    assert not Path("sprung").exists()


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of keys to all nodes of a JSON tree."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(leaf for key, value in children for leaf in paths(value, (*path, key)))]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_change_is_read_or_rejected_with_a_user_error(tmp_path: Path, data: st.DataObject) -> None:
    """Replace one value of a valid report by an arbitrary one, and overwrite up to two bytes."""
    tree = copy.deepcopy(valid_report())
    path = data.draw(st.sampled_from(paths(tree)))
    value = data.draw(ANY)
    if path:
        target: Any = tree
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
    text = bytearray(json.dumps(tree if path else value).encode())
    changes = st.lists(st.tuples(st.integers(0, len(text) - 1), st.integers(0, 255)), max_size=2)
    for position, byte in data.draw(changes):
        text[position] = byte
    file = tmp_path / "a.json"
    file.write_bytes(text)
    try:
        report = read(file)
    except UserError as error:
        assert "a.json" in str(error)
        return
    assert report.format <= FORMAT
    assert isinstance(RegisteredEnv(report.env.name, report.env.options), RegisteredEnv)
