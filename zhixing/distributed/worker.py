"""One worker: an actor with its share of the environments and a learner of its own. In this process or on Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from zhixing import algorithms, config, envs
from zhixing.buffers.rollout import Rollout, RolloutPart
from zhixing.collect.actor import Actor
from zhixing.collect.evaluation import Episode
from zhixing.core.batch import Batch
from zhixing.core.learner import Gradients, Learner, LearnsFromExpert, LearnsOnWorkers, Update
from zhixing.core.policy import Phase
from zhixing.core.seeding import derive_seed
from zhixing.distributed.parameter_servers import ParameterServers
from zhixing.envs import portable
from zhixing.nets.policies import GreedyPolicy
from zhixing.training.data import load_expert

SPREAD = 7.0  # how much less the last worker explores than the first, as a power of epsilon (Horgan et al., 2018)

Weights = Mapping[str, Mapping[str, np.ndarray[Any, Any]]]  # of a learner's networks, by their names


@dataclass(frozen=True)
class Setup:
    """What a worker must know to begin. `life` counts those that did its work before and died."""

    settings: dict[str, Any]  # the run's whole configuration, plain
    number: int
    workers: int  # in all
    first: int  # of the run's environments
    last: int  # one past its last
    crashes: Path  # folder of crash reports
    threads: int | None  # that torch computes with, in a process of its own
    incarnation: int = 0
    servers: ParameterServers | None = None  # that have the weights
    objects: bytes = b""  # what this process doesn't know of the run's environment and network
    search: list[str] = field(default_factory=lambda: [entry for entry in sys.path if entry])

    @property
    def num_envs(self) -> int:
        return self.last - self.first

    @property
    def seed(self) -> int:
        """The first worker's is the run's own: alone it does what a run without workers does."""
        seed: int = self.settings["seed"]
        if self.number:
            seed = derive_seed(seed, "worker", self.number)
        return derive_seed(seed, "life", self.incarnation) if self.incarnation else seed


class WorkerResult(NamedTuple):
    """What a worker did: a rollout, or what it learned from one."""

    episodes: list[Episode]
    num_env_restarts: int  # environments that failed so far
    part: RolloutPart | None = None
    gradients: Gradients | None = None
    update: Update | None = None  # what servers did with the gradients
    priority: np.ndarray[Any, Any] | None = None  # of each step of the rollout `[T,n]`, for a replay


class Worker:
    """Nothing is made before the first call, so that what is wrong then is told like any other mistake."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.learner: Learner | None = None

    def begin(self) -> tuple[Actor, Learner]:
        if self.learner is None:
            setup = self.setup
            sys.path += [entry for entry in setup.search if entry not in sys.path]
            if setup.threads is not None:
                torch.set_num_threads(setup.threads)
            portable.unpack(setup.objects)
            cfg = self.cfg = config.build([setup.settings], {})
            vector, asked = cfg.vector, cfg.vector.workers
            env = envs.make_vector(
                cfg.env.name,
                setup.num_envs,
                backend=cfg.vector.backend,
                workers=min(asked, setup.num_envs) if isinstance(asked, int) else None,
                options=cfg.env.options,
                failure_policy=envs.FailurePolicy(
                    vector.on_crash, vector.step_timeout, setup.crashes, vector.call_timeout
                ),
            )
            learner = algorithms.get(cfg.algorithm).make(cfg, env.spaces, torch.device("cpu"))
            if isinstance(learner, LearnsFromExpert):
                learner.set_expert(load_expert(cfg, env.spaces))
            if isinstance(learner.policy, GreedyPolicy) and setup.number:
                self._explore_less(learner.policy)
            self.actor = Actor(learner.policy, env, learner.extra_fields, seed=setup.seed)
            self.learner = learner
        return self.actor, self.learner

    def ready(self) -> None:
        """Ends when it is: for those who want to wait, or to hear now what is wrong."""
        self.begin()

    def _explore_less(self, policy: GreedyPolicy) -> None:
        power = 1.0 + SPREAD * self.setup.number / (self.setup.workers - 1)
        usual = policy.epsilon
        policy.epsilon = lambda env_steps: usual(env_steps) ** power

    def load(self, weights: Weights) -> None:
        """Act with these from now on."""
        _, learner = self.begin()
        for name, arrays in weights.items():
            tensors = {key: torch.from_numpy(np.array(array)) for key, array in arrays.items()}
            getattr(learner, name).load_state_dict(tensors)

    def collect(self, steps: int, phase: str, env_steps: int, rate: bool = False) -> WorkerResult:
        """A rollout; `env_steps` are those of all workers so far. With `rate` also how wrong the learner was."""
        actor, learner = self.begin()
        actor.env_steps = env_steps
        experience = actor.collect(steps=steps, phase=Phase(phase))
        assert isinstance(actor.rollout, Rollout)
        priority = self._priority(learner, experience.batch) if rate else None
        return WorkerResult(
            experience.episodes, actor.num_env_restarts, actor.rollout.to_part(steps), priority=priority
        )

    def gradients(self, steps: int, phase: str, env_steps: int) -> WorkerResult:
        """What a rollout teaches: others apply it. Where that isn't finite they get the rollout, too, to look at."""
        actor, learner = self.begin()
        actor.env_steps = env_steps
        experience = actor.collect(steps=steps, phase=Phase(phase))
        assert isinstance(actor.rollout, Rollout)
        assert isinstance(learner, LearnsOnWorkers)
        gradients = learner.compute_gradients(experience.batch.to("cpu"))
        part = None if gradients.finite else actor.rollout.to_part(steps)
        return WorkerResult(experience.episodes, actor.num_env_restarts, part, gradients)

    def learn(self, steps: int, phase: str, env_steps: int, lr: float, turn: int) -> WorkerResult:
        """Act with the servers' weights, and let them apply what that teaches."""
        _, learner = self.begin()
        servers = self.setup.servers
        assert servers is not None
        assert isinstance(learner, LearnsOnWorkers)
        servers.pull(learner.optimizer)
        done = self.gradients(steps, phase, env_steps)
        assert done.gradients is not None
        update = servers.push(learner.optimizer, done.gradients, lr, self.setup.number, turn)
        return done if update is None else done._replace(gradients=None, update=update)

    def _priority(self, learner: Learner, batch: Batch) -> np.ndarray[Any, Any] | None:
        """Of single steps, whatever the replay sums up: a first guess until they are learned from."""
        flat = batch.to("cpu").flatten()
        names = [name for name in flat.fields if name not in learner.extra_fields]
        steps = {name: getattr(flat, name) for name in names}
        found = learner.priority(Batch(**steps, discount=torch.full_like(flat.reward, self.cfg.gamma)))
        return None if found is None else found.numpy().reshape(batch.terminated.shape)

    def state(self, weights: bool) -> dict[str, Any]:
        """Of the environments in the middle of their episodes; where `weights` are old, also these."""
        actor, learner = self.begin()
        return {"actor": actor.state_dict(), "policy": learner.policy.state_dict() if weights else None}

    def restore(self, state: Mapping[str, Any]) -> list[int]:
        """The environments of the run that could not be put back into mid-episode."""
        actor, learner = self.begin()
        if state["policy"] is not None:
            learner.policy.load_state_dict(state["policy"])
        return [self.setup.first + index for index in actor.load_state_dict(state["actor"])]

    def process_id(self) -> int:
        return os.getpid()

    def close(self) -> None:
        if self.learner is not None:
            self.actor.close()


def packed(learner: Learner, whole: bool = False) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """The weights that acting takes, or those of all networks, as arrays that travel without a copy."""
    parts = {"policy": learner.policy} if not whole else learner.networks()
    return {
        name: {key: value.detach().cpu().numpy() for key, value in part.state_dict().items()}
        for name, part in parts.items()
    }
