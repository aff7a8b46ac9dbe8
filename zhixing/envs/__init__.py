"""Environments: by name, one or many at once. Free of torch, so that worker processes start fast."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zhixing.envs.checker.env_checker import Finding, check
from zhixing.envs.crash.failure_policy import ON_CRASH, Faults, keep_capsule
from zhixing.envs.portable import reference
from zhixing.envs.registry import Task, make, names
from zhixing.envs.vector.base import VectorEnv
from zhixing.envs.vector.choose_backend import choose, default_workers, probe
from zhixing.envs.vector.native import NativeVectorEnv, suits_auto
from zhixing.envs.vector.process import ProcessVectorEnv
from zhixing.envs.vector.serial import LIMITS_NEED_PROCESSES, SerialVectorEnv, layout_of
from zhixing.envs.wrappers.time_limit import time_limit_of
from zhixing.errors import EnvCrashError, UserError, note, unknown

__all__ = [
    "Faults",
    "Finding",
    "NativeVectorEnv",
    "ProcessVectorEnv",
    "SerialVectorEnv",
    "Task",
    "VectorEnv",
    "check",
    "make",
    "make_few",
    "make_vector",
    "names",
]

BACKENDS = ("auto", "serial", "process", "mixed", "native", "envpool", "torch", "ray")


def make_few(task: Task, num: int, vector: Any, folder: Path | None = None) -> SerialVectorEnv | ProcessVectorEnv:
    """Return a few environments for a side task of a run with the settings `vector`, such as a video: in this process,
    or in one worker process where the settings keep environments out of this one. Crash capsules go to `folder`."""
    if not vector.isolated:
        return SerialVectorEnv(task, num, faults=Faults(folder=folder))
    return ProcessVectorEnv(task, num, 1, faults=Faults.of(vector, folder))


def make_vector(
    name: str | Any,
    num: int,
    backend: str = "auto",
    workers: int | None = None,
    options: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
    faults: Faults | None = None,
    address: str | None = None,
    device: str = "cpu",
    idle: bool = True,
) -> VectorEnv:
    """`num` copies of an environment, given by its name, or as a class, a function or an instance. What was chosen for
    `auto` is in `.backend` and `.workers`. With backend ray `address` is that of a cluster, with backend torch `device`
    where they live. `idle` tells `auto` that this process has nothing else to do while they step."""
    faults = faults or Faults()
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if faults.on_crash not in ON_CRASH:
        raise unknown("on_crash", faults.on_crash, ON_CRASH)
    if num < 1:
        raise UserError(f"the number of environments is {num}; it must be at least 1")
    if workers is not None and not 1 <= workers <= num:
        raise UserError(f"the number of workers is {workers}; it must be from 1 to the {num} environments")
    if workers not in (None, 1) and backend in ("serial", "native", "envpool", "torch"):
        raise UserError(f"{backend} environments have no workers, not {workers}; backends process, mixed and ray have")
    if faults.guarded and backend in ("native", "envpool", "torch", "mixed"):
        why = "live in this process too" if backend == "mixed" else "step together"
        raise UserError(f"{backend} environments {why}: on_crash=replace and time limits take backend process")
    named = {"name": name} if isinstance(name, str) else reference(name)
    name, given = named.pop("name"), {**named, **(options or {})}
    if render_mode is not None:
        given["render_mode"] = render_mode
    task = Task(name, given)
    if backend == "native" or (backend == "auto" and not faults.guarded and num > 1 and suits_auto(name, given)):
        one = task()  # the same errors for wrong names and options as everywhere
        one.close()
        native = NativeVectorEnv(name, num, given)
        native.max_episode_steps = time_limit_of(one)
        return native
    if backend == "envpool":
        from zhixing.envs.vector.envpool import EnvPoolVectorEnv  # only now: others needn't have it

        layout = layout_of(task)
        pool = EnvPoolVectorEnv(name, num, layout.spaces, given)
        pool.max_episode_steps = layout.max_episode_steps
        return pool
    if backend == "torch":
        from zhixing.envs.torch_native import TorchVectorEnv  # only now: worker processes start without torch

        return TorchVectorEnv(name, num, layout_of(task).spaces, given, device)
    if backend == "serial":
        return SerialVectorEnv(task, num, faults=faults)
    if backend == "ray":
        from zhixing.distributed.vector import RayVectorEnv  # only now: others needn't have it

        if faults.limited:
            raise UserError(LIMITS_NEED_PROCESSES)
        return RayVectorEnv(task, num, workers or num, layout_of(task), faults, address)
    if faults.guarded:  # only a process can be ended, and a trial of what may fail has more risk than use
        return ProcessVectorEnv(task, num, workers or default_workers(num, waits=False), faults=faults)
    if backend == "process":
        return ProcessVectorEnv(task, num, workers, faults=faults)
    if backend == "mixed" and workers is not None:
        return ProcessVectorEnv(task, num, workers, faults=faults, mixed=True)
    try:
        found = probe(task)
    except EnvCrashError as crash:
        keep_capsule(crash, faults, env={"name": name, "options": given}, backend="serial")
        raise
    workers = workers or default_workers(num, found.waits)
    decides = backend == "auto"
    if decides:
        backend = choose(num, found, workers, idle)
    if backend == "serial":
        return SerialVectorEnv(task, num, found.layout, faults)
    try:
        return ProcessVectorEnv(task, num, workers, found.layout, faults, mixed=backend == "mixed")
    except (UserError, EnvCrashError) as error:
        if not decides:
            raise
        note(f"{name} runs in this process (vector.backend=serial): {str(error).strip().splitlines()[0]}")
        return SerialVectorEnv(task, num, found.layout, faults)
