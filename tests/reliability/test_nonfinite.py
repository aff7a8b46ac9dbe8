"""A batch that makes a loss NaN: the run stops, names what was wrong, keeps the batch and the last good checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from soaking import SOAKING, count

import zhixing as zx
from zhixing.collect.actor import Actor
from zhixing.collect.collector import Experience
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.tree import tree_map
from zhixing.distributed.collector import DistributedCollector
from zhixing.distributed.worker_pool import LocalWorkerPool
from zhixing.errors import NonFiniteError
from zhixing.training.run_folder import RunFolder, read_checkpoint


class Poison(zx.Callback):
    """From some step on every batch holds observations and rewards that are NaN."""

    def iteration_begin(self, loop: zx.TrainingLoop) -> None:
        if loop.steps < 300 or hasattr(self, "update"):
            return
        self.update = loop.learner.update
        if loop.learner.gradients_on_workers:
            assert isinstance(loop.collector, DistributedCollector)
            assert isinstance(loop.collector.pool, LocalWorkerPool)
            for worker in loop.collector.pool.workers:
                spoil_rollouts(worker.actor)
        self.weights = {name: value.clone() for name, value in loop.learner.weights().items()}

        def poisoned(batch: Batch, **others: Batch) -> object:
            def spoil(leaf: torch.Tensor) -> torch.Tensor:
                spoiled = leaf.clone()
                spoiled.view(-1)[:8] = torch.nan
                return spoiled

            spoiled = {name: tree_map(spoil, getattr(batch, name)) for name in ("obs", "reward") if name in batch}
            spoiled = {name: value for name, value in spoiled.items() if value.dtype.is_floating_point}
            batch = batch.replace(**spoiled)
            if not loop.learner.failed:
                loop.batch = batch
            return self.update(batch, **others)

        loop.learner.update = poisoned  # type: ignore[method-assign]


def spoil_rollouts(actor: Actor) -> None:
    """For those who learn where they act."""
    collect = actor.collect

    def poisoned(steps: int, phase: Phase) -> Experience:
        experience = collect(steps=steps, phase=phase)
        experience.batch.obs[0] = experience.batch.reward[0] = np.nan
        return experience

    actor.collect = poisoned  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    "name", zx.algorithms.names() if SOAKING else ["ppo", "dqn", "sac", "bc", "a3c"]
)  # of each scheme
def test_no_algorithm_learns_from_nan(name: str, short_config: Callable, tmp_path: Path) -> None:
    cfg = short_config(name, checkpoint_every_steps=100, vector__backend="serial", env_steps=600, eval_every_steps=0)
    if not isinstance(cfg, zx.config.OnPolicyConfig | zx.config.DataConfig):
        pytest.skip("learns from positions of games, which are bits")
    poison = Poison()
    session = zx.Session(cfg, tmp_path / "run", [poison], quiet=True)
    with pytest.raises(NonFiniteError, match=r"The batch is in .*crash/batch-\d{12}\.safetensors") as caught:
        session.run()
    assert "this update didn't change the weights" in str(caught.value)
    assert all(bool(torch.isfinite(value).all()) for value in session.learner.weights().values())
    kept = max((tmp_path / "run" / "crash").glob("batch-*.safetensors"))
    batch = Batch(**read_checkpoint(kept)["batch"])
    assert np.isnan(np.asarray(batch.reward if "reward" in batch else batch.obs)).any()
    state = RunFolder.open(tmp_path / "run").load()
    assert state["steps"] in range(200, 401)  # from before it
    count("faults", injected=1, what=f"NaN in a batch of {name}")


def test_the_tensor_is_named(short_config: Callable, tmp_path: Path) -> None:
    session = zx.Session(short_config("dqn", checkpoint_every_steps=100), tmp_path / "run", [Poison()], quiet=True)
    with pytest.raises(NonFiniteError, match=r"the first non-finite gradient is that of net\.[\w.]+\. The batch"):
        session.run()
