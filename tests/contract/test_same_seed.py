"""Contract 2: the same seed gives the same run, bit for bit, with the serial and the process back end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import checkpoint_tensors, differing_tensors, metrics_rows

import zhixing as zx


def test_same_seed_same_run(algorithm: str, short_config: Callable, tmp_path: Path) -> None:
    """Runs neither use nor change torch's global random state."""
    for name in ("a", "b"):
        torch.manual_seed(ord(name))
        before = torch.get_rng_state()
        zx.Session(short_config(algorithm, seed=1), tmp_path / name, quiet=True).run()
        assert torch.equal(torch.get_rng_state(), before)
    assert differing_tensors(tmp_path / "a", tmp_path / "b") == []
    assert metrics_rows(tmp_path / "a") == metrics_rows(tmp_path / "b")


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_any_number_of_worker_processes_gives_the_serial_run(name: str, short_config: Callable, tmp_path: Path) -> None:
    backends = {"serial": {"backend": "serial"}, "one": {"backend": "process", "workers": 1}}
    backends["two"] = {"backend": "process", "workers": 2}
    backends["mixed"] = {"backend": "mixed", "workers": 2}
    for run, vector in backends.items():
        zx.Session(short_config(name, seed=5, num_envs=3, vector=vector), tmp_path / run, quiet=True).run()
    for run in ("one", "two", "mixed"):
        assert differing_tensors(tmp_path / "serial", tmp_path / run) == []
        assert metrics_rows(tmp_path / "serial") == metrics_rows(tmp_path / run)


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_different_seeds_give_different_runs(name: str, short_config: Callable, tmp_path: Path) -> None:
    for seed in (1, 2):
        zx.Session(short_config(name, seed=seed), tmp_path / str(seed), quiet=True).run()
    first, second = checkpoint_tensors(tmp_path / "1"), checkpoint_tensors(tmp_path / "2")
    assert any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_written_configuration_reproduces_the_run(name: str, short_config: Callable, tmp_path: Path) -> None:
    zx.Session(short_config(name, seed=4), tmp_path / "a", quiet=True).run()
    zx.Session(zx.config.load(tmp_path / "a" / "config.yaml"), tmp_path / "b", quiet=True).run()
    assert differing_tensors(tmp_path / "a", tmp_path / "b") == []
    assert (tmp_path / "a" / "config.yaml").read_text() == (tmp_path / "b" / "config.yaml").read_text()
