"""Datasets in a run: opened, checked against the environment, and read by buffers."""

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
from zhixing.core.seeding import derive_seed
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError
from zhixing.offline import Dataset
from zhixing.training.agent import load
from zhixing.training.resolve import NO_ENV

if TYPE_CHECKING:
    from zhixing.training.loop import TrainingLoop


def open_data(cfg: RunConfig) -> Dataset | None:
    """Open the dataset that a run trains on, or return None if it trains in an environment."""
    if cfg.needs_data and getattr(cfg, "dataset", None) is None:
        raise UserError(f"{cfg.algorithm} trains on a dataset: name one with --dataset")
    if not isinstance(cfg, DataConfig) or cfg.dataset is None:
        if cfg.env.name == NO_ENV:
            raise UserError("--env none is for training on a dataset: name one with --dataset, or name an environment")
        return None
    start = cfg.replay.start if isinstance(cfg, OffPolicyConfig) else None
    for name, value in (("episodes", cfg.episodes), ("replay.start", start)):
        if value is not None:
            raise UserError(
                f"{name}={value} has no effect with a dataset, because no environment is stepped: leave it out"
            )
    has_env = cfg.env.name != NO_ENV
    return offline.open(cfg.dataset, cfg.env.name if has_env else None, cfg.env.options if has_env else None)


def check_data(data: Dataset, spaces: Spaces, env: str) -> None:
    """Raise `UserError` if the spaces of a dataset differ from those of the environment that the agent acts in."""
    for name, actual, expected in (
        ("agents", data.spaces.num_agents, spaces.num_agents),
        ("observations", data.spaces.fields()["obs"], spaces.fields()["obs"]),
        ("actions", data.spaces.action, spaces.action),
        ("extra fields", data.spaces.extras(), spaces.extras()),
        ("info_fields", data.spaces.info, spaces.info),
    ):
        if actual != expected:
            raise UserError(f"the dataset's {name} don't fit {env}: the dataset has {actual}, {env} has {expected}")


def load_demonstrations(cfg: Any, spaces: Spaces) -> Batch:
    """Return the steps `[B]` of `cfg.demonstrations` episodes of an expert, chosen at random by the seed."""
    data = offline.open(cfg.dataset, cfg.env.name, cfg.env.options)
    check_data(data, spaces, cfg.env.name)
    num = data.num_episodes if cfg.demonstrations is None else cfg.demonstrations
    if num > data.num_episodes:
        raise UserError(f"demonstrations={num} are more than the {data.num_episodes} episodes of {cfg.dataset}")
    chosen = np.random.default_rng(derive_seed(cfg.seed, "demonstrations")).permutation(data.num_episodes)[:num]
    steps = data.select(np.sort(chosen)).arrays
    return Batch(obs=steps["obs"], action=steps["action"]).map(np.array)  # torch needs writable copies


def load_expert(cfg: Any, spaces: Spaces) -> Policy:
    """Return the policy of the run `cfg.expert`."""
    if cfg.expert is None:
        raise UserError(f"{cfg.algorithm} queries an expert: name its run with expert=RUN")
    agent = load(cfg.expert)
    if agent.spaces.fields()["obs"] != spaces.fields()["obs"] or agent.spaces.action != spaces.action:
        raise UserError(
            f"the expert {cfg.expert} is for {agent.cfg.env.name}, whose observations or actions differ from those of "
            f"{cfg.env.name}"
        )
    return agent.policy


def summarize(data: Dataset) -> dict[str, Any]:
    """Return what a run stores about the dataset that it trained on."""
    return {
        "env": data.env,
        "steps": len(data),
        "episodes": data.num_episodes,
        "mean_return": float(data.returns().mean()),
        "references": dict(data.references),
        "note": data.note,
    }


def open_ring(data: Dataset) -> Ring:
    """Return a read-only ring over the arrays of a dataset."""
    return Ring.from_arrays(data.spaces.fields(), data.arrays, data.final_fields, data.ends)


def fill_buffer(buffer: Buffer, data: Dataset, chunk_steps: int = 4096) -> None:
    """Add the newest recorded steps to an empty buffer, as many as fit, in equal parts per environment."""
    ring, num_envs = open_ring(data), buffer.num_envs
    length = min(len(data), buffer.capacity) // num_envs
    if length == 0:
        raise UserError(f"the dataset holds {len(data)} steps, too few for {num_envs} environments: set num_envs=1")
    first = len(data) - length * num_envs
    for start in range(0, length, chunk_steps):
        time = np.arange(start, min(start + chunk_steps, length))[:, None]
        index = first + time + np.arange(num_envs) * length  # [T,N]
        buffer.add(gather_steps(ring, index, ring.store.spec))


def gather_steps(ring: Ring, index: Array, names: Iterable[str]) -> Batch:
    """Return stored steps `[T,N]` with their successors, as a batch that can be added to a buffer or dataset."""
    rows = ring.to_row(index.reshape(-1))
    fields = {name: ring.take(name, rows) for name in names}
    fields |= {after: ring.take_successors(name, rows) for name, after in SUCCESSORS.items() if name in fields}
    return Batch(**fields).map(lambda leaf: leaf.reshape(*index.shape, *leaf.shape[1:])).numpy()


def initialize_from_data(loop: TrainingLoop, data: Dataset | None, spaces: Spaces) -> None:
    """Prepare a new run: compute observation statistics of its dataset, and fill its buffer from `replay.start`."""
    cfg, learner = loop.cfg, loop.learner
    if isinstance(cfg, DataConfig) and data is not None and cfg.normalize_obs:
        for batch in data.batches(10_000):
            learner.update_normalizers(batch.map(np.array).to(learner.device))
    if isinstance(cfg, OffPolicyConfig) and cfg.replay.start is not None:
        recorded = offline.open(cfg.replay.start, cfg.env.name, cfg.env.options)
        check_data(recorded, spaces, cfg.env.name)
        fill_buffer(loop.buffer, recorded)
