"""All collectors have one interface, and your own can take their place."""

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


def collector_of(kind: str, short_config: Callable[..., RunConfig], folder: Path) -> tuple[zx.Session, zx.Collector]:
    algorithm, settings = COLLECTORS[kind]
    env = {} if kind == "SelfPlay" else {"env": "CartPole-v1"}
    session = zx.Session(short_config(algorithm, **env, **settings), folder, quiet=True)
    assert session.actor is not None
    assert type(session.actor).__name__ == kind
    return session, session.actor


@pytest.mark.parametrize("kind", COLLECTORS)
def test_steps_or_episodes_are_collected(kind: str, short_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """The same steps, whether their number or that of the episodes that end in them is given."""
    session, collector = collector_of(kind, short_config, tmp_path / "episodes")
    by_episodes = collector.collect(episodes=3)
    steps, rest = divmod(collector.env_steps, session.cfg.num_envs)
    session.close()
    assert len(by_episodes.episodes) >= 3
    assert rest == 0
    session, collector = collector_of(kind, short_config, tmp_path / "steps")
    by_steps = collector.collect(steps=steps)
    session.close()
    assert by_steps.episodes == by_episodes.episodes
    for name in ("obs", "reward", "terminated", "next_obs"):
        one, other = (np.asarray(getattr(each.batch, name)) for each in (by_steps, by_episodes))
        assert np.array_equal(one, other), name


@pytest.mark.parametrize("kind", COLLECTORS)
@pytest.mark.parametrize("given", [{}, {"steps": 1, "episodes": 1}])
def test_steps_and_episodes_exclude_each_other(
    kind: str, given: dict[str, int], short_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    session, collector = collector_of(kind, short_config, tmp_path / "run")
    with pytest.raises(ValueError, match=r"either steps=\.\.\. or episodes=\.\.\."):
        collector.collect(**given)
    session.close()


class Recorded(zx.Collector):
    """A collector without environments: it returns rewards of 1 and an episode every five steps."""

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


class Counts(zx.Learner):
    metrics = ("reward",)

    def gradients(self, batch: zx.Batch) -> zx.Gradients:
        return zx.Gradients({}, {})

    def update(self, batch: zx.Batch) -> zx.Update:
        self.updates += 1
        return zx.Update({"reward": batch.reward.mean()})


def test_a_trainer_drives_any_collector() -> None:
    cfg = zx.config.OnPolicyConfig(
        algorithm="none", env={"name": "toy/match"}, env_steps=40, rollout_steps=10, num_envs=1
    )
    env = zx.envs.make_vector("toy/match", 1, "serial")
    collector = Recorded()
    loop = zx.TrainingLoop(cfg, collector, Counts(cfg, env.spaces))
    env.close()
    zx.on_policy(loop)
    assert (loop.env_steps, loop.updates, loop.episodes) == (40, 4, 4)
    assert (loop.num_env_restarts, loop.num_worker_restarts, loop.logged_info_keys, loop.longest_so_far) == (
        0,
        0,
        (),
        5,
    )
    assert torch.equal(loop.metrics["reward"], torch.tensor(1.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda collector: collector.collect_from_worker(1), "Recorded has no workers"),
        (lambda collector: collector.copy_policy(), "Recorded can't collect while the learner updates"),
    ],
)
def test_what_a_collector_lacks_is_an_error(call: Callable[[zx.Collector], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(Recorded())
