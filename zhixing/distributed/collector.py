"""The collector whose environments are distributed over workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zhixing.buffers.rollout import Rollout
from zhixing.collect.collector import Collector, Experience, WorkerExperience, check_collect, collect_episodes
from zhixing.config import AsynchronousConfig, RunConfig
from zhixing.core.learner import Learner, LearnsOnWorkers
from zhixing.core.optimizer import Optimizer
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.core.state import Count, check_state
from zhixing.distributed.parameter_servers import ParameterServers
from zhixing.distributed.worker import Setup, WorkerResult, packed
from zhixing.distributed.worker_pool import LocalCrew, RayCrew, WorkerPool
from zhixing.envs import portable
from zhixing.errors import UserError

PENDING = ("collect", "gradients", "learn")  # what workers may be at when a checkpoint is written
SAVED = {
    "env_steps": Count,
    "lost": Count,
    "lives": list[Count],
    "workers": list[dict[str, Any]],
    "pending": list[list[Any]],
    "idle": list[Count],
}


class DistributedCollector(Collector):
    """Collects with workers, each with its share of the environments.

    `collect` waits for all workers, which all act with the learner's current weights. `collect_from_worker`
    waits for the first worker only; the others continue with the weights that they started with.
    """

    def __init__(
        self,
        crew: WorkerPool,
        learner: Learner,
        spaces: Spaces,
        logged_info_keys: tuple[str, ...] = (),
        servers: ParameterServers | None = None,
    ) -> None:
        """With parameter servers the learner's weights are those of the last `settle`."""
        self.crew, self.learner, self.spaces, self.servers = crew, learner, spaces, servers
        self._logged_info_keys = logged_info_keys
        self.num_envs = crew.setups[-1].last
        self.env_steps = 0
        self.schedule_lead = 0  # environment steps by which the policy's schedules are ahead of `env_steps`
        self.lost_before = 0  # workers that died before the run was resumed
        self._num_env_restarts = [0] * len(crew)
        self._idle = list(range(len(crew)))
        self._shared: tuple[int, Any] = (-1, None)  # number of updates, and the weights after them
        self._settled = -1  # number of updates when the learner's weights were last those of the servers
        self._turns = 0  # that were started

    def start(self) -> None:
        """Wait until all workers have started, so errors are raised now and start-up isn't training time."""
        if not self.crew.pending:
            self.crew.call(None, "ready", [()] * len(self.crew))

    def collect(
        self, steps: int | None = None, episodes: int | None = None, phase: Phase = Phase.COLLECT
    ) -> Experience:
        """Collect steps `[T,N]` of all environments; those of each worker are side by side."""
        check_collect(steps, episodes)
        if episodes is not None:
            return collect_episodes(lambda steps: self._collect(steps, phase), episodes)
        assert steps is not None
        return self._collect(steps, phase)

    def _collect(self, steps: int, phase: Phase) -> Experience:
        weights, scheduled = self.crew.share(packed(self.learner)), self.env_steps + self.schedule_lead
        turns: list[WorkerResult] = self.crew.call(
            weights, "collect", [(steps, phase.value, scheduled)] * len(self.crew)
        )
        self.env_steps += steps * self.num_envs
        self._num_env_restarts = [turn.num_env_restarts for turn in turns]
        batch = Rollout.join([turn.part for turn in turns if turn.part is not None])
        return Experience(batch, [episode for turn in turns for episode in turn.episodes])

    def collect_from_worker(
        self, steps: int, phase: Phase = Phase.COLLECT, *, gradients: bool = False, priorities: bool = False
    ) -> WorkerExperience:
        """Return the experience of the first worker that has finished.

        With `gradients` the worker has computed gradients of its steps and waits for the weights that result;
        otherwise it continues at once. With `priorities` it has computed the priority of each step.
        """
        way = "collect" if not gradients else "gradients" if self.servers is None else "learn"
        task = (way, steps, phase.value)
        for worker in self._idle:
            self._start(worker, task, priorities)
        self._idle = []
        worker, turn = self.crew.wait()
        if gradients:
            self._idle = [worker]
        else:
            self._start(worker, task, priorities)
        setup = self.crew.setups[worker]
        self.env_steps += steps * setup.num_envs
        self._num_env_restarts[worker] = turn.num_env_restarts
        batch = None if turn.part is None else Rollout.join([turn.part])
        envs = np.arange(setup.first, setup.last)
        return WorkerExperience(batch, turn.episodes, envs, turn.gradients, turn.update, turn.priority)

    def _start(self, worker: int, task: tuple[Any, ...], priorities: bool) -> None:
        self._turns += 1
        if self.servers is not None:
            if self._settled < 0:
                self.servers.load(self._optimizer)
                self._settled = self.learner.updates
            self.crew.start(worker, None, *task, self.env_steps + self.schedule_lead, self._optimizer.lr, self._turns)
            return
        if self._shared[0] != self.learner.updates:
            self._shared = self.learner.updates, self.crew.share(packed(self.learner, whole=priorities))
        further = (priorities,) if priorities else ()
        self.crew.start(worker, self._shared[1], *task, self.env_steps + self.schedule_lead, *further)

    @property
    def _optimizer(self) -> Optimizer:
        """The optimizer whose weights are on the parameter servers."""
        assert isinstance(self.learner, LearnsOnWorkers)
        return self.learner.optimizer

    def drain(self) -> None:
        """Copy the weights from the parameter servers to the learner, if there are servers."""
        if self.servers is not None and 0 <= self._settled < self.learner.updates:
            self.servers.fetch(self._optimizer)
            self._settled = self.learner.updates

    @property
    def logged_info_keys(self) -> tuple[str, ...]:
        return self._logged_info_keys

    @property
    def num_env_restarts(self) -> int:
        return sum(self._num_env_restarts)

    @property
    def num_worker_restarts(self) -> int:
        return self.lost_before + self.crew.lost

    def close(self) -> None:
        self.crew.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state. It leaves out what busy Ray workers are collecting: nothing waits for them."""
        state: dict[str, Any] = {
            "env_steps": self.env_steps,
            "lost": self.num_worker_restarts,
            "lives": self.crew.incarnations,
        }
        pending = self.crew.pending
        if self.crew.here or not pending:
            states = self._states(bool(pending))
            state |= {"workers": states, "pending": [list(task) for task in pending], "idle": list(self._idle)}
        return state

    def _states(self, weights: bool) -> list[Any]:
        if isinstance(self.crew, LocalCrew):
            return [worker.state(weights) for worker in self.crew.workers]
        return self.crew.call(None, "state", [(weights,)] * len(self.crew))

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Restore a saved state. With another number of workers all environments start a new episode."""
        state = check_state("the workers", state, SAVED)
        self.env_steps, self.lost_before = state["env_steps"], state.get("lost", 0)
        states = state.get("workers")
        if states is None or len(states) != len(self.crew):
            later = max(state.get("lives", [0])) + 1
            self.crew.begin_anew([later] * len(self.crew))
            return list(range(self.num_envs))
        if any(state["lives"]):
            self.crew.begin_anew(state["lives"])
        lost: list[list[int]] = self.crew.call(None, "restore", [(one,) for one in states])
        for worker, method, *arguments in state["pending"]:
            if type(worker) is not int or not 0 <= worker < len(self.crew) or method not in PENDING:
                raise UserError(f"the saved state of the workers lets worker {worker!r} do {str(method)[:80]!r}")
            self.crew.start(worker, None, method, *arguments)
        self._idle = list(state["idle"])
        return [index for one in lost for index in one]


def spread(
    cfg: RunConfig, learner: Learner, spaces: Spaces, logged_info_keys: Sequence[str], folder: Path
) -> DistributedCollector:
    """Start workers with equal shares of the run's environments, or shares that differ by one."""
    asked = cfg.distributed.workers
    workers = asked or (cfg.actors if isinstance(cfg, AsynchronousConfig) else 1)
    bounds = np.linspace(0, cfg.num_envs, workers + 1).astype(int).tolist()
    threads = int(cfg.num_threads) if asked else None
    settings = cfg.model_dump(mode="json")
    objects = portable.pack_settings(settings)
    setups = [
        Setup(settings, k, workers, bounds[k], bounds[k + 1], folder.resolve() / "crash", threads, objects=objects)
        for k in range(workers)
    ]
    crew = RayCrew(setups, cfg.distributed.address) if asked else LocalCrew(setups)
    servers = None
    if cfg.distributed.servers and isinstance(crew, RayCrew):
        servers = ParameterServers.start(crew.cluster, cfg.distributed.servers)
        crew.setups = [replace(setup, servers=servers) for setup in setups]
    return DistributedCollector(crew, learner, spaces, tuple(logged_info_keys), servers)
