"""Helpers of the benchmarks: interpreters, which peer does which row, and the check that both did the same work."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="only in a checkout")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of the benchmarks by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    return importlib.import_module


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_find_python_prefers_the_path_then_the_newest_of_pyenv(module, tmp_path, monkeypatch) -> None:
    find_python = module("common").find_python
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert find_python("3.9") is None
    for patch in ("9", "18"):  # the newest by number, not alphabetically
        write_script(tmp_path / "pyenv" / "versions" / f"3.9.{patch}" / "bin" / "python", "exit 0")
    assert find_python("3.9") == tmp_path / "pyenv" / "versions" / "3.9.18" / "bin" / "python"
    on_path = write_script(tmp_path / "path" / "python3.9", "exit 127")  # pyenv's shim of a version that isn't active
    assert find_python("3.9") == tmp_path / "pyenv" / "versions" / "3.9.18" / "bin" / "python"
    on_path.write_text("#!/bin/sh\nexit 0\n")
    assert find_python("3.9") == on_path


def test_a_row_that_is_a_peers_example_is_only_for_that_peer(module) -> None:
    fixed_work = module("fixed_work")
    names = [file.stem for file in (BENCHMARKS / "peers").glob("*.py") if file.stem not in fixed_work.NOT_PEERS]
    peers: dict[str, ModuleType] = {name: module(f"peers.{name}") for name in names}

    def supporting(row: str) -> set[str]:
        return {name for name, peer in peers.items() if fixed_work.supports(name, peer, fixed_work.ROWS[row])}

    assert supporting("dqn-mindrl") == supporting("dqn-mindrl-threads") == {"mindrl"}
    assert supporting("dqn-cartpole") == supporting("ppo-cartpole") == {"sb3", "sbx", "tianshou", "torchrl", "rllib"}


def test_table_names_skipped_rows_with_the_reason(module) -> None:
    results = {"rows": {}, "titles": {}, "skipped": {"dqn-mindrl": "MindRL (needs Python 3.9, which was not found)"}}
    text = module("fixed_work").make_table(results)
    assert text.endswith("not measured: dqn-mindrl by MindRL (needs Python 3.9, which was not found).")


def test_counts_may_differ_within_the_tolerance_of_a_peer(module) -> None:
    check = module("fixed_work").check_same_work
    row = {"measured_steps": 1000}
    ours = {"env_steps": 1000, "optimizer_steps": 80, "parameters": 7, "threads": 1, "versions": {"torch": "2"}}
    check("row", "rllib", row, ours, {**ours, "env_steps": 1030})  # 30 / 1030 is less than 3 %
    check("row", "mindrl", row, ours, {**ours, "versions": {}})  # doesn't use torch
    with pytest.raises(AssertionError, match="env_steps 1000 in zhixing, 1040 in rllib"):
        check("row", "rllib", row, ours, {**ours, "env_steps": 1040})
    with pytest.raises(AssertionError, match="env_steps 1000 in zhixing, 1030 in sb3"):
        check("row", "sb3", row, ours, {**ours, "env_steps": 1030})
    with pytest.raises(AssertionError, match="two versions of torch"):
        check("row", "rllib", row, ours, {**ours, "versions": {"torch": "3"}})


def test_measurement_is_the_difference_of_two_snapshots(module, capsys) -> None:
    measurement = module("measurement")
    snapshots = [measurement.Snapshot(1.0, 0.5, 100, 10), measurement.Snapshot(3.5, 1.5, 300, 60)]
    measurement.print_measurement(snapshots, 702, {"MindRL": "0.7.0"}, (), threads=1)
    printed = json.loads(capsys.readouterr().out)
    assert {name: printed[name] for name in ("seconds", "cpu_seconds")} == {"seconds": 2.5, "cpu_seconds": 1.0}
    assert {name: printed[name] for name in ("env_steps", "optimizer_steps")} == {
        "env_steps": 200,
        "optimizer_steps": 50,
    }
    assert printed["threads"] == 1
    assert "torch" not in printed["versions"]


@pytest.mark.parametrize("name", ["mindrl", "measurement"])
def test_files_used_with_python_3_9_parse_there(name: str) -> None:
    ast.parse((BENCHMARKS / "peers" / f"{name}.py").read_text(), feature_version=(3, 9))


def test_tests_that_soak_runs_exist(module) -> None:
    selected = {argument.removeprefix("--deselect=") for part in module("soak").PARTS.values() for argument in part}
    for path, _, test in (argument.partition("::") for argument in selected):
        text = (BENCHMARKS.parent / path).read_text(encoding="utf-8")
        assert f"def {test.partition('[')[0]}(" in text or not test, f"{path}::{test}"
