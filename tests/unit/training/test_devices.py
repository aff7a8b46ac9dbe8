"""The choice of the device, and training on an accelerator: the device of fake_npu.py, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zhixing as zx
from zhixing.errors import UserError
from zhixing.training import resolve

TESTS = Path(__file__).parents[2]
CHECKS = [
    line.removeprefix("def ").partition("(")[0]
    for line in (TESTS / "accelerator_checks.py").read_text().splitlines()
    if line.startswith("def check_")
]


def resolved(device: str) -> str:
    cfg = zx.config.load(algorithm="ppo", env="CartPole-v1", device=device)
    return resolve.resolve_device(cfg).device


@pytest.mark.parametrize(
    ("available", "auto"),
    [
        (("cuda", "npu", "mps"), "cuda"),
        (("npu", "mps"), "npu"),
        (("mps",), "mps"),
        ((), "cpu"),
    ],
)
def test_device_is_the_first_available_one(
    available: tuple[str, ...], auto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Present:
        def is_available(self) -> bool:
            return True

    class Absent:
        def is_available(self) -> bool:
            return False

    for name in ("cuda", "npu", "mps"):
        monkeypatch.setattr(torch, name, Present() if name in available else Absent(), raising=False)
    assert resolved("auto") == auto
    if available:
        assert (resolved("gpu"), resolved("gpu:1")) == (auto, f"{auto}:1")
    else:
        with pytest.raises(UserError, match="device='gpu' can't be used here: torch finds no cuda, npu, mps"):
            resolved("gpu")


def test_missing_npu_is_rejected() -> None:
    with pytest.raises(UserError, match="device='npu' can't be used here"):
        resolved("npu")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Errors of the checks by name, empty for those that passed."""
    folder = tmp_path_factory.mktemp("accelerator")
    root = str(TESTS.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(TESTS)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "accelerator_checks.py")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_accelerator(check: str, results: dict[str, str]) -> None:
    assert results[check] == ""
