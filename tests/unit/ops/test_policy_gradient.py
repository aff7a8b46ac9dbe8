"""Minibatches of equal size, and PPO's clipped loss against the formula of the paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import differing_tensors

import zhixing as zx
from zhixing.compile import updates
from zhixing.core.batch import Batch
from zhixing.core.learner import Learner
from zhixing.ops.policy_gradient import minibatches, ppo_clip_loss
from zhixing.training.loop import TrainingLoop

Small = Callable[..., zx.config.RunConfig]


def split(steps: int, envs: int, size: int, sequences: bool = False) -> list[torch.Tensor]:
    data = Batch(returns=torch.arange(float(steps * envs)).view(steps, envs))
    return [part.returns for part in minibatches(data, size, torch.Generator().manual_seed(0), sequences)]


@pytest.mark.parametrize(
    ("steps", "envs", "size", "sizes"),
    [
        (6, 2, 4, [4, 4, 4]),
        (6, 2, 5, [4, 4, 4]),  # not 5, 5 and a full update from 2
        (64, 8, 100, [86, 86, 85, 85, 85, 85]),  # as many updates as with a remainder of 12
        (13, 1, 12, [7, 6]),  # not 12 and 1
        (6, 2, 12, [12]),
        (6, 2, 100, [12]),
        (3, 1, 2, [3]),  # not 2 and 1
        (5, 1, 2, [3, 2]),
        (3, 1, 1, [1, 1, 1]),  # as configured
        (1, 1, 64, [1]),
    ],
)
def test_minibatches_have_equal_sizes_and_cover_the_rollout_once(
    steps: int, envs: int, size: int, sizes: list[int]
) -> None:
    parts = split(steps, envs, size)
    assert [len(part) for part in parts] == sizes
    assert torch.cat(parts).sort().values.tolist() == list(range(steps * envs))


@pytest.mark.parametrize(("envs", "size", "columns"), [(4, 12, [2, 2]), (7, 18, [3, 2, 2]), (3, 6, [1, 1, 1])])
def test_minibatches_of_sequences_are_whole_columns(envs: int, size: int, columns: list[int]) -> None:
    parts = split(6, envs, size, sequences=True)
    assert [part.shape for part in parts] == [(6, n) for n in columns]
    rollout = torch.arange(6.0 * envs).view(6, envs)
    assert sorted(torch.cat(parts, 1)[0].tolist()) == rollout[0].tolist()
    for part in parts:
        assert torch.equal(part, rollout[:, part[0].long()])


@pytest.mark.parametrize("clip", [0.0, 0.2, 0.7])
def test_ppo_clip_loss_equals_the_formula_of_the_paper(clip: float) -> None:
    g = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(1000, generator=g, dtype=torch.float64).requires_grad_()
    advantage = torch.randn(1000, generator=g, dtype=torch.float64)
    ratio = log_ratio.exp()
    expected = -torch.min(ratio * advantage, torch.clip(ratio, 1 - clip, 1 + clip) * advantage).mean()
    actual = ppo_clip_loss(log_ratio, advantage, clip)
    assert torch.allclose(actual, expected)
    gradients = [torch.autograd.grad(loss, log_ratio)[0] for loss in (actual, expected)]
    assert torch.allclose(*gradients)


class RecordSizes(zx.Callback):
    """Records the number of rows of each update."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def train_begin(self, loop: TrainingLoop) -> None:
        run_step = loop.learner.run_step

        def counting(method: Callable, batch: Batch, options: dict) -> object:
            self.rows.append(len(batch.returns) if "returns" in batch else 0)
            return run_step(method, batch, options)

        loop.learner.run_step = counting  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("name", ["ppo", "ppg", "trpo", "gail", "mappo", "coma"])
def test_no_update_from_a_single_remaining_sample(name: str, short_config: Small, tmp_path: Path) -> None:
    """2 envs x 32 steps in minibatches of 63: two of 32, not one of 63 and one of 1."""
    sizes = RecordSizes()
    cfg = short_config(name, minibatch_size=63, env_steps=64, eval_every=0, vector__backend="serial")
    session = zx.Session(cfg, tmp_path / "run", [sizes], quiet=True)
    if name == "gail":  # its policy is trained by an inner learner
        sizes.train_begin(InnerLoop(session.learner.learner))  # type: ignore[attr-defined,arg-type]
    session.run()
    assert set(sizes.rows) - {0} == {32}


class InnerLoop:
    def __init__(self, learner: Learner) -> None:
        self.learner = learner


class StopAfter(zx.Callback):
    def __init__(self, iterations: int) -> None:
        self.left = iterations

    def iteration_end(self, loop: TrainingLoop, metrics: object) -> None:
        self.left -= 1
        if not self.left:
            loop.stop("interrupted")


@pytest.mark.parametrize("graph", [False, True])
def test_resume_with_unequal_minibatches_is_exact(
    graph: bool, short_config: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 steps in minibatches of 30 are 22, 21 and 21: two shapes, and one graph per shape."""
    monkeypatch.setattr(updates, "compile_graph", lambda module, examples: lambda inputs: list(module(*inputs)))
    settings = {"minibatch_size": 30, "env_steps": 256, "eval_every": 0, "compile": graph, "epochs": 2}
    cfg = short_config("ppo", vector__backend="serial", **settings)
    whole = zx.Session(cfg, tmp_path / "whole", quiet=True)
    assert whole.run()["updates"] == 4 * 2 * 3
    assert whole.learner.executor is None or len(whole.learner.executor.graphs) == 2
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [StopAfter(2)], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []
