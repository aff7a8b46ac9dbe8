"""Vector environments by name: a table of back ends behind one function, `make_vector`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zhixing.envs.crash.failure_policy import ON_CRASH, FailurePolicy, keep_capsule
from zhixing.envs.portable import reference
from zhixing.envs.registry import RegisteredEnv
from zhixing.envs.vector.base import VectorEnv
from zhixing.envs.vector.choose_backend import Probe, choose, default_workers, probe
from zhixing.envs.vector.native import NativeVectorEnv, suits_auto
from zhixing.envs.vector.process import ProcessVectorEnv
from zhixing.envs.vector.serial import LIMITS_NEED_PROCESSES, SerialVectorEnv, layout_of
from zhixing.envs.wrappers.time_limit import time_limit_of
from zhixing.errors import EnvCrashError, UserError, note, unknown

WITHOUT_WORKERS = ("serial", "native", "envpool", "torch")
STEP_TOGETHER = ("native", "envpool", "torch")  # one call steps all environments, so none can be restarted alone


@dataclass(frozen=True)
class Request:
    """Arguments of `make_vector`, after validation."""

    task: RegisteredEnv
    num: int
    workers: int | None
    faults: FailurePolicy
    address: str | None
    device: str
    idle: bool

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.task.options)


def make_vector(
    name: str | Any,
    num: int,
    backend: str = "auto",
    workers: int | None = None,
    options: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
    faults: FailurePolicy | None = None,
    address: str | None = None,
    device: str = "cpu",
    idle: bool = True,
) -> VectorEnv:
    """Make a vector of `num` environments.

    `name` is a registered name, a class, a function that makes an environment, or an environment. The back end and the
    number of workers that `auto` chose are in `.backend` and `.workers`. `address` is that of a Ray cluster (back end
    ray), `device` the torch device (back end torch). `idle=False` means that this process computes something else
    while the environments step, which `auto` takes into account.
    """
    faults = faults or FailurePolicy()
    _check(num, backend, workers, faults)
    named = {"name": name} if isinstance(name, str) else reference(name)
    env_name, given = named.pop("name"), {**named, **(options or {})}
    if render_mode is not None:
        given["render_mode"] = render_mode
    return BACKENDS[backend](Request(RegisteredEnv(env_name, given), num, workers, faults, address, device, idle))


def make_few(
    task: RegisteredEnv, num: int, vector: Any, folder: Path | None = None
) -> SerialVectorEnv | ProcessVectorEnv:
    """Make a few environments for a side job of a run with the settings `vector`, such as a video.

    They live in this process, or in one worker process if the settings keep environments out of this one. Crash
    reports go to `folder`.
    """
    if not vector.isolated:
        return SerialVectorEnv(task, num, faults=FailurePolicy(folder=folder))
    return ProcessVectorEnv(task, num, 1, faults=FailurePolicy.of(vector, folder))


def _check(num: int, backend: str, workers: int | None, faults: FailurePolicy) -> None:
    """Raise `UserError` if the arguments of `make_vector` don't fit together."""
    if backend not in BACKENDS:
        raise unknown("backend", backend, tuple(BACKENDS))
    if faults.on_crash not in ON_CRASH:
        raise unknown("on_crash", faults.on_crash, ON_CRASH)
    if num < 1:
        raise UserError(f"the number of environments is {num}; it must be at least 1")
    if workers is not None and not 1 <= workers <= num:
        raise UserError(f"the number of workers is {workers}; it must be from 1 to the {num} environments")
    if workers not in (None, 1) and backend in WITHOUT_WORKERS:
        raise UserError(f"{backend} environments have no workers, not {workers}; backends process, mixed and ray have")
    if faults.guarded and backend in (*STEP_TOGETHER, "mixed"):
        why = "live in this process too" if backend == "mixed" else "step together"
        raise UserError(f"{backend} environments {why}: on_crash=replace and time limits take backend process")
    if faults.limited and backend == "ray":
        raise UserError(LIMITS_NEED_PROCESSES)


def _auto(request: Request) -> VectorEnv:
    """Choose the fastest back end: a native one if there is one, otherwise by measuring an environment."""
    task, num, faults = request.task, request.num, request.faults
    if faults.guarded:  # only a worker process can be killed, and measuring an environment that may fail is a risk
        return _process(request)
    if num > 1 and suits_auto(task.name, request.options):
        return _native(request)
    probed = _probe(request)
    workers = request.workers or default_workers(num, probed.waits)
    backend = choose(num, probed, workers, request.idle)
    if backend != "serial":
        try:
            return ProcessVectorEnv(task, num, workers, probed.layout, faults, mixed=backend == "mixed")
        except (UserError, EnvCrashError) as error:
            reason = str(error).strip().splitlines()[0]
            note(f"{task.name} runs in this process (vector.backend=serial): {reason}")
    return SerialVectorEnv(task, num, probed.layout, faults)


def _serial(request: Request) -> VectorEnv:
    return SerialVectorEnv(request.task, request.num, faults=request.faults)


def _process(request: Request) -> VectorEnv:
    workers = request.workers
    if workers is None and request.faults.guarded:
        workers = default_workers(request.num, waits=False)
    return ProcessVectorEnv(request.task, request.num, workers, faults=request.faults)


def _mixed(request: Request) -> VectorEnv:
    workers, layout = request.workers, None
    if workers is None:
        probed = _probe(request)
        workers, layout = default_workers(request.num, probed.waits), probed.layout
    return ProcessVectorEnv(request.task, request.num, workers, layout, request.faults, mixed=True)


def _native(request: Request) -> VectorEnv:
    one = request.task()  # rejects wrong names and options with the usual errors
    one.close()
    env = NativeVectorEnv(request.task.name, request.num, request.options)
    env.max_episode_steps = time_limit_of(one)
    return env


def _envpool(request: Request) -> VectorEnv:
    from zhixing.envs.vector.envpool import EnvPoolVectorEnv  # an optional dependency

    layout = layout_of(request.task)
    env = EnvPoolVectorEnv(request.task.name, request.num, layout.spaces, request.options)
    env.max_episode_steps = layout.max_episode_steps
    return env


def _torch(request: Request) -> VectorEnv:
    from zhixing.envs.torch_native import TorchVectorEnv  # worker processes start faster without torch

    spaces = layout_of(request.task).spaces
    return TorchVectorEnv(request.task.name, request.num, spaces, request.options, request.device)


def _ray(request: Request) -> VectorEnv:
    from zhixing.distributed.vector import RayVectorEnv  # an optional dependency

    workers, layout = request.workers or request.num, layout_of(request.task)
    return RayVectorEnv(request.task, request.num, workers, layout, request.faults, request.address)


def _probe(request: Request) -> Probe:
    """Measure one environment; write a crash report if it fails."""
    task = request.task
    try:
        return probe(task)
    except EnvCrashError as crash:
        keep_capsule(crash, request.faults, env={"name": task.name, "options": task.options}, backend="serial")
        raise


BACKENDS: dict[str, Callable[[Request], VectorEnv]] = {
    "auto": _auto,
    "serial": _serial,
    "process": _process,
    "mixed": _mixed,
    "native": _native,
    "envpool": _envpool,
    "torch": _torch,
    "ray": _ray,
}
