"""The state that trainers share: parts, counters, budgets and callbacks."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field
from torch import Tensor

from zhixing.buffers import Buffer, BufferGroup
from zhixing.collectors.collector import Collector
from zhixing.collectors.evaluation import Episode, Evaluation
from zhixing.config import DataConfig, RunConfig, parse_duration, parse_interval
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner
from zhixing.core.seeding import derive_seed
from zhixing.core.state import Count, check_state
from zhixing.errors import UserError
from zhixing.training.callbacks.base import Callback, EvaluationInterrupted, as_list

INTERRUPTED = "interrupted"
SavedNumber = Annotated[float, Field(ge=0, allow_inf_nan=False)]
SAVED = {
    "episodes": Count,
    "longest_episode": Count,
    "seconds": float,
    "counts": list[SavedNumber],
    "counts_before": list[SavedNumber],
    "steps_before": Count,  # of older checkpoints
    "unfinished": tuple[int, bool] | None,
    "finished": bool,
    "recent": list[tuple[float, int, dict[str, float | bool]]],
    "metrics": dict[str, Tensor],
}


class Counts(NamedTuple):
    """What intervals count, in the units of `parse_interval`. In offline training, steps are updates."""

    steps: float = 0
    episodes: float = 0
    updates: float = 0
    seconds: float = 0.0


class TrainingLoop:
    """The parts, counters and callbacks of a training in progress."""

    def __init__(
        self,
        cfg: RunConfig,
        collector: Collector | None,
        learner: Learner,
        *,
        buffer: Buffer | BufferGroup | None = None,
        callbacks: Callback | Sequence[Callback] = (),
    ) -> None:
        """Offline training has no collector, on-policy training no buffer."""
        self.cfg, self.learner = cfg, learner
        self._collector, self.replay = collector, buffer
        self.callbacks = as_list(callbacks)
        self.rng = np.random.default_rng(derive_seed(cfg.seed, "replay"))  # samples from the buffer
        self.episodes = 0
        self.seconds = 0.0  # of training, without evaluations and checkpoints
        self.recent_episodes: deque[Episode] = deque(maxlen=100)
        self.batch: Batch | None = None  # of the last update, or of the first with a non-finite step
        self.metrics: Mapping[str, Tensor] = {}  # of the last iteration with updates
        self.counts = self.counts_before = Counts()  # at the end of the last iteration, and of the one before
        self.longest_episode = 0  # steps of the longest finished training episode
        self.stop_reason: str | None = None
        self.interrupt_requested = False
        self.interrupted = False  # stopped early, to be resumed: `train_end` leaves out final work
        self.finished = False  # the final evaluation and checkpoint are done
        self.out_of_budget = False
        # the callback whose `iteration_end` was interrupted, and whether the iteration had metrics
        self._unfinished: tuple[int, bool] | None = None
        self._clock_start: float | None = None  # None while the clock of training time is stopped

    @property
    def offline(self) -> bool:
        """Whether training reads a dataset instead of collecting."""
        return self._collector is None

    @property
    def collector(self) -> Collector:
        if self._collector is None:
            raise RuntimeError("offline training has no collector; check loop.offline first")
        return self._collector

    @property
    def has_buffer(self) -> bool:
        """Whether there is one buffer. With several learners, `replay` is a group of buffers."""
        return isinstance(self.replay, Buffer)

    @property
    def buffer(self) -> Buffer:
        """The buffer that updates sample."""
        if not isinstance(self.replay, Buffer):
            raise RuntimeError("on-policy training has no buffer; check loop.has_buffer first")
        return self.replay

    @property
    def env_steps(self) -> int:
        return 0 if self.offline else self.collector.env_steps

    @property
    def updates(self) -> int:
        return self.learner.updates

    @property
    def steps(self) -> int:
        """The unit of budgets and intervals: environment steps, or updates in offline training."""
        return self.updates if self.offline else self.env_steps

    @property
    def unit(self) -> str:
        return "updates" if self.offline else "steps"

    @property
    def logged_info_keys(self) -> tuple[str, ...]:
        """Keys of `info` at the ends of episodes that are logged."""
        return () if self.offline else self.collector.logged_info_keys

    @property
    def num_env_restarts(self) -> int:
        """Number of environments that failed and were restarted."""
        return 0 if self.offline else self.collector.num_env_restarts

    @property
    def num_worker_restarts(self) -> int:
        """Number of workers that died and were restarted."""
        return 0 if self.offline else self.collector.num_worker_restarts

    @property
    def budget_fractions(self) -> dict[str, float]:
        """The used fraction of each budget, by the name of its setting."""
        cfg = self.cfg
        if self.offline and isinstance(cfg, DataConfig):
            fractions = {"offline_updates": self.steps / cfg.offline_updates}
        else:
            fractions = {"env_steps": self.steps / cfg.env_steps}
        if cfg.episodes is not None:
            fractions["episodes"] = self.episodes / cfg.episodes
        if cfg.duration is not None:
            fractions["duration"] = self.seconds / parse_duration(cfg.duration)
        return fractions

    @property
    def progress(self) -> float:
        """The largest used fraction of any budget, at most 1."""
        return min(1.0, max(self.budget_fractions.values()))

    def num_intervals(self, every: int | str) -> int:
        """Return the number of complete intervals so far; 0 with `every=0`."""
        number, unit = parse_interval(every)
        return int(getattr(self.counts, unit) // number) if number else 0

    def is_due(self, every: int | str) -> bool:
        """Return whether this iteration has completed an interval, such as 5000 (steps) or "10 episodes".

        Resumed runs give the same answers, except for intervals in seconds. With `every=0` nothing is ever due.
        """
        number, unit = parse_interval(every)
        return number > 0 and getattr(self.counts, unit) // number > getattr(self.counts_before, unit) // number

    def stop(self, reason: str) -> None:
        """End training after this iteration."""
        if reason == INTERRUPTED:  # doesn't replace a reason that ends the run for good
            self.interrupt_requested = True
            reason = self.stop_reason or INTERRUPTED
        self.stop_reason = reason

    @property
    def longest_so_far(self) -> int:
        """Steps of the longest training episode, finished or not."""
        running = 0 if self.offline else self.collector.longest_running
        return max(self.longest_episode, running)

    @property
    def ending(self) -> bool:
        """Whether this iteration is the last one of the run."""
        return self.out_of_budget or self.stop_reason not in (None, INTERRUPTED)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enter the callbacks and call `train_begin` and `train_end` around a trainer's loop."""
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback)
            for callback in self.callbacks:
                callback.train_begin(self)
            self.finished = False
            self._clock_start = time.perf_counter()
            if self._unfinished is not None:
                first, had_metrics = self._unfinished
                self.out_of_budget = self.progress >= 1.0
                self._end_iteration(self.metrics if had_metrics else {}, first)
            yield
            self._update_seconds()
            self._clock_start = None
            self.interrupted = self.interrupt_requested
            for callback in self.callbacks:
                try:
                    callback.train_end(self)
                except EvaluationInterrupted:
                    self.interrupted = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock of training time. Inside, the learner has the current weights."""
        self._update_seconds()
        if not self.offline:
            self.collector.drain()
        running, self._clock_start = self._clock_start is not None, None
        try:
            yield
        finally:
            self._clock_start = time.perf_counter() if running else None

    def _update_seconds(self) -> None:
        if self._clock_start is not None:
            now = time.perf_counter()
            self.seconds += now - self._clock_start
            self._clock_start = now

    def iterations(self) -> Iterator[None]:
        """Yield once per iteration until the budget is used or a callback stops training."""
        self.out_of_budget = self.progress >= 1.0
        while self.stop_reason is None and not self.out_of_budget:
            self._set_progress()
            for callback in self.callbacks:
                callback.iteration_begin(self)
            yield

    def _set_progress(self) -> None:
        """Set all schedules to the used fraction of the budget."""
        progress = self.progress
        self.learner.set_progress(progress)
        if self.replay is not None:
            self.replay.set_progress(progress)
        if not self.offline:
            # schedules of policies count environment steps; a budget of episodes or time may be used faster
            self.collector.schedule_lead = max(0, int(progress * self.cfg.env_steps) - self.env_steps)

    def iteration_end(self, episodes: list[Episode], metrics: Mapping[str, Tensor]) -> None:
        """Count the finished episodes and call the callbacks. `metrics` are those of the last update, if any."""
        self._update_seconds()
        self.episodes += len(episodes)
        # a snapshot, so a callback that takes long doesn't make the next ones miss an interval
        self.counts_before = self.counts
        self.counts = Counts(self.steps, self.episodes, self.updates, self.seconds)
        self.longest_episode = max([self.longest_episode, *(episode.length for episode in episodes)])
        self.out_of_budget = self.progress >= 1.0
        if episodes:
            self._report_episodes(episodes)
        self.metrics = metrics or self.metrics
        self._end_iteration(metrics)

    def _end_iteration(self, metrics: Mapping[str, Tensor], first: int = 0) -> None:
        """Call the callbacks from index `first` on. After an interrupted evaluation, the resumed run calls the rest."""
        self._unfinished = None
        for i, callback in enumerate(self.callbacks[first:], first):
            try:
                callback.iteration_end(self, metrics)
            except EvaluationInterrupted:
                self._unfinished = i, bool(metrics)
                return

    def _report_episodes(self, episodes: list[Episode]) -> None:
        # calling only overridden hooks saves time with thousands of environments
        callbacks = [callback for callback in self.callbacks if type(callback).episode_end is not Callback.episode_end]
        if not callbacks:
            self.recent_episodes.extend(episodes)
            return
        for episode in episodes:
            self.recent_episodes.append(episode)
            for callback in callbacks:
                callback.episode_end(self, episode)

    def evaluation_step(self) -> None:
        """Call the callbacks after a step of an evaluation. Raise `EvaluationInterrupted` if the run is to stop."""
        if self.interrupt_requested:
            raise EvaluationInterrupted
        for callback in self.callbacks:
            callback.evaluation_step(self)

    def evaluation_end(self, evaluation: Evaluation) -> None:
        for callback in self.callbacks:
            callback.evaluation_end(self, evaluation)

    def log(self, name: str, value: float) -> None:
        """Log a custom number, such as `loop.log("goals_reached", 3)`.

        The next row of metrics.csv has the last value logged before it, in a column of this name. TensorBoard and
        trackers show it as `custom/NAME`, or as NAME if that has a slash. Reading the value of a tensor waits for its
        device.
        """
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][\w.-]*(/[\w.-]+)*", name):
            raise UserError(f"loop.log: {name!r} is not a valid name; use letters, digits and _ . - /")
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"loop.log({name!r}, ...): the value must be a single number, not {value!r}") from None
        for callback in self.callbacks:
            callback.metric_logged(self, name, number)

    def video_recorded(self, path: Path) -> None:
        for callback in self.callbacks:
            callback.video_recorded(self, path)

    def recent_mean(self, field: str) -> float:
        """Return the mean `episode_return` or `length` of the last 100 training episodes; NaN if none has ended."""
        return float(np.mean([getattr(e, field) for e in self.recent_episodes])) if self.recent_episodes else math.nan

    def recent_info_mean(self, name: str) -> float:
        """Return the mean of a number in `info` over the last 100 training episodes; NaN if none has it."""
        values = [episode.info[name] for episode in self.recent_episodes if name in episode.info]
        return float(np.mean(values)) if values else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the buffer, which is large and saved in its own files."""
        self._update_seconds()
        return {
            "learner": self.learner.state_dict(),
            "actor": None if self.offline else self.collector.state_dict(),
            "rng": self.rng.bit_generator.state,
            "episodes": self.episodes,
            "longest_episode": self.longest_so_far,
            "seconds": self.seconds,
            "counts": [float(count) for count in self.counts],
            "counts_before": [float(count) for count in self.counts_before],
            "unfinished": self._unfinished,
            "finished": self.finished,
            "recent": [(e.episode_return, e.length, e.info) for e in self.recent_episodes],
            "metrics": {name: value.detach().clone() for name, value in self.metrics.items()},
            "callbacks": {name: callback.state_dict() for name, callback in self._named_callbacks()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Restore a saved state. Return the indices of environments that start a new episode instead of continuing."""
        saved = check_state("the run", {name: state[name] for name in SAVED if name in state}, SAVED)
        self.learner.load_state_dict(state["learner"])
        restarted = [] if self.offline else self.collector.load_state_dict(state["actor"])
        self.rng.bit_generator.state = state["rng"]
        self.episodes, self.seconds = saved["episodes"], saved["seconds"]
        # older checkpoints lack these; they were written at the end of an iteration
        self.longest_episode = saved.get("longest_episode", 0)
        now = Counts(self.steps, self.episodes, self.updates, self.seconds)
        self.counts, self.counts_before = (
            Counts(*saved[name]) if name in saved else now for name in ("counts", "counts_before")
        )
        self._unfinished, self.finished = saved.get("unfinished"), saved.get("finished", True)
        self.recent_episodes.extend(Episode(*values) for values in saved["recent"])
        self.metrics = saved["metrics"]
        for name, callback in self._named_callbacks():
            if name in state["callbacks"]:  # a resumed run may have other callbacks
                callback.load_state_dict(state["callbacks"][name])
        return restarted

    def _named_callbacks(self) -> list[tuple[str, Callback]]:
        names = [type(callback).__name__ for callback in self.callbacks]
        return [(f"{name} {names[:i].count(name)}", self.callbacks[i]) for i, name in enumerate(names)]
