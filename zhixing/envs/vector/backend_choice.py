"""Choose a back end and a number of workers for an environment by timing some of its steps."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from zhixing.core.spaces import Spaces
from zhixing.core.tree import tree_map
from zhixing.envs.env_spec import EnvSpec, inspect_env
from zhixing.envs.vector.action_log import ActionLog
from zhixing.envs.vector.serial import EnvFn, env_name_of
from zhixing.envs.vector.step_buffers import Array, StepBuffers, allocate
from zhixing.envs.vector.sub_env_group import SubEnvGroup
from zhixing.utils.cpus import cpu_count

PROBE_SECONDS = 0.05
# How much time per step of the vector worker processes must save to be used. Measured on two virtual CPUs with 8
# environments:
# - `process`, 2 workers: waking a worker and replying costs 65-140 us. Environment steps of 10, 20, 40, 80 us take 90,
#   170, 335, 655 us in one process and 120-160, 145-240, 250-420, 420-430 us in two. So 20 us is about even and 40 us
#   mostly a gain.
# - `mixed`, where workers poll for a while before they sleep: environment steps of 8, 13, 42 us take 66, 108, 345 us in
#   one process and 50, 67, 200 us in two. All of these gain, the first one least, and another process takes time to
#   start.
WAKE_SECONDS = {"process": 150e-6, "mixed": 50e-6}
MAX_WAITING_WORKERS = 32  # each is an interpreter of about 40 MB


class Timing(NamedTuple):
    """Measured steps of one environment."""

    step_seconds: float
    waits: bool  # it mostly sleeps or waits for another process, rather than computes


class Probe(NamedTuple):
    """Spec and timing of one environment."""

    env_spec: EnvSpec
    step_seconds: float
    waits: bool


def probe(env_fn: EnvFn) -> Probe:
    """Describe and time a temporary environment in this process."""
    name = env_name_of(env_fn)
    env = env_fn()
    try:
        env_spec = inspect_env(env, name)
        return Probe(env_spec, *time_steps(env, env_spec, name, allocate(env_spec.spaces, 1)))
    finally:
        env.close()


def time_steps(
    env: gym.Env[Any, Any], env_spec: EnvSpec, name: str, buffers: StepBuffers, action_log: ActionLog | None = None
) -> Timing:
    """Time random steps of one environment. `buffers` must have one row."""
    group = SubEnvGroup([lambda: env], env_spec, buffers, 0, name, action_log=action_log)
    group.reset([0], None)
    spaces = env_spec.spaces
    spaces.action.seed(0)
    wall_times: list[float] = []
    cpu_times: list[float] = []
    deadline = time.perf_counter() + PROBE_SECONDS
    while len(wall_times) < 3 or time.perf_counter() < deadline:
        buffers.action[0] = spaces.flatten_action(random_action(spaces, buffers.extras.get("mask")))
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        group.step()
        wall_times.append(time.perf_counter() - wall_start)
        cpu_times.append(time.process_time() - cpu_start)
    # the lower quartile: on a busy machine, slow steps are due to other processes
    step_seconds, cpu_seconds = (float(np.quantile(times, 0.25)) for times in (wall_times, cpu_times))
    return Timing(step_seconds, waits=cpu_seconds < 0.5 * step_seconds)


def random_action(spaces: Spaces, mask: Array | None) -> Any:
    """Sample an allowed action, or for several agents an action of each, with the agents as first dimension."""
    masks = [None] * spaces.num_agents if mask is None else mask.reshape(spaces.num_agents, -1).astype(np.int8)
    actions = [spaces.layout.sample(row) for row in masks]
    return tree_map(lambda *leaves: np.stack(leaves), *actions) if spaces.agents else actions[0]


def default_workers(num_envs: int, waits: bool) -> int:
    """Return one worker per CPU, because more would only share CPUs. Environments that wait can have more."""
    return min(num_envs, MAX_WAITING_WORKERS if waits else cpu_count())


def choose_backend(num_envs: int, probed: Probe, workers: int, idle: bool) -> str:
    """Return the fastest back end.

    `mixed` needs an `idle` parent process: one that computes meanwhile shouldn't step environments. Environments that
    wait have more workers than there are CPUs, so their workers can't poll and `mixed` gains nothing.
    """
    backend = "mixed" if idle and not probed.waits else "process"
    parallel = workers if probed.waits else min(workers, cpu_count())
    saved_seconds = num_envs * probed.step_seconds * (1.0 - 1.0 / parallel)
    use_workers = num_envs > 1 and cpu_count() > 1 and saved_seconds > WAKE_SECONDS[backend]
    return backend if use_workers else "serial"
