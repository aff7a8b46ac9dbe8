"""Training loops: budgets, the ratio of updates to steps, phases, callbacks, the clock and saved state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import differing_tensors, metrics_rows
from gymnasium.spaces import Box, Discrete

import zhixing as zx
from zhixing.buffers import Buffer, NStep, Prioritized, Uniform
from zhixing.collectors.actor import Actor
from zhixing.collectors.collector import Experience
from zhixing.collectors.evaluation import Episode, Evaluation
from zhixing.config import OffPolicyConfig, OnPolicyConfig
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner, Update
from zhixing.core.policy import Decision, Phase, Policy
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.training.loop import TrainingLoop
from zhixing.training.trainers import off_policy, on_policy


class FirstActionPolicy(Policy):
    """Take action 0, or a random one in the random phase. Record phases and actions."""

    def __init__(self, spaces: Spaces) -> None:
        super().__init__(spaces)
        self.phases: list[Phase] = []
        self.actions: list[int] = []

    def act(self, obs: Tree, hidden: Tree, mask: Any, phase: Phase, rng: torch.Generator, env_steps: int) -> Decision:
        action = torch.zeros(len(obs), dtype=torch.long)
        if phase is Phase.RANDOM:
            action = self.random_action(len(obs), mask, rng)
        self.phases.append(phase)
        self.actions += action.tolist()
        return Decision(action)


class CountingLearner(Learner):
    """Learn nothing; record batch sizes and progress."""

    metrics = ("rows",)

    def __init__(self, cfg: Any, spaces: Spaces) -> None:
        super().__init__(cfg, spaces)
        self.policy = FirstActionPolicy(spaces)
        self.sizes: list[int] = []
        self.progress: list[float] = []

    def update(self, batch: Batch) -> Update:
        self.updates += 1
        self.sizes.append(batch.reward.numel())
        return Update({"rows": torch.tensor(float(self.updates))})

    def set_progress(self, fraction: float) -> None:
        self.progress.append(fraction)


def make_loop(
    scheme: type,
    callbacks: Any = (),
    num_envs: int = 2,
    learner_type: type[CountingLearner] = CountingLearner,
    sampler: Uniform | Prioritized | None = None,
    **settings: Any,
) -> TrainingLoop:
    cfg = scheme(algorithm="none", env={"name": "dummy_envs:TerminatingEnv"}, num_envs=num_envs, **settings)
    env = zx.envs.make_vector("dummy_envs:TerminatingEnv", num_envs, backend="serial")  # five steps, a reward of 1 each
    learner = learner_type(cfg, env.spaces)
    actor = Actor(learner.policy, env, seed=cfg.seed)
    buffer = None
    if scheme is OffPolicyConfig:
        buffer = Buffer(env.spaces.fields(), 1000, num_envs, sampler=sampler or Uniform(), view=NStep(1, 0.9))
    return TrainingLoop(cfg, actor, learner, buffer=buffer, callbacks=callbacks)


class EventLog(zx.Callback):
    """Record all hook calls."""

    def __init__(self, name: str = "", events: list[str] | None = None) -> None:
        self.name, self.events = name, events if events is not None else []

    def __enter__(self) -> EventLog:
        self.events.append(f"{self.name}enter")
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.events.append(f"{self.name}exit {kind.__name__ if kind else ''}".strip())

    def train_begin(self, loop: TrainingLoop) -> None:
        self.events.append(f"{self.name}begin")

    def iteration_begin(self, loop: TrainingLoop) -> None:
        self.events.append(f"{self.name}iteration {loop.env_steps}")

    def episode_end(self, loop: TrainingLoop, episode: Episode) -> None:
        self.events.append(f"{self.name}episode {episode.episode_return:g}")

    def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
        self.events.append(f"{self.name}end {loop.env_steps} {sorted(metrics)}")

    def evaluation_end(self, loop: TrainingLoop, evaluation: Evaluation) -> None:
        self.events.append(f"{self.name}evaluation")

    def train_end(self, loop: TrainingLoop) -> None:
        self.events.append(f"{self.name}finish")


# --- budgets ---


def test_step_budget_ends_with_the_iteration_that_exhausts_it() -> None:
    run = make_loop(OnPolicyConfig, env_steps=50, rollout_steps=8)
    on_policy(run)
    assert run.env_steps == 64  # 16 per iteration: 48 is not enough
    assert run.updates == 4
    assert run.learner.sizes == [16] * 4
    assert run.learner.progress == pytest.approx([0.0, 0.32, 0.64, 0.96])
    assert run.progress == 1.0


def test_episode_budget() -> None:
    run = make_loop(OnPolicyConfig, episodes=7, rollout_steps=1)
    on_policy(run)
    # both environments end an episode at every fifth step: 2, 4, 6, 8
    assert (run.episodes, run.env_steps) == (8, 40)


def test_time_budget() -> None:
    class Slow(zx.Callback):
        def iteration_begin(self, loop: TrainingLoop) -> None:
            time.sleep(0.02)

    run = make_loop(OnPolicyConfig, [Slow()], duration=0.1, rollout_steps=1)
    on_policy(run)
    assert 0.1 <= run.seconds < 0.2
    assert run.env_steps <= 10  # five iterations of 20 ms


def test_first_exhausted_budget_ends_training() -> None:
    run = make_loop(OnPolicyConfig, env_steps=10, episodes=1000, duration="1h", rollout_steps=1)
    on_policy(run)
    assert run.env_steps == 10


def test_exhausted_budget_trains_nothing() -> None:
    run = make_loop(OnPolicyConfig, env_steps=10, rollout_steps=5)
    on_policy(run)
    on_policy(run)
    assert (run.env_steps, run.updates) == (10, 1)


def test_stop_ends_training_after_the_current_iteration() -> None:
    class Stop(zx.Callback):
        def episode_end(self, loop: TrainingLoop, episode: Episode) -> None:
            loop.stop("enough")

    after = EventLog()
    run = make_loop(OnPolicyConfig, [Stop(), after], rollout_steps=3)
    on_policy(run)
    assert run.env_steps == 12  # the first episodes end in the second iteration
    assert run.stop_reason == "enough"
    assert after.events[-3:] == ["end 12 ['rows']", "finish", "exit"]


# --- off-policy ---


@pytest.mark.parametrize(("ratio", "steps"), [(1.0, 1), (0.5, 2), (2.0, 3), (0.25, 1), (0.3, 5)])
def test_ratio_of_updates_to_steps_is_exact(ratio: float, steps: int) -> None:
    ratios = []

    class RecordRatio(zx.Callback):
        def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
            due = max(0, loop.env_steps - 40) * ratio
            ratios.append((loop.updates, due))

    run = make_loop(
        OffPolicyConfig,
        [RecordRatio()],
        env_steps=240,
        learning_starts=40,
        updates_per_step=ratio,
        train_every=steps,
        batch_size=8,
    )
    off_policy(run)
    assert all(due - 1 < updates <= due + 1e-9 for updates, due in ratios), ratios
    assert run.learner.sizes == [8] * run.updates


def test_rounding_errors_of_the_ratio_skip_no_update() -> None:
    # 0.29 x 100 is 28.999999999999996 in floating point
    run = make_loop(OffPolicyConfig, env_steps=100, learning_starts=0, updates_per_step=0.29, batch_size=4)
    off_policy(run)
    assert run.updates == 29


def test_steps_before_learning_starts_are_random_and_without_updates() -> None:
    run = make_loop(OffPolicyConfig, env_steps=60, learning_starts=20, batch_size=4)
    off_policy(run)
    phases = run.learner.policy.phases
    assert phases[:10] == [Phase.RANDOM] * 10  # 2 environments
    assert set(phases[10:]) == {Phase.COLLECT}
    assert run.updates == 40
    assert len(run.buffer) == 60
    assert set(run.learner.policy.actions[:20]) == {0, 1}
    assert set(run.learner.policy.actions[20:]) == {0}


def test_priorities_of_an_update_are_set_on_the_sampled_rows() -> None:
    sampled = []

    class ZeroPriorityLearner(CountingLearner):
        def update(self, batch: Batch) -> Update:
            sampled.append(batch.index.clone())
            return super().update(batch)._replace(priority=torch.zeros(4))

    settings = {"env_steps": 20, "learning_starts": 10, "batch_size": 4}
    off_policy(make_loop(OffPolicyConfig, learner_type=ZeroPriorityLearner, sampler=Prioritized(1.0), **settings))
    # sampled rows get priority 0 and new rows the largest, so the next sample has none of the first
    assert len(sampled) == 10
    assert not set(sampled[0].tolist()) & set(sampled[1].tolist())


# --- callbacks ---


def test_hooks_are_called_in_the_order_of_the_callbacks() -> None:
    events: list[str] = []
    run = make_loop(
        OnPolicyConfig, [EventLog("a ", events), EventLog("b ", events)], num_envs=1, env_steps=6, rollout_steps=3
    )
    on_policy(run)
    order = ["iteration 0", "end 3 ['rows']", "iteration 3", "episode 5", "end 6 ['rows']", "finish"]
    expected = [f"{name} {event}" for event in ["enter", "begin", *order] for name in "ab"]
    assert events == [*expected, "b exit", "a exit"]


def test_metrics_are_empty_before_the_first_update() -> None:
    log = EventLog()
    off_policy(make_loop(OffPolicyConfig, [log], env_steps=8, learning_starts=4, train_every=2))
    assert [event for event in log.events if event.startswith("end")] == ["end 4 []", "end 8 ['rows']"]


def test_callbacks_exit_when_training_raises() -> None:
    class Raises(zx.Callback):
        def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
            raise ZeroDivisionError

    log = EventLog()
    with pytest.raises(ZeroDivisionError):
        on_policy(make_loop(OnPolicyConfig, [log, Raises()], rollout_steps=2))
    assert log.events[-1] == "exit ZeroDivisionError"
    assert "finish" not in log.events


def test_entered_callbacks_exit_when_entering_another_raises() -> None:
    class Locked(zx.Callback):
        def __enter__(self) -> Locked:
            raise PermissionError

    log = EventLog()
    with pytest.raises(PermissionError):
        on_policy(make_loop(OnPolicyConfig, [log, Locked()]))
    assert log.events == ["enter", "exit PermissionError"]


def test_recent_means_are_of_the_last_hundred_episodes() -> None:
    run = make_loop(OnPolicyConfig)
    assert np.isnan(run.recent_mean("episode_return"))
    run.iteration_end([Episode(0.0, 1, {})] * 60, {})
    run.iteration_end([Episode(1.0, 3, {})] * 80, {})
    # the last hundred: 20 of the first kind, 80 of the second
    assert run.recent_mean("episode_return") == pytest.approx(0.8)
    assert run.recent_mean("length") == pytest.approx(2.6)
    assert run.episodes == 140


# --- the clock ---


class Pauses(zx.Callback):
    def __init__(self, action: Any = None) -> None:
        self.action = action

    def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
        with loop.paused():
            time.sleep(0.1)
            if self.action is not None:
                self.action(loop)


def _pause_again(loop: TrainingLoop) -> None:
    with loop.paused():
        time.sleep(0.1)
    time.sleep(0.1)


@pytest.mark.parametrize(
    "action", [None, TrainingLoop.state_dict, _pause_again], ids=["plain", "saving", "nested pause"]
)
def test_paused_time_is_not_training_time(action: Any) -> None:
    run = make_loop(OnPolicyConfig, [Pauses(action)], env_steps=4, rollout_steps=1)
    started = time.perf_counter()
    on_policy(run)
    assert time.perf_counter() - started >= 0.2
    assert 0 < run.seconds < 0.1


def test_exceptions_in_a_pause_propagate() -> None:
    run = make_loop(OnPolicyConfig)
    with pytest.raises(KeyError), run.paused():
        raise KeyError


# --- state ---


def test_state_round_trip() -> None:
    def make() -> TrainingLoop:
        return make_loop(OffPolicyConfig, [CountIterations()], env_steps=30, learning_starts=4, batch_size=4, seed=3)

    class CountIterations(zx.Callback):
        def __init__(self) -> None:
            self.number = 0

        def iteration_end(self, loop: TrainingLoop, metrics: Any) -> None:
            self.number += 1

        def state_dict(self) -> dict[str, Any]:
            return {"number": self.number}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.number = state["number"]

    first = make()
    off_policy(first)
    restored = make()
    assert restored.load_state_dict(first.state_dict()) == []
    assert restored.callbacks[0].number == 15
    assert (restored.env_steps, restored.updates, restored.episodes) == (30, 26, 6)
    assert restored.seconds == first.seconds > 0
    assert list(restored.recent_episodes) == list(first.recent_episodes)
    assert restored.metrics == first.metrics
    assert restored.rng.random(3).tolist() == first.rng.random(3).tolist()


def test_callbacks_of_one_class_restore_separate_states_and_new_ones_start_fresh() -> None:
    class Named(zx.Callback):
        def __init__(self, word: str) -> None:
            self.word = word

        def state_dict(self) -> dict[str, Any]:
            return {"word": self.word}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.word = state["word"]

    first = make_loop(OnPolicyConfig, [Named("a"), Named("b")])
    second = make_loop(OnPolicyConfig, [Named("x"), Named("y"), Named("z")])
    second.load_state_dict(first.state_dict())
    assert [callback.word for callback in second.callbacks] == ["a", "b", "z"]


def test_random_actions_are_uniform() -> None:
    spaces = Spaces(Box(-1, 1, (2,), np.float32), Discrete(3))
    actions = FirstActionPolicy(spaces).random_action(3000, None, torch.Generator().manual_seed(0))
    assert (actions.bincount(minlength=3) / 3000).tolist() == pytest.approx([1 / 3] * 3, abs=0.03)


def test_async_collection_runs_during_updates(short_config: Callable[..., Any], tmp_path: Path) -> None:
    """Each rollout after `learning_starts` waits for an update, which a sequential loop would never make.

    1200 steps in 2 environments, 4 steps per iteration: the last iteration starts with (1196 - 200) / 2 updates due.
    """
    session = zx.Session(
        short_config("dqn", async_collect=True, vector__backend="serial"), tmp_path / "run", quiet=True
    )
    actor, learner = session.collector, session.learner
    assert isinstance(actor, Actor)
    collect, update = actor.collect, learner.update
    updated = threading.Event()
    waited: list[bool] = []

    def collect_after_update(steps: int, phase: Phase) -> Experience:
        if actor.env_steps > 208:
            waited.append(updated.wait(60))
            updated.clear()
        return collect(steps=steps, phase=phase)

    def signal_update(batch: Batch) -> Update:
        result = update(batch)
        updated.set()
        return result

    actor.collect, learner.update = collect_after_update, signal_update  # type: ignore[method-assign, assignment]
    result = session.run()
    assert len(waited) == 247  # (1200 - 212) / 4
    assert all(waited)
    assert result["updates"] == 498


def test_async_collection_is_deterministic_and_resumes_exactly(
    short_config: Callable[..., Any], tmp_path: Path
) -> None:
    class Stop(zx.Callback):
        def iteration_end(self, loop: TrainingLoop, metrics: object) -> None:
            if loop.steps == 600:
                raise RuntimeError("power cut")

    class Slow(zx.Callback):
        """Vary the timing, so sometimes the updates and sometimes the collection finish first."""

        def iteration_begin(self, loop: TrainingLoop) -> None:
            time.sleep(0.001 * (loop.steps % 3))

    settings = {"async_collect": True, "checkpoint_every": 200, "vector__backend": "serial"}
    cfg = short_config("sac", "Pendulum-v1", **settings)
    zx.Session(cfg, tmp_path / "one", quiet=True).run()
    with pytest.raises(RuntimeError, match="power cut"):
        zx.Session(cfg, tmp_path / "two", [Stop()], quiet=True).run()
    zx.Session.resume(tmp_path / "two", [Slow()], quiet=True).run()
    assert differing_tensors(tmp_path / "one", tmp_path / "two") == []
    assert metrics_rows(tmp_path / "one") == metrics_rows(tmp_path / "two")
    with pytest.raises(zx.UserError, match="async_collect=true can't be combined with"):
        zx.Session(short_config("sac", "Pendulum-v1", async_collect=True, distributed__workers=1), tmp_path / "three")
