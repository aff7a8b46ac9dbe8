"""Environments: by name, one or many at once. Free of torch, so that worker processes start fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zhixing.envs.choice import default_workers, probe, worth_processes
from zhixing.envs.families import Task, make, names
from zhixing.envs.native import NativeVectorEnv, suits_auto
from zhixing.envs.process import ProcessVectorEnv
from zhixing.envs.serial import SerialVectorEnv
from zhixing.envs.vector import VectorEnv
from zhixing.errors import UserError, unknown

__all__ = [
    "NativeVectorEnv",
    "ProcessVectorEnv",
    "SerialVectorEnv",
    "Task",
    "VectorEnv",
    "make",
    "make_vector",
    "names",
]

BACKENDS = ("auto", "serial", "process", "native")


def make_vector(
    name: str,
    num: int,
    backend: str = "auto",
    workers: int | None = None,
    options: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
) -> VectorEnv:
    """`num` copies of an environment. What was chosen for `auto` is in `.backend` and `.workers`."""
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if num < 1:
        raise UserError(f"the number of environments is {num}; it must be at least 1")
    if workers is not None and not 1 <= workers <= num:
        raise UserError(f"the number of workers is {workers}; it must be from 1 to the {num} environments")
    given = dict(options or {})
    if render_mode is not None:
        given["render_mode"] = render_mode
    task = Task(name, given)
    if backend == "native" or (backend == "auto" and num > 1 and suits_auto(name, given)):
        task().close()  # the same errors for wrong names and options as everywhere
        return NativeVectorEnv(name, num, given)
    if backend == "serial":
        return SerialVectorEnv(task, num)
    found = probe(task)
    workers = workers or default_workers(num, found.waits)
    if backend == "process" or worth_processes(num, found.step_seconds, found.waits, workers):
        return ProcessVectorEnv(task, num, workers, found.layout)
    return SerialVectorEnv(task, num, found.layout)
