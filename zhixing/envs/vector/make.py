"""Make vector environments by name: a table of back ends behind one function, `make_vector`."""

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
from zhixing.envs.vector.constructors import find_torch_task, find_vector
from zhixing.envs.vector.gym_vector import GymVectorEnv
from zhixing.envs.vector.native import NATIVE, NativeVectorEnv, auto_uses_native
from zhixing.envs.vector.process import ProcessVectorEnv
from zhixing.envs.vector.serial import TIMEOUTS_NEED_PROCESSES, SerialVectorEnv, infer_env_spec
from zhixing.envs.wrappers.time_limit import time_limit_of
from zhixing.errors import EnvCrashError, UserError, note, unknown

WITHOUT_WORKERS = ("serial", "native", "envpool", "torch")
LOCKSTEP = ("native", "envpool", "torch")  # one call steps all environments, so none can be replaced alone


@dataclass(frozen=True)
class Request:
    """Validated arguments of `make_vector`."""

    env: RegisteredEnv
    num_envs: int
    workers: int | None
    failure_policy: FailurePolicy
    address: str | None
    device: str
    idle: bool

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.env.options)


def make_vector(
    env: str | Any,
    num_envs: int,
    backend: str = "auto",
    workers: int | None = None,
    options: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
    failure_policy: FailurePolicy | None = None,
    address: str | None = None,
    device: str = "cpu",
    idle: bool = True,
) -> VectorEnv:
    """Make a vector of `num_envs` environments.

    `env` is a registered name, a class, a function that makes an environment or a vector environment, or one of these
    itself. The back end and the
    number of workers that `auto` chose are in `.backend` and `.workers`. `address` is that of a Ray cluster (back end
    ray), `device` the torch device (back end torch). `idle=False` means that this process computes something else
    while the environments step, which `auto` takes into account.
    """
    failure_policy = failure_policy or FailurePolicy()
    named = {"name": env} if isinstance(env, str) else env_settings(env)
    name, env_options = named.pop("name"), {**named, **(options or {})}
    if render_mode is not None:
        env_options["render_mode"] = render_mode
    if backend in BACKENDS:
        backend = _backend_for(name, backend)
    _check_arguments(num_envs, backend, workers, failure_policy)
    registered = RegisteredEnv(name, env_options)
    return BACKENDS[backend](Request(registered, num_envs, workers, failure_policy, address, device, idle))


def make_small_vector(env: RegisteredEnv, num_envs: int, vector: Any, folder: Path | None = None) -> VectorEnv:
    """Make a few environments for a side job of a run, such as a video. `vector` are the settings of the run.

    They live in this process, or in one worker process if the settings keep environments out of this one. Crash
    reports go to `folder`.
    """
    backend = _backend_for(env.name, "auto")
    if backend != "auto":
        return BACKENDS[backend](Request(env, num_envs, None, FailurePolicy(), None, "cpu", True))
    if not vector.isolated:
        return SerialVectorEnv(env, num_envs, failure_policy=FailurePolicy(folder=folder))
    return ProcessVectorEnv(env, num_envs, 1, failure_policy=FailurePolicy.from_settings(vector, folder))


def _check_arguments(num_envs: int, backend: str, workers: int | None, failure_policy: FailurePolicy) -> None:
    """Raise `UserError` if the arguments of `make_vector` don't fit together."""
    if backend not in BACKENDS:
        raise unknown("backend", backend, tuple(BACKENDS))
    if failure_policy.on_crash not in ON_CRASH:
        raise unknown("on_crash", failure_policy.on_crash, ON_CRASH)
    if num_envs < 1:
        raise UserError(f"num_envs is {num_envs}; it must be at least 1")
    if workers is not None and not 1 <= workers <= num_envs:
        raise UserError(f"workers is {workers}; it must be from 1 to num_envs ({num_envs})")
    if workers not in (None, 1) and backend in WITHOUT_WORKERS:
        raise UserError(f"workers is {workers}, but backend {backend} has no workers; use process, mixed or ray")
    if failure_policy.needs_processes and backend in (*LOCKSTEP, "mixed"):
        reason = "partly run in this process" if backend == "mixed" else "step together"
        raise UserError(f"{backend} environments {reason}: on_crash=replace and timeouts need backend process")
    if failure_policy.has_timeout and backend == "ray":
        raise UserError(TIMEOUTS_NEED_PROCESSES)


def _backend_for(name: str, backend: str) -> str:
    """Return the back end for environments of a user that only one back end can step, or the given one."""
    vector = find_vector(name)
    if vector is not None and vector.only:
        only, kind = "native", "a vector environment"
    elif find_torch_task(name) is not None:
        only, kind = "torch", "a torch task"
    else:
        return backend
    if backend not in ("auto", only):
        raise UserError(
            f"vector.backend={backend} needs single environments, but {name} is {kind}; set vector.backend=auto or "
            f"{only}"
        )
    return only


def _auto(request: Request) -> VectorEnv:
    """Choose the fastest back end: a native one if there is one, otherwise by timing an environment."""
    env, num_envs, failure_policy = request.env, request.num_envs, request.failure_policy
    if failure_policy.needs_processes:  # don't time an environment that may fail in this process
        return _process(request)
    if num_envs > 1 and auto_uses_native(env.name, request.options):
        return _native(request)
    probed = _probe(request)
    workers = request.workers or default_workers(num_envs, probed.waits)
    backend = choose_backend(num_envs, probed, workers, request.idle)
    if backend != "serial":
        try:
            return ProcessVectorEnv(env, num_envs, workers, probed.env_spec, failure_policy, mixed=backend == "mixed")
        except (UserError, EnvCrashError) as error:
            reason = str(error).strip().splitlines()[0]
            note(f"{env.name} runs in this process (vector.backend=serial): {reason}")
    return SerialVectorEnv(env, num_envs, probed.env_spec, failure_policy)


def _serial(request: Request) -> VectorEnv:
    return SerialVectorEnv(request.env, request.num_envs, failure_policy=request.failure_policy)


def _process(request: Request) -> VectorEnv:
    workers = request.workers
    if workers is None and request.failure_policy.needs_processes:
        workers = default_workers(request.num_envs, waits=False)
    return ProcessVectorEnv(request.env, request.num_envs, workers, failure_policy=request.failure_policy)


def _mixed(request: Request) -> VectorEnv:
    workers, env_spec = request.workers, None
    if workers is None:
        probed = _probe(request)
        workers, env_spec = default_workers(request.num_envs, probed.waits), probed.env_spec
    return ProcessVectorEnv(request.env, request.num_envs, workers, env_spec, request.failure_policy, mixed=True)


def _native(request: Request) -> VectorEnv:
    constructor = find_vector(request.env.name)
    if constructor is not None and request.env.name not in NATIVE:
        return GymVectorEnv(constructor, request.num_envs, request.options)
    single_env = request.env()  # rejects wrong names and options with the usual errors
    single_env.close()
    vector = NativeVectorEnv(request.env.name, request.num_envs, request.options)
    vector.max_episode_steps = time_limit_of(single_env)
    return vector


def _envpool(request: Request) -> VectorEnv:
    from zhixing.envs.vector.envpool import EnvPoolVectorEnv  # an optional dependency

    env_spec = infer_env_spec(request.env)
    vector = EnvPoolVectorEnv(request.env.name, request.num_envs, env_spec.spaces, request.options)
    vector.max_episode_steps = env_spec.max_episode_steps
    return vector


def _torch(request: Request) -> VectorEnv:
    from zhixing.envs.torch_native import TorchVectorEnv  # worker processes start faster without torch

    name, task = request.env.name, find_torch_task(request.env.name)
    spaces = infer_env_spec(request.env).spaces if task is None else None
    return TorchVectorEnv(name, request.num_envs, spaces, request.options, request.device, task)


def _ray(request: Request) -> VectorEnv:
    from zhixing.distributed.vector import RayVectorEnv  # an optional dependency

    workers, env_spec = request.workers or request.num_envs, infer_env_spec(request.env)
    return RayVectorEnv(request.env, request.num_envs, workers, env_spec, request.failure_policy, request.address)


def _probe(request: Request) -> Probe:
    """Time one environment; write a crash report if it fails."""
    env = request.env
    try:
        return probe(env)
    except EnvCrashError as crash:
        env_reference = {"name": env.name, "options": env.options}
        save_crash_report(crash, request.failure_policy, env=env_reference, backend="serial")
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
