"""A batch that makes a loss NaN: the run stops, reports the cause, and keeps the batch and the last good checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from soak_config import SOAK, record

import zhixing as zx
from zhixing.collectors.actor import Actor
from zhixing.collectors.collector import Experience
from zhixing.core.batch import Batch
from zhixing.core.policy import Phase
from zhixing.core.tree import tree_map
from zhixing.distributed.collector import DistributedCollector
from zhixing.distributed.worker_pool import LocalWorkerPool
from zhixing.errors import NonFiniteError
from zhixing.training.run_folder import RunFolder, read_checkpoint


class Poison(zx.Callback):
    """After 300 steps, put NaN into the observations and rewards of all batches."""

    def iteration_begin(self, loop: zx.TrainingLoop) -> None:
        if loop.steps < 300 or hasattr(self, "update"):
            return
        self.update = loop.learner.update
        if loop.cfg.gradients_on_workers:
            assert isinstance(loop.collector, DistributedCollector)
            assert isinstance(loop.collector.pool, LocalWorkerPool)
            for worker in loop.collector.pool.workers:
                poison_rollouts(worker.actor)

        def update(batch: Batch) -> object:
            def poison(leaf: torch.Tensor) -> torch.Tensor:
                poisoned = leaf.clone()
                poisoned.view(-1)[:8] = torch.nan
                return poisoned

            fields = {name: getattr(batch, name) for name in ("obs", "reward") if name in batch}
            batch = batch.replace(
                **{name: tree_map(poison, value) for name, value in fields.items() if value.dtype.is_floating_point}
            )
            if not loop.learner.has_nonfinite_step:
                loop.batch = batch
            return self.update(batch)

        loop.learner.update = update  # type: ignore[method-assign]


def poison_rollouts(actor: Actor) -> None:
    """Put NaN into rollouts whose gradients a worker computes."""
    collect = actor.collect

    def poisoned(steps: int, phase: Phase) -> Experience:
        experience = collect(steps=steps, phase=phase)
        experience.batch.obs[0] = experience.batch.reward[0] = np.nan
        return experience

    actor.collect = poisoned  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    "name", zx.algorithms.names() if SOAK else ["ppo", "dqn", "sac", "bc", "a3c"]
)  # one of each scheme
def test_nan_stops_the_run_before_it_reaches_the_weights(name: str, short_config: Callable, tmp_path: Path) -> None:
    cfg = short_config(name, checkpoint_every=100, vector__backend="serial", env_steps=600, eval_every=0)
    if not isinstance(cfg, zx.config.OnPolicyConfig | zx.config.DataConfig):
        pytest.skip("learns from positions of board games, which can't be NaN")
    session = zx.Session(cfg, tmp_path / "run", [Poison()], quiet=True)
    with pytest.raises(NonFiniteError, match=r"The batch is in .*crash/batch-\d{12}\.safetensors") as caught:
        session.run()
    assert "this update didn't change the weights" in str(caught.value)
    for net in session.learner.networks().values():
        assert all(bool(torch.isfinite(value).all()) for value in net.state_dict().values())
    saved = max((tmp_path / "run" / "crash").glob("batch-*.safetensors"))
    batch = Batch(**read_checkpoint(saved)["batch"])
    assert np.isnan(np.asarray(batch.reward if "reward" in batch else batch.obs)).any()
    state = RunFolder.open(tmp_path / "run").load()
    assert state["steps"] in range(200, 401)  # from before the first NaN
    record("faults", injected=1, what=f"NaN in a batch of {name}")


def test_error_names_the_parameter(short_config: Callable, tmp_path: Path) -> None:
    session = zx.Session(short_config("dqn", checkpoint_every=100), tmp_path / "run", [Poison()], quiet=True)
    with pytest.raises(NonFiniteError, match=r"the first non-finite gradient is that of net\.[\w.]+\. The batch"):
        session.run()
