"""Weights & Biases and MLflow: real packages, W&B in its offline mode, MLflow with its own stores."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import zhixing as zx
from zhixing.config import RunConfig
from zhixing.errors import UserError
from zhixing.training.callbacks import tracker
from zhixing.training.callbacks.tracker import Tracker
from zhixing.training.run_folder import RunFolder

SHORT: dict[str, Any] = {
    "env_steps": 512, "rollout_steps": 32, "num_envs": 4, "minibatch_size": 64, "log_every": 128, "eval_every": 256,
    "eval_episodes": 2, "checkpoint_every": 256, "tensorboard": False, "vector__backend": "serial", "quiet": True,
    "lr_schedule": "constant",
}  # fmt: skip


class Crash(zx.Callback):
    """Fail after an iteration, as a bug of the user's would."""

    def __init__(self, at: int) -> None:
        self.at = at

    def iteration_end(self, loop: zx.TrainingLoop, metrics: Any) -> None:
        if loop.env_steps >= self.at:
            raise RuntimeError("a bug")


def rows_of(run: Path) -> dict[int, dict[str, float]]:
    """Return the values of metrics.csv by step."""
    with open(run / "metrics.csv", encoding="utf-8") as file:
        rows = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    return {int(row["env_steps"]): row for row in rows}


def assert_equals_csv(logged: Mapping[int, Mapping[str, float]], run: Path) -> None:
    """Compare `{step: {tag: value}}` with metrics.csv, which has seven digits."""
    expected = rows_of(run)
    assert sorted(logged) == sorted(expected)
    for step, row in expected.items():
        values = {tag.partition("/")[2]: value for tag, value in logged[step].items() if not tag.startswith("eval/")}
        columns = {name for name in row if not name.startswith("eval_")}
        assert columns - {"env_steps"} <= values.keys()
        for name in columns - {"env_steps", "seconds", "steps_per_second"}:
            assert values[name] == pytest.approx(row[name], rel=1e-5), name
        evaluated = logged[step].get("eval/mean_return", math.nan)
        assert evaluated == pytest.approx(row.get("eval_return_mean", math.nan), rel=1e-5, nan_ok=True)


# --- Weights & Biases ---


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package in its offline mode, with all its folders in `tmp_path`."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    variables = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "HOME": str(tmp_path)}
    variables |= {f"WANDB_{name}_DIR": str(tmp_path / name) for name in ("CACHE", "CONFIG", "DATA")}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_API_KEY", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    wandb.teardown()  # forget the settings of other tests
    yield wandb
    wandb.teardown()


def records(file: Path) -> Iterator[Any]:
    """Read a `.wandb` file: after 7 bytes a log of LevelDB, in blocks of 32 KiB, with a protobuf message per record."""
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    assert data[:4] == b":W&B"
    at, message = 7, b""
    while at + 7 <= len(data):
        if 32_768 - at % 32_768 < 7:  # padding
            at += 32_768 - at % 32_768
            continue
        length, kind = struct.unpack("<4xHB", data[at : at + 7])
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            yield record


def offline_runs(folder: Path) -> list[list[Any]]:
    """Return the records of each offline run, oldest first."""
    return [list(records(file)) for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]


def history(run: list[Any]) -> dict[int, dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    for record in run:
        if record.WhichOneof("record_type") == "history":
            items = {
                "/".join([item.key, *item.nested_key]).strip("/"): json.loads(item.value_json)
                for item in record.history.item
            }
            rows[record.history.step.num] = items
    return rows


def run_ids(run: list[Any]) -> set[str]:
    return {record.run.run_id for record in run if record.WhichOneof("record_type") == "run"}


def test_wandb_has_metrics_settings_videos_and_files(wandb: Any, tmp_path: Path) -> None:
    zx.train("ppo", "CartPole-v1", out="run", wandb="team/cartpole", eval_video=True, **SHORT)
    (run,) = offline_runs(tmp_path)
    rows = history(run)
    assert_equals_csv(rows, tmp_path / "run")
    assert all(row["env_steps"] == step for step, row in rows.items())
    videos = {
        step: row["eval/video/sha256"] for step, row in rows.items() if row.get("eval/video/_type") == "video-file"
    }
    files = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(Path("run/videos").iterdir())]
    assert videos == dict(zip((256, 512), files, strict=True))

    (start,) = [record.run for record in run if record.WhichOneof("record_type") == "run"]
    assert (start.project, start.entity, start.display_name) == ("cartpole", "team", "run")
    settings = {item.key: json.loads(item.value_json) for item in start.config.update}
    assert settings["algorithm"] == "ppo"
    assert settings["env"] == {"name": "CartPole-v1"}
    (artifact,) = [r.request.log_artifact.artifact if r.WhichOneof("record_type") == "request" else r.artifact
                   for r in run if r.WhichOneof("record_type") == "artifact"]  # fmt: skip
    sizes = {entry.path: entry.size for entry in artifact.manifest.contents}
    assert sizes["result.json"] == (tmp_path / "run" / "result.json").stat().st_size
    assert {"config.yaml", "spaces.json", "metrics.csv", "checkpoints/000000000512.safetensors"} <= sizes.keys()
    assert [record.exit.exit_code for record in run if record.WhichOneof("record_type") == "exit"] == [0]


def test_resumed_run_continues_the_run_of_wandb(wandb: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        zx.train("ppo", "CartPole-v1", out="run", wandb="cartpole", callbacks=Crash(384), **SHORT)
    zx.Session.resume("run", quiet=True, env_steps=640).run()
    first, second = offline_runs(tmp_path)
    assert run_ids(first) == run_ids(second)
    assert len(run_ids(first)) == 1
    assert sorted(history(first)) == [128, 256]  # the callback fails before the loggers at step 384
    assert sorted(history(second)) == [384, 512, 640]
    (changed,) = [record.run for record in second if record.WhichOneof("record_type") == "run"]
    assert {item.key: item.value_json for item in changed.config.update}["env_steps"] == "640"
    assert [r.exit.exit_code for run in (first, second) for r in run if r.WhichOneof("record_type") == "exit"] == [1, 0]


def test_run_is_logged_offline_if_the_server_of_wandb_does_not_answer(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    init = wandb.init

    def unreachable(mode: str | None = None, **arguments: Any) -> Any:
        if mode != "offline":
            raise wandb.errors.CommError("Run initialization has timed out after 90.0 sec.\nPlease try again")
        return init(mode=mode, **arguments)

    monkeypatch.setattr(wandb, "init", unreachable)
    zx.train("ppo", "CartPole-v1", out="run", wandb="cartpole", **SHORT)
    (run,) = offline_runs(tmp_path)
    assert_equals_csv(history(run), tmp_path / "run")
    notes = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note:")]
    assert notes == [
        "note: Weights & Biases can't be reached: Run initialization has timed out after 90.0 sec.; the run is logged "
        "offline, for `wandb sync`"
    ]


def test_wandb_without_an_account_is_rejected_before_training(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError, match="isn't logged in: run `wandb login`"):
        zx.train("ppo", "CartPole-v1", out="run", wandb="cartpole", **SHORT)
    assert not (tmp_path / "run").exists()


# --- MLflow ---


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a folder, which is faster to create than a database."""
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return (tmp_path / "mlflow").as_uri()


def mlflow_runs(uri: str, experiment: str = "zhixing") -> tuple[Any, list[Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    return client, client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


def mlflow_history(client: Any, run: Any) -> dict[int, dict[str, float]]:
    """Return metrics by step. Fails if a step was logged twice."""
    rows: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            assert name not in rows.setdefault(metric.step, {})
            rows[metric.step][name] = metric.value
    return rows


def artifacts(client: Any, run: Any, folder: str | None = None) -> set[str]:
    entries = client.list_artifacts(run.info.run_id, folder)
    return {e.path for e in entries if not e.is_dir} | {
        p for e in entries if e.is_dir for p in artifacts(client, run, e.path)
    }


def test_mlflow_has_metrics_settings_videos_and_files(store: str, tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    zx.train("ppo", "CartPole-v1", out="run", mlflow=uri, eval_video=True, **SHORT)
    client, (run,) = mlflow_runs(uri)
    assert_equals_csv(mlflow_history(client, run), tmp_path / "run")
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["algorithm"] == "ppo"
    assert run.data.params["net.hidden_sizes"] == "[64, 64]"
    assert artifacts(client, run) == {
        "config.yaml", "spaces.json", "metrics.csv", "result.json", "videos/000000000256.mp4",
        "videos/000000000512.mp4", "checkpoints/best.safetensors", "checkpoints/000000000512.safetensors",
    }  # fmt: skip
    downloaded = client.download_artifacts(run.info.run_id, "", str(tmp_path))
    assert zx.load(downloaded).act([0.0, 0.0, 0.0, 0.0]) == zx.load("run").act([0.0, 0.0, 0.0, 0.0])


def test_resumed_run_continues_the_run_of_mlflow_without_repeated_steps(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "poles")

    class LateCrash(Crash):
        """Fails after the loggers, so the tracker has a step that the checkpoint hasn't."""

        def iteration_begin(self, loop: zx.TrainingLoop) -> None:
            super().iteration_end(loop, {})

        def iteration_end(self, loop: zx.TrainingLoop, metrics: Any) -> None: ...

    with pytest.raises(RuntimeError, match="a bug"):
        zx.train("ppo", "CartPole-v1", out="run", mlflow=store, callbacks=LateCrash(384), **SHORT)
    client, (run,) = mlflow_runs(store, "poles")
    assert (run.info.status, sorted(mlflow_history(client, run))) == ("FAILED", [128, 256, 384])
    assert RunFolder.open("run").newest_step() == 256
    zx.Session.resume("run", quiet=True, env_steps=640).run()
    client, (run,) = mlflow_runs(store, "poles")
    assert run.info.status == "FINISHED"
    assert_equals_csv(mlflow_history(client, run), tmp_path / "run")
    assert "env_steps: 640" in Path(client.download_artifacts(run.info.run_id, "config.yaml")).read_text()


def test_lost_server_of_mlflow_does_not_end_training(
    store: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = "http://127.0.0.1:9"  # nothing listens there
    result = zx.train("ppo", "CartPole-v1", out="run", mlflow=uri, **SHORT)
    assert result["env_steps"] == 512
    assert sorted(rows_of(tmp_path / "run")) == [128, 256, 384, 512]
    notes = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note:")]
    assert len(notes) == 2
    assert re.match(f"note: MLflow can't log to {uri}: .*; training continues and tries again", notes[0])
    assert notes[1] == f"note: {uri} didn't receive everything; the complete metrics are in {tmp_path}/run/metrics.csv"


def test_invalid_uri_of_mlflow_is_rejected_before_training(store: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mlflow=htp://host: .*use the address of a tracking server"):
        zx.train("ppo", "CartPole-v1", out="run", mlflow="htp://host", **SHORT)
    assert not (tmp_path / "run").exists()


# --- all trackers ---


class FlakyTracker(Tracker):
    """A tracker that can't be reached while `down`."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(folder, "http://flaky")
        self.down, self.calls, self.received = True, 0, []  # type: ignore[var-annotated]

    def _receive(self, event: Any) -> None:
        self.calls += 1
        if self.down:
            raise ConnectionError("no route to host\nmore text")
        self.received.append(event)

    def start_run(self, cfg: RunConfig) -> None:
        self._receive(cfg.algorithm)
        self.run_id = "abc"

    def send(self, values: Mapping[str, float], steps: int, seconds: float) -> None:
        self._receive(steps)

    def send_video(self, path: Path, steps: int) -> None:
        self._receive(path)

    def send_files(self, files: list[Path]) -> None:
        self._receive([file.name for file in files])

    def end_run(self) -> None:
        self._receive(self.status)


def test_unsent_values_are_sent_in_order_when_the_tracker_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = 1_000.0
    monkeypatch.setattr(tracker.time, "monotonic", lambda: now)
    flaky = FlakyTracker(RunFolder(tmp_path))
    cfg = zx.config.load(algorithm="ppo", env="CartPole-v1")
    flaky._started = True
    flaky._submit(lambda: flaky.start_run(cfg))
    for steps in (1, 2, 3):
        flaky.write_scalars({"time/updates": 1.0}, steps)
    assert flaky.calls == 1  # tried once in this minute
    now += 61.0
    flaky.write_scalars({}, 4)
    assert flaky.calls == 2
    now += 61.0  # the pause has doubled
    flaky.write_scalars({}, 5)
    assert flaky.calls == 2
    now += 60.0
    flaky.down = False
    flaky.write_scalars({}, 6)
    assert flaky.received == ["ppo", 1, 2, 3, 4, 5, 6]
    flaky.status = "finished"
    flaky.close()
    assert flaky.received[7:] == [[], "finished"]
    assert capfd.readouterr().err == (
        "note: FlakyTracker can't log to http://flaky: no route to host; training continues and tries again\n"
    )


def test_interrupted_and_unused_trackers(tmp_path: Path) -> None:
    flaky = FlakyTracker(RunFolder(tmp_path))
    flaky.close()  # training never started
    assert flaky.calls == 0
    flaky.down, flaky._started, flaky.status = False, True, "interrupted"
    flaky.close()
    flaky.close()
    assert flaky.received == ["interrupted"]  # no files: the resumed run sends them


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_package_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"{name}=there needs the extra '{name}': pip install"):
        zx.train("ppo", "CartPole-v1", out=tmp_path / "run", **SHORT, **{name: "there"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("run_id", ["../../other", "", 3, "x" * 200])
def test_manipulated_run_id_is_rejected(run_id: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the saved state of FlakyTracker has run_id"):
        FlakyTracker(RunFolder(tmp_path)).load_state_dict({"run_id": run_id})


def test_exported_agents_name_no_tracker(store: str, tmp_path: Path) -> None:
    zx.train("ppo", "CartPole-v1", out="run", mlflow=store, **SHORT)
    card = zx.export("run", "exported", episodes=1)
    assert "mlflow" not in card["trained_by"]
    assert zx.load("exported").cfg.mlflow is None


def test_metrics_that_are_not_numbers_yet_are_left_out(store: str) -> None:
    zx.train("ppo", "CartPole-v1", out="run", mlflow=store, **SHORT)
    _, (run,) = mlflow_runs(store)
    assert not [value for value in run.data.metrics.values() if math.isnan(value)]
