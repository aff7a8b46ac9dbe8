"""Which back end and how many workers suit a task: decided by timing a few of its steps."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete

from zhixing.envs.env_spec import EnvSpec, describe
from zhixing.envs.vector.action_log import ActionLog
from zhixing.envs.vector.serial import EnvFn, env_name_of
from zhixing.envs.vector.step_buffers import Array, StepBuffers, allocate
from zhixing.envs.vector.sub_env_group import SubEnvGroup
from zhixing.utils.cpus import cpu_count

PROBE_SECONDS = 0.05
# What worker processes must save per step of the vector to be worth it. Measured on two virtual CPUs, 8 environments:
# - `process`, 2 workers: waking and answering costs 65-140 us; steps of 10, 20, 40, 80 us take 90, 170, 335, 655 us in
#   one process and 120-160, 145-240, 250-420, 420-430 us in two. So 20 us is about even and 40 us mostly a gain.
# - `mixed`, where who has just worked is awake: steps of 8, 13, 42 us take 66, 108, 345 us in one process and 50, 67,
#   200 us in two. It pays for all of these, but least for the first, and a further process takes its time to start.
WAKE_SECONDS = {"process": 150e-6, "mixed": 50e-6}
MAX_WAITING_WORKERS = 32  # an interpreter each, about 40 MB


class Timing(NamedTuple):
    """How long steps of one copy of a task took."""

    step_seconds: float
    waits: bool  # it sleeps or waits for another process, rather than computes


class Probe(NamedTuple):
    """What one copy of a task showed."""

    env_spec: EnvSpec
    step_seconds: float
    waits: bool


def probe(factory: EnvFn) -> Probe:
    """Try a task in this process."""
    name = env_name_of(factory)
    env = factory()
    try:
        env_spec = describe(env, name)
        return Probe(env_spec, *time_steps(env, env_spec, name, allocate(env_spec.spaces, 1)))
    finally:
        env.close()


def time_steps(
    env: gym.Env[Any, Any], env_spec: EnvSpec, name: str, buffers: StepBuffers, action_log: ActionLog | None = None
) -> Timing:
    """Time random steps of one copy of a task, which uses the only row of `arrays`."""
    group = SubEnvGroup([lambda: env], env_spec, buffers, 0, name, action_log=action_log)
    group.reset([0], None)
    action = env_spec.spaces.action
    action.seed(0)
    walls: list[float] = []
    cpus: list[float] = []
    until = time.perf_counter() + PROBE_SECONDS
    while len(walls) < 3 or time.perf_counter() < until:
        buffers.action[0] = random_action(action, buffers.extras.get("mask"), env_spec.spaces.num_agents)
        wall, cpu = time.perf_counter(), time.process_time()
        group.step()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    # a quarter of the steps are faster: on a busy machine the others take long, and not because of the task
    step_seconds, cpu_seconds = (float(np.quantile(times, 0.25)) for times in (walls, cpus))
    return Timing(step_seconds, waits=cpu_seconds < 0.5 * step_seconds)


def random_action(space: gym.Space[Any], mask: Array | None, num_agents: int) -> Any:
    """Any allowed action; of many agents one each."""
    if mask is None or not isinstance(space, (Discrete, MultiDiscrete)):
        actions = [space.sample() for _ in range(num_agents)]
    else:
        rows: list[Any] = list(mask.reshape(num_agents, -1).astype(np.int8))
        if isinstance(space, MultiDiscrete):
            rows = [tuple(np.split(row, np.cumsum(space.nvec)[:-1])) for row in rows]
        actions = [space.sample(row) for row in rows]
    return actions[0] if num_agents == 1 else np.array(actions)


def default_workers(num: int, waits: bool) -> int:
    """One per CPU, for more would only take turns; tasks that wait do so side by side."""
    return min(num, MAX_WAITING_WORKERS if waits else cpu_count())


def choose_backend(num: int, found: Probe, workers: int, idle: bool) -> str:
    """The back end that is fastest. Where this process computes meanwhile (not `idle`), it steps none of them itself;
    tasks that wait have more workers than there are CPUs, which must be woken anyway."""
    backend = "mixed" if idle and not found.waits else "process"
    at_once = workers if found.waits else min(workers, cpu_count())
    saved = num * found.step_seconds * (1.0 - 1.0 / at_once)
    worth = num > 1 and cpu_count() > 1 and saved > WAKE_SECONDS[backend]
    return backend if worth else "serial"
