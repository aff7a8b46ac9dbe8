"""The training loops, one function per scheme, and what they share: counters, budgets and callbacks."""

from __future__ import annotations

import copy
import math
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from zhixing.actor import Actor, Episode, Evaluation
from zhixing.batch import Batch
from zhixing.buffers import Buffer
from zhixing.buffers.rollout import Rollout
from zhixing.callbacks.base import Callback, EvaluationInterrupted, as_list
from zhixing.config import (
    AsynchronousConfig,
    DataConfig,
    OffPolicyConfig,
    OnPolicyConfig,
    RunConfig,
    SearchConfig,
    SelfPlayConfig,
    seconds,
)
from zhixing.distributed.actor import SpreadActor
from zhixing.errors import UserError
from zhixing.learner import Learner
from zhixing.ops.seeding import stream
from zhixing.policy import Phase
from zhixing.search import SelfPlay
from zhixing.state import Count, checked
from zhixing.torch_actor import TorchActor

INTERRUPTED = "interrupted"
SAVED = {
    "episodes": Count,
    "longest_episode": Count,
    "seconds": float,
    "steps_before": Count,
    "unfinished": tuple[int, bool] | None,
    "finished": bool,
    "recent": list[tuple[float, int, dict[str, float | bool]]],
    "metrics": dict[str, Tensor],
}


class Loop:
    """A training under way: its parts, its counters, and its callbacks."""

    def __init__(
        self,
        cfg: RunConfig,
        actor: Actor | TorchActor | SpreadActor | SelfPlay | None,
        learner: Learner,
        *,
        buffer: Buffer | None = None,
        further: Mapping[str, Buffer] | None = None,
        callbacks: Callback | Sequence[Callback] = (),
    ) -> None:
        """`further` are the buffers, by name, that the learner declares besides the replay. There is no actor where
        all is learned from what was recorded."""
        self.cfg, self.actor, self.learner, self.buffer = cfg, actor, learner, buffer
        self.further = dict(further or {})
        self.callbacks = as_list(callbacks)
        self.rng = np.random.default_rng(stream(cfg.seed, "replay"))  # draws samples from the replay
        self.episodes = 0
        self.seconds = 0.0  # of training; evaluations and checkpoints don't count
        self.recent: deque[Episode] = deque(maxlen=100)
        self.metrics: Mapping[str, Tensor] = {}  # of the last iteration that updated
        self.steps_before = 0  # at the begin of this iteration
        self.longest_episode = 0  # steps of the longest training episode that has ended
        self.stop_reason: str | None = None
        self.interrupt_requested = False
        self.interrupted = False  # stopped before its end, to be resumed: nothing that belongs to the end is done
        self.finished = False  # all that belongs to the end is done
        self.out_of_budget = False
        # the callback whose `iteration_end` was interrupted, and whether the iteration had metrics
        self._unfinished: tuple[int, bool] | None = None
        self.batch: Batch | None = None  # what the last update learned from, or the first whose step was left out
        self._since: float | None = None

    @property
    def env_steps(self) -> int:
        return 0 if self.actor is None else self.actor.env_steps

    @property
    def steps(self) -> int:
        """What budget and intervals count: steps of the environment, or updates where there is none."""
        return self.updates if self.actor is None else self.env_steps

    @property
    def unit(self) -> str:
        return "updates" if self.actor is None else "steps"

    @property
    def tells(self) -> tuple[str, ...]:
        """Numbers of the task, at the ends of its episodes, that are worth a log."""
        return () if self.actor is None else self.actor.tells

    @property
    def replaced(self) -> int:
        """How often an environment failed and another took its place."""
        return self.actor.replaced if isinstance(self.actor, (Actor, SpreadActor)) else 0

    @property
    def lost(self) -> int:
        """How often a worker died and another took its place."""
        return self.actor.lost if isinstance(self.actor, SpreadActor) else 0

    @property
    def updates(self) -> int:
        return self.learner.updates

    @property
    def shares(self) -> dict[str, float]:
        """How much of each budget is used, by the name of its setting."""
        cfg = self.cfg
        if self.actor is None and isinstance(cfg, DataConfig):
            shares = {"offline_updates": self.steps / cfg.offline_updates}
        else:
            shares = {"env_steps": self.steps / cfg.env_steps}
        if cfg.episodes is not None:
            shares["episodes"] = self.episodes / cfg.episodes
        if cfg.duration is not None:
            shares["duration"] = self.seconds / seconds(cfg.duration)
        return shares

    @property
    def fraction(self) -> float:
        """How much of the budget is used: the largest share of those that are set."""
        return min(1.0, max(self.shares.values()))

    def stop(self, reason: str) -> None:
        """End training after this iteration."""
        if reason == INTERRUPTED:  # doesn't replace a reason to end for good
            self.interrupt_requested = True
            reason = self.stop_reason or INTERRUPTED
        self.stop_reason = reason

    @property
    def longest_so_far(self) -> int:
        """Steps of the longest training episode, ended or not."""
        running = self.actor.longest_running if isinstance(self.actor, (Actor, TorchActor)) else 0
        return max(self.longest_episode, running)

    @property
    def ending(self) -> bool:
        """This iteration is the last one for good."""
        return self.out_of_budget or self.stop_reason not in (None, INTERRUPTED)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a trainer's loop: enters the callbacks and tells them of begin and end."""
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback)
            for callback in self.callbacks:
                callback.train_begin(self)
            self.finished = False
            self._since = time.perf_counter()
            if self._unfinished is not None:
                first, had_metrics = self._unfinished
                self.out_of_budget = self.fraction >= 1.0
                self._end_iteration(self.metrics if had_metrics else {}, first)
            yield
            self._tick()
            self._since = None
            self.interrupted = self.interrupt_requested
            for callback in self.callbacks:
                try:
                    callback.train_end(self)
                except EvaluationInterrupted:
                    self.interrupted = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside isn't training time, and finds the learner with its present weights."""
        self._tick()
        if isinstance(self.actor, SpreadActor):
            self.actor.settle()
        running, self._since = self._since is not None, None
        try:
            yield
        finally:
            self._since = time.perf_counter() if running else None

    def _tick(self) -> None:
        if self._since is not None:
            now = time.perf_counter()
            self.seconds += now - self._since
            self._since = now

    def iterations(self) -> Iterator[None]:
        """One round after the other until the budget is used or somebody asks to stop."""
        self.out_of_budget = self.fraction >= 1.0
        while self.stop_reason is None and not self.out_of_budget:
            self.steps_before = self.steps
            self._set_progress(self.fraction)
            for callback in self.callbacks:
                callback.iteration_begin(self)
            yield

    def _set_progress(self, fraction: float) -> None:
        """Let all schedules know how much of the budget is used, whichever part of the budget ends the run."""
        self.learner.set_progress(fraction)
        for buffer in self.buffers.values():
            buffer.set_progress(fraction)
        if self.actor is not None:
            # policies count environment steps: where episodes or time are used up faster, they are ahead of these
            self.actor.schedule_lead = max(0, int(fraction * self.cfg.env_steps) - self.env_steps)

    def learns_from(self, batch: Batch) -> Batch:
        """Told before each update, so that a batch whose update fails can be looked at."""
        if not self.learner.failed:
            self.batch = batch
        return batch

    def iteration_end(self, episodes: list[Episode], metrics: Mapping[str, Tensor]) -> None:
        self._tick()
        self.episodes += len(episodes)
        self.longest_episode = max([self.longest_episode, *(episode.length for episode in episodes)])
        self.out_of_budget = self.fraction >= 1.0
        if episodes:
            self._tell(episodes)
        self.metrics = metrics or self.metrics
        self._end_iteration(metrics)

    def _end_iteration(self, metrics: Mapping[str, Tensor], first: int = 0) -> None:
        """Call the callbacks from the `first` on. After an interrupted evaluation, the resumed run calls the rest."""
        self._unfinished = None
        for i, callback in enumerate(self.callbacks[first:], first):
            try:
                callback.iteration_end(self, metrics)
            except EvaluationInterrupted:
                self._unfinished = i, bool(metrics)
                return

    def _tell(self, episodes: list[Episode]) -> None:
        listening = [each for each in self.callbacks if type(each).episode_end is not Callback.episode_end]
        if not listening:  # of thousands of environments they are thousands
            self.recent.extend(episodes)
            return
        for episode in episodes:
            self.recent.append(episode)
            for callback in listening:
                callback.episode_end(self, episode)

    def evaluation_step(self) -> None:
        """Call after each step of an evaluation. Raises `EvaluationInterrupted` if the run was asked to stop."""
        if self.interrupt_requested:
            raise EvaluationInterrupted
        for callback in self.callbacks:
            callback.evaluation_step(self)

    def evaluation_end(self, evaluation: Evaluation) -> None:
        for callback in self.callbacks:
            callback.evaluation_end(self, evaluation)

    def log(self, name: str, value: float) -> None:
        """Log a number of your own, such as `loop.log("goals_reached", 3)`.

        The next row of metrics.csv has the last value logged before it, in a column of this name; TensorBoard shows it
        as `custom/NAME`, or as NAME where this has a slash. Reading a tensor's value waits for its device.
        """
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][\w.-]*(/[\w.-]+)*", name):
            raise UserError(f"loop.log: {name!r} is no name of a metric: use letters, digits and the signs _ . - /")
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"loop.log({name!r}, ...): the value must be one number, not {value!r}") from None
        for callback in self.callbacks:
            callback.metric_logged(self, name, number)

    def video_recorded(self, path: Path) -> None:
        for callback in self.callbacks:
            callback.video_recorded(self, path)

    def recent_mean(self, what: str) -> float:
        """Mean `ret` or `length` of the last hundred training episodes; NaN before the first has ended."""
        return float(np.mean([getattr(e, what) for e in self.recent])) if self.recent else math.nan

    def recent_told(self, name: str) -> float:
        """The same of a number that the task tells at the ends of episodes."""
        told = [episode.info[name] for episode in self.recent if name in episode.info]
        return float(np.mean(told)) if told else math.nan

    @property
    def buffers(self) -> dict[str, Buffer]:
        return ({} if self.buffer is None else {"replay": self.buffer}) | self.further

    def state_dict(self) -> dict[str, Any]:
        """All but the buffers, which are saved apart since they are large."""
        self._tick()
        return {
            "learner": self.learner.state_dict(),
            "actor": None if self.actor is None else self.actor.state_dict(),
            "rng": self.rng.bit_generator.state,
            "episodes": self.episodes,
            "longest_episode": self.longest_so_far,
            "seconds": self.seconds,
            "steps_before": self.steps_before,
            "unfinished": self._unfinished,
            "finished": self.finished,
            "recent": [(e.ret, e.length, e.info) for e in self.recent],
            "metrics": {name: value.detach().clone() for name, value in self.metrics.items()},
            "callbacks": {name: callback.state_dict() for name, callback in self._named_callbacks()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Returns the environments that could not be restored in mid-episode."""
        saved = checked("the run", {name: state[name] for name in SAVED if name in state}, SAVED)
        self.learner.load_state_dict(state["learner"])
        lost = [] if self.actor is None else self.actor.load_state_dict(state["actor"])
        self.rng.bit_generator.state = state["rng"]
        self.episodes, self.seconds = saved["episodes"], saved["seconds"]
        # older checkpoints lack these; theirs were written when all was done
        self.longest_episode, self.steps_before = saved.get("longest_episode", 0), saved.get("steps_before", 0)
        self._unfinished, self.finished = saved.get("unfinished"), saved.get("finished", True)
        self.recent.extend(Episode(*values) for values in saved["recent"])
        self.metrics = saved["metrics"]
        for name, callback in self._named_callbacks():
            if name in state["callbacks"]:  # a user may resume with other callbacks
                callback.load_state_dict(state["callbacks"][name])
        return lost

    def _named_callbacks(self) -> list[tuple[str, Callback]]:
        names = [type(callback).__name__ for callback in self.callbacks]
        return [(f"{name} {names[:i].count(name)}", self.callbacks[i]) for i, name in enumerate(names)]


def on_policy(loop: Loop) -> None:
    """Collect with the present policy, learn from just that, forget it."""
    cfg, actor, learner = loop.cfg, loop.actor, loop.learner
    assert isinstance(cfg, OnPolicyConfig)
    assert isinstance(actor, (Actor, TorchActor, SpreadActor))
    with loop.running():
        for _ in loop.iterations():
            experience = actor.collect(steps=cfg.steps_per_iteration)
            update = learner.update(loop.learns_from(experience.batch.to(learner.device)))
            loop.iteration_end(experience.episodes, update.metrics)


def asynchronous(loop: Loop) -> None:
    """Learn from whoever is ready: its rollout, or the gradients that it took of it, by weights some updates old."""
    cfg, actor, learner = loop.cfg, loop.actor, loop.learner
    assert isinstance(cfg, AsynchronousConfig)
    assert isinstance(actor, SpreadActor)
    with loop.running():
        for _ in loop.iterations():
            turn, _ = actor.turn(cfg.steps_per_iteration, gradients=learner.learns_apart)
            if turn.part is not None:
                batch = loop.learns_from(Rollout.joined([turn.part]).to(learner.device))
            if turn.update is not None:  # by the servers that have the weights
                update = turn.update
                learner.updates += 1
            elif turn.gradients is not None:
                update = learner.apply(turn.gradients.to(learner.device))
            else:
                update = learner.update(batch)
            loop.iteration_end(turn.episodes, update.metrics)


def off_policy(loop: Loop) -> None:
    """Collect into the replay, learn from samples of it."""
    cfg, actor, buffer = loop.cfg, loop.actor, loop.buffer
    assert isinstance(cfg, OffPolicyConfig)
    assert isinstance(actor, Actor)
    assert buffer is not None
    with loop.running():
        for _ in loop.iterations():
            phase = Phase.RANDOM if loop.env_steps < cfg.warmup_steps else Phase.COLLECT
            experience = actor.collect(steps=cfg.steps_per_iteration, phase=phase)
            _store(loop, cfg, experience.batch)
            loop.iteration_end(experience.episodes, _learn(loop, buffer, cfg.batch_size, _due(loop, cfg)))


def off_policy_ahead(loop: Loop) -> None:
    """The same, while the next steps are made in another thread: with the weights that learning begins with, so all is
    as repeatable as one after the other. What is learned from doesn't hold these steps yet."""
    cfg, actor, learner, buffer = loop.cfg, loop.actor, loop.learner, loop.buffer
    assert isinstance(cfg, OffPolicyConfig)
    assert isinstance(actor, Actor)
    assert buffer is not None
    actor.policy = copy.deepcopy(learner.policy)  # nobody moves its weights while it acts
    with loop.running(), ThreadPoolExecutor(1) as other:
        for _ in loop.iterations():
            phase = Phase.RANDOM if loop.env_steps < cfg.warmup_steps else Phase.COLLECT
            due = _due(loop, cfg)
            actor.load(learner.weights())
            acting = other.submit(actor.collect, steps=cfg.steps_per_iteration, phase=phase)
            metrics = _learn(loop, buffer, cfg.batch_size, due)
            experience = acting.result()
            _store(loop, cfg, experience.batch)
            loop.iteration_end(experience.episodes, metrics)


def off_policy_apart(loop: Loop) -> None:
    """Workers fill the replay, each at its own pace, and say how much there is to learn of what they did; this process
    only learns (Ape-X; Horgan et al., 2018). Unlike there it waits for them: updates per step are as set."""
    cfg, actor, learner, buffer = loop.cfg, loop.actor, loop.learner, loop.buffer
    assert isinstance(cfg, OffPolicyConfig)
    assert isinstance(actor, SpreadActor)
    assert buffer is not None
    with loop.running():
        for _ in loop.iterations():
            phase = Phase.RANDOM if loop.env_steps < cfg.warmup_steps else Phase.COLLECT
            turn, envs = actor.turn(cfg.steps_per_iteration, phase, rate=cfg.replay.prioritized)
            assert turn.part is not None
            batch = Rollout.joined([turn.part])
            buffer.add(batch, envs, turn.priority)
            for other in loop.further.values():
                other.add(batch, envs)
            if cfg.normalise_obs:
                learner.observe(batch.to(learner.device))
            loop.iteration_end(turn.episodes, _learn(loop, buffer, cfg.batch_size, _due(loop, cfg)))


def offline(loop: Loop) -> None:
    """Learn from samples of what was recorded; no environment is stepped."""
    cfg, buffer = loop.cfg, loop.buffer
    assert isinstance(cfg, DataConfig)
    assert buffer is not None
    with loop.running():
        for _ in loop.iterations():
            loop.iteration_end([], _learn(loop, buffer, cfg.batch_size, 1))


def self_play(loop: Loop) -> None:
    """Play against oneself, learn from samples of the positions of games that ended."""
    cfg, actor, buffer = loop.cfg, loop.actor, loop.buffer
    assert isinstance(cfg, SelfPlayConfig)
    assert isinstance(actor, SelfPlay)
    assert buffer is not None
    with loop.running():
        for _ in loop.iterations():
            experience = actor.collect(cfg.steps_per_iteration)
            if len(experience.batch):
                buffer.add(experience.batch)
            metrics: Mapping[str, Tensor] = {}
            if buffer.ready:
                due = int(cfg.updates_per_step * loop.env_steps + 1e-9) - loop.updates
                metrics = _learn(loop, buffer, cfg.batch_size, due)
            loop.iteration_end(experience.episodes, metrics)


def play(loop: Loop) -> None:
    """Only act: for those that look ahead instead of learning."""
    cfg, actor = loop.cfg, loop.actor
    assert isinstance(cfg, SearchConfig)
    assert isinstance(actor, Actor)
    with loop.running():
        for _ in loop.iterations():
            experience = actor.collect(steps=cfg.steps_per_iteration)
            loop.iteration_end(experience.episodes, {})


def _store(loop: Loop, cfg: OffPolicyConfig, batch: Batch) -> None:
    for buffer in loop.buffers.values():
        buffer.add(batch)
    if cfg.normalise_obs:
        loop.learner.observe(batch.to(loop.learner.device))


def _due(loop: Loop, cfg: OffPolicyConfig) -> int:
    """How many updates the steps so far ask for."""
    buffer = loop.buffer
    assert buffer is not None
    if not buffer.ready and not buffer.full:  # full and yet nothing to sample is an error, which `sample` tells
        return 0
    return int(cfg.updates_per_step * max(0, loop.env_steps - cfg.warmup_steps) + 1e-9) - loop.updates


def _learn(loop: Loop, buffer: Buffer, batch_size: int, times: int) -> Mapping[str, Tensor]:
    """Updates from a sample each; what the last one tells."""
    learner = loop.learner
    metrics: Mapping[str, Tensor] = {}
    for _ in range(times):
        batch = loop.learns_from(_moved(buffer.sample(batch_size, loop.rng), learner))
        others = {name: _moved(other.sample(batch_size, loop.rng), learner) for name, other in loop.further.items()}
        update = learner.update(batch, **others)  # taken by those that declare them
        buffer.set_priority(batch.index, update.priority)
        metrics = update.metrics
    return metrics


def _moved(batch: Batch, learner: Learner) -> Batch:
    return batch if learner.device.type == "cpu" else batch.to(learner.device)  # costs a little even if it is there


TRAINERS = {
    "on_policy": on_policy,
    "asynchronous": asynchronous,
    "off_policy": off_policy,
    "off_policy_ahead": off_policy_ahead,
    "off_policy_apart": off_policy_apart,
    "offline": offline,
    "self_play": self_play,
    "play": play,
}
