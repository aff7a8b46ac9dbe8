"""Disks that are full or read-only while a run writes: it says so, keeps what it has, and goes on where it can.

A real disk of a few hundred kilobytes, mounted in a process of its own, is filled up and freed while a run trains.
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
from soaking import count

import zhixing as zx
from zhixing.training.run_folder import RunFolder

SETTINGS: dict[str, Any] = {
    "ppo": {"rollout_steps": 10, "minibatch_size": 10, "epochs": 1},
    "dqn": {"learning_starts": 50, "batch_size": 8, "updates_per_step": 0.1, "train_every": 10},
}
COMMON = {"env_steps": 1000, "log_every_steps": 10, "checkpoint_every_steps": 100, "eval_every_steps": 250, "seed": 2}
COMMON |= {"eval_episodes": 1, "vector__backend": "serial", "net__hidden_sizes": [8], "num_envs": 1}


class Fault(zx.Callback):
    """Breaks the disk before step `since` and mends it before step `until`."""

    def __init__(self, kind: str, disk: Path, since: int, until: int) -> None:
        self.kind, self.disk, self.since, self.until = kind, disk, since, until
        self.filler = disk / "filler"

    def iteration_begin(self, loop: zx.TrainingLoop) -> None:
        if loop.env_steps == self.since:
            self.set(True)
        elif loop.env_steps == self.until:
            self.set(False)

    def set(self, broken: bool) -> None:
        if self.kind == "read-only":
            for folder in (self.disk / "run" / "checkpoints", self.disk / "run" / "replay"):
                folder.mkdir(exist_ok=True)
                steps = [["--bind", folder, folder], ["-o", "remount,bind,ro", folder]]
                for command in [["mount", *words] for words in steps] if broken else [["umount", folder]]:
                    subprocess.run(command, check=True)
        elif broken:
            with self.filler.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(512))
        else:
            self.filler.unlink()


def train(name: str, out: Path, *callbacks: zx.Callback, **further: Any) -> Mapping[str, Any]:
    return zx.train(
        name, "CartPole-v1", out=out, quiet=True, callbacks=callbacks, **COMMON, **SETTINGS[name], **further
    )


# --- what runs in a process that has a disk of its own ---


def passing(kind: str, name: str, disk: Path) -> None:
    """The disk fails for some checkpoints and rows, and works again before the end."""
    train(name, disk / "run", Fault(kind, disk, 250, 650), tensorboard=True)


def lasting(kind: str, name: str, disk: Path) -> None:
    """It stays broken: the last checkpoint can't be written, the one before is there."""
    fault = Fault(kind, disk, 450, -1)
    with pytest.raises(zx.UserError, match=r"the last checkpoint is lost, .*zhixing resume .* after step 400"):
        train(name, disk / "run", fault, tensorboard=False)
    assert RunFolder.open(disk / "run").load()["steps"] == 400
    fault.set(False)
    zx.Session.resume(disk / "run", quiet=True).run()


def video(kind: str, name: str, disk: Path) -> None:
    train(name, disk / "run", tensorboard=False)
    (disk / "a.mp4").write_bytes(b"the old one")
    Fault(kind, disk, 0, 0).set(True)
    from zhixing.report.video import record_video

    with pytest.raises(zx.UserError, match=r"can't write the video .*a.mp4: "):
        record_video(disk / "run", disk / "a.mp4")
    assert (disk / "a.mp4").read_bytes() == b"the old one"
    assert not list(disk.glob(".a*"))


def main(folder: Path) -> None:
    """All of them, each on a disk of its own; what is on it at the end is copied to a folder that outlives us."""
    torch.set_num_threads(1)
    for name in SETTINGS:
        train(name, folder / f"whole-{name}", tensorboard=False)
    for case in CASES:
        job, kind, name = case.split()
        disk = folder / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640k", "none", disk], check=True)
        with (folder / f"{case}.txt").open("w") as said, redirect_stderr(said):
            globals()[job](kind, name, disk)
        shutil.copytree(disk / "run", folder / case)
        subprocess.run(["umount", disk], check=True)
        disk.rmdir()


# --- and who looks at what came out ---

CASES = ["passing full ppo", "passing full dqn", "passing read-only dqn"]
CASES += ["lasting full dqn", "lasting read-only ppo", "video full ppo"]


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    can = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
    if shutil.which("unshare") is None or subprocess.run(can, capture_output=True).returncode:
        pytest.skip("this system lets users mount no disk of their own")
    folder = tmp_path_factory.mktemp("disks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["unshare", "-rm", sys.executable, __file__, str(folder)]
    told = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert told.returncode == 0, told.stderr
    count("faults", injected=len(CASES), what="disks that are full or read-only")
    return folder


def same_end(disks: Path, case: str) -> None:
    whole = disks / f"whole-{case.split()[2]}"
    assert differing_tensors(whole, disks / case) == []
    assert metrics_rows(whole) == metrics_rows(disks / case)  # rows that had to wait are all there


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("passing")])
def test_a_disk_that_fails_for_a_while_costs_nothing(case: str, disks: Path) -> None:
    said = (disks / f"{case}.txt").read_text()
    reason = "No space left on device" if "full" in case else "Read-only file system"
    assert f"note: no checkpoint at step 300, {disks}/disk/run can't be written: {reason}" in said
    assert "the last one is from step 200, training continues" in said
    if "full" in case:
        assert "metrics.csv can't be written: No space left on device; training continues and retries later" in said
        assert "TensorBoard events in" in said
    same_end(disks, case)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("lasting")])
def test_a_disk_that_stays_broken_leaves_the_last_good_checkpoint(case: str, disks: Path) -> None:
    same_end(disks, case)  # resumed from it, see above


def test_a_video_that_does_not_fit_is_told_and_leaves_the_old_one(disks: Path) -> None:
    assert (disks / "video full ppo").is_dir()  # what is asked of it stands above


if __name__ == "__main__":
    main(Path(sys.argv[1]))
