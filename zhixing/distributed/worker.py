"""A rollout worker: an actor with some of the run's environments and a copy of the learner."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from zhixing import algorithms, config, envs
from zhixing.buffers.rollout import Rollout, RolloutPart
from zhixing.collectors.actor import Actor
from zhixing.collectors.evaluation import Episode
from zhixing.core.batch import Batch
from zhixing.core.learner import Gradients, Learner, LearnsFromExpert, LearnsOnWorkers, Update
from zhixing.core.policy import Phase
from zhixing.core.seeding import derive_seed
from zhixing.distributed.parameter_servers import ParameterServers
from zhixing.envs import portable
from zhixing.nets.policies import GreedyPolicy
from zhixing.training.data import load_expert

EPSILON_ALPHA = 7.0  # worker i of N explores with epsilon ** (1 + alpha * i / (N - 1)) (Horgan et al., 2018)

# state dicts of networks, by the name of the learner's attribute
Weights = Mapping[str, Mapping[str, np.ndarray[Any, Any]]]


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a worker needs to start, on this or another machine."""

    settings: dict[str, Any]  # the complete configuration of the run, as plain data
    index: int
    num_workers: int
    first: int  # of the run's environments, this worker has `first` up to, but not including, `last`
    last: int
    crash_folder: Path
    num_threads: int | None  # for torch in a worker process; None for a worker in the run's own process
    incarnation: int = 0  # how often this worker was restarted; each incarnation has different seeds
    servers: ParameterServers | None = None
    objects: bytes = b""  # what `portable.unpack` needs for the env and network, which may be classes of a script
    import_path: list[str] = field(default_factory=lambda: [entry for entry in sys.path if entry])

    @property
    def num_envs(self) -> int:
        return self.last - self.first

    @property
    def seed(self) -> int:
        """The seed of the actor. The first worker has the run's seed, so one worker gives the same run as none."""
        seed: int = self.settings["seed"]
        if self.index:
            seed = derive_seed(seed, "worker", self.index)
        return derive_seed(seed, "life", self.incarnation) if self.incarnation else seed


class WorkerResult(NamedTuple):
    """Result of a worker's rollout: the steps, or what the worker computed from them."""

    episodes: list[Episode]
    num_env_restarts: int  # since the worker started
    rollout: RolloutPart | None = None
    gradients: Gradients | None = None
    update: Update | None = None  # set if parameter servers have applied the gradients
    priority: np.ndarray[Any, Any] | None = None  # [T,n] initial priorities of the steps


class RolloutWorker:
    """Collects rollouts, and optionally computes priorities or gradients.

    The environments and networks are made at the first call, so their errors are raised by that call.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._learner: Learner | None = None

    def build(self) -> tuple[Actor, Learner]:
        """Return the actor and the learner, and make them at the first call."""
        if self._learner is None:
            spec = self.spec
            sys.path += [entry for entry in spec.import_path if entry not in sys.path]
            if spec.num_threads is not None:
                torch.set_num_threads(spec.num_threads)
            portable.unpack(spec.objects)
            cfg = self.cfg = config.build([spec.settings], {})
            env_workers = cfg.vector.workers
            env = envs.make_vector(
                cfg.env.name,
                spec.num_envs,
                backend=cfg.vector.backend,
                workers=min(env_workers, spec.num_envs) if isinstance(env_workers, int) else None,
                options=cfg.env.options,
                failure_policy=envs.FailurePolicy.from_settings(cfg.vector, spec.crash_folder),
            )
            learner = algorithms.get(cfg.algorithm).make(cfg, env.spaces, torch.device("cpu"))
            if isinstance(learner, LearnsFromExpert):
                learner.set_expert(load_expert(cfg, env.spaces))
            if isinstance(learner.policy, GreedyPolicy) and spec.index:
                self._reduce_epsilon(learner.policy)
            self.actor = Actor(learner.policy, env, learner.extra_fields, seed=spec.seed)
            self._learner = learner
        return self.actor, self._learner

    def ready(self) -> None:
        """Build everything. A caller waits for this call until the worker can start to collect."""
        self.build()

    def _reduce_epsilon(self, policy: GreedyPolicy) -> None:
        """Explore less with each further worker, as in Ape-X."""
        exponent = 1.0 + EPSILON_ALPHA * self.spec.index / (self.spec.num_workers - 1)
        schedule = policy.epsilon
        policy.epsilon = lambda env_steps: schedule(env_steps) ** exponent

    def load_weights(self, weights: Weights) -> None:
        _, learner = self.build()
        for name, arrays in weights.items():
            tensors = {key: torch.from_numpy(np.array(array)) for key, array in arrays.items()}
            getattr(learner, name).load_state_dict(tensors)

    def collect(self, steps: int, phase: str, env_steps: int, with_priorities: bool = False) -> WorkerResult:
        """Collect a rollout. `env_steps` is the number of steps of all workers so far, for schedules."""
        learner, batch, result = self._collect(steps, phase, env_steps)
        priority = self._compute_priority(learner, batch) if with_priorities else None
        return result._replace(priority=priority)

    def compute_gradients(self, steps: int, phase: str, env_steps: int) -> WorkerResult:
        """Collect a rollout and return its gradients. The rollout is returned only if they aren't finite."""
        learner, batch, result = self._collect(steps, phase, env_steps)
        assert isinstance(learner, LearnsOnWorkers)
        gradients = learner.compute_gradients(batch.to("cpu"))
        return result._replace(rollout=None if gradients.finite else result.rollout, gradients=gradients)

    def push_gradients(self, steps: int, phase: str, env_steps: int, lr: float, rollout_id: int) -> WorkerResult:
        """Collect a rollout with the weights of the parameter servers and send them its gradients.

        The gradients are returned only if they aren't finite.
        """
        _, learner = self.build()
        servers = self.spec.servers
        assert servers is not None
        assert isinstance(learner, LearnsOnWorkers)
        servers.pull(learner.optimizer)
        result = self.compute_gradients(steps, phase, env_steps)
        assert result.gradients is not None
        update = servers.push(learner.optimizer, result.gradients, lr, self.spec.index, rollout_id)
        return result if update is None else result._replace(gradients=None, update=update)

    def _collect(self, steps: int, phase: str, env_steps: int) -> tuple[Learner, Batch, WorkerResult]:
        actor, learner = self.build()
        actor.env_steps = env_steps
        experience = actor.collect(steps=steps, phase=Phase(phase))
        assert isinstance(actor.rollout, Rollout)
        part = actor.rollout.to_part(steps)
        return learner, experience.batch, WorkerResult(experience.episodes, actor.num_env_restarts, part)

    def _compute_priority(self, learner: Learner, batch: Batch) -> np.ndarray[Any, Any] | None:
        """Return the priorities `[T,n]` of one-step transitions, even if the replay buffer samples n-step returns.

        They are initial values: the learner replaces them when it updates from the steps.
        """
        flat = batch.to("cpu").flatten()
        names = [name for name in flat.fields if name not in learner.extra_fields]
        steps = {name: getattr(flat, name) for name in names}
        priority = learner.priority(Batch(**steps, discount=torch.full_like(flat.reward, self.cfg.gamma)))
        return None if priority is None else priority.numpy().reshape(batch.terminated.shape)

    def state_dict(self, with_policy: bool) -> dict[str, Any]:
        """Return the state of the environments, and of the policy if its weights differ from the learner's."""
        actor, learner = self.build()
        return {"actor": actor.state_dict(), "policy": learner.policy.state_dict() if with_policy else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[int]:
        """Restore a saved state. Return the indices of environments that start a new episode instead of continuing."""
        actor, learner = self.build()
        if state["policy"] is not None:
            learner.policy.load_state_dict(state["policy"])
        return [self.spec.first + index for index in actor.load_state_dict(state["actor"])]

    def process_id(self) -> int:
        return os.getpid()

    def close(self) -> None:
        if self._learner is not None:
            self.actor.close()


def policy_weights(learner: Learner) -> Weights:
    """Return the weights that workers need to act."""
    return {"policy": _to_arrays(learner.policy)}


def network_weights(learner: Learner) -> Weights:
    """Return the weights of all networks, which workers need to compute priorities."""
    return {name: _to_arrays(net) for name, net in learner.networks().items()}


def _to_arrays(net: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """Return the state dict as NumPy arrays, which Ray sends without copying them."""
    return {name: value.detach().cpu().numpy() for name, value in net.state_dict().items()}
