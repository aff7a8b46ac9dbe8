"""Trainers: the training loops, one function per scheme."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from zhixing.buffers import Buffer
from zhixing.buffers.rollout import Rollout
from zhixing.collect.actor import Actor
from zhixing.collect.torch_collector import TorchActor
from zhixing.config import (
    AsynchronousConfig,
    DataConfig,
    OffPolicyConfig,
    OnPolicyConfig,
    SearchConfig,
    SelfPlayConfig,
)
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner
from zhixing.core.policy import Phase
from zhixing.distributed.collector import SpreadActor
from zhixing.search import SelfPlay
from zhixing.training.loop import Loop


def on_policy(loop: Loop) -> None:
    """Collect with the present policy, learn from just that, forget it."""
    cfg, actor, learner = loop.cfg, loop.actor, loop.learner
    assert isinstance(cfg, OnPolicyConfig)
    assert isinstance(actor, (Actor, TorchActor, SpreadActor))
    with loop.running():
        for _ in loop.iterations():
            experience = actor.collect(steps=cfg.steps_per_iteration)
            update = learner.update(loop.learns_from(experience.batch.to(learner.device)))
            loop.iteration_end(experience.episodes, update.metrics)


def asynchronous(loop: Loop) -> None:
    """Learn from whoever is ready: its rollout, or the gradients that it took of it, by weights some updates old."""
    cfg, actor, learner = loop.cfg, loop.actor, loop.learner
    assert isinstance(cfg, AsynchronousConfig)
    assert isinstance(actor, SpreadActor)
    with loop.running():
        for _ in loop.iterations():
            turn, _ = actor.turn(cfg.steps_per_iteration, gradients=learner.learns_apart)
            if turn.part is not None:
                batch = loop.learns_from(Rollout.joined([turn.part]).to(learner.device))
            if turn.update is not None:  # by the servers that have the weights
                update = turn.update
                learner.updates += 1
            elif turn.gradients is not None:
                update = learner.apply(turn.gradients.to(learner.device))
            else:
                update = learner.update(batch)
            loop.iteration_end(turn.episodes, update.metrics)


def off_policy(loop: Loop) -> None:
    """Collect into the replay, learn from samples of it."""
    cfg, actor, buffer = loop.cfg, loop.actor, loop.buffer
    assert isinstance(cfg, OffPolicyConfig)
    assert isinstance(actor, Actor)
    assert buffer is not None
    with loop.running():
        for _ in loop.iterations():
            phase = Phase.RANDOM if loop.env_steps < cfg.warmup_steps else Phase.COLLECT
            experience = actor.collect(steps=cfg.steps_per_iteration, phase=phase)
            _store(loop, cfg, experience.batch)
            loop.iteration_end(experience.episodes, _learn(loop, buffer, cfg.batch_size, _due(loop, cfg)))


def off_policy_ahead(loop: Loop) -> None:
    """The same, while the next steps are made in another thread: with the weights that learning begins with, so all is
    as repeatable as one after the other. What is learned from doesn't hold these steps yet."""
    cfg, actor, learner, buffer = loop.cfg, loop.actor, loop.learner, loop.buffer
    assert isinstance(cfg, OffPolicyConfig)
    assert isinstance(actor, Actor)
    assert buffer is not None
    actor.policy = copy.deepcopy(learner.policy)  # nobody moves its weights while it acts
    with loop.running(), ThreadPoolExecutor(1) as other:
        for _ in loop.iterations():
            phase = Phase.RANDOM if loop.env_steps < cfg.warmup_steps else Phase.COLLECT
            due = _due(loop, cfg)
            actor.load(learner.weights())
            acting = other.submit(actor.collect, steps=cfg.steps_per_iteration, phase=phase)
            metrics = _learn(loop, buffer, cfg.batch_size, due)
            experience = acting.result()
            _store(loop, cfg, experience.batch)
            loop.iteration_end(experience.episodes, metrics)


def off_policy_apart(loop: Loop) -> None:
    """Workers fill the replay, each at its own pace, and say how much there is to learn of what they did; this process
    only learns (Ape-X; Horgan et al., 2018). Unlike there it waits for them: updates per step are as set."""
    cfg, actor, learner, buffer = loop.cfg, loop.actor, loop.learner, loop.buffer
    assert isinstance(cfg, OffPolicyConfig)
    assert isinstance(actor, SpreadActor)
    assert buffer is not None
    with loop.running():
        for _ in loop.iterations():
            phase = Phase.RANDOM if loop.env_steps < cfg.warmup_steps else Phase.COLLECT
            turn, envs = actor.turn(cfg.steps_per_iteration, phase, rate=cfg.replay.prioritized)
            assert turn.part is not None
            batch = Rollout.joined([turn.part])
            buffer.add(batch, envs, turn.priority)
            for other in loop.further.values():
                other.add(batch, envs)
            if cfg.normalise_obs:
                learner.observe(batch.to(learner.device))
            loop.iteration_end(turn.episodes, _learn(loop, buffer, cfg.batch_size, _due(loop, cfg)))


def offline(loop: Loop) -> None:
    """Learn from samples of what was recorded; no environment is stepped."""
    cfg, buffer = loop.cfg, loop.buffer
    assert isinstance(cfg, DataConfig)
    assert buffer is not None
    with loop.running():
        for _ in loop.iterations():
            loop.iteration_end([], _learn(loop, buffer, cfg.batch_size, 1))


def self_play(loop: Loop) -> None:
    """Play against oneself, learn from samples of the positions of games that ended."""
    cfg, actor, buffer = loop.cfg, loop.actor, loop.buffer
    assert isinstance(cfg, SelfPlayConfig)
    assert isinstance(actor, SelfPlay)
    assert buffer is not None
    with loop.running():
        for _ in loop.iterations():
            experience = actor.collect(cfg.steps_per_iteration)
            if len(experience.batch):
                buffer.add(experience.batch)
            metrics: Mapping[str, Tensor] = {}
            if buffer.ready:
                due = int(cfg.updates_per_step * loop.env_steps + 1e-9) - loop.updates
                metrics = _learn(loop, buffer, cfg.batch_size, due)
            loop.iteration_end(experience.episodes, metrics)


def play(loop: Loop) -> None:
    """Only act: for those that look ahead instead of learning."""
    cfg, actor = loop.cfg, loop.actor
    assert isinstance(cfg, SearchConfig)
    assert isinstance(actor, Actor)
    with loop.running():
        for _ in loop.iterations():
            experience = actor.collect(steps=cfg.steps_per_iteration)
            loop.iteration_end(experience.episodes, {})


def _store(loop: Loop, cfg: OffPolicyConfig, batch: Batch) -> None:
    for buffer in loop.buffers.values():
        buffer.add(batch)
    if cfg.normalise_obs:
        loop.learner.observe(batch.to(loop.learner.device))


def _due(loop: Loop, cfg: OffPolicyConfig) -> int:
    """How many updates the steps so far ask for."""
    buffer = loop.buffer
    assert buffer is not None
    if not buffer.ready and not buffer.full:  # full and yet nothing to sample is an error, which `sample` tells
        return 0
    return int(cfg.updates_per_step * max(0, loop.env_steps - cfg.warmup_steps) + 1e-9) - loop.updates


def _learn(loop: Loop, buffer: Buffer, batch_size: int, times: int) -> Mapping[str, Tensor]:
    """Updates from a sample each; what the last one tells."""
    learner = loop.learner
    metrics: Mapping[str, Tensor] = {}
    for _ in range(times):
        batch = loop.learns_from(_moved(buffer.sample(batch_size, loop.rng), learner))
        others = {name: _moved(other.sample(batch_size, loop.rng), learner) for name, other in loop.further.items()}
        update = learner.update(batch, **others)  # taken by those that declare them
        buffer.set_priority(batch.index, update.priority)
        metrics = update.metrics
    return metrics


def _moved(batch: Batch, learner: Learner) -> Batch:
    return batch if learner.device.type == "cpu" else batch.to(learner.device)  # costs a little even if it is there


TRAINERS = {
    "on_policy": on_policy,
    "asynchronous": asynchronous,
    "off_policy": off_policy,
    "off_policy_ahead": off_policy_ahead,
    "off_policy_apart": off_policy_apart,
    "offline": offline,
    "self_play": self_play,
    "play": play,
}
