"""Log to Weights & Biases (wandb=PROJECT)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zhixing.errors import UserError, note
from zhixing.training.callbacks.tracker import Tracker
from zhixing.utils.extras import require_extra

if TYPE_CHECKING:
    from zhixing.config import RunConfig
    from zhixing.training.run_folder import RunFolder

TIMEOUTS = {"init_timeout": 90.0, "finish_timeout": 600.0}  # seconds to wait for W&B's server


class WandB(Tracker):
    """Log to a project of Weights & Biases. W&B's steps are environment steps (offline: updates).

    W&B sends from a process of its own and keeps everything in the folder `wandb`, where `wandb sync` finds what could
    not be sent. If its server doesn't answer when training starts, the run is logged offline.
    """

    def __init__(self, folder: RunFolder, target: str) -> None:
        super().__init__(folder, target)
        with require_extra(f"wandb={target}", "wandb"):
            import wandb
        self._wandb: Any = wandb
        self._run: Any = None
        if wandb.setup().settings.mode in ("online", "run", "shared") and not wandb.login(
            prompt=sys.stdin is not None and sys.stdin.isatty()
        ):
            raise UserError(
                f"wandb={target} needs an account of Weights & Biases, and this machine isn't logged in: run `wandb "
                f"login`, set WANDB_API_KEY, or log to files with WANDB_MODE=offline"
            )

    def start_run(self, cfg: RunConfig) -> None:
        entity, _, project = self.target.rpartition("/")
        arguments: dict[str, Any] = {
            "project": project,
            "entity": entity or None,
            "id": self.run_id,
            "name": self.folder.path.name,
            "config": cfg.model_dump(mode="json"),
            "allow_val_change": True,  # settings that a resumed run changes
            "resume": "allow",
            "reinit": "create_new",  # a run of the caller's stays as it is
        }
        settings = {name: value for name, value in TIMEOUTS.items() if f"WANDB_{name.upper()}" not in os.environ}
        try:
            self._run = self._wandb.init(**arguments, settings=settings)
        except self._wandb.errors.CommError as error:
            reason = str(error).strip().split("\n")[0][:300]
            note(f"Weights & Biases can't be reached: {reason}; the run is logged offline, for `wandb sync`")
            self._run = self._wandb.init(**arguments, settings=settings, mode="offline")
        self.run_id = self._run.id

    def send(self, values: Mapping[str, float], steps: int, seconds: float) -> None:
        self._run.log({**values, "env_steps": steps}, step=steps)  # W&B ignores steps that a run already has

    def send_video(self, path: Path, steps: int) -> None:
        self._run.log({"eval/video": self._wandb.Video(str(path), format="mp4")}, step=steps)

    def send_files(self, files: list[Path]) -> None:
        artifact = self._wandb.Artifact(f"run-{self.run_id}", "model")
        for file in files:
            artifact.add_file(str(file), str(file.relative_to(self.folder.path)))
        self._run.log_artifact(artifact)

    def end_run(self) -> None:
        self._run.finish(exit_code=0 if self.status == "finished" else 1)
