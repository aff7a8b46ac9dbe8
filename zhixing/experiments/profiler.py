"""Measure where the time of a run goes and which settings would be faster.

The parts of a session are timed by wrapping their methods from outside, so unprofiled runs pay nothing. Evaluations,
checkpoints and logging are excluded: their cost depends on their intervals.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from zhixing import config
from zhixing.config import OnPolicyConfig, RunConfig
from zhixing.core.learner import Learner, LearnsOnWorkers
from zhixing.core.optimizer import Optimizer, TargetUpdater
from zhixing.distributed.collector import DistributedCollector
from zhixing.distributed.worker_pool import LocalWorkerPool
from zhixing.envs.vector.native import has_native
from zhixing.errors import UserError
from zhixing.training.callbacks import Callback, StopOnNonFinite
from zhixing.training.loop import TrainingLoop
from zhixing.training.session import Session
from zhixing.training.trainers import off_policy, off_policy_async
from zhixing.utils.cpus import cpu_count

if TYPE_CHECKING:
    from torch import Tensor

PARTS = {
    "environment": "environment steps",
    "policy": "choosing actions",
    "actor": "storing steps; games and searches in self-play",
    "replay": "adding and sampling",
    "loss": "losses, advantages, minibatches",
    "gradient": "backward pass",
    "optimizer": "clipping, weight updates, target networks",
    "other": "the training loop itself",
}
GROUPS = {
    "environments": ("environment",),
    "acting": ("policy", "actor"),
    "learning": ("replay", "loss", "gradient", "optimizer"),
}
WARMUP_SECONDS = 0.3  # at most, after the first update: first calls are slow
ALTERNATIVE_SHARE = 0.2  # of the profile's time, for one round of one alternative
ROUNDS = 2
MIN_BUDGET_SECONDS = 30.0  # for measuring all alternatives together
MIN_SPEEDUP = 1.15  # smaller differences may be noise
BASELINE = "current settings"


class PartTimer:
    """Sum up the seconds spent in each part. Time in a nested part counts for that part only, so the parts add up."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.nested_seconds = [0.0]  # per active call: the time spent in timed calls inside it
        # on accelerators, calls return before their work is done
        self.synchronize = None if device.type == "cpu" else torch.get_device_module(device).synchronize

    def now(self) -> float:
        if self.synchronize is not None:
            self.synchronize()
        return time.perf_counter()

    def wrap(self, owner: Any, method: str, part: str) -> None:
        """Replace a method by one that adds its time to `part`."""
        call = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            self.nested_seconds.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                elapsed = self.now() - start
                self.seconds[part] += elapsed - self.nested_seconds.pop()
                self.nested_seconds[-1] += elapsed

        setattr(owner, method, timed)

    def wrap_session(self, session: Session) -> None:
        if session.env is not None:
            for method in ("step", "reset", "step_tensors", "reset_tensors"):  # the last two exist in torch-native envs
                if hasattr(session.env, method):
                    self.wrap(session.env, method, "environment")
        if session.collector is not None:
            self.wrap(session.collector, "collect", "actor")
        if isinstance(session.collector, DistributedCollector):
            self.wrap(session.collector, "collect_from_worker", "actor")
            if isinstance(session.collector.pool, LocalWorkerPool):
                for worker in session.collector.pool.workers:
                    actor, learner = worker.build()
                    self.wrap(actor.env, "step", "environment")
                    self.wrap(learner.policy, "act", "policy")
                    if isinstance(learner, LearnsOnWorkers):
                        self.wrap(learner, "compute_gradients", "loss")
        self.wrap(session.learner.policy, "act", "policy")
        if session.loop.has_buffer:
            for method in ("add", "sample", "set_priority"):
                self.wrap(session.loop.buffer, method, "replay")
        for learner in _nested_learners(session.learner):
            for method in ("update", "update_normalizers"):
                self.wrap(learner, method, "loss")
            for attribute in vars(learner).values():
                if isinstance(attribute, Optimizer):
                    self.wrap(attribute, "compute_gradients", "gradient")
                    self.wrap(attribute, "apply", "optimizer")
                elif isinstance(attribute, TargetUpdater):
                    self.wrap(attribute, "polyak_update", "optimizer")


def _nested_learners(learner: Learner) -> Iterator[Learner]:
    """Yield a learner and, recursively, the learners it contains."""
    yield learner
    for attribute in vars(learner).values():
        if isinstance(attribute, Learner):
            yield from _nested_learners(attribute)


class MeasureSpeed(Callback):
    """Count steps for `seconds` after the warm-up, then stop training."""

    def __init__(self, seconds: float, timer: PartTimer) -> None:
        self.seconds, self.timer = seconds, timer
        self.warmup_end: float | None = None
        self.start: float | None = None
        self.steps_at_start, self.steps, self.elapsed = 0, 0, 0.0

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        now = self.timer.now()
        if self.start is not None:
            self.steps, self.elapsed = loop.steps - self.steps_at_start, now - self.start
            if self.elapsed >= self.seconds:
                loop.stop("measured")
        elif self.warmup_end is None and (loop.updates or loop.cfg.scheme == "play"):
            self.warmup_end = now + min(WARMUP_SECONDS, self.seconds)
        elif self.warmup_end is not None and now >= self.warmup_end:
            self.start, self.steps_at_start = now, loop.steps
            self.timer.seconds = dict.fromkeys(PARTS, 0.0)


@dataclass(frozen=True)
class Profile:
    cfg: RunConfig  # with every `auto` resolved
    unit: str  # what is counted: environment steps, or updates on a dataset
    steps: int
    seconds: float
    parts: dict[str, float]  # seconds per part
    max_rollout: int | None = None  # steps that an iteration was limited to, if a whole one would take too long

    @property
    def speed(self) -> float:
        return self.steps / self.seconds

    @property
    def shares(self) -> dict[str, float]:
        return {part: seconds / self.seconds for part, seconds in self.parts.items()}

    @property
    def group_shares(self) -> dict[str, float]:
        return {name: sum(self.shares[part] for part in parts) for name, parts in GROUPS.items()}

    @property
    def bottleneck(self) -> str:
        return max(self.group_shares, key=lambda name: self.group_shares[name])


def profile(cfg: RunConfig, seconds: float) -> Profile:
    """Train for `seconds` without writing a run folder, and return where the time went.

    If an iteration would take more than half of that time, it is shortened, with the same number of updates per step.
    """
    max_rollout = None
    if cfg.scheme == "on_policy" and shorten_rollout(cfg, 1) != cfg:
        speed = _measure(shorten_rollout(cfg, 1), 0.0, time_parts=False).speed  # with the shortest possible iterations
        max_rollout = int(speed * seconds / 2)
    short = shorten_rollout(cfg, max_rollout)
    return replace(_measure(short, seconds), max_rollout=max_rollout if short != cfg else None)


def shorten_rollout(cfg: RunConfig, max_rollout: int | None) -> RunConfig:
    """Halve an on-policy rollout until it has at most `max_rollout` steps, but keep at least a minibatch."""
    if max_rollout is None or not isinstance(cfg, OnPolicyConfig):
        return cfg
    num_envs, steps, minibatch = cfg.num_envs, cfg.rollout_steps, getattr(cfg, "minibatch_size", cfg.num_envs)
    while num_envs * steps > max_rollout and steps % 2 == 0 and num_envs * steps // 2 >= minibatch:
        steps //= 2
    return cfg.model_copy(update={"rollout_steps": steps})


def _measure(cfg: RunConfig, seconds: float, time_parts: bool = True) -> Profile:
    """Train for `seconds` after the warm-up. Without `time_parts`, measure only the speed, free of timing overhead."""
    num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        session = Session(_steady_state(cfg), folder, quiet=True)
        try:
            timer = PartTimer(session.learner.device)
            if time_parts:
                timer.wrap_session(session)
            speed = MeasureSpeed(seconds, timer)
            session.loop.callbacks = [StopOnNonFinite(), speed]
            # concurrent parts can't be timed separately: run them in sequence
            sequential = time_parts and session.trainer is off_policy_async
            (off_policy if sequential else session.trainer)(session.loop)
        finally:
            session.close()
            torch.set_num_threads(num_threads)
    parts = dict(timer.seconds)
    parts["other"] = speed.elapsed - sum(parts.values())
    return Profile(session.cfg, session.loop.unit, speed.steps, speed.elapsed, parts)


def _steady_state(cfg: RunConfig) -> RunConfig:
    """Return a config that trains as in most of a run: past the warm-up, with little exploration, far from its end."""
    changes: dict[str, Any] = {"env_steps": 10**9, "episodes": None, "duration": None, "stop_return": None}
    changes |= {"eval_video": False, "plot": None}
    fields = type(cfg).model_fields
    if "offline_updates" in fields:
        changes["offline_updates"] = 10**9
    if "learning_starts" in fields:
        changes["learning_starts"] = min(getattr(cfg, "learning_starts"), 4 * getattr(cfg, "batch_size"))  # noqa: B009
    if "epsilon_start" in fields:
        changes["epsilon_start"] = getattr(cfg, "epsilon_end")  # noqa: B009
    return cfg.model_copy(update=changes)


# --- faster settings ---


@dataclass(frozen=True)
class Alternative:
    """A setting that was tried in place of the current one, and its measured speed."""

    setting: str  # as written on the command line
    speed: float  # steps per second, in the faster round
    speedup: float  # relative to the current settings
    skipped: str = ""  # why it has no measurement


def alternatives(profile: Profile) -> dict[str, dict[str, Any]]:
    """Return the settings to try instead of the profiled ones: their overrides, by how a user writes them."""
    cfg = profile.cfg
    changes: dict[str, Any] = {}
    for threads in sorted({1, cpu_count()} - {cfg.num_threads}):
        changes[f"num_threads={threads}"] = {"num_threads": threads}
    if profile.unit == "updates":
        return changes
    for num_envs in (cfg.num_envs // 2, 2 * cfg.num_envs, 4 * cfg.num_envs):
        if num_envs:
            auto_backend = {"backend": "auto", "workers": "auto"}
            changes[f"num_envs={num_envs}"] = {"num_envs": num_envs, "vector": auto_backend}
    if cfg.scheme == "self_play":  # has no vector env
        return changes
    native = ["native"] if has_native(cfg.env.name, cfg.env.options) else []
    for backend in ("serial", *(["process", "mixed"] if cfg.num_envs > 1 else []), *native):
        if backend != cfg.vector.backend:
            changes[f"vector.backend={backend}"] = {"vector": {"backend": backend, "workers": "auto"}}
    return changes


def measure_alternatives(
    cfg: RunConfig, profile: Profile, seconds: float, on_start: Callable[[str], None] = lambda setting: None
) -> list[Alternative]:
    """Measure the current settings, then each alternative, in several rounds.

    The rounds interleave the settings, so temporary load on the machine affects all of them. Alternatives that don't
    fit into `time_budget` are skipped.
    """
    base = cfg.model_dump(mode="json")
    changes: dict[str, dict[str, Any]] = {BASELINE: {}, **alternatives(profile)}
    deadline = time.monotonic() + time_budget(profile, seconds)
    speeds: dict[str, list[float]] = {setting: [] for setting in changes}
    rejected: dict[str, str] = {}
    for _ in range(ROUNDS):
        for setting in [setting for setting in changes if setting not in rejected]:
            if time.monotonic() > deadline and speeds[BASELINE]:
                continue
            on_start(setting)
            try:
                changed = shorten_rollout(config.build([base], changes[setting]), profile.max_rollout)
                speeds[setting].append(_measure(changed, ALTERNATIVE_SHARE * seconds, time_parts=False).speed)
            except UserError as error:
                rejected[setting] = str(error).split("\n")[0]
    baseline = max(speeds[BASELINE])
    results = []
    for setting, measured in speeds.items():
        best = max(measured, default=0.0)
        skipped = "" if measured else "not measured: out of time"
        if setting in rejected:
            skipped = f"rejected: {rejected[setting]}"
        results.append(Alternative(setting, best, best / baseline, skipped))
    return results


def time_budget(profile: Profile, seconds: float) -> float:
    """Return the seconds after which no further alternative is started."""
    return max(MIN_BUDGET_SECONDS, 2 * seconds * (1 + len(alternatives(profile))))


def recommend(measured: list[Alternative]) -> list[Alternative]:
    """Return the alternatives that are clearly faster, fastest first."""
    return sorted((a for a in measured if a.speedup >= MIN_SPEEDUP), key=lambda a: -a.speedup)


def part_rows(profile: Profile) -> list[dict[str, Any]]:
    return [
        {"part": part, "share": f"{100 * share:5.1f} %", "seconds": profile.parts[part], "what": PARTS[part]}
        for part, share in profile.shares.items()
        if share > 0
    ]


def alternative_rows(measured: list[Alternative], unit: str) -> list[dict[str, Any]]:
    return [
        {"setting": a.setting, f"{unit}/s": f"{a.speed:,.0f}", "speedup": f"{a.speedup:.2f}", "": ""}
        if not a.skipped
        else {"setting": a.setting, f"{unit}/s": "", "speedup": "", "": a.skipped}
        for a in measured
    ]
