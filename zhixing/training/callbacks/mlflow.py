"""Log to MLflow (mlflow=URI)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zhixing import config
from zhixing.errors import UserError
from zhixing.training.callbacks.tracker import Tracker
from zhixing.utils.extras import require_extra

if TYPE_CHECKING:
    from zhixing.config import RunConfig
    from zhixing.training.run_folder import RunFolder

EXPERIMENT = "zhixing"  # unless MLFLOW_EXPERIMENT_NAME names another one
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
PARAMS_PER_CALL = 100  # MLflow's limit
# MLflow's own limits let a lost server block for minutes
REQUESTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class MLflow(Tracker):
    """Log to the tracking server or database at a URI. Steps are environment steps (offline: updates)."""

    def __init__(self, folder: RunFolder, target: str) -> None:
        super().__init__(folder, target)
        for name, value in REQUESTS.items():
            os.environ.setdefault(name, value)
        with require_extra(f"mlflow={target}", "mlflow"):
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        try:
            self._client: Any = MlflowClient(target)
        except MlflowException as error:
            raise UserError(
                f"mlflow={target}: {str(error).split('. ')[0]}; use the address of a tracking server, such as "
                f"http://127.0.0.1:5000, or a database, such as sqlite:///mlflow.db"
            ) from None
        self._last_step = -1  # that the tracker's run has

    def start_run(self, cfg: RunConfig) -> None:
        if self.run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            self.run_id = self._client.create_run(experiment_id, run_name=self.folder.path.name).info.run_id
        else:
            self._client.update_run(self.run_id, status="RUNNING")
            # a resumed run repeats the steps after its checkpoint
            history = self._client.get_metric_history(self.run_id, "time/updates")
            self._last_step = max((metric.step for metric in history), default=-1)
        self._log_params(config.flat_settings(cfg.model_dump(mode="json")))
        self._client.log_text(self.run_id, config.dump(cfg), "config.yaml")

    def _log_params(self, settings: Mapping[str, Any]) -> None:
        """Log the settings that the run doesn't have yet: MLflow can't change one."""
        from mlflow.entities import Param

        logged = self._client.get_run(self.run_id).data.params
        params = [Param(name, str(value)) for name, value in settings.items() if name not in logged]
        for i in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, params=params[i : i + PARAMS_PER_CALL])

    def send(self, values: Mapping[str, float], steps: int, seconds: float) -> None:
        from mlflow.entities import Metric

        if steps > self._last_step:
            metrics = [Metric(name, value, int(1000 * seconds), steps) for name, value in values.items()]
            self._client.log_batch(self.run_id, metrics=metrics)

    def send_video(self, path: Path, steps: int) -> None:
        self._client.log_artifact(self.run_id, str(path), "videos")

    def send_files(self, files: list[Path]) -> None:
        for file in files:
            folder = file.relative_to(self.folder.path).parent
            self._client.log_artifact(self.run_id, str(file), None if folder == Path() else str(folder))

    def end_run(self) -> None:
        self._client.set_terminated(self.run_id, STATUS[self.status])
