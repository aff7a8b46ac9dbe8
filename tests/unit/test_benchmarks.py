"""What benchmarks do before anything is measured: who does which row, and with which Python."""

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
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    return importlib.import_module


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_another_python_is_found_on_the_path_then_the_newest_of_pyenv(module, tmp_path, monkeypatch) -> None:
    find_python = module("common").find_python
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert find_python("3.9") is None
    for patch in ("9", "18"):  # the newest by number, not by letters
        script(tmp_path / "pyenv" / "versions" / f"3.9.{patch}" / "bin" / "python", "exit 0")
    assert find_python("3.9") == tmp_path / "pyenv" / "versions" / "3.9.18" / "bin" / "python"
    on_path = script(tmp_path / "path" / "python3.9", "exit 127")  # pyenv's name for a version that isn't switched on
    assert find_python("3.9") == tmp_path / "pyenv" / "versions" / "3.9.18" / "bin" / "python"
    on_path.write_text("#!/bin/sh\nexit 0\n")
    assert find_python("3.9") == on_path


def test_the_example_of_a_peer_is_for_nobody_else_and_others_are_not_for_it(module) -> None:
    fixed_work = module("fixed_work")
    names = [file.stem for file in (BENCHMARKS / "peers").glob("*.py") if file.stem not in fixed_work.OTHERS]
    peers: dict[str, ModuleType] = {name: module(f"peers.{name}") for name in names}

    def able(row: str) -> set[str]:
        return {name for name, peer in peers.items() if fixed_work._does(name, peer, fixed_work.ROWS[row])}

    assert able("dqn-mindrl") == able("dqn-mindrl-threads") == {"mindrl"}
    assert able("dqn-cartpole") == able("ppo-cartpole") == {"sb3", "sbx", "tianshou", "torchrl", "rllib"}


def test_a_row_that_was_skipped_is_named_with_its_reason(module) -> None:
    told = module("fixed_work")._table({}, {}, {"dqn-mindrl": "MindRL (needs Python 3.9, which was not found)"})
    assert told.endswith("not measured: dqn-mindrl by MindRL (needs Python 3.9, which was not found).")


def test_counts_of_a_peer_may_differ_as_far_as_it_says(module) -> None:
    check = module("fixed_work").check_same_work
    row = {"measured_steps": 1000}
    ours = {"env_steps": 1000, "optimizer_steps": 80, "parameters": 7, "threads": 1, "versions": {"torch": "2"}}
    check("row", "rllib", row, ours, {**ours, "env_steps": 1030})  # 30 / 1030 is less than 3 %
    check("row", "mindrl", row, ours, {**ours, "versions": {}})  # computes without torch
    with pytest.raises(AssertionError, match="env_steps 1000 here, 1040 in rllib"):
        check("row", "rllib", row, ours, {**ours, "env_steps": 1040})
    with pytest.raises(AssertionError, match="env_steps 1000 here, 1030 in sb3"):
        check("row", "sb3", row, ours, {**ours, "env_steps": 1030})
    with pytest.raises(AssertionError, match="two versions of torch"):
        check("row", "rllib", row, ours, {**ours, "versions": {"torch": "3"}})


def test_who_computes_without_torch_tells_what_passed_between_two_marks(module, capsys) -> None:
    module("telling").tell([(1.0, 0.5, 100, 10), (3.5, 1.5, 300, 60)], 702, {"MindRL": "0.7.0"}, (), threads=1)
    told = json.loads(capsys.readouterr().out)
    passed = {"seconds": 2.5, "cpu_seconds": 1.0, "env_steps": 200, "optimizer_steps": 50}
    assert {name: told[name] for name in passed} == passed
    assert told["threads"] == 1
    assert "torch" not in told["versions"]


@pytest.mark.parametrize("name", ["mindrl", "telling"])
def test_what_runs_on_python_3_9_is_written_for_it(name: str) -> None:
    ast.parse((BENCHMARKS / "peers" / f"{name}.py").read_text(), feature_version=(3, 9))


def test_tests_that_soak_runs_exist(module) -> None:
    selected = {argument.removeprefix("--deselect=") for part in module("soak").PARTS.values() for argument in part}
    for path, _, test in (argument.partition("::") for argument in selected):
        text = (BENCHMARKS.parent / path).read_text(encoding="utf-8")
        assert f"def {test.partition('[')[0]}(" in text or not test, f"{path}::{test}"
