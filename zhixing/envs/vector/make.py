"""Vector environments by name: a table of back ends behind one function, `make_vector`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zhixing.envs.crash.failure_policy import ON_CRASH, FailurePolicy, save_crash_report
from zhixing.envs.portable import env_settings
from zhixing.envs.registry import RegisteredEnv
from zhixing.envs.vector.backend_choice import Probe, choose_backend, default_workers, probe
from zhixing.envs.vector.base import VectorEnv
from zhixing.envs.vector.native import NativeVectorEnv, auto_uses_native
from zhixing.envs.vector.process import ProcessVectorEnv
from zhixing.envs.vector.serial import LIMITS_NEED_PROCESSES, SerialVectorEnv, infer_env_spec
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
    failure_policy: FailurePolicy
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
    failure_policy: FailurePolicy | None = None,
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
    failure_policy = failure_policy or FailurePolicy()
    _check(num, backend, workers, failure_policy)
    named = {"name": name} if isinstance(name, str) else env_settings(name)
    env_name, given = named.pop("name"), {**named, **(options or {})}
    if render_mode is not None:
        given["render_mode"] = render_mode
    return BACKENDS[backend](
        Request(RegisteredEnv(env_name, given), num, workers, failure_policy, address, device, idle)
    )


def make_small_vector(
    task: RegisteredEnv, num: int, vector: Any, folder: Path | None = None
) -> SerialVectorEnv | ProcessVectorEnv:
    """Make a few environments for a side job of a run with the settings `vector`, such as a video.

    They live in this process, or in one worker process if the settings keep environments out of this one. Crash
    reports go to `folder`.
    """
    if not vector.isolated:
        return SerialVectorEnv(task, num, failure_policy=FailurePolicy(folder=folder))
    return ProcessVectorEnv(task, num, 1, failure_policy=FailurePolicy.from_settings(vector, folder))


def _check(num: int, backend: str, workers: int | None, failure_policy: FailurePolicy) -> None:
    """Raise `UserError` if the arguments of `make_vector` don't fit together."""
    if backend not in BACKENDS:
        raise unknown("backend", backend, tuple(BACKENDS))
    if failure_policy.on_crash not in ON_CRASH:
        raise unknown("on_crash", failure_policy.on_crash, ON_CRASH)
    if num < 1:
        raise UserError(f"the number of environments is {num}; it must be at least 1")
    if workers is not None and not 1 <= workers <= num:
        raise UserError(f"the number of workers is {workers}; it must be from 1 to the {num} environments")
    if workers not in (None, 1) and backend in WITHOUT_WORKERS:
        raise UserError(f"{backend} environments have no workers, not {workers}; backends process, mixed and ray have")
    if failure_policy.needs_processes and backend in (*STEP_TOGETHER, "mixed"):
        why = "live in this process too" if backend == "mixed" else "step together"
        raise UserError(f"{backend} environments {why}: on_crash=replace and time limits take backend process")
    if failure_policy.has_timeout and backend == "ray":
        raise UserError(LIMITS_NEED_PROCESSES)


def _auto(request: Request) -> VectorEnv:
    """Choose the fastest back end: a native one if there is one, otherwise by measuring an environment."""
    task, num, failure_policy = request.task, request.num, request.failure_policy
    if (
        failure_policy.needs_processes
    ):  # only a worker process can be killed, and measuring an environment that may fail is a risk
        return _process(request)
    if num > 1 and auto_uses_native(task.name, request.options):
        return _native(request)
    probed = _probe(request)
    workers = request.workers or default_workers(num, probed.waits)
    backend = choose_backend(num, probed, workers, request.idle)
    if backend != "serial":
        try:
            return ProcessVectorEnv(task, num, workers, probed.env_spec, failure_policy, mixed=backend == "mixed")
        except (UserError, EnvCrashError) as error:
            reason = str(error).strip().splitlines()[0]
            note(f"{task.name} runs in this process (vector.backend=serial): {reason}")
    return SerialVectorEnv(task, num, probed.env_spec, failure_policy)


def _serial(request: Request) -> VectorEnv:
    return SerialVectorEnv(request.task, request.num, failure_policy=request.failure_policy)


def _process(request: Request) -> VectorEnv:
    workers = request.workers
    if workers is None and request.failure_policy.needs_processes:
        workers = default_workers(request.num, waits=False)
    return ProcessVectorEnv(request.task, request.num, workers, failure_policy=request.failure_policy)


def _mixed(request: Request) -> VectorEnv:
    workers, env_spec = request.workers, None
    if workers is None:
        probed = _probe(request)
        workers, env_spec = default_workers(request.num, probed.waits), probed.env_spec
    return ProcessVectorEnv(request.task, request.num, workers, env_spec, request.failure_policy, mixed=True)


def _native(request: Request) -> VectorEnv:
    one = request.task()  # rejects wrong names and options with the usual errors
    one.close()
    env = NativeVectorEnv(request.task.name, request.num, request.options)
    env.max_episode_steps = time_limit_of(one)
    return env


def _envpool(request: Request) -> VectorEnv:
    from zhixing.envs.vector.envpool import EnvPoolVectorEnv  # an optional dependency

    env_spec = infer_env_spec(request.task)
    env = EnvPoolVectorEnv(request.task.name, request.num, env_spec.spaces, request.options)
    env.max_episode_steps = env_spec.max_episode_steps
    return env


def _torch(request: Request) -> VectorEnv:
    from zhixing.envs.torch_native import TorchVectorEnv  # worker processes start faster without torch

    spaces = infer_env_spec(request.task).spaces
    return TorchVectorEnv(request.task.name, request.num, spaces, request.options, request.device)


def _ray(request: Request) -> VectorEnv:
    from zhixing.distributed.vector import RayVectorEnv  # an optional dependency

    workers, env_spec = request.workers or request.num, infer_env_spec(request.task)
    return RayVectorEnv(request.task, request.num, workers, env_spec, request.failure_policy, request.address)


def _probe(request: Request) -> Probe:
    """Measure one environment; write a crash report if it fails."""
    task = request.task
    try:
        return probe(task)
    except EnvCrashError as crash:
        save_crash_report(
            crash, request.failure_policy, env={"name": task.name, "options": task.options}, backend="serial"
        )
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
