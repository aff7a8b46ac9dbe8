"""Where the time of a run goes, and which settings would make it faster.

The parts of a session are timed by wrapping their methods from outside, so that a run that isn't profiled pays nothing.
Evaluations, checkpoints and logs are left out: they cost what their intervals say.
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
from zhixing.core.learner import Learner
from zhixing.core.optimizer import Optimizer
from zhixing.distributed.collector import DistributedCollector
from zhixing.distributed.worker_pool import LocalCrew
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
    "environment": "steps of the task",
    "policy": "choosing actions",
    "actor": "storing steps; in self-play games and searches",
    "replay": "adding and sampling",
    "loss": "losses, advantages, minibatches",
    "gradient": "backward",
    "optimizer": "clipping, moving weights, targets",
    "the rest": "the loop itself",
}
GROUPS = {
    "environments": ("environment",),
    "acting": ("policy", "actor"),
    "learning": ("replay", "loss", "gradient", "optimizer"),
}
WARM_SECONDS = 0.3  # at most, after the first update, since first calls are slow
TRY_SHARE = 0.2  # of the time of the profile, for each round of each setting that is tried
ROUNDS = 2
TRIES_SECONDS = 30.0  # for all settings that are tried, at least; else twice the time of the profile for each
WORTH = 1.15  # times as fast: less may be chance
AS_IT_IS = "as it is"


class Clock:
    """Seconds by part. What a part inside another takes isn't counted for the outer one, so that they add up."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.inside = [0.0]  # of each call under way: what calls inside it took
        self.waits = device.type == "cuda"  # where a call returns before its work is done

    def now(self) -> float:
        if self.waits:
            torch.cuda.synchronize()
        return time.perf_counter()

    def time(self, owner: Any, method: str, part: str) -> None:
        call = getattr(owner, method)

        def timed(*args: Any, **settings: Any) -> Any:
            begin = self.now()
            self.inside.append(0.0)
            try:
                return call(*args, **settings)
            finally:
                took = self.now() - begin
                self.seconds[part] += took - self.inside.pop()
                self.inside[-1] += took

        setattr(owner, method, timed)

    def watch(self, session: Session) -> None:
        """All parts of a session."""
        if session.env is not None:
            for method in ("step", "reset", "advance", "begin"):  # the last two of tasks written in torch
                if hasattr(session.env, method):
                    self.time(session.env, method, "environment")
        if session.actor is not None:
            self.time(session.actor, "collect", "actor")
        if isinstance(session.actor, DistributedCollector):
            self.time(session.actor, "turn", "actor")
            if isinstance(session.actor.crew, LocalCrew):
                for worker in session.actor.crew.workers:
                    own, learner = worker.begin()
                    self.time(own.env, "step", "environment")
                    self.time(learner.policy, "act", "policy")
                    self.time(learner, "gradients", "loss")
        self.time(session.learner.policy, "act", "policy")
        for buffer in session.loop.buffers.values():
            for method in ("add", "sample", "set_priority"):
                self.time(buffer, method, "replay")
        for learner in _learners(session.learner):
            for method, part in {"update": "loss", "gradients": "loss", "observe": "loss"}.items():
                self.time(learner, method, part)
            self.time(learner, "after_step", "optimizer")
            for each in vars(learner).values():
                if isinstance(each, Optimizer):
                    self.time(each, "gradient", "gradient")
                    self.time(each, "step", "optimizer")


def _learners(learner: Learner) -> Iterator[Learner]:
    """It and those that it is made of."""
    yield learner
    for part in vars(learner).values():
        if isinstance(part, Learner):
            yield from _learners(part)


class Stopwatch(Callback):
    """Ends training so many seconds after it has warmed up; what was before isn't counted."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self.seconds, self.clock = seconds, clock
        self.warm_at: float | None = None  # when it will be
        self.begin: float | None = None
        self.steps_before, self.steps, self.took = 0, 0, 0.0

    def iteration_end(self, loop: TrainingLoop, metrics: Mapping[str, Tensor]) -> None:
        now = self.clock.now()
        if self.begin is not None:
            self.steps, self.took = loop.steps - self.steps_before, now - self.begin
            if self.took >= self.seconds:
                loop.stop("measured")
        elif self.warm_at is None and (loop.updates or loop.cfg.scheme == "play"):
            self.warm_at = now + min(WARM_SECONDS, self.seconds)
        elif self.warm_at is not None and now >= self.warm_at:
            self.begin, self.steps_before = now, loop.steps
            self.clock.seconds = dict.fromkeys(PARTS, 0.0)


@dataclass(frozen=True)
class Profile:
    cfg: RunConfig  # with what was decided for auto
    unit: str  # of steps: those of the environment, or updates from a dataset
    steps: int
    seconds: float
    parts: dict[str, float]  # seconds of each
    rollout: int | None = None  # steps of an iteration, where it was cut since a whole one takes too long

    @property
    def speed(self) -> float:
        return self.steps / self.seconds

    @property
    def shares(self) -> dict[str, float]:
        return {part: seconds / self.seconds for part, seconds in self.parts.items()}

    @property
    def groups(self) -> dict[str, float]:
        """Shares of environments, acting and learning."""
        return {name: sum(self.shares[part] for part in parts) for name, parts in GROUPS.items()}

    @property
    def bound_by(self) -> str:
        return max(self.groups, key=lambda name: self.groups[name])


def profile(cfg: RunConfig, seconds: float) -> Profile:
    """Train for so long, writing nothing. Iterations that would take longer than half of it are cut shorter, with as
    many updates per step."""
    rollout = None
    if cfg.scheme == "on_policy" and shorter(cfg, 1) != cfg:
        speed = _measure(shorter(cfg, 1), 0.0, detail=False).speed  # of the shortest iterations there can be
        rollout = int(speed * seconds / 2)
    short = shorter(cfg, rollout)
    return replace(_measure(short, seconds), rollout=rollout if short != cfg else None)


def shorter(cfg: RunConfig, rollout: int | None) -> RunConfig:
    """With iterations halved until they have at most so many steps, but never smaller than a minibatch."""
    if rollout is None or not isinstance(cfg, OnPolicyConfig):
        return cfg
    num, steps, minibatch = cfg.num_envs, cfg.rollout_steps, getattr(cfg, "minibatch_size", cfg.num_envs)
    while num * steps > rollout and steps % 2 == 0 and num * steps // 2 >= minibatch:
        steps //= 2
    return cfg.model_copy(update={"rollout_steps": steps})


def _measure(cfg: RunConfig, seconds: float, detail: bool = True) -> Profile:
    """Without `detail` only the speed is measured, free of the clocks' cost."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as aside:
        session = Session(_steady(cfg), aside, quiet=True)
        try:
            clock = Clock(session.learner.device)
            if detail:
                clock.watch(session)
            stopwatch = Stopwatch(seconds, clock)
            session.loop.callbacks = [StopOnNonFinite(), stopwatch]
            # what overlaps can't be told apart: its parts are measured one after the other
            overlaps = detail and session.trainer is off_policy_async
            (off_policy if overlaps else session.trainer)(session.loop)
        finally:
            session.close()
            torch.set_num_threads(threads)
    parts = dict(clock.seconds)
    parts["the rest"] = stopwatch.took - sum(parts.values())
    return Profile(session.cfg, session.loop.unit, stopwatch.steps, stopwatch.took, parts)


def _steady(cfg: RunConfig) -> RunConfig:
    """As it is for most of a run: beyond the warm-up, with little exploration, far from its end."""
    changes: dict[str, Any] = {"env_steps": 10**9, "episodes": None, "duration": None, "stop_return": None}
    changes |= {"eval_video": False, "plot": None}  # whose parts needn't be made
    fields = type(cfg).model_fields
    if "offline_updates" in fields:
        changes["offline_updates"] = 10**9
    if "learning_starts" in fields:
        changes["learning_starts"] = min(getattr(cfg, "learning_starts"), 4 * getattr(cfg, "batch_size"))  # noqa: B009
    if "epsilon_start" in fields:
        changes["epsilon_start"] = getattr(cfg, "epsilon_end")  # noqa: B009
    return cfg.model_copy(update=changes)


# --- what would be faster ---


@dataclass(frozen=True)
class Try:
    setting: str  # as one writes it
    speed: float  # steps per second, in the better of its rounds
    times: float  # as fast as it is now
    untold: str = ""  # why there is no speed


def alternatives(found: Profile) -> dict[str, dict[str, Any]]:
    """Settings to try beside those of a profile, by how one writes them."""
    cfg = found.cfg
    changes: dict[str, Any] = {}
    for threads in sorted({1, cpu_count()} - {cfg.num_threads}):
        changes[f"num_threads={threads}"] = {"num_threads": threads}
    if found.unit == "updates":
        return changes
    num = cfg.num_envs
    for other in (num // 2, 2 * num, 4 * num):
        if other:  # with whatever back end suits so many
            changes[f"num_envs={other}"] = {"num_envs": other, "vector": {"backend": "auto", "workers": "auto"}}
    if cfg.scheme == "self_play":  # games of its own, in this process
        return changes
    native = ["native"] if has_native(cfg.env.name, cfg.env.options) else []
    for backend in ("serial", *(["process", "mixed"] if num > 1 else []), *native):
        if backend != cfg.vector.backend:
            changes[f"vector.backend={backend}"] = {"vector": {"backend": backend, "workers": "auto"}}
    return changes


def try_alternatives(
    asked: RunConfig, found: Profile, seconds: float, tell: Callable[[str], None] = lambda setting: None
) -> list[Try]:
    """Each for a short time, in turn, so that a machine that is busy for a while is so for all. The settings as they
    are come first. When they take too long together, what is left isn't tried."""
    plain = asked.model_dump(mode="json")
    changes: dict[str, dict[str, Any]] = {AS_IT_IS: {}, **alternatives(found)}
    until = time.monotonic() + tries_seconds(found, seconds)
    speeds: dict[str, list[float]] = {setting: [] for setting in changes}
    refused: dict[str, str] = {}
    for _ in range(ROUNDS):
        for setting in [one for one in changes if one not in refused]:
            if time.monotonic() > until and speeds[AS_IT_IS]:
                continue
            tell(setting)
            try:
                cfg = shorter(config.build([plain], changes[setting]), found.rollout)
                speeds[setting].append(_measure(cfg, TRY_SHARE * seconds, detail=False).speed)
            except UserError as error:
                refused[setting] = str(error).split("\n")[0]
    now = max(speeds[AS_IT_IS])
    tries = []
    for setting, mine in speeds.items():
        best = max(mine, default=0.0)
        why = f"refused: {refused[setting]}" if setting in refused else "" if mine else "not tried: no time was left"
        tries.append(Try(setting, best, best / now, why))
    return tries


def tries_seconds(found: Profile, seconds: float) -> float:
    """How long all tries may take, but for the one that is under way then."""
    return max(TRIES_SECONDS, 2 * seconds * (1 + len(alternatives(found))))


def advice(tries: list[Try]) -> list[Try]:
    """What is clearly faster, the fastest first."""
    return sorted((one for one in tries if one.times >= WORTH), key=lambda one: -one.times)


def rows_of_parts(found: Profile) -> list[dict[str, Any]]:
    return [
        {"part": part, "share": f"{100 * share:5.1f} %", "seconds": found.parts[part], "what": PARTS[part]}
        for part, share in found.shares.items()
        if share > 0
    ]


def rows_of_tries(tries: list[Try], unit: str) -> list[dict[str, Any]]:
    return [
        {"setting": one.setting, f"{unit}/s": f"{one.speed:,.0f}", "times": f"{one.times:.2f}", "": ""}
        if not one.untold
        else {"setting": one.setting, f"{unit}/s": "", "times": "", "": one.untold}
        for one in tries
    ]
