"""Helpers of trainers with a replay buffer: how many updates are due, and updating from samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from zhixing.config import OffPolicyConfig, parse_interval
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner
from zhixing.core.policy import Phase
from zhixing.training.loop import TrainingLoop

Array = np.ndarray[Any, Any]


def collect_phase(loop: TrainingLoop, cfg: OffPolicyConfig) -> Phase:
    """Return `Phase.RANDOM` until `learning_starts`, then `Phase.COLLECT`."""
    return Phase.RANDOM if loop.env_steps < cfg.learning_starts else Phase.COLLECT


def steps_per_iteration(cfg: OffPolicyConfig) -> int:
    """Return the steps per environment between updates; 1 if `train_every` counts episodes.

    Single steps bound the memory and let evaluations, checkpoints and budgets come in the middle of a long episode.
    """
    number, unit = parse_interval(cfg.train_every)
    return int(number) if unit == "steps" else 1


def training_is_due(loop: TrainingLoop, cfg: OffPolicyConfig, num_ended: int) -> bool:
    """Return whether updates follow these steps, in which `num_ended` episodes have ended."""
    number, unit = parse_interval(cfg.train_every)
    return unit == "steps" or (loop.episodes + num_ended) // number > loop.episodes // number


def add_to_buffer(
    loop: TrainingLoop,
    cfg: OffPolicyConfig,
    batch: Batch,
    envs: Array | None = None,
    priority: Array | None = None,
) -> None:
    """Add steps `[T,n]` to the buffer and update the learner's observation statistics.

    `envs` are the indices of the environments that the steps come from, by default all. New steps without a `priority`
    get the largest one.
    """
    loop.buffer.add(batch, envs, priority)
    if cfg.normalize_obs:
        loop.learner.update_normalizers(batch.to(loop.learner.device))


def num_updates_due(loop: TrainingLoop, updates_per_step: float, learning_starts: int = 0) -> int:
    """Return the number of updates that the environment steps since `learning_starts` still require."""
    buffer = loop.buffer
    if not buffer.ready and not buffer.full:  # `sample` raises an error if a full buffer has nothing to sample
        return 0
    return int(updates_per_step * max(0, loop.env_steps - learning_starts) + 1e-9) - loop.updates


def update_from_samples(loop: TrainingLoop, batch_size: int, num_updates: int) -> Mapping[str, Tensor]:
    """Update `num_updates` times, each from a new sample of the buffer. Return the metrics of the last update."""
    learner, buffer = loop.learner, loop.buffer
    metrics: Mapping[str, Tensor] = {}
    for _ in range(num_updates):
        batch = _to_device(buffer.sample(batch_size, loop.rng), learner)
        if not learner.has_nonfinite_step:  # keep the first batch with a non-finite step, for the error report
            loop.batch = batch
        update = learner.update(batch)
        buffer.set_priority(batch.index, update.priority)
        metrics = update.metrics
    return metrics


def _to_device(batch: Batch, learner: Learner) -> Batch:
    return batch if learner.device.type == "cpu" else batch.to(learner.device)  # `to` takes time even on the CPU
