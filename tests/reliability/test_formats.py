"""Files written by every released version can still be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import zhixing as zx
from zhixing import offline
from zhixing.envs.crash import crash_report
from zhixing.training.run_folder import RunFolder

FORMATS = Path(__file__).parents[1] / "fixtures" / "formats"
VERSIONS = sorted(path.name for path in FORMATS.iterdir())
OBS = np.linspace(-0.1, 0.1, 20, dtype=np.float32).reshape(5, 4)


def test_files_of_the_current_version_exist() -> None:
    assert zx.__version__ in VERSIONS, "run tests/fixtures/make_formats.py at each release"


@pytest.mark.parametrize("version", VERSIONS)
def test_files_of_a_released_version_load(version: str, tmp_path: Path) -> None:
    shutil.copytree(FORMATS / version, tmp_path / "old")
    old = tmp_path / "old"
    expected = json.loads((old / "expected.json").read_text())
    assert np.asarray(zx.load(old / "run").act(OBS)).tolist() == expected["actions"]
    data = offline.open(old / "data")
    assert (len(data), data.num_episodes) == (expected["data_steps"], expected["data_episodes"])
    assert float(data.arrays["reward"].sum()) == expected["data_reward"]
    assert crash_report.read(old / "crash" / "crash-001.json").actions == [0, 1]
    # the run resumes in the middle of its episodes
    session = zx.Session.resume(old / "run", quiet=True, env_steps=90)
    assert session.loop.env_steps == expected["env_steps"]
    assert len(session.loop.buffer) == expected["replay"]
    assert session.run()["env_steps"] == 90
    assert RunFolder.open(old / "run").load()["steps"] == 90
