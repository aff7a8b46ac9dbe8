"""A disk that is full or read-only during a run: the run reports it, loses no saved data, and continues if it can.

A subprocess mounts a small disk, which is filled and freed while a run trains.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import differing_tensors, metrics_rows
from soak_config import record

import zhixing as zx
from zhixing.training.run_folder import RunFolder

SETTINGS: dict[str, Any] = {
    "ppo": {"rollout_steps": 10, "minibatch_size": 10, "epochs": 1},
    "dqn": {"learning_starts": 50, "batch_size": 8, "updates_per_step": 0.1, "train_every": 10},
}
COMMON = {"env_steps": 1000, "log_every": 10, "checkpoint_every": 100, "eval_every": 250, "seed": 2}
COMMON |= {"eval_episodes": 1, "vector__backend": "serial", "net__hidden_sizes": [8], "num_envs": 1}


class Fault(zx.Callback):
    """Breaks the disk at step `begin` and repairs it at step `end`."""

    def __init__(self, kind: str, disk: Path, begin: int, end: int) -> None:
        self.kind, self.disk, self.begin, self.end = kind, disk, begin, end
        self.filler = disk / "filler"

    def iteration_begin(self, loop: zx.TrainingLoop) -> None:
        if loop.env_steps == self.begin:
            self.set(broken=True)
        elif loop.env_steps == self.end:
            self.set(broken=False)

    def set(self, broken: bool) -> None:
        if self.kind == "read-only":
            for folder in (self.disk / "run" / "checkpoints", self.disk / "run" / "replay"):
                folder.mkdir(exist_ok=True)
                mounts = [["mount", "--bind", folder, folder], ["mount", "-o", "remount,bind,ro", folder]]
                for command in mounts if broken else [["umount", folder]]:
                    subprocess.run(command, check=True)
        elif broken:
            with self.filler.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(512))
        else:
            self.filler.unlink()


def train(name: str, out: Path, *callbacks: zx.Callback, **settings: Any) -> Mapping[str, Any]:
    return zx.train(
        name, "CartPole-v1", out=out, quiet=True, callbacks=callbacks, **COMMON, **SETTINGS[name], **settings
    )


# --- cases, run in the subprocess with the mounted disk ---


def temporary(kind: str, name: str, disk: Path) -> None:
    """Some checkpoints and rows of metrics can't be written, but the disk works again before the end."""
    train(name, disk / "run", Fault(kind, disk, 250, 650), tensorboard=True)


def permanent(kind: str, name: str, disk: Path) -> None:
    """The last checkpoint can't be written. The run resumes from the one before once the disk is repaired."""
    fault = Fault(kind, disk, 450, -1)
    with pytest.raises(zx.UserError, match=r"the last checkpoint is lost, .*zhixing resume .* after step 400"):
        train(name, disk / "run", fault, tensorboard=False)
    assert RunFolder.open(disk / "run").load()["steps"] == 400
    fault.set(broken=False)
    zx.Session.resume(disk / "run", quiet=True).run()


def video(kind: str, name: str, disk: Path) -> None:
    """A video that can't be written doesn't replace the existing file."""
    train(name, disk / "run", tensorboard=False)
    (disk / "a.mp4").write_bytes(b"existing")
    Fault(kind, disk, 0, 0).set(broken=True)
    from zhixing.reports.video import record_video

    with pytest.raises(zx.UserError, match=r"can't write the video .*a.mp4: "):
        record_video(disk / "run", disk / "a.mp4")
    assert (disk / "a.mp4").read_bytes() == b"existing"
    assert not list(disk.glob(".a*"))


def main(folder: Path) -> None:
    """Run every case on a new disk. Copy the run and its messages to a folder that remains."""
    torch.set_num_threads(1)
    for name in SETTINGS:
        train(name, folder / f"whole-{name}", tensorboard=False)
    for case in CASES:
        function, kind, name = case.split()
        disk = folder / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640k", "none", disk], check=True)
        with (folder / f"{case}.txt").open("w") as messages, redirect_stderr(messages):
            CASE_FUNCTIONS[function](kind, name, disk)
        shutil.copytree(disk / "run", folder / case)
        subprocess.run(["umount", disk], check=True)
        disk.rmdir()


CASE_FUNCTIONS = {"temporary": temporary, "permanent": permanent, "video": video}
CASES = ["temporary full ppo", "temporary full dqn", "temporary read-only dqn"]
CASES += ["permanent full dqn", "permanent read-only ppo", "video full ppo"]


# --- tests of the results ---


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mount = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
    if shutil.which("unshare") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("users can't mount disks on this system")
    folder = tmp_path_factory.mktemp("disks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["unshare", "-rm", sys.executable, __file__, str(folder)]
    completed = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert completed.returncode == 0, completed.stderr
    record("faults", injected=len(CASES), what="disks that are full or read-only")
    return folder


def assert_same_end(disks: Path, case: str) -> None:
    whole = disks / f"whole-{case.split()[2]}"
    assert differing_tensors(whole, disks / case) == []
    assert metrics_rows(whole) == metrics_rows(disks / case)  # including rows that were written late


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("temporary")])
def test_temporary_failure_changes_nothing(case: str, disks: Path) -> None:
    messages = (disks / f"{case}.txt").read_text()
    reason = "No space left on device" if "full" in case else "Read-only file system"
    assert f"note: no checkpoint at step 300, {disks}/disk/run can't be written: {reason}" in messages
    assert "the last one is from step 200, training continues" in messages
    if "full" in case:
        assert "metrics.csv can't be written: No space left on device; training continues and retries later" in messages
        assert "TensorBoard events in" in messages
    assert_same_end(disks, case)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("permanent")])
def test_permanent_failure_keeps_the_last_good_checkpoint(case: str, disks: Path) -> None:
    assert_same_end(disks, case)  # `permanent` has resumed it


def test_failed_video_keeps_the_existing_file(disks: Path) -> None:
    assert (disks / "video full ppo").is_dir()  # the assertions are in `video`


if __name__ == "__main__":
    main(Path(sys.argv[1]))
