"""All collectors share one interface, and custom ones can replace them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zhixing as zx
from zhixing.config import RunConfig
from zhixing.errors import UserError

COLLECTORS = {
    "Actor": ("ppo", {"vector__backend": "serial"}),
    "TorchActor": ("ppo", {"vector__backend": "torch"}),
    "DistributedCollector": ("impala", {"vector__backend": "serial"}),
    "SelfPlay": ("alphazero", {}),
}


def make_collector(kind: str, short_config: Callable[..., RunConfig], folder: Path) -> tuple[zx.Session, zx.Collector]:
    algorithm, settings = COLLECTORS[kind]
    env = {} if kind == "SelfPlay" else {"env": "CartPole-v1"}
    session = zx.Session(short_config(algorithm, **env, **settings), folder, quiet=True)
    assert session.collector is not None
    assert type(session.collector).__name__ == kind
    return session, session.collector


@pytest.mark.parametrize("kind", COLLECTORS)
def test_collect_takes_steps_or_episodes(kind: str, short_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Both ways of calling `collect` return the same steps."""
    session, collector = make_collector(kind, short_config, tmp_path / "episodes")
    by_episodes = collector.collect(episodes=3)
    steps, rest = divmod(collector.env_steps, session.cfg.num_envs)
    session.close()
    assert len(by_episodes.episodes) >= 3
    assert rest == 0
    session, collector = make_collector(kind, short_config, tmp_path / "steps")
    by_steps = collector.collect(steps=steps)
    session.close()
    assert by_steps.episodes == by_episodes.episodes
    for name in ("obs", "reward", "terminated", "next_obs"):
        assert np.array_equal(getattr(by_steps.batch, name), getattr(by_episodes.batch, name)), name


@pytest.mark.parametrize("kind", COLLECTORS)
@pytest.mark.parametrize("arguments", [{}, {"steps": 1, "episodes": 1}])
def test_collect_rejects_both_or_neither_of_steps_and_episodes(
    kind: str, arguments: dict[str, int], short_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    session, collector = make_collector(kind, short_config, tmp_path / "run")
    with pytest.raises(ValueError, match=r"either steps=\.\.\. or episodes=\.\.\."):
        collector.collect(**arguments)
    session.close()


class ConstantCollector(zx.Collector):
    """Return rewards of 1 and one episode of five steps per call, without an environment."""

    def __init__(self) -> None:
        self.calls: list[zx.Phase] = []

    def collect(
        self, steps: int | None = None, episodes: int | None = None, phase: zx.Phase = zx.Phase.COLLECT
    ) -> zx.Experience:
        assert steps is not None
        self.calls.append(phase)
        self.env_steps += steps
        ones = np.ones((steps, 1), np.float32)
        return zx.Experience(zx.Batch(reward=ones), [zx.Episode(5.0, 5, {})])

    def state_dict(self) -> dict[str, Any]:
        return {"env_steps": self.env_steps}

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        self.env_steps = state["env_steps"]
        return []


class CountingLearner(zx.Learner):
    metrics = ("reward",)

    def update(self, batch: zx.Batch) -> zx.Update:
        self.updates += 1
        return zx.Update({"reward": batch.reward.mean()})


def test_trainer_works_with_a_custom_collector() -> None:
    cfg = zx.config.OnPolicyConfig(
        algorithm="none", env={"name": "toy/match"}, env_steps=40, rollout_steps=10, num_envs=1
    )
    env = zx.envs.make_vector("toy/match", 1, "serial")
    collector = ConstantCollector()
    loop = zx.TrainingLoop(cfg, collector, CountingLearner(cfg, env.spaces))
    env.close()
    zx.on_policy(loop)
    assert (loop.env_steps, loop.updates, loop.episodes) == (40, 4, 4)
    assert (loop.num_env_restarts, loop.num_worker_restarts) == (0, 0)
    assert (loop.logged_info_keys, loop.longest_so_far) == ((), 5)
    assert torch.equal(loop.metrics["reward"], torch.tensor(1.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda collector: collector.collect_from_worker(1), "ConstantCollector has no workers"),
        (lambda collector: collector.copy_policy(), "ConstantCollector can't collect while the learner updates"),
    ],
)
def test_unsupported_methods_raise(call: Callable[[zx.Collector], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(ConstantCollector())
