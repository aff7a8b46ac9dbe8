"""Trainers: training loops, one function `(loop) -> None` per scheme.

A config class may name its own trainer in the class attribute `trainer`. Without one, `select_trainer` takes the
function of the scheme's config class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from zhixing.buffers import Buffer
from zhixing.config import (
    AsynchronousConfig,
    DataConfig,
    OffPolicyConfig,
    OnPolicyConfig,
    RunConfig,
    SearchConfig,
    SelfPlayConfig,
)
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner
from zhixing.core.policy import Phase
from zhixing.training.loop import TrainingLoop

Trainer = Callable[[TrainingLoop], None]


def on_policy(loop: TrainingLoop) -> None:
    """Collect with the current policy, update from these steps, and discard them."""
    cfg, actor, learner = loop.cfg, loop.actor, loop.learner
    assert isinstance(cfg, OnPolicyConfig)
    assert actor is not None
    with loop.running():
        for _ in loop.iterations():
            experience = actor.collect(steps=cfg.rollout_steps)
            update = learner.update(loop.learns_from(experience.batch.to(learner.device)))
            loop.iteration_end(experience.episodes, update.metrics)


def asynchronous(loop: TrainingLoop) -> None:
    """Update from the first worker that is ready: from its rollout, or with the gradients that it computed of it.

    Workers act with weights that are some updates old.
    """
    cfg, actor, learner = loop.cfg, loop.actor, loop.learner
    assert isinstance(cfg, AsynchronousConfig)
    assert actor is not None
    with loop.running():
        for _ in loop.iterations():
            turn = actor.collect_from_worker(cfg.rollout_steps, gradients=learner.gradients_on_workers)
            if turn.batch is not None:
                batch = loop.learns_from(turn.batch.to(learner.device))
            if turn.update is not None:  # by the parameter servers
                update = turn.update
                learner.updates += 1
            elif turn.gradients is not None:
                update = learner.apply(turn.gradients.to(learner.device))
            else:
                update = learner.update(batch)
            loop.iteration_end(turn.episodes, update.metrics)


def off_policy(loop: TrainingLoop) -> None:
    """Collect into the replay buffer and update from samples of it."""
    cfg, actor, buffer = loop.cfg, loop.actor, loop.buffer
    assert isinstance(cfg, OffPolicyConfig)
    assert actor is not None
    assert buffer is not None
    with loop.running():
        for _ in loop.iterations():
            experience = actor.collect(steps=cfg.train_every, phase=_phase(loop, cfg))
            add_to_buffer(loop, cfg, buffer, experience.batch)
            loop.iteration_end(experience.episodes, _learn(loop, buffer, cfg.batch_size, num_updates_due(loop, cfg)))


def off_policy_async(loop: TrainingLoop) -> None:
    """Like `off_policy`, but collect in a second thread while updating.

    Collection uses the weights from the start of the iteration, so runs stay deterministic. The updates of an iteration
    don't sample its new steps.
    """
    cfg, actor, learner, buffer = loop.cfg, loop.actor, loop.learner, loop.buffer
    assert isinstance(cfg, OffPolicyConfig)
    assert actor is not None
    assert buffer is not None
    actor.copy_policy()
    with loop.running(), ThreadPoolExecutor(1) as executor:
        for _ in loop.iterations():
            phase, due = _phase(loop, cfg), num_updates_due(loop, cfg)
            actor.load_weights(learner.weights())
            collecting = executor.submit(actor.collect, steps=cfg.train_every, phase=phase)
            metrics = _learn(loop, buffer, cfg.batch_size, due)
            experience = collecting.result()
            add_to_buffer(loop, cfg, buffer, experience.batch)
            loop.iteration_end(experience.episodes, metrics)


def off_policy_distributed(loop: TrainingLoop) -> None:
    """Like `off_policy`, but distributed workers fill the replay buffer and compute priorities; this process updates.

    As in Ape-X (Horgan et al., 2018), each worker collects at its own pace. Differs from the paper: the learner waits
    for workers, so the number of updates per step is as configured.
    """
    cfg, actor, learner, buffer = loop.cfg, loop.actor, loop.learner, loop.buffer
    assert isinstance(cfg, OffPolicyConfig)
    assert actor is not None
    assert buffer is not None
    with loop.running():
        for _ in loop.iterations():
            turn = actor.collect_from_worker(cfg.train_every, _phase(loop, cfg), priorities=cfg.replay.prioritized)
            assert turn.batch is not None
            buffer.add(turn.batch, turn.envs, turn.priority)
            if cfg.normalize_obs:
                learner.observe(turn.batch.to(learner.device))
            loop.iteration_end(turn.episodes, _learn(loop, buffer, cfg.batch_size, num_updates_due(loop, cfg)))


def offline(loop: TrainingLoop) -> None:
    """Update from samples of a dataset, without an environment."""
    cfg, buffer = loop.cfg, loop.buffer
    assert isinstance(cfg, DataConfig)
    assert buffer is not None
    with loop.running():
        for _ in loop.iterations():
            loop.iteration_end([], _learn(loop, buffer, cfg.batch_size, 1))


def self_play(loop: TrainingLoop) -> None:
    """Play games against oneself and update from samples of the positions of finished games."""
    cfg, actor, buffer = loop.cfg, loop.actor, loop.buffer
    assert isinstance(cfg, SelfPlayConfig)
    assert actor is not None
    assert buffer is not None
    with loop.running():
        for _ in loop.iterations():
            experience = actor.collect(steps=cfg.rollout_steps)
            if len(experience.batch):
                buffer.add(experience.batch)
            metrics: Mapping[str, Tensor] = {}
            if buffer.ready:
                due = int(cfg.updates_per_step * loop.env_steps + 1e-9) - loop.updates
                metrics = _learn(loop, buffer, cfg.batch_size, due)
            loop.iteration_end(experience.episodes, metrics)


def play(loop: TrainingLoop) -> None:
    """Act without updates, for algorithms that search instead of learning."""
    cfg, actor = loop.cfg, loop.actor
    assert isinstance(cfg, SearchConfig)
    assert actor is not None
    with loop.running():
        for _ in loop.iterations():
            experience = actor.collect(steps=cfg.rollout_steps)
            loop.iteration_end(experience.episodes, {})


TRAINERS: dict[type[RunConfig], Trainer] = {
    OnPolicyConfig: on_policy,
    AsynchronousConfig: asynchronous,
    OffPolicyConfig: off_policy,
    DataConfig: offline,
    SelfPlayConfig: self_play,
    SearchConfig: play,
}


def select_trainer(cfg: RunConfig, *, from_data: bool = False, distributed: bool = False) -> Trainer:
    """Return the trainer of a run: that of its config class, or the variant for its settings.

    `from_data` means that a dataset replaces the environment, `distributed` that workers collect.
    """
    named = type(cfg).trainer
    if named is not None:
        return named
    trainer = next(TRAINERS[kind] for kind in type(cfg).__mro__ if kind in TRAINERS)
    if from_data:
        return offline
    if trainer is off_policy and isinstance(cfg, OffPolicyConfig):
        return off_policy_async if cfg.async_collect else off_policy_distributed if distributed else off_policy
    return trainer


def _phase(loop: TrainingLoop, cfg: OffPolicyConfig) -> Phase:
    return Phase.RANDOM if loop.env_steps < cfg.learning_starts else Phase.COLLECT


def add_to_buffer(loop: TrainingLoop, cfg: OffPolicyConfig, buffer: Buffer, batch: Batch) -> None:
    buffer.add(batch)
    if cfg.normalize_obs:
        loop.learner.observe(batch.to(loop.learner.device))


def num_updates_due(loop: TrainingLoop, cfg: OffPolicyConfig) -> int:
    """Return the number of updates that the steps so far require."""
    buffer = loop.buffer
    assert buffer is not None
    if not buffer.ready and not buffer.full:  # a full buffer without anything to sample is an error of `sample`
        return 0
    return int(cfg.updates_per_step * max(0, loop.env_steps - cfg.learning_starts) + 1e-9) - loop.updates


def _learn(loop: TrainingLoop, buffer: Buffer, batch_size: int, times: int) -> Mapping[str, Tensor]:
    """Update `times` times, each from a new sample. Return the metrics of the last update."""
    learner = loop.learner
    metrics: Mapping[str, Tensor] = {}
    for _ in range(times):
        batch = loop.learns_from(_moved(buffer.sample(batch_size, loop.rng), learner))
        update = learner.update(batch)
        buffer.set_priority(batch.index, update.priority)
        metrics = update.metrics
    return metrics


def _moved(batch: Batch, learner: Learner) -> Batch:
    return batch if learner.device.type == "cpu" else batch.to(learner.device)  # `to` costs a little even on the CPU
