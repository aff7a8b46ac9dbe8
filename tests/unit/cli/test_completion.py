"""Shell completion: candidates, in the forms that bash, zsh and fish ask for them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Command

import zhixing as zx
from zhixing.cli.source_settings import algorithm_summaries, read_settings
from zhixing.config import list_settings

ROOT = Path(zx.__file__).parents[1]


def complete(run_cli: Command, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """Return the candidates for the last word as bash asks for them."""
    monkeypatch.setenv("_ZHIXING_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(("zhixing", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    code, out, _ = run_cli()
    assert code == 0
    return out.split()


CASES: dict[str, tuple[list[str], list[str]]] = {
    "command": (["tr"], ["train"]),
    "algorithm": (["train", "pp"], ["ppg", "ppo"]),
    "algorithm to show": (["show", "dq"], ["dqn"]),
    "environment": (["train", "ppo", "--env", "toy/mat"], ["toy/match"]),
    "environment after settings": (["train", "ppo", "lr=1e-3", "--env", "CartPole-v"], ["CartPole-v1"]),
    "environment to check": (["check", "toy/mat"], ["toy/match"]),
    "settings": (["train", "ppo", "lr"], ["lr=", "lr_schedule="]),
    # the default follows, because the shell adds a space after a single candidate
    "single setting": (["train", "ppo", "epoc"], ["epochs=", "epochs=10"]),
    "setting after options": (["train", "ppo", "--env-steps", "100", "epoc"], ["epochs=", "epochs=10"]),
    "setting of another algorithm": (["train", "dqn", "epoc"], []),
    "setting of a group": (["train", "ppo", "net.act"], ["net.activation=", *(f"net.activation={name}" for name in (
        "tanh", "relu", "silu", "elu", "gelu"
    ))]),
    "changed default of a group": (["train", "dreamer", "replay.burn"], ["replay.burn_in=", "replay.burn_in=0"]),
    "value": (["train", "ppo", "net.activation", "=", "re"], ["relu"]),
    "empty value": (["train", "ppo", "compile", "="], ["true", "false"]),
    "name of a schedule": (["train", "ppo", "lr_schedule", "=", "c"], ["constant", "cosine"]),
    "setting in a sweep": (["sweep", "dqn", "replay.her_"], ["replay.her_ratio=", "replay.her_ratio=0.8"]),
    "bundled agent": (["eval", "cartp"], ["cartpole"]),
    "kind": (["list", "e"], ["envs"]),
    "format": (["export", "cartpole", "--format", "o"], ["onnx"]),
    "option": (["train", "ppo", "--see"], ["--seed"]),
}  # fmt: skip


@pytest.mark.parametrize(("words", "candidates"), CASES.values(), ids=CASES)
def test_candidates(words: list[str], candidates: list[str], run_cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert complete(run_cli, monkeypatch, *words) == candidates


def test_runs_and_their_settings(run_cli: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("runs/one", "runs/sweep/a", "runs/sweep/deep/er", ".hidden/run"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("algorithm: dqn\n")
    assert complete(run_cli, monkeypatch, "eval", "ru") == ["runs/one"]
    assert complete(run_cli, monkeypatch, "plot", "runs/one", "runs/") == ["runs/one", "runs/sweep/a"]
    assert complete(run_cli, monkeypatch, "train", "dqn", "--init-from", "runs/sweep/") == [
        "runs/sweep/a",
        "runs/sweep/deep/er",
    ]
    assert complete(run_cli, monkeypatch, "eval", "runs/one", "--checkpoint", "") == ["last", "best"]
    assert complete(run_cli, monkeypatch, "resume", "runs/one", "epsilon_s") == ["epsilon_start=", "epsilon_start=1.0"]


def test_other_shells_complete_whole_words(run_cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "zhixing train ppo net.activation=r")
    monkeypatch.setenv("_ZHIXING_COMPLETE", "complete_zsh")
    assert run_cli()[1] == """_arguments '*: :(("net.activation=relu"))'\n"""
    monkeypatch.setenv("_ZHIXING_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    assert run_cli()[1] == "net.activation=relu\n"
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "zhixing train pp")
    assert run_cli()[1].splitlines() == [f"{name}\t{algorithm_summaries()[name]}" for name in ("ppg", "ppo")]


def test_settings_read_from_source_are_those_of_the_classes(algorithm: str) -> None:
    settings = {setting.name: setting for setting in list_settings(zx.algorithms.get(algorithm).settings)}
    read = read_settings(algorithm)
    assert {name: setting.description for name, setting in read.items()} == {
        name: setting.description for name, setting in settings.items() if not name.startswith("env.")
    }
    for name, setting in read.items():
        text = setting.default.strip("'").replace("_", "")
        expected = settings[name].default.replace("_", "")
        if text != expected and setting.default:
            assert str(eval(setting.default)).lower() == expected, name
        for choice in setting.choices:
            allowed = [text, *re.findall(r"\w+", settings[name].type.replace("bool", "true false"))]
            assert choice in allowed or choice in setting.description, name


def test_every_algorithm_has_a_summary() -> None:
    assert algorithm_summaries() == {name: zx.algorithms.get(name).summary for name in zx.algorithms.names()}


def test_completion_does_not_import_torch() -> None:
    """The shell waits for it."""
    code = (
        "import sys\n"
        "from zhixing.cli import main\n"
        "sys.argv = ['zhixing']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = {'torch', 'matplotlib', 'zhixing.config', *sys.argv[1:]} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    for words in (["train", "pp"], ["train", "ppo", "lr"], ["eval", "ca"], ["train", "ppo", "--env", "Cart"]):
        names = "gymnasium" if "--env" not in words else "none"
        environ = {"COMP_WORDS": "\n".join(("zhixing", *words)), "COMP_CWORD": str(len(words))}
        result = subprocess.run(
            [sys.executable, "-c", code.replace("'zhixing']", f"'zhixing', '{names}']", 1)],
            env={**os.environ, **environ, "_ZHIXING_COMPLETE": "complete_bash", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_installed_completion_works_in_bash(tmp_path: Path) -> None:
    """Installs it in a home folder, and completes two words as an interactive shell does."""
    program = tmp_path / "bin" / "zhixing"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m zhixing "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "HOME": str(tmp_path), "PATH": path, "PYTHONPATH": str(ROOT)}
    install = f"'{sys.executable}' -m zhixing --install-completion"
    out = subprocess.check_output(["bash", "-c", f"{install}; true"], env=environ, text=True)
    assert "bash completion installed" in out
    script = (
        f"source '{tmp_path}/.bashrc'\n"
        "COMP_WORDS=(zhixing train ppo net.activation = re); COMP_CWORD=5\n"
        '_zhixing_completion zhixing re =; echo "${COMPREPLY[*]}"\n'
        "COMP_WORDS=(zhixing train rainb); COMP_CWORD=2\n"
        '_zhixing_completion zhixing rainb train; echo "${COMPREPLY[*]}"\n'
        "complete -p zhixing\n"
    )
    out = subprocess.check_output(["bash", "--norc", "-c", script], env=environ, text=True)
    assert out.splitlines() == ["relu", "rainbow", "complete -o default -F _zhixing_completion zhixing"]
