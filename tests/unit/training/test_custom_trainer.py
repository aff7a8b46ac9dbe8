"""Config classes name their trainer, which may be any function of the loop."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

import zhixing as zx
from zhixing.algorithms.ppo import PPO, PPOConfig
from zhixing.training.loop import TrainingLoop
from zhixing.training.trainers import (
    act_only,
    asynchronous,
    asynchronous_gradients,
    off_policy,
    off_policy_async,
    off_policy_distributed,
    offline,
    on_policy,
    select_trainer,
    self_play,
)


def update_twice(loop: TrainingLoop) -> None:
    """Update twice from every rollout."""
    with loop.running():
        for _ in loop.iterations():
            experience = loop.collector.collect(steps=16)
            batch = experience.batch.to(loop.learner.device)
            loop.learner.update(batch)
            loop.iteration_end(experience.episodes, loop.learner.update(batch).metrics)


class TwiceConfig(PPOConfig):
    trainer = update_twice


class Twice(PPO):
    """PPO that updates twice from every rollout."""

    settings: ClassVar[type[PPOConfig]] = TwiceConfig


def test_custom_algorithm_trains_with_its_trainer(tmp_path: Path) -> None:
    """64 steps with 32 per iteration and two updates each; `on_policy` would collect 256 per environment."""
    settings = {"env": "toy/match", "env_steps": 64, "num_envs": 2, "vector": {"backend": "serial"}, "eval_episodes": 1}
    result = zx.train(f"{__name__}:Twice", out=tmp_path / "run", quiet=True, epochs=1, minibatch_size=32, **settings)
    assert (result["env_steps"], result["updates"]) == (64, 4)
    resumed = zx.Session.resume(tmp_path / "run", quiet=True, trust=True, env_steps=128)
    assert resumed.trainer is update_twice
    assert resumed.run()["updates"] == 8


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("ppo", {}, on_policy),
        ("impala", {"distributed": True}, asynchronous),
        ("a3c", {"distributed": True}, asynchronous_gradients),
        ("dqn", {}, off_policy),
        ("dqn", {"distributed": True}, off_policy_distributed),
        ("dqn", {"from_data": True}, offline),
        ("bc", {"from_data": True}, offline),
        ("alphazero", {}, self_play),
        ("mcts", {}, act_only),
    ],
)
def test_each_scheme_has_a_trainer(name: str, options: dict[str, bool], expected: object) -> None:
    env = "pettingzoo/tictactoe" if name in ("alphazero", "mcts") else "CartPole-v1"
    cfg = zx.config.load(algorithm=name, env=env)
    assert select_trainer(cfg, **options) is expected


def test_async_collect_selects_its_trainer() -> None:
    assert select_trainer(zx.config.load(algorithm="dqn", env="CartPole-v1", async_collect=True)) is off_policy_async
