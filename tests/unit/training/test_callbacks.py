"""Callbacks in short runs."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import metrics_rows
from gymnasium.spaces import Box, Discrete
from torch import Tensor

import zhixing as zx
from zhixing.algorithms.ppo import PPO
from zhixing.collectors.evaluation import Episode, Evaluation
from zhixing.core.batch import Batch
from zhixing.errors import NonFiniteError, UserError
from zhixing.reports.plots.metrics import read_metrics
from zhixing.training.callbacks import Callback, Progress
from zhixing.training.callbacks.csv import metrics_row
from zhixing.training.callbacks.hooks import HOOKS, OTHER_LIBRARIES
from zhixing.training.callbacks.progress import _format_time
from zhixing.training.loop import TrainingLoop
from zhixing.training.run_folder import read_checkpoint
from zhixing.training.session import Session


class CoinEnv(gym.Env[Any, Any]):
    """Episodes of one step; the reward is 0 or 1 at random."""

    observation_space = Box(0.0, 1.0, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), float(self.np_random.random() < 0.5), True, False, {}


class NanLossPPO(PPO):
    """The value loss is NaN from the fifth update on."""

    def value_loss(self, value: Tensor, batch: Batch) -> Tensor:
        return super().value_loss(value, batch) * (math.nan if self.updates > 4 else 1.0)


class InfiniteGradientPPO(PPO):
    """The loss is finite, but its gradient is infinite: the slope of the square root at 0."""

    def value_loss(self, value: Tensor, batch: Batch) -> Tensor:
        return super().value_loss(value, batch) + (value - value.detach()).abs().sqrt().sum()


class Recorder(Callback):
    """Record iterations, evaluations, and the weights before each iteration and at the end."""

    def __init__(self) -> None:
        self.iterations: list[int] = []
        self.evaluations: list[tuple[int, Evaluation]] = []
        self.weights: list[dict[str, Tensor]] = []

    def iteration_begin(self, loop: TrainingLoop) -> None:
        self.weights.append({name: value.clone() for name, value in loop.learner.policy.state_dict().items()})

    def train_end(self, loop: TrainingLoop) -> None:
        self.iteration_begin(loop)

    def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
        self.iterations.append(loop.env_steps)

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        self.evaluations.append((loop.env_steps, evaluation))


def make_session(
    out: Path, *callbacks: Callback, algorithm: str = "ppo", env: str = "toy/match", **settings: Any
) -> Session:
    """Make a session with iterations of 64 steps in 2 environments, and one update of 4 epochs each."""
    short = {
        "env_steps": 640,
        "num_envs": 2,
        "vector": {"backend": "serial"},
        "net": {"hidden_sizes": [8]},
        "rollout_steps": 32,
        "minibatch_size": 64,
        "epochs": 4,
        "eval_every": 0,
        "eval_episodes": 3,
        "tensorboard": False,
    }
    return Session(zx.config.load(algorithm=algorithm, env=env, **(short | settings)), out, callbacks, quiet=True)


# --- progress ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress_output(out: io.StringIO, tmp_path: Path, every_seconds: float | None = None) -> str:
    progress = Progress(out)
    if every_seconds is not None:
        progress.every_seconds = every_seconds
    make_session(tmp_path / "run", progress, eval_every=320).run()
    return out.getvalue()


def test_progress_is_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    text = progress_output(io.StringIO(), tmp_path, every_seconds=0.0)
    lines = [line for line in text.splitlines() if "evaluating" not in line]
    assert text.endswith("\n")
    assert "\r" not in text
    assert "\x1b" not in text
    steps = [int(line.split()[0]) for line in lines]
    assert steps == [*range(64, 641, 64), 640]  # the last one twice, the second time with the final evaluation
    assert "steps  10%" in lines[0]
    assert "train return" in lines[0]
    assert "eval return" not in lines[0]
    assert "eval return" in lines[5]
    assert "policy loss" in lines[0]
    assert lines[-1].endswith("0:00 left")


def test_progress_has_no_return_before_the_first_episode_ends(tmp_path: Path) -> None:
    out = io.StringIO()
    progress = Progress(out)
    progress.every_seconds = 0.0
    make_session(tmp_path / "run", progress, rollout_steps=8, minibatch_size=16, env_steps=32).run()
    lines = out.getvalue().splitlines()  # 16 steps of two environments each; an episode takes 10
    assert "train return -  " in lines[0]
    assert "train return -" not in lines[1]
    assert "nan" not in out.getvalue()


def test_format_of_the_remaining_time() -> None:
    assert [_format_time(seconds) for seconds in (5, 65, 3600, 360_000)] == ["0:05", "1:05", "1:00:00", "4 days"]


def test_progress_of_a_short_run_without_a_terminal_is_one_line(tmp_path: Path) -> None:
    lines = progress_output(io.StringIO(), tmp_path).splitlines()
    assert len(lines) == 1
    assert "640 steps 100%" in lines[0]


def test_progress_is_one_live_line_in_a_terminal(tmp_path: Path) -> None:
    text = progress_output(Terminal(), tmp_path, every_seconds=0.0)
    assert text.count("\n") == 1  # only at the end
    assert text.endswith("\n")
    lines = text.split("\r\x1b[2K")[1:]  # each overwrites the line before
    assert len([line for line in lines if "evaluating" not in line]) == 11


def test_progress_shows_evaluations(tmp_path: Path) -> None:
    lines = progress_output(io.StringIO(), tmp_path, every_seconds=0.0).splitlines()
    assert [int(line.split()[0]) for line in lines if "  evaluating  " in line] == [320] * 11 + [640] * 11
    assert "  eval " in lines[-1]  # the final evaluation follows the last iteration


# --- metrics.csv ---


def test_csv_has_a_row_every_log_every_and_a_last_one(tmp_path: Path) -> None:
    make_session(tmp_path / "run", log_every=150, eval_every=0).run()
    # 64 steps at a time, multiples of 150 are passed at 192 (150), 320 (300), 512 (450), 640 (600)
    assert list(read_metrics(tmp_path / "run/metrics.csv")["env_steps"]) == [192, 320, 512, 640]


def test_last_row_is_written_even_if_not_due(tmp_path: Path) -> None:
    make_session(tmp_path / "run", log_every=250).run()
    assert list(read_metrics(tmp_path / "run/metrics.csv")["env_steps"]) == [256, 512, 640]


def test_last_row_includes_the_final_evaluation(tmp_path: Path) -> None:
    make_session(tmp_path / "run", log_every=64, eval_every=0).run()
    columns = read_metrics(tmp_path / "run/metrics.csv")
    assert list(columns["env_steps"]) == [64 * i for i in range(1, 11)]
    assert np.isfinite(columns["eval_return_mean"][-1])


def test_csv_agrees_with_result_json_and_evaluations(tmp_path: Path) -> None:
    recorder = Recorder()
    make_session(tmp_path / "run", recorder, log_every=64, eval_every=128).run()
    columns = read_metrics(tmp_path / "run/metrics.csv")
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert list(columns["env_steps"]) == recorder.iterations  # no row twice
    assert columns["updates"][-1] == result["updates"] == 40
    assert columns["seconds"][-1] == pytest.approx(result["seconds"], abs=0.01)
    evaluated = {
        step: value
        for step, value in zip(columns["env_steps"], columns["eval_return_mean"], strict=True)
        if value == value
    }
    assert evaluated == {step: pytest.approx(evaluation.mean_return) for step, evaluation in recorder.evaluations}
    assert list(evaluated) == [128, 256, 384, 512, 640]
    _, last = recorder.evaluations[-1]
    for name, value in (("std", last.returns.std()), ("min", last.returns.min()), ("max", last.returns.max())):
        assert columns[f"eval_return_{name}"][-1] == pytest.approx(value)
    assert np.isfinite(columns["policy_loss"]).all()
    assert np.all(np.diff(columns["seconds"]) > 0)


def test_csv_has_the_range_of_the_last_100_returns(tmp_path: Path) -> None:
    session = make_session(tmp_path / "run")
    loop = session.loop
    assert np.isnan(metrics_row(loop)["return_std"])
    loop.recent_episodes.extend(Episode(episode_return, 1, {}) for episode_return in (1.0, 2.0, 6.0))
    row = metrics_row(loop)
    # the mean is 3, the variance (4 + 1 + 9) / 3
    assert row["return_std"] == pytest.approx((14 / 3) ** 0.5)
    assert (row["return_min"], row["return_max"]) == (1.0, 6.0)
    session.close()


# --- TensorBoard ---


def test_tensorboard_has_the_values_of_the_csv(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = Recorder()
    make_session(tmp_path / "run", recorder, log_every=128, eval_every=128, tensorboard=True).run()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    columns = read_metrics(tmp_path / "run/metrics.csv")
    steps = columns.pop("env_steps")
    columns = {name: values for name, values in columns.items() if not name.startswith("eval_return_")}
    groups = dict.fromkeys(["return_std", "return_min", "return_max"], "rollout")
    groups |= {"return_mean": "rollout", "length_mean": "rollout", "seconds": "time", "steps_per_second": "time"}
    groups |= {"updates": "time", "episodes": "time"}
    assert events.Tags()["scalars"]
    assert all("/" in tag for tag in events.Tags()["scalars"])
    for name, values in columns.items():
        scalars = events.Scalars(f"{groups.get(name, 'train')}/{name}")
        assert [scalar.step for scalar in scalars] == list(steps), name
        assert [scalar.value for scalar in scalars] == pytest.approx(values, rel=1e-5, abs=1e-12), name
    evaluated = {scalar.step: scalar.value for scalar in events.Scalars("eval/mean_return")}
    assert evaluated == {step: pytest.approx(evaluation.mean_return) for step, evaluation in recorder.evaluations}


def test_tensorboard_has_the_last_row(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_session(tmp_path / "run", log_every=250, tensorboard=True).run()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("rollout/return_mean")] == [256, 512, 640]


def test_tensorboard_has_the_settings_as_text_and_as_hyperparameters(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    make_session(tmp_path / "run", tensorboard=True, lr=0.005).run()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == ["checkpoints"]  # no second run
    (text,) = events.Tensors("settings/text_summary")
    assert "lr: 0.005" in text.tensor_proto.string_val[0].decode()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["lr"].number_value == 0.005
    assert hparams["net.hidden_sizes"].string_value == "[8]"
    assert hparams["algorithm"].string_value == "ppo"


# --- custom metrics ---


class LogCounts(Callback):
    """Log the number of iterations, and its square from the fourth on."""

    def __init__(self) -> None:
        self.count = 0

    def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
        self.count += 1
        loop.log("count", self.count)
        if self.count >= 4:
            loop.log("custom/square", torch.tensor(self.count**2))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_csv_and_tensorboard_have_custom_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_session(tmp_path / "run", LogCounts(), log_every=128, tensorboard=True).run()
    columns = read_metrics(tmp_path / "run/metrics.csv")
    assert list(columns)[-2:] == ["count", "custom/square"]
    assert list(columns["count"]) == [2, 4, 6, 8, 10]
    np.testing.assert_array_equal(columns["custom/square"], [np.nan, 16, 36, 64, 100])
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("custom/count")][:2] == [(128, 2), (256, 4)]
    assert [(one.step, one.value) for one in events.Scalars("custom/square")][:2] == [(256, 16), (384, 36)]


def test_csv_cell_is_blank_if_nothing_was_logged_since_the_last_row(tmp_path: Path) -> None:
    class LogOnce(Callback):
        def train_begin(self, loop: TrainingLoop) -> None:
            loop.log("once", 3)

    make_session(tmp_path / "run", LogOnce(), log_every=256).run()
    np.testing.assert_array_equal(read_metrics(tmp_path / "run/metrics.csv")["once"], [3, np.nan, np.nan])


@pytest.mark.parametrize("killed_at", [5, 7])
def test_resumed_run_writes_the_same_added_columns(tmp_path: Path, killed_at: int) -> None:
    """The column `custom/square` is added in iteration 4, between the checkpoints of iterations 3 and 6."""

    class RaiseAt(Callback):
        def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
            if loop.env_steps == killed_at * 64:
                raise RuntimeError("killed")

    every = {"checkpoint_every": 192, "log_every": 64}
    make_session(tmp_path / "whole", LogCounts(), **every).run()
    with pytest.raises(RuntimeError, match="killed"):
        make_session(tmp_path / "parts", LogCounts(), RaiseAt(), **every).run()
    assert "custom/square" in (tmp_path / "parts/metrics.csv").read_text()
    Session.resume(tmp_path / "parts", LogCounts(), quiet=True).run()
    assert metrics_rows(tmp_path / "parts") == metrics_rows(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("env_steps", 3, "metrics.csv already has this column"),
        ("a,b", 3, "is not a valid name"),
        ("", 3, "is not a valid name"),
        (3, 3, "is not a valid name"),
        ("mine", "three", "must be a single number"),
        ("mine", torch.zeros(2), "must be a single number"),
        ("mine", None, "must be a single number"),
    ],
)
def test_log_rejects_invalid_names_and_values(tmp_path: Path, name: Any, value: Any, message: str) -> None:
    class LogInvalid(Callback):
        def train_begin(self, loop: TrainingLoop) -> None:
            loop.log(name, value)

    with pytest.raises(UserError, match=message):
        make_session(tmp_path / "run", LogInvalid()).run()


# --- hooks ---


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("on_evaluation_end", "evaluation_end"),
        ("_on_step", "iteration_end"),
        ("_on_training_start", "train_begin"),
        ("on_train_begin", "train_begin"),
        ("on_train_epoch_end", "iteration_end"),
        ("on_validation_end", "evaluation_end"),
        ("on_episode_end", "episode_end"),
        ("on_iteration_ended", "iteration_end"),
        ("evalution_end", "evaluation_end"),
        ("iteration_ended", "iteration_end"),
        ("train_start", "train_begin"),
        ("stop_fn", "evaluation_end"),
        ("begin", "train_begin"),
    ],
)
def test_methods_that_resemble_hooks_are_rejected(name: str, hook: str) -> None:
    with pytest.raises(UserError, match=rf"Custom.{name} would never be called.*Did you mean {hook} \("):
        type("Custom", (Callback,), {name: lambda self, loop: None})


@pytest.mark.parametrize(
    "name",
    ["evaluate", "_train_end", "step", "on_disk", "on_key", "save", "end_of_file", "log", "_start"],
)
def test_other_method_names_are_allowed(name: str) -> None:
    type("Custom", (Callback,), {name: lambda self: None, "on_step": 3})


def test_hooks_are_exactly_the_methods_of_callback() -> None:
    not_hooks = {"state_dict", "load_state_dict", "close"}
    assert {name for name in vars(Callback) if not name.startswith("__")} - not_hooks == set(HOOKS)
    assert set(OTHER_LIBRARIES.values()) <= set(HOOKS)


def test_session_takes_a_single_callback(tmp_path: Path) -> None:
    recorder = Recorder()
    cfg = make_session(tmp_path / "first").cfg
    Session(cfg, tmp_path / "run", recorder, quiet=True).run()
    assert recorder.iterations[-1] == 640
    with pytest.raises(UserError, match=r"write Recorder\(\) instead of Recorder"):
        Session(cfg, tmp_path / "second", [Recorder], quiet=True)  # type: ignore[list-item]
    with pytest.raises(UserError, match="is not a callback"):
        Session(cfg, tmp_path / "third", [print], quiet=True)  # type: ignore[list-item]
    assert not (tmp_path / "second").exists()


# --- checkpoints ---


def test_newest_checkpoints_and_the_best_weights_are_kept(tmp_path: Path) -> None:
    recorder = Recorder()
    settings = {"checkpoint_every": 128, "keep_checkpoints": 3, "eval_every": 64}
    make_session(tmp_path / "run", recorder, **settings).run()
    names = sorted(file.name for file in (tmp_path / "run/checkpoints").iterdir())
    assert names == [
        "000000000384.safetensors",
        "000000000512.safetensors",
        "000000000640.safetensors",
        "best.safetensors",
    ]
    best = read_checkpoint(tmp_path / "run/checkpoints/best.safetensors")
    step, evaluation = max(
        recorder.evaluations, key=lambda pair: pair[1].mean_return
    )  # the first one if several are equal
    assert (best["steps"], best["return"]) == (step, evaluation.mean_return)
    last = read_checkpoint(tmp_path / "run/checkpoints/000000000640.safetensors")
    assert last["steps"] == last["loop"]["actor"]["env_steps"] == 640


def test_best_checkpoint_holds_the_weights_that_were_evaluated(tmp_path: Path) -> None:
    recorder = Recorder()
    make_session(tmp_path / "run", recorder, eval_every=64).run()
    best = read_checkpoint(tmp_path / "run/checkpoints/best.safetensors")
    evaluated = recorder.weights[best["steps"] // 64]
    assert all(torch.equal(best["policy"][name], value) for name, value in evaluated.items())


# --- evaluation and stop_return ---


def test_stop_return_is_confirmed_by_100_episodes(tmp_path: Path) -> None:
    recorder = Recorder()
    result = make_session(tmp_path / "run", recorder, eval_every=128, stop_return=-1.0).run()  # any policy reaches it
    assert [(step, len(evaluation.episodes)) for step, evaluation in recorder.evaluations] == [(128, 100)]
    assert result["reached"] is True
    assert result["env_steps"] == result["env_steps_to_stop"] == recorder.iterations[-1] == 128
    assert result["final_return"] == recorder.evaluations[0][1].mean_return
    assert result["seconds_to_stop"] == result["seconds"]


def test_unconfirmed_evaluation_does_not_stop_training(tmp_path: Path) -> None:
    recorder = Recorder()
    settings = {"eval_every": 64, "eval_episodes": 1, "stop_return": 0.9}
    result = make_session(tmp_path / "run", recorder, env=f"{__name__}:CoinEnv", **settings).run()
    confirmations = [evaluation for _, evaluation in recorder.evaluations if len(evaluation.episodes) == 100]
    assert confirmations  # half of the evaluations, of one episode each, have a return of 1
    assert all(evaluation.mean_return < 0.9 for evaluation in confirmations)
    assert result["env_steps"] == 640
    assert result["reached"] is False
    assert result["env_steps_to_stop"] is result["seconds_to_stop"] is None


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    often, never = Recorder(), Recorder()
    make_session(tmp_path / "a", often, eval_every=64).run()
    make_session(tmp_path / "b", never, eval_every=0).run()
    assert len(often.evaluations) == 10
    assert len(never.evaluations) == 1  # at the end
    for actual, expected in zip(often.weights, never.weights, strict=True):
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


# --- non-finite numbers ---


def test_nan_stops_the_run_and_names_loss_and_step(tmp_path: Path) -> None:
    recorder = Recorder()
    run = make_session(tmp_path / "run", recorder, algorithm=f"{__name__}:NanLossPPO", normalize_obs=False)
    with pytest.raises(
        NonFiniteError, match=r"^value_loss is nan at environment step 128, update 8; this update didn't"
    ):
        run.run()
    # only the first iteration changed the weights
    after = run.learner.policy.state_dict()
    assert all(torch.equal(after[name], value) for name, value in recorder.weights[1].items())
    assert any(not torch.equal(after[name], value) for name, value in recorder.weights[0].items())


def test_infinite_gradient_of_a_finite_loss_stops_the_run(tmp_path: Path) -> None:
    run = make_session(tmp_path / "run", algorithm=f"{__name__}:InfiniteGradientPPO")
    with pytest.raises(NonFiniteError, match=r"^grad_norm is (nan|inf) at environment step 64, update 4"):
        run.run()
    assert all(torch.isfinite(value).all() for value in run.learner.policy.state_dict().values())
