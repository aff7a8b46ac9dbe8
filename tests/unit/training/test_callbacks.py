"""Callbacks in real runs that take about a second."""

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
from zhixing.collect.evaluation import Evaluation
from zhixing.core.batch import Batch
from zhixing.errors import NonFiniteError, UserError
from zhixing.report.plots.metrics import read_metrics
from zhixing.training.callbacks import Callback, Progress
from zhixing.training.callbacks.hooks import ELSEWHERE, HOOKS
from zhixing.training.callbacks.progress import _clock
from zhixing.training.loop import TrainingLoop
from zhixing.training.run_folder import read_checkpoint
from zhixing.training.session import Session


class Coin(gym.Env[Any, Any]):
    """One step; it pays 1 in half of the cases, whatever is done."""

    observation_space = Box(0.0, 1.0, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), float(self.np_random.random() < 0.5), True, False, {}


class Breaks(PPO):
    """Its value loss is NaN from the fifth update on."""

    def value_loss(self, value: Tensor, batch: Batch) -> Tensor:
        return super().value_loss(value, batch) * (math.nan if self.updates >= 4 else 1.0)


class Steep(PPO):
    """A loss without fault whose gradient is infinite: the slope of the root at zero."""

    def value_loss(self, value: Tensor, batch: Batch) -> Tensor:
        return super().value_loss(value, batch) + (value - value.detach()).abs().sqrt().sum()


class Watch(Callback):
    """Keeps what it is told, and the weights before each iteration and at the end."""

    def __init__(self) -> None:
        self.iterations: list[int] = []
        self.evaluations: list[tuple[int, Evaluation]] = []
        self.weights: list[dict[str, Tensor]] = []

    def iteration_begin(self, loop: TrainingLoop) -> None:
        self.weights.append({name: value.clone() for name, value in loop.learner.weights().items()})

    def train_end(self, loop: TrainingLoop) -> None:
        self.iteration_begin(loop)

    def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
        self.iterations.append(loop.env_steps)

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        self.evaluations.append((loop.env_steps, evaluation))


def session(
    out: Path, *callbacks: Callback, algorithm: str = "ppo", env: str = "toy/match", **settings: Any
) -> Session:
    """Iterations of 64 steps: 2 environments x 32, and one update of 4 epochs."""
    short = {
        "env_steps": 640,
        "num_envs": 2,
        "vector": {"backend": "serial"},
        "net": {"hidden_sizes": [8]},
        "rollout_steps": 32,
        "minibatch_size": 64,
        "epochs": 4,
        "eval_every_steps": 0,
        "eval_episodes": 3,
        "tensorboard": False,
    }
    return Session(zx.config.load(algorithm=algorithm, env=env, **(short | settings)), out, callbacks, quiet=True)


# --- progress ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO, tmp_path: Path, every_seconds: float | None = None) -> str:
    progress = Progress(out)
    if every_seconds is not None:
        progress.every_seconds = every_seconds
    session(tmp_path / "run", progress, eval_every_steps=320).run()
    return out.getvalue()


def test_progress_is_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    text = shown(io.StringIO(), tmp_path, every_seconds=0.0)
    lines = [line for line in text.splitlines() if "evaluating" not in line]
    assert text.endswith("\n")
    assert "\r" not in text
    assert "\x1b" not in text
    steps = [int(line.split()[0]) for line in lines]
    assert steps == [*range(64, 641, 64), 640]  # the last one again, with the evaluation at the end
    assert "steps  10%" in lines[0]
    assert "train return" in lines[0]
    assert "eval return" not in lines[0]
    assert "eval return" in lines[5]
    assert "policy loss" in lines[0]
    assert lines[-1].endswith("0:00 left")


def test_before_the_first_episode_has_ended_there_is_no_return(tmp_path: Path) -> None:
    out = io.StringIO()
    progress = Progress(out)
    progress.every_seconds = 0.0
    session(tmp_path / "run", progress, rollout_steps=8, minibatch_size=16, env_steps=32).run()
    lines = out.getvalue().splitlines()  # 16 steps of two environments each; an episode takes 10
    assert "train return -  " in lines[0]
    assert "train return -" not in lines[1]
    assert "nan" not in out.getvalue()


def test_the_time_left_is_readable_at_any_length() -> None:
    assert [_clock(seconds) for seconds in (5, 65, 3600, 360_000)] == ["0:05", "1:05", "1:00:00", "4 days"]


def test_short_run_without_a_terminal_is_one_line_at_its_end(tmp_path: Path) -> None:
    lines = shown(io.StringIO(), tmp_path).splitlines()
    assert len(lines) == 1
    assert "640 steps 100%" in lines[0]


def test_progress_is_one_live_line_in_a_terminal(tmp_path: Path) -> None:
    text = shown(Terminal(), tmp_path, every_seconds=0.0)
    assert text.count("\n") == 1  # only at the end, so that what follows has a line of its own
    assert text.endswith("\n")
    lines = text.split("\r\x1b[2K")[1:]  # each time over the line before
    assert len([line for line in lines if "evaluating" not in line]) == 11


def test_progress_says_when_it_evaluates(tmp_path: Path) -> None:
    lines = shown(io.StringIO(), tmp_path, every_seconds=0.0).splitlines()
    assert [int(line.split()[0]) for line in lines if "  evaluating  " in line] == [320] * 11 + [640] * 11
    assert "  eval " in lines[-1]  # the evaluation at the end comes after the last iteration


# --- metrics.csv ---


def test_csv_has_a_row_whenever_log_every_steps_is_passed_and_a_last_one(tmp_path: Path) -> None:
    session(tmp_path / "run", log_every_steps=150, eval_every_steps=0).run()
    # 64 steps at a time, multiples of 150 are passed at 192 (150), 320 (300), 512 (450), 640 (600)
    assert list(read_metrics(tmp_path / "run/metrics.csv")["env_steps"]) == [192, 320, 512, 640]


def test_last_row_comes_also_between_two_due_ones(tmp_path: Path) -> None:
    session(tmp_path / "run", log_every_steps=250).run()
    assert list(read_metrics(tmp_path / "run/metrics.csv")["env_steps"]) == [256, 512, 640]


def test_last_row_that_is_due_waits_for_the_evaluation_at_the_end(tmp_path: Path) -> None:
    session(tmp_path / "run", log_every_steps=64, eval_every_steps=0).run()
    columns = read_metrics(tmp_path / "run/metrics.csv")
    assert list(columns["env_steps"]) == [64 * i for i in range(1, 11)]
    assert np.isfinite(columns["eval_return_mean"][-1])


def test_csv_tells_what_result_json_and_the_evaluations_tell(tmp_path: Path) -> None:
    watch = Watch()
    session(tmp_path / "run", watch, log_every_steps=64, eval_every_steps=128).run()
    columns = read_metrics(tmp_path / "run/metrics.csv")
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert list(columns["env_steps"]) == watch.iterations  # no row twice
    assert columns["updates"][-1] == result["updates"] == 40
    assert columns["seconds"][-1] == pytest.approx(result["seconds"], abs=0.01)
    told = {
        step: value
        for step, value in zip(columns["env_steps"], columns["eval_return_mean"], strict=True)
        if value == value
    }
    assert told == {step: pytest.approx(evaluation.mean_return) for step, evaluation in watch.evaluations}
    assert list(told) == [128, 256, 384, 512, 640]
    assert np.isfinite(columns["policy_loss"]).all()
    assert np.all(np.diff(columns["seconds"]) > 0)


# --- TensorBoard ---


def test_tensorboard_has_the_values_of_the_csv(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watch = Watch()
    session(tmp_path / "run", watch, log_every_steps=128, eval_every_steps=128, tensorboard=True).run()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    columns = read_metrics(tmp_path / "run/metrics.csv")
    steps = columns.pop("env_steps")
    columns.pop("eval_return_mean")
    groups = {"return_mean": "rollout", "length_mean": "rollout", "seconds": "time", "steps_per_second": "time"}
    groups |= {"updates": "time", "episodes": "time"}
    assert events.Tags()["scalars"]
    assert all("/" in tag for tag in events.Tags()["scalars"])
    for name, values in columns.items():
        scalars = events.Scalars(f"{groups.get(name, 'train')}/{name}")
        assert [scalar.step for scalar in scalars] == list(steps), name
        assert [scalar.value for scalar in scalars] == pytest.approx(values, rel=1e-5, abs=1e-12), name
    evaluated = {scalar.step: scalar.value for scalar in events.Scalars("eval/mean_return")}
    assert evaluated == {step: pytest.approx(one.mean_return) for step, one in watch.evaluations}


def test_tensorboard_has_the_last_row_too(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    session(tmp_path / "run", log_every_steps=250, tensorboard=True).run()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("rollout/return_mean")] == [256, 512, 640]


def test_tensorboard_has_the_settings_as_text_and_as_hyperparameters(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    session(tmp_path / "run", tensorboard=True, lr=0.005).run()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == ["checkpoints"]  # no second run
    (text,) = events.Tensors("settings/text_summary")
    assert "lr: 0.005" in text.tensor_proto.string_val[0].decode()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    assert found["lr"].number_value == 0.005
    assert found["net.hidden_sizes"].string_value == "[8]"
    assert found["algorithm"].string_value == "ppo"


# --- numbers of one's own ---


class Logs(Callback):
    """Logs how many iterations there were, and from the fourth on their square."""

    def __init__(self) -> None:
        self.count = 0

    def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
        self.count += 1
        loop.log("count", self.count)
        if self.count >= 4:
            loop.log("mine/square", torch.tensor(self.count**2))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_logged_numbers_reach_the_csv_and_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    session(tmp_path / "run", Logs(), log_every_steps=128, tensorboard=True).run()
    columns = read_metrics(tmp_path / "run/metrics.csv")
    assert list(columns)[-2:] == ["count", "mine/square"]
    assert list(columns["count"]) == [2, 4, 6, 8, 10]
    np.testing.assert_array_equal(columns["mine/square"], [np.nan, 16, 36, 64, 100])
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("custom/count")][:2] == [(128, 2), (256, 4)]
    assert [(one.step, one.value) for one in events.Scalars("mine/square")][:2] == [(256, 16), (384, 36)]


def test_a_number_that_is_not_logged_again_is_blank(tmp_path: Path) -> None:
    class Once(Callback):
        def train_begin(self, loop: TrainingLoop) -> None:
            loop.log("once", 3)

    session(tmp_path / "run", Once(), log_every_steps=256).run()
    np.testing.assert_array_equal(read_metrics(tmp_path / "run/metrics.csv")["once"], [3, np.nan, np.nan])


@pytest.mark.parametrize("killed_at", [5, 7])
def test_columns_that_came_later_are_the_same_after_a_resume(tmp_path: Path, killed_at: int) -> None:
    """The column `mine/square` comes at iteration 4: after the checkpoint of iteration 3, before that of 6."""

    class Dies(Callback):
        def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
            if loop.env_steps == killed_at * 64:
                raise RuntimeError("killed")

    every = {"checkpoint_every_steps": 192, "log_every_steps": 64}
    session(tmp_path / "whole", Logs(), **every).run()
    with pytest.raises(RuntimeError, match="killed"):
        session(tmp_path / "parts", Logs(), Dies(), **every).run()
    assert "mine/square" in (tmp_path / "parts/metrics.csv").read_text()
    Session.resume(tmp_path / "parts", Logs(), quiet=True).run()
    assert metrics_rows(tmp_path / "parts") == metrics_rows(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("env_steps", 3, "metrics.csv has this column already"),
        ("a,b", 3, "is not a valid name"),
        ("", 3, "is not a valid name"),
        (3, 3, "is not a valid name"),
        ("mine", "three", "must be a single number"),
        ("mine", torch.zeros(2), "must be a single number"),
        ("mine", None, "must be a single number"),
    ],
)
def test_what_cannot_be_logged_is_told(tmp_path: Path, name: Any, value: Any, message: str) -> None:
    class Wrong(Callback):
        def train_begin(self, loop: TrainingLoop) -> None:
            loop.log(name, value)

    with pytest.raises(UserError, match=message):
        session(tmp_path / "run", Wrong()).run()


# --- hooks ---


@pytest.mark.parametrize(
    ("name", "right"),
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
def test_methods_that_look_like_hooks_are_told(name: str, right: str) -> None:
    with pytest.raises(UserError, match=rf"Mine.{name} would never be called.*Did you mean {right} \("):
        type("Mine", (Callback,), {name: lambda self, loop: None})


@pytest.mark.parametrize(
    "name",
    ["evaluate", "_train_end", "step", "on_disk", "on_key", "save", "end_of_file", "log", "_start"],
)
def test_helpers_may_have_other_names(name: str) -> None:
    type("Mine", (Callback,), {name: lambda self: None, "on_step": 3})


def test_every_hook_is_a_method_and_the_other_way_round() -> None:
    own = {"state_dict", "load_state_dict", "close"}
    assert {name for name in vars(Callback) if not name.startswith("__")} - own == set(HOOKS)
    assert set(ELSEWHERE.values()) <= set(HOOKS)


def test_one_callback_needs_no_list(tmp_path: Path) -> None:
    watch = Watch()
    cfg = session(tmp_path / "first").cfg
    Session(cfg, tmp_path / "run", watch, quiet=True).run()
    assert watch.iterations[-1] == 640
    with pytest.raises(UserError, match=r"write Watch\(\) instead of Watch"):
        Session(cfg, tmp_path / "second", [Watch], quiet=True)  # type: ignore[list-item]
    with pytest.raises(UserError, match="is no callback"):
        Session(cfg, tmp_path / "third", [print], quiet=True)  # type: ignore[list-item]
    assert not (tmp_path / "second").exists()


# --- checkpoints ---


def test_newest_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    watch = Watch()
    settings = {"checkpoint_every_steps": 128, "keep_checkpoints": 3, "eval_every_steps": 64}
    session(tmp_path / "run", watch, **settings).run()
    names = sorted(file.name for file in (tmp_path / "run/checkpoints").iterdir())
    assert names == [
        "000000000384.safetensors",
        "000000000512.safetensors",
        "000000000640.safetensors",
        "best.safetensors",
    ]
    best = read_checkpoint(tmp_path / "run/checkpoints/best.safetensors")
    step, evaluation = max(watch.evaluations, key=lambda pair: pair[1].mean_return)  # the first of equal ones
    assert (best["steps"], best["return"]) == (step, evaluation.mean_return)
    last = read_checkpoint(tmp_path / "run/checkpoints/000000000640.safetensors")
    assert last["steps"] == last["loop"]["actor"]["env_steps"] == 640


def test_best_checkpoint_holds_the_weights_that_were_evaluated(tmp_path: Path) -> None:
    watch = Watch()
    session(tmp_path / "run", watch, eval_every_steps=64).run()
    best = read_checkpoint(tmp_path / "run/checkpoints/best.safetensors")
    evaluated = watch.weights[best["steps"] // 64]
    assert all(torch.equal(best["policy"][name], value) for name, value in evaluated.items())


# --- evaluation and stop_return ---


def test_reached_stop_return_is_confirmed_by_a_hundred_episodes(tmp_path: Path) -> None:
    watch = Watch()
    result = session(tmp_path / "run", watch, eval_every_steps=128, stop_return=-1.0).run()  # any policy does
    assert [(step, len(one.episodes)) for step, one in watch.evaluations] == [(128, 100)]
    assert result["reached"] is True
    assert result["env_steps"] == result["env_steps_to_stop"] == watch.iterations[-1] == 128
    assert result["final_return"] == watch.evaluations[0][1].mean_return
    assert result["seconds_to_stop"] == result["seconds"]


def test_lucky_evaluation_that_is_not_confirmed_does_not_stop(tmp_path: Path) -> None:
    watch = Watch()
    settings = {"eval_every_steps": 64, "eval_episodes": 1, "stop_return": 0.9}
    result = session(tmp_path / "run", watch, env=f"{__name__}:Coin", **settings).run()
    asked_again = [one for _, one in watch.evaluations if len(one.episodes) == 100]
    assert asked_again  # one episode pays 1 half of the time
    assert all(one.mean_return < 0.9 for one in asked_again)
    assert result["env_steps"] == 640
    assert result["reached"] is False
    assert result["env_steps_to_stop"] is result["seconds_to_stop"] is None


def test_evaluation_does_not_disturb_training(tmp_path: Path) -> None:
    often, never = Watch(), Watch()
    session(tmp_path / "a", often, eval_every_steps=64).run()
    session(tmp_path / "b", never, eval_every_steps=0).run()
    assert len(often.evaluations) == 10
    assert len(never.evaluations) == 1  # at the end
    for one, other in zip(often.weights, never.weights, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


# --- numbers that are not finite ---


def test_nan_stops_the_run_and_names_loss_and_step(tmp_path: Path) -> None:
    watch = Watch()
    run = session(tmp_path / "run", watch, algorithm=f"{__name__}:Breaks", normalize_obs=False)
    with pytest.raises(NonFiniteError, match=r"^value_loss is nan at environment step 128, update 8; the weights"):
        run.run()
    # the iteration before was the last to change anything
    after = run.learner.weights()
    assert all(torch.equal(after[name], value) for name, value in watch.weights[1].items())
    assert any(not torch.equal(after[name], value) for name, value in watch.weights[0].items())


def test_infinite_gradient_of_a_finite_loss_stops_the_run(tmp_path: Path) -> None:
    run = session(tmp_path / "run", algorithm=f"{__name__}:Steep")
    with pytest.raises(NonFiniteError, match=r"^grad_norm is (nan|inf) at environment step 64, update 4"):
        run.run()
    assert all(torch.isfinite(value).all() for value in run.learner.weights().values())
