"""Custom trainers and collectors, named in settings or set on a settings class."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

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
from zhixing.utils import importing, named_objects


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


def count_iterations(loop: TrainingLoop) -> None:
    with loop.running():
        for _ in loop.iterations():
            loop.iteration_end(loop.collector.collect(steps=5).episodes, {})


class DoublingActor(zx.Actor):
    """Doubles rewards."""

    def __init__(self, cfg: zx.config.RunConfig, learner: zx.Learner, env: zx.envs.VectorEnv) -> None:
        super().__init__(learner.policy, env, learner.extra_fields, seed=cfg.seed)

    def collect(self, *args: Any, **kwargs: Any) -> zx.Experience:
        experience = super().collect(*args, **kwargs)
        return experience._replace(batch=experience.batch.replace(reward=2 * experience.batch.reward))


class DoublingConfig(PPOConfig):
    trainer = count_iterations
    collector = DoublingActor


NOT_A_FUNCTION = 3
SHORT: dict[str, Any] = {
    "env": "toy/match",
    "env_steps": 20,
    "num_envs": 1,
    "vector__backend": "serial",
    "eval_episodes": 1,
    "tensorboard": False,
}


@pytest.mark.parametrize("trainer", [count_iterations, f"{__name__}:count_iterations"])
def test_setting_names_the_trainer_of_a_built_in_algorithm(trainer: Any, tmp_path: Path) -> None:
    """20 steps in iterations of 5, without an update."""
    result = zx.train("ppo", out=tmp_path / "run", quiet=True, trainer=trainer, **SHORT)
    assert (result["env_steps"], result["updates"]) == (20, 0)
    resumed = zx.Session.resume(tmp_path / "run", quiet=True, env_steps=40)
    assert resumed.cfg.trainer == f"{__name__}:count_iterations"
    assert resumed.run()["updates"] == 0


def test_trainer_that_cant_be_imported_is_given_again_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def local(loop: TrainingLoop) -> None:
        count_iterations(loop)

    zx.train("ppo", out=tmp_path / "run", quiet=True, trainer=local, **SHORT)
    monkeypatch.setattr(named_objects, "_objects", {})  # as in another process
    zx.evaluate(tmp_path / "run", episodes=1, trust=True)
    with pytest.raises(zx.UserError, match="given in Python as an object, so it can't be imported here"):
        zx.Session.resume(tmp_path / "run", quiet=True, trust=True)
    resumed = zx.Session.resume(tmp_path / "run", quiet=True, trust=True, trainer=local, env_steps=40)
    assert resumed.run()["env_steps"] == 40


def test_setting_names_the_collector(tmp_path: Path) -> None:
    rewards = []
    for name, collector in {"plain": None, "doubled": DoublingActor}.items():
        session = zx.Session(zx.config.load(algorithm="ppo", collector=collector, **SHORT), tmp_path / name, quiet=True)
        rewards.append(session.loop.collector.collect(steps=20).batch.reward)
        session.close()
    assert rewards[0].any()
    assert (rewards[1] == 2 * rewards[0]).all()


def test_settings_class_sets_both(tmp_path: Path) -> None:
    cfg = DoublingConfig(algorithm="ppo", env="toy/match")  # type: ignore[arg-type]
    assert (cfg.trainer, cfg.collector) == (f"{__name__}:count_iterations", f"{__name__}:DoublingActor")
    defaults = {setting.name: setting.default for setting in zx.config.list_settings(DoublingConfig)}
    assert (defaults["trainer"], defaults["collector"]) == (cfg.trainer, cfg.collector)
    types = {setting.name: setting.type for setting in zx.config.list_settings(DoublingConfig)}
    assert types["trainer"] == types["collector"] == "str or none"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": "on_polcy"}, r"trainer='on_polcy': not a name of code; write your\.module:Name, or none"),
        ({"trainer": "no_such_module:train"}, r"no_such_module:train: there is no module 'no_such_module'"),
        ({"trainer": f"{__name__}:count_iteration"}, r"unknown name in module .* 'count_iteration'.*count_iterations"),
        ({"trainer": f"{__name__}:NOT_A_FUNCTION"}, "must be a function with one parameter, the training loop"),
        ({"trainer": f"{__name__}:test_settings_class_sets_both.x"}, "unknown name in module"),
        ({"trainer": f"{__name__}:select_trainer"}, None),  # takes one argument
        ({"collector": "Actor"}, r"collector='Actor': not a name of code"),
        ({"collector": f"{__name__}:Twice"}, r"must be a class that derives from zhixing\.Collector or zhixing\.Actor"),
        ({"collector": f"{__name__}:count_iterations"}, "must be a class that derives from"),
        (
            {"collector": f"{__name__}:DoublingActor", "algorithm": "a3c", "num_envs": 2},
            "whose steps come from workers",
        ),
        (
            {"collector": f"{__name__}:DoublingActor", "algorithm": "alphazero", "env": "pettingzoo/tictactoe"},
            "self-play",
        ),
    ],
)
def test_invalid_parts_are_rejected(settings: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    def make() -> None:
        zx.Session(zx.config.load(**{"algorithm": "ppo", **SHORT, **settings}), tmp_path / "run", quiet=True).close()

    if message is None:
        make()
        return
    with pytest.raises(zx.UserError, match=message):
        make()


class NoScheme(PPO):
    settings: ClassVar[type] = zx.config.LearnerConfig


def test_settings_without_a_scheme_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        zx.UserError, match=r"LearnerConfig, the settings of .*, has no training scheme; derive it from"
    ):
        zx.Session(zx.config.load(algorithm=f"{__name__}:NoScheme", **SHORT), tmp_path / "run", quiet=True)


def test_object_of_a_module_imported_from_a_file_is_named_by_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def train(loop): ...\n")
    name = f"{tmp_path / 'mine.py'}:train"
    assert named_objects.register_object(importing.import_object(name)) == name
