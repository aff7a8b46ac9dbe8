"""The collector that distributes the run's environments over workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zhixing.buffers.rollout import Rollout
from zhixing.collectors.collector import Collector, Experience, WorkerExperience, check_collect, collect_episodes
from zhixing.config import AsynchronousConfig, RunConfig
from zhixing.core.learner import Learner, LearnsOnWorkers
from zhixing.core.optimizer import Optimizer
from zhixing.core.policy import Phase
from zhixing.core.spaces import Spaces
from zhixing.core.state import Count, check_state
from zhixing.distributed.parameter_servers import ParameterServers
from zhixing.distributed.worker import WorkerResult, WorkerSpec, network_weights, policy_weights
from zhixing.distributed.worker_pool import LocalWorkerPool, RayWorkerPool, WorkerPool
from zhixing.envs import portable
from zhixing.errors import UserError

RESUMABLE = ("collect", "compute_gradients", "push_gradients")  # calls that a checkpoint may contain as pending
SAVED = {
    "env_steps": Count,
    "lost": Count,
    "lives": list[Count],
    "workers": list[dict[str, Any]],
    "pending": list[list[Any]],
    "idle": list[Count],
}


class DistributedCollector(Collector):
    """Collects with workers, each with some of the environments.

    `collect` waits for all workers, which all act with the learner's current weights. `collect_from_worker` waits for
    the first worker only; the others continue with the weights that they started with.
    """

    def __init__(
        self,
        pool: WorkerPool,
        learner: Learner,
        spaces: Spaces,
        logged_info_keys: tuple[str, ...] = (),
        servers: ParameterServers | None = None,
    ) -> None:
        """With parameter servers, only `drain` updates the learner's weights."""
        self.pool, self.learner, self.spaces, self.servers = pool, learner, spaces, servers
        self._logged_info_keys = logged_info_keys
        self.num_envs = pool.specs[-1].last
        self.env_steps = 0
        self.schedule_lead = 0  # environment steps by which the policy's schedules are ahead of `env_steps`
        self._earlier_worker_restarts = 0  # before the run was resumed
        self._num_env_restarts = [0] * len(pool)
        self._idle = list(range(len(pool)))  # workers that `collect_from_worker` has to start
        self._weights: tuple[int, Any] = (-1, None)  # the weights for workers, and the learner's updates at that time
        self._drained_at = -1  # the learner's updates when it last had the servers' weights; -1 before they have any
        self._num_rollouts = 0  # started by `collect_from_worker`

    def start(self) -> None:
        """Wait until all workers have started, so errors are raised now and start-up isn't training time."""
        if not self.pool.pending:
            self.pool.call_all(None, "ready", [()] * len(self.pool))

    def collect(
        self, steps: int | None = None, episodes: int | None = None, phase: Phase = Phase.COLLECT
    ) -> Experience:
        """Collect steps `[T,N]` in all environments. Those of a worker are consecutive columns."""
        check_collect(steps, episodes)
        if episodes is not None:
            return collect_episodes(lambda steps: self._collect(steps, phase), episodes)
        assert steps is not None
        return self._collect(steps, phase)

    def _collect(self, steps: int, phase: Phase) -> Experience:
        weights, schedule_steps = self.pool.put(policy_weights(self.learner)), self.env_steps + self.schedule_lead
        arguments = [(steps, phase.value, schedule_steps)] * len(self.pool)
        results: list[WorkerResult] = self.pool.call_all(weights, "collect", arguments)
        self.env_steps += steps * self.num_envs
        self._num_env_restarts = [result.num_env_restarts for result in results]
        batch = Rollout.join([result.rollout for result in results if result.rollout is not None])
        return Experience(batch, [episode for result in results for episode in result.episodes])

    def collect_from_worker(
        self, steps: int, phase: Phase = Phase.COLLECT, *, gradients: bool = False, priorities: bool = False
    ) -> WorkerExperience:
        """Return the experience of the first worker that has finished.

        With `gradients`, the worker has computed gradients of its steps and waits for the weights that result;
        otherwise it continues at once. With `priorities`, it has computed the priority of each step.
        """
        method = "collect" if not gradients else "compute_gradients" if self.servers is None else "push_gradients"
        for worker in self._idle:
            self._submit(worker, method, steps, phase, priorities)
        self._idle = []
        worker, result = self.pool.wait()
        if gradients:
            self._idle = [worker]
        else:
            self._submit(worker, method, steps, phase, priorities)
        spec = self.pool.specs[worker]
        self.env_steps += steps * spec.num_envs
        self._num_env_restarts[worker] = result.num_env_restarts
        batch = None if result.rollout is None else Rollout.join([result.rollout])
        envs = np.arange(spec.first, spec.last)
        return WorkerExperience(batch, result.episodes, envs, result.gradients, result.update, result.priority)

    def _submit(self, worker: int, method: str, steps: int, phase: Phase, priorities: bool) -> None:
        self._num_rollouts += 1
        arguments = (steps, phase.value, self.env_steps + self.schedule_lead)
        if self.servers is not None:
            if self._drained_at < 0:
                self.servers.load(self._optimizer)
                self._drained_at = self.learner.updates
            self.pool.submit(worker, None, method, *arguments, self._optimizer.lr, self._num_rollouts)
            return
        if self._weights[0] != self.learner.updates:
            weights = network_weights(self.learner) if priorities else policy_weights(self.learner)
            self._weights = self.learner.updates, self.pool.put(weights)
        self.pool.submit(worker, self._weights[1], method, *arguments, *([True] if priorities else []))

    @property
    def _optimizer(self) -> Optimizer:
        """The optimizer whose weights are on the parameter servers."""
        assert isinstance(self.learner, LearnsOnWorkers)
        return self.learner.optimizer

    def drain(self) -> None:
        """Copy the weights from the parameter servers to the learner, if there are servers."""
        if self.servers is not None and 0 <= self._drained_at < self.learner.updates:
            self.servers.fetch(self._optimizer)
            self._drained_at = self.learner.updates

    @property
    def logged_info_keys(self) -> tuple[str, ...]:
        return self._logged_info_keys

    @property
    def num_env_restarts(self) -> int:
        return sum(self._num_env_restarts)

    @property
    def num_worker_restarts(self) -> int:
        return self._earlier_worker_restarts + self.pool.num_restarts

    def close(self) -> None:
        self.pool.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state. It leaves out busy Ray workers: a resumed run repeats their rollouts in new episodes."""
        state: dict[str, Any] = {
            "env_steps": self.env_steps,
            "lost": self.num_worker_restarts,
            "lives": self.pool.incarnations,
        }
        workers = self.pool.state_dicts()
        if workers is not None:
            pending = [[call.worker, call.method, *call.arguments] for call in self.pool.pending]
            state |= {"workers": workers, "pending": pending, "idle": list(self._idle)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Restore a saved state. With another number of workers, all environments start a new episode."""
        state = check_state("the workers", state, SAVED)
        self.env_steps, self._earlier_worker_restarts = state["env_steps"], state.get("lost", 0)
        workers = state.get("workers")
        if workers is None or len(workers) != len(self.pool):
            incarnation = max(state.get("lives", [0])) + 1  # new seeds: the new episodes differ from those before
            self.pool.restart_all([incarnation] * len(self.pool))
            return list(range(self.num_envs))
        if any(state["lives"]):
            self.pool.restart_all(state["lives"])
        restarted: list[list[int]] = self.pool.call_all(None, "load_state_dict", [(worker,) for worker in workers])
        for worker, method, *arguments in state["pending"]:
            if type(worker) is not int or not 0 <= worker < len(self.pool) or method not in RESUMABLE:
                raise UserError(
                    f"the saved state of the workers has a call of {str(method)[:80]!r} by worker {worker!r}; allowed "
                    f"are calls of {', '.join(RESUMABLE)} by workers 0 to {len(self.pool) - 1}"
                )
            self.pool.submit(worker, None, method, *arguments)
        self._idle = list(state["idle"])
        return [index for indices in restarted for index in indices]


def make_distributed_collector(
    cfg: RunConfig, learner: Learner, spaces: Spaces, logged_info_keys: Sequence[str], folder: Path
) -> DistributedCollector:
    """Make the workers of a run: Ray workers with `distributed.workers`, otherwise workers in this process.

    The numbers of environments of any two workers differ by at most one.
    """
    on_ray = cfg.distributed.workers > 0
    num_actors = cfg.actors if isinstance(cfg, AsynchronousConfig) else 1
    num_workers = cfg.distributed.workers if on_ray else num_actors
    bounds = np.linspace(0, cfg.num_envs, num_workers + 1).astype(int).tolist()
    settings = cfg.model_dump(mode="json")
    num_threads, objects = int(cfg.num_threads) if on_ray else None, portable.pack_settings(settings)
    crash_folder = folder.resolve() / "crash"
    specs = [
        WorkerSpec(settings, k, num_workers, bounds[k], bounds[k + 1], crash_folder, num_threads, objects=objects)
        for k in range(num_workers)
    ]
    if not on_ray:
        return DistributedCollector(LocalWorkerPool(specs), learner, spaces, tuple(logged_info_keys))
    pool, servers = RayWorkerPool(specs, cfg.distributed.address), None
    if cfg.distributed.servers:
        servers = ParameterServers.start(pool.cluster, cfg.distributed.servers)
        pool.specs = [replace(spec, servers=servers) for spec in specs]
    return DistributedCollector(pool, learner, spaces, tuple(logged_info_keys), servers)
