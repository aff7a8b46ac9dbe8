"""Recorded experience as a run uses it: opened, checked against the task, and read by buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from zhixing import offline
from zhixing.buffers import SUCCESSORS, Buffer
from zhixing.buffers.fields import Array
from zhixing.buffers.ring import Ring
from zhixing.config import DataConfig, OffPolicyConfig, RunConfig
from zhixing.core.batch import Batch
from zhixing.core.policy import Policy
from zhixing.core.seeding import stream
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.offline import Dataset
from zhixing.training.agent import load

if TYPE_CHECKING:
    from zhixing.training.loop import TrainingLoop

NO_ENV = "none"  # the name of no task: learn without evaluations


def open_data(cfg: RunConfig) -> Dataset | None:
    """What a run learns from instead of an environment, if it does."""
    if cfg.needs_data and getattr(cfg, "dataset", None) is None:
        raise UserError(f"{cfg.algorithm} learns from recorded experience: name it with --dataset")
    if not isinstance(cfg, DataConfig) or cfg.dataset is None:
        if cfg.env.name == NO_ENV:
            raise UserError(
                "--env none is for learning from recorded experience: name it with --dataset, or name a task"
            )
        return None
    start = cfg.replay.start if isinstance(cfg, OffPolicyConfig) else None
    for name, value in (("episodes", cfg.episodes), ("replay.start", start)):
        if value is not None:
            raise UserError(f"{name}={value} means nothing with a dataset, where no environment is stepped")
    named = cfg.env.name != NO_ENV
    return offline.open(cfg.dataset, cfg.env.name if named else None, cfg.env.options if named else None)


def check_spaces(data: Dataset, spaces: Spaces, task: str) -> None:
    """Refuse data of another kind of task than the one that an agent will act in."""
    for name, mine, theirs in (
        ("agents", data.spaces.num_agents, spaces.num_agents),
        ("observations", data.spaces.fields()["obs"], spaces.fields()["obs"]),
        ("actions", data.spaces.action, spaces.action),
        ("what is shown beside observations", data.spaces.extras(), spaces.extras()),
    ):
        if mine != theirs:
            raise UserError(f"the data's {name} don't fit {task}: the data has {mine}, the task {theirs}")


def demonstrations(cfg: Any, spaces: Spaces) -> Batch:
    """The steps `[B]` of some episodes of an expert: which ones depends on the seed."""
    data = offline.open(cfg.dataset, cfg.env.name, cfg.env.options)
    check_spaces(data, spaces, cfg.env.name)
    num = data.num_episodes if cfg.demonstrations is None else cfg.demonstrations
    if num > data.num_episodes:
        raise UserError(f"demonstrations={num} are more than the {data.num_episodes} episodes of {cfg.dataset}")
    chosen = np.random.default_rng(stream(cfg.seed, "demonstrations")).permutation(data.num_episodes)[:num]
    steps = data.select(np.sort(chosen)).arrays
    return Batch(obs=steps["obs"], action=steps["action"]).map(np.array)  # a copy that torch may hold


def expert_policy(cfg: Any, spaces: Spaces) -> Policy:
    """The policy of a run that can be asked."""
    if cfg.expert is None:
        raise UserError(f"{cfg.algorithm} asks an expert: name its run with expert=RUN")
    agent = load(cfg.expert)
    if agent.spaces.fields() != spaces.fields() or agent.spaces.action != spaces.action:
        raise UserError(
            f"the expert {cfg.expert} is for {agent.cfg.env.name}, whose observations or actions aren't those of "
            f"{cfg.env.name}"
        )
    return agent.policy


def summary_of(data: Dataset) -> dict[str, Any]:
    """What a run keeps of the data that it learned from."""
    return {
        "env": data.env,
        "steps": len(data),
        "episodes": data.num_episodes,
        "mean_return": float(data.returns().mean()),
        "references": dict(data.references),
        "note": data.note,
    }


def storage_of(data: Dataset) -> Ring:
    return Ring.over(data.spaces.fields(), data.arrays, data.lasts, data.ends)


def fill(buffer: Buffer, data: Dataset, rows: int = 4096) -> None:
    """Put recorded steps into an empty buffer, as many as it holds, in equal parts for its columns."""
    ring, columns = storage_of(data), buffer.num_envs
    length = min(len(data), buffer.capacity) // columns
    if length == 0:
        raise UserError(f"the data holds {len(data)} steps, too few for {columns} environments: set num_envs=1")
    first = len(data) - length * columns  # the newest ones
    for begin in range(0, length, rows):
        time = np.arange(begin, min(begin + rows, length))[:, None]
        index = first + time + np.arange(columns) * length  # [T,N]
        buffer.add(rows_of(ring, index, ring.table.spec))


def rows_of(ring: Ring, index: Array, names: Iterable[str]) -> Batch:
    """Stored steps `[T,N]` with what followed them, as a batch to be added elsewhere."""
    flat = ring.flat(index.reshape(-1))
    fields = {name: ring.take(name, flat) for name in names}
    fields |= {after: ring.successor(name, flat) for name, after in SUCCESSORS.items() if name in fields}
    return Batch(**fields).map(lambda leaf: leaf.reshape(*index.shape, *leaf.shape[1:])).numpy()


def start_with_data(loop: TrainingLoop, data: Dataset | None, spaces: Spaces) -> None:
    """Prepare a new run: set observation statistics from its dataset, and fill its replay from `replay.start`."""
    cfg, learner = loop.cfg, loop.learner
    if isinstance(cfg, DataConfig) and data is not None and cfg.normalize_obs:
        for batch in data.batches(10_000):
            learner.observe(batch.map(np.array).to(learner.device))
    if isinstance(cfg, OffPolicyConfig) and cfg.replay.start is not None:
        recorded = offline.open(cfg.replay.start, cfg.env.name, cfg.env.options)
        check_spaces(recorded, spaces, cfg.env.name)
        assert loop.buffer is not None
        fill(loop.buffer, recorded)
