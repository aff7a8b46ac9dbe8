"""Evaluations, videos and data collection end even if episodes of the environment never do."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Command, differing_tensors, metrics_rows

import zhixing as zx
from zhixing.collectors.actor import Actor
from zhixing.collectors.evaluation import MIN_EVAL_STEPS, default_eval_steps
from zhixing.core.policy import Decision, Phase, Policy
from zhixing.training.run_folder import RunFolder
from zhixing.training.zoo import export

LIMIT = 30


class FirstActionPolicy(Policy):
    """Always take action 0."""

    def act(self, obs: Any, hidden: Any, mask: Any, phase: Phase, rng: Any, env_steps: int) -> Decision:
        return Decision(self.random_action(len(obs), mask, rng) * 0)


def evaluate_policy(env_name: str, num_envs: int, episodes: int, max_steps: int | None) -> zx.Evaluation:
    env = zx.envs.make_vector(env_name, num_envs, backend="serial")
    try:
        return Actor(FirstActionPolicy(env.spaces), env).evaluate(episodes, seed=0, max_steps=max_steps)
    finally:
        env.close()


@pytest.mark.parametrize("num_envs", [1, 2, 3])
def test_evaluation_cuts_episodes_and_counts_them(num_envs: int) -> None:
    evaluation = evaluate_policy("dummy_envs:EndlessEnv", num_envs, 5, 7)
    assert evaluation.returns.tolist() == [7.0] * 5  # 1 per step
    assert [episode.length for episode in evaluation.episodes] == [7] * 5
    assert evaluation.cut_episodes == evaluation.summary()["cut_episodes"] == 5


def test_episodes_that_end_in_time_are_not_cut() -> None:
    assert evaluate_policy("dummy_envs:FixedLengthEnv", 2, 5, 5).cut_episodes == 0  # they end at the fifth step
    evaluation = evaluate_policy("dummy_envs:FixedLengthEnv", 2, 5, 4)
    assert (evaluation.cut_episodes, evaluation.mean_return) == (5, 4.0)


def test_default_limit_is_twice_the_longest_episode_if_the_env_has_no_time_limit() -> None:
    assert default_eval_steps(None) == default_eval_steps(None, 10) == MIN_EVAL_STEPS
    assert default_eval_steps(None, MIN_EVAL_STEPS) == 2 * MIN_EVAL_STEPS
    assert default_eval_steps(500, 10**9) is None


def test_evaluation_without_max_steps_uses_the_default_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zhixing.collectors.evaluation.MIN_EVAL_STEPS", 11)
    assert evaluate_policy("dummy_envs:EndlessEnv", 2, 2, None).returns.tolist() == [11.0, 11.0]


# --- training ---


def make_config(short_config: Callable, name: str = "ppo", **settings: Any) -> Any:
    return short_config(name, "dummy_envs:EndlessEnv", eval_max_steps=LIMIT, eval_episodes=3, **settings)


@pytest.mark.parametrize("name", ["ppo", "dqn"])
@pytest.mark.parametrize("eval_every", [0, 300])
def test_training_ends_with_a_checkpoint(
    name: str, eval_every: int, short_config: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = zx.Session(make_config(short_config, name, eval_every=eval_every), tmp_path / "run", quiet=True).run()
    assert result["final_return"] == LIMIT
    assert RunFolder.open(tmp_path / "run").newest_step() == result["env_steps"]
    notes = [line for line in capsys.readouterr().err.splitlines() if "evaluation episodes were cut" in line]
    assert len(notes) == 1  # once, not at each evaluation
    assert "3 of 3 evaluation episodes were cut after 30 steps" in notes[0]
    assert "env.max_episode_steps" in notes[0]


def test_training_and_eval_cut_episodes_at_twice_the_longest_training_episode(
    short_config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unfinished episodes count, too; here none ends."""
    monkeypatch.setattr("zhixing.collectors.evaluation.MIN_EVAL_STEPS", 10)
    cfg = short_config("ppo", "dummy_envs:EndlessEnv", num_envs=2, env_steps=200, eval_every=0, eval_episodes=1)
    result = zx.Session(cfg, tmp_path / "run", quiet=True).run()
    longest = result["env_steps"] // 2
    assert result["final_return"] == 2 * longest
    for checkpoint in ("last", "best"):
        evaluation = zx.evaluate(tmp_path / "run", 1, checkpoint=checkpoint)
        assert (evaluation.mean_return, evaluation.cut_episodes) == (2 * longest, 1)


class InterruptEvaluation(zx.Callback):
    """Send SIGINT after `after` evaluation steps, counted from training step `at_steps` on."""

    def __init__(self, at_steps: int, after: int = 5) -> None:
        self.at_steps, self.remaining = at_steps, after

    def evaluation_step(self, loop: zx.TrainingLoop) -> None:
        if loop.steps >= self.at_steps:
            self.remaining -= 1
            if self.remaining == 0:
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("at_steps", [300, 700, 1200])  # the last one is the final evaluation
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_first_ctrl_c_ends_an_evaluation_and_resume_repeats_it(
    name: str, at_steps: int, short_config: Callable, tmp_path: Path
) -> None:
    cfg = make_config(short_config, name, eval_every=300, log_every=100, env_steps=1200)
    whole = zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [InterruptEvaluation(at_steps)], quiet=True).run()
    assert not (tmp_path / "parts" / "result.json").exists()
    assert RunFolder.open(tmp_path / "parts").newest_step() >= at_steps
    with pytest.raises(KeyboardInterrupt):  # again, in the repeated evaluation
        zx.Session.resume(tmp_path / "parts", [InterruptEvaluation(at_steps, after=12)], quiet=True).run()
    parts = zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")
    for key in ("final_return", "best_return", "env_steps"):
        assert whole[key] == parts[key]


class RaiseInFinalEvaluation(zx.Callback):
    """Raise in the first step of the final evaluation, as if the process were killed."""

    def evaluation_step(self, loop: zx.TrainingLoop) -> None:
        if loop.ending:
            raise RuntimeError("killed")


def test_last_checkpoint_is_written_before_the_last_evaluation(short_config: Callable, tmp_path: Path) -> None:
    cfg = make_config(short_config, eval_every=300, checkpoint_every=0, env_steps=600)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(RuntimeError, match="killed"):
        zx.Session(cfg, tmp_path / "parts", [RaiseInFinalEvaluation()], quiet=True).run()
    assert RunFolder.open(tmp_path / "parts").newest_step() == 640
    assert not (tmp_path / "parts" / "result.json").exists()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()  # only the evaluation is missing
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")


def test_ctrl_c_after_reaching_stop_return_loses_no_row(short_config: Callable, tmp_path: Path) -> None:
    """The row of the last iteration is written once, when training ends for good."""

    class CtrlC(zx.Callback):
        def evaluation_end(self, loop: zx.TrainingLoop, evaluation: Any) -> None:
            loop.stop("interrupted")

    cfg = short_config("ppo", "toy/match", stop_return=0.0, env_steps=5000)
    zx.Session(cfg, tmp_path / "whole", quiet=True).run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [CtrlC()], quiet=True).run()
    result = zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert (result["reached"], result["env_steps"]) == (True, 512)
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")


# --- commands ---


@pytest.fixture
def run(short_config: Callable, tmp_path: Path) -> str:
    zx.Session(make_config(short_config, env_steps=100, eval_every=0), tmp_path / "run", quiet=True).run()
    return str(tmp_path / "run")


def test_eval_reports_cut_episodes(run_cli: Command, run: str) -> None:
    code, out, _ = run_cli("eval", run, "--episodes", "4", "--json", "--trust")
    summary = json.loads(out)
    assert (code, summary["mean_return"], summary["cut_episodes"]) == (0, LIMIT, 4)
    code, out, _ = run_cli("eval", run, "--episodes", "4", "--max-steps", "9", "--trust")
    assert "mean length  9" in out
    assert "cut episodes 4" in out


def test_collect_truncates_episodes_and_reports_only_complete_ones(run_cli: Command, run: str, tmp_path: Path) -> None:
    code, out, _ = run_cli("collect", run, "-o", str(tmp_path / "data"), "--steps", "500", "--trust")
    assert code == 0
    data = zx.offline.open(str(tmp_path / "data"))
    assert data.options["max_episode_steps"] == LIMIT
    # eight environments, 62 or 63 steps each: two complete episodes and 2 or 3 steps of a third one
    assert np.bincount(data.complete()).tolist() == [8, 16]
    assert "500 steps in 24 episodes" in out
    assert f"mean return {LIMIT} of 16 complete episodes" in out
    assert "8 episodes are incomplete and not part of the mean return" in out


def test_exported_agents_keep_the_longest_episode(run: str, tmp_path: Path) -> None:
    expected = RunFolder.open(run).load_agent()["longest_episode"]
    assert expected > 0
    export(run, tmp_path / "agent", episodes=1)
    assert RunFolder.open(tmp_path / "agent").load_agent()["longest_episode"] == expected
