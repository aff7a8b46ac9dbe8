"""Trainers: one training loop per scheme, a function `(loop) -> None`.

The setting `trainer` may name a custom one. Otherwise `select_trainer` returns the function of the scheme's config
class.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from zhixing.algorithms.multi_policy import MultiPolicy
from zhixing.buffers import BufferGroup
from zhixing.collectors.evaluation import Episode
from zhixing.config import (
    AsynchronousConfig,
    DataConfig,
    MultiPolicyConfig,
    OffPolicyConfig,
    OnPolicyConfig,
    RunConfig,
    SearchConfig,
    SelfPlayConfig,
)
from zhixing.core.batch import Batch
from zhixing.core.learner import LearnsOnWorkers
from zhixing.errors import UserError
from zhixing.training.loop import TrainingLoop
from zhixing.training.updates import (
    add_to_buffer,
    collect_phase,
    num_updates_due,
    steps_per_iteration,
    training_is_due,
    update_from_samples,
)
from zhixing.utils.importing import import_object

Trainer = Callable[[TrainingLoop], None]


def on_policy(loop: TrainingLoop) -> None:
    """Collect with the current policy, update from these steps, and discard them."""
    cfg, collector, learner = loop.cfg, loop.collector, loop.learner
    assert isinstance(cfg, OnPolicyConfig)
    with loop.running():
        for _ in loop.iterations():
            experience = collector.collect(steps=cfg.rollout_steps)
            loop.batch = experience.batch.to(learner.device)
            update = learner.update(loop.batch)
            loop.iteration_end(experience.episodes, update.metrics)


def asynchronous(loop: TrainingLoop) -> None:
    """Update from the rollout of the first worker that has finished. Workers act with weights some updates old."""
    cfg, collector, learner = loop.cfg, loop.collector, loop.learner
    assert isinstance(cfg, AsynchronousConfig)
    with loop.running():
        for _ in loop.iterations():
            experience = collector.collect_from_worker(cfg.rollout_steps)
            assert experience.batch is not None
            loop.batch = experience.batch.to(learner.device)
            update = learner.update(loop.batch)
            loop.iteration_end(experience.episodes, update.metrics)


def asynchronous_gradients(loop: TrainingLoop) -> None:
    """Apply the gradients of the first worker that has finished. Workers compute them with weights some updates old."""
    cfg, collector, learner = loop.cfg, loop.collector, loop.learner
    assert isinstance(cfg, AsynchronousConfig)
    assert isinstance(learner, LearnsOnWorkers)
    assert collector is not None
    with loop.running():
        for _ in loop.iterations():
            experience = collector.collect_from_worker(cfg.rollout_steps, gradients=True)
            if experience.batch is not None:  # only if the gradients aren't finite
                loop.batch = experience.batch.to(learner.device)
            if experience.gradients is not None:
                update = learner.apply_gradients(experience.gradients.to(learner.device))
            else:  # parameter servers have applied them
                assert experience.update is not None
                update = experience.update
                learner.updates += 1
            loop.iteration_end(experience.episodes, update.metrics)


def off_policy(loop: TrainingLoop) -> None:
    """Collect into the replay buffer and update from samples of it."""
    cfg, collector = loop.cfg, loop.collector
    assert isinstance(cfg, OffPolicyConfig)
    with loop.running():
        for _ in loop.iterations():
            experience = collector.collect(steps=steps_per_iteration(cfg), phase=collect_phase(loop, cfg))
            add_to_buffer(loop, cfg, experience.batch)
            num_updates = 0
            if training_is_due(loop, cfg, len(experience.episodes)):
                num_updates = num_updates_due(loop, cfg.updates_per_step, cfg.learning_starts)
            metrics = update_from_samples(loop, cfg.batch_size, num_updates)
            loop.iteration_end(experience.episodes, metrics)


def off_policy_async(loop: TrainingLoop) -> None:
    """Like `off_policy`, but collect in a second thread while updating.

    Collection uses the weights from the start of the iteration, so runs stay deterministic. The updates of an iteration
    don't sample its new steps.
    """
    cfg, collector, learner = loop.cfg, loop.collector, loop.learner
    assert isinstance(cfg, OffPolicyConfig)
    collector.copy_policy()
    with loop.running(), ThreadPoolExecutor(1) as executor:
        for _ in loop.iterations():
            phase = collect_phase(loop, cfg)
            num_updates = num_updates_due(loop, cfg.updates_per_step, cfg.learning_starts)
            collector.load_weights(learner.policy.state_dict())
            collecting = executor.submit(collector.collect, steps=steps_per_iteration(cfg), phase=phase)
            metrics = update_from_samples(loop, cfg.batch_size, num_updates)
            experience = collecting.result()
            add_to_buffer(loop, cfg, experience.batch)
            loop.iteration_end(experience.episodes, metrics)


def off_policy_distributed(loop: TrainingLoop) -> None:
    """Like `off_policy`, but distributed workers fill the replay buffer and compute priorities; this process updates.

    As in Ape-X (Horgan et al., 2018), each worker collects at its own pace. Differs from the paper: the learner waits
    for workers, so the number of updates per step is as configured.
    """
    cfg, collector = loop.cfg, loop.collector
    assert isinstance(cfg, OffPolicyConfig)
    with loop.running():
        for _ in loop.iterations():
            experience = collector.collect_from_worker(
                steps_per_iteration(cfg), collect_phase(loop, cfg), priorities=cfg.replay.prioritized
            )
            assert experience.batch is not None
            add_to_buffer(loop, cfg, experience.batch, experience.envs, experience.priority)
            num_updates = num_updates_due(loop, cfg.updates_per_step, cfg.learning_starts)
            metrics = update_from_samples(loop, cfg.batch_size, num_updates)
            loop.iteration_end(experience.episodes, metrics)


def offline(loop: TrainingLoop) -> None:
    """Update from samples of a dataset, without an environment."""
    cfg = loop.cfg
    assert isinstance(cfg, DataConfig)
    with loop.running():
        for _ in loop.iterations():
            loop.iteration_end([], update_from_samples(loop, cfg.batch_size, 1))


def self_play(loop: TrainingLoop) -> None:
    """Collect games of self-play and update from samples of the positions of finished games."""
    cfg, collector, buffer = loop.cfg, loop.collector, loop.buffer
    assert isinstance(cfg, SelfPlayConfig)
    with loop.running():
        for _ in loop.iterations():
            experience = collector.collect(steps=cfg.rollout_steps)
            if len(experience.batch):  # no game may have finished
                buffer.add(experience.batch)
            metrics = update_from_samples(loop, cfg.batch_size, num_updates_due(loop, cfg.updates_per_step))
            loop.iteration_end(experience.episodes, metrics)


def multi_policy(loop: TrainingLoop) -> None:
    """Collect with several policies, and update each learner as its own scheme does.

    An iteration lasts as long as the longest interval between updates, which the others must divide. So no learner has
    an incomplete rollout at its end.
    """
    learner = loop.learner
    assert isinstance(learner, MultiPolicy)
    buffers = loop.replay.buffers if isinstance(loop.replay, BufferGroup) else {}
    parts = {
        name: TrainingLoop(learner.configs[name], loop.collector, part, buffer=buffers.get(name))
        for name, part in learner.learners.items()
    }
    intervals = _steps_between_updates(parts)
    chunk, total = min(intervals.values(), default=1), max(intervals.values(), default=1)
    rollouts: dict[str, list[Batch]] = {name: [] for name in parts}
    with loop.running():
        for _ in loop.iterations():
            episodes: list[Episode] = []
            metrics: dict[str, Tensor] = {}
            for steps in range(chunk, total + 1, chunk):
                experience = loop.collector.collect(steps=chunk)
                episodes += experience.episodes
                for name, part in parts.items():
                    part.rng, failed = loop.rng, learner.has_nonfinite_step
                    batch = learner.view(name, experience.batch)
                    if part.has_buffer:
                        part_metrics = _update_from_replay(part, batch, steps % intervals[name] == 0)
                    else:
                        # copied, because the next `collect` overwrites the batch
                        rollouts[name].append(batch if intervals[name] == chunk else Batch.cat([batch]))
                        part_metrics = _update_from_rollout(part, rollouts[name], steps % intervals[name] == 0)
                    if not failed:  # keep the first batch with a non-finite step, for the error report
                        loop.batch = part.batch
                    metrics |= {f"{name}/{key}": value for key, value in part_metrics.items()}
                learner.update_leagues(experience.batch, loop.env_steps)
                learner.count_updates()
            loop.iteration_end(episodes, metrics)


def _steps_between_updates(parts: Mapping[str, TrainingLoop]) -> dict[str, int]:
    """Return the steps per environment between the updates of each learner."""
    intervals = {
        name: steps_per_iteration(part.cfg) if isinstance(part.cfg, OffPolicyConfig) else part.cfg.rollout_steps  # type: ignore[attr-defined]
        for name, part in parts.items()
    }
    ordered = sorted(intervals.values())
    if any(longer % shorter for shorter, longer in itertools.pairwise(ordered)):
        given = ", ".join(f"{name} {steps}" for name, steps in intervals.items())
        raise UserError(
            f"the policies update at steps that don't fit together ({given}): each rollout_steps or train_every must "
            f"divide the longer ones"
        )
    return intervals


def _update_from_replay(part: TrainingLoop, batch: Batch, is_due: bool) -> Mapping[str, Tensor]:
    cfg = part.cfg
    assert isinstance(cfg, OffPolicyConfig)
    add_to_buffer(part, cfg, batch)
    num_updates = num_updates_due(part, cfg.updates_per_step, cfg.learning_starts) if is_due else 0
    return update_from_samples(part, cfg.batch_size, num_updates)


def _update_from_rollout(part: TrainingLoop, rollout: list[Batch], is_due: bool) -> Mapping[str, Tensor]:
    if not is_due:
        return {}
    batch = rollout[0] if len(rollout) == 1 else Batch.cat(rollout)
    rollout.clear()
    part.batch = batch.to(part.learner.device)
    return part.learner.update(part.batch).metrics


def act_only(loop: TrainingLoop) -> None:
    """Act without updates, for algorithms that search instead of learning."""
    cfg, collector = loop.cfg, loop.collector
    assert isinstance(cfg, SearchConfig)
    with loop.running():
        for _ in loop.iterations():
            experience = collector.collect(steps=cfg.rollout_steps)
            loop.iteration_end(experience.episodes, {})


TRAINERS: dict[type[RunConfig], Trainer] = {
    OnPolicyConfig: on_policy,
    AsynchronousConfig: asynchronous,
    OffPolicyConfig: off_policy,
    DataConfig: offline,
    SelfPlayConfig: self_play,
    SearchConfig: act_only,
    MultiPolicyConfig: multi_policy,
}


def select_trainer(cfg: RunConfig, *, from_data: bool = False, distributed: bool = False) -> Trainer:
    """Return the trainer of a run: the custom one, or that of its config class in the variant that settings require.

    `from_data` means that a dataset replaces the environment, `distributed` that workers collect.
    """
    if isinstance(cfg.trainer, str):
        return _custom_trainer(cfg.trainer)
    trainer = next((TRAINERS[kind] for kind in type(cfg).__mro__ if kind in TRAINERS), None)
    if trainer is None:
        raise UserError(
            f"{type(cfg).__name__}, the settings of {cfg.algorithm}, has no training scheme; derive it from "
            f"{', '.join(kind.__name__ for kind in TRAINERS)}, or set trainer=your.module:your_trainer"
        )
    if from_data:
        return offline
    if cfg.gradients_on_workers:
        return asynchronous_gradients
    if trainer is off_policy and isinstance(cfg, OffPolicyConfig):
        return off_policy_async if cfg.async_collect else off_policy_distributed if distributed else off_policy
    return trainer


def _custom_trainer(name: str) -> Trainer:
    trainer: Trainer = import_object(name)
    try:
        inspect.signature(trainer).bind(None)
    except (TypeError, ValueError):
        raise UserError(f"trainer={name!r} must be a function with one parameter, the training loop") from None
    return trainer
