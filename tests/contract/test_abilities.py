"""Contract 8: an algorithm supports an ability from training to resuming, or rejects it with a message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import differing_tensors, metrics_rows, multi_agent, short_policies, supports_discrete, toy_env
from feature_table import documented_features

import zhixing as zx
from zhixing.algorithms.multi_policy import MultiPolicy
from zhixing.core.optimizer import CustomOptimizer
from zhixing.core.tree import tree_map
from zhixing.training.updates import update_from_samples


class Ability(NamedTuple):
    env: str | None  # None for an environment with the actions that the algorithm supports
    settings: dict[str, Any]
    keywords: tuple[str, ...]  # a rejection must contain one of them


CNN = {"net__cnn": "simple"}  # the images are small
ABILITIES = {
    "dict, discrete": Ability("dummy_envs:DictObsEnv", {"env__kind": "discrete", **CNN}, ("Discrete", "Dict", "dict")),
    "dict, multi": Ability("dummy_envs:DictObsEnv", {"env__kind": "multi", **CNN}, ("MultiDiscrete", "Dict", "dict")),
    "dict, continuous": Ability("dummy_envs:DictObsEnv", {"env__kind": "continuous", **CNN}, ("Box", "Dict", "dict")),
    "dict, bits": Ability("dummy_envs:DictObsEnv", {"env__kind": "bits", **CNN}, ("MultiBinary", "Dict", "dict")),
    "dict, hybrid": Ability("dummy_envs:DictObsEnv", {"env__kind": "hybrid", **CNN}, ("Dict", "dict")),
    "masks, hybrid": Ability("dummy_envs:MaskedHybridEnv", {}, ("mask", "Dict")),
    "masks": Ability("dummy_envs:MaskedEnv", {}, ("mask", "Discrete")),  # the environment raises on a masked action
    "gru": Ability(None, {"net__recurrent": "gru", "net__recurrent_size": 8}, ("recurrent",)),
    "stack": Ability(None, {"env__stack": 3}, ("stack",)),
    "dict, stack": Ability("dummy_envs:DictObsEnv", {"env__stack": 3, **CNN}, ("Discrete", "Dict", "dict", "stack")),
    "lstm": Ability(None, {"net__recurrent": "lstm", "net__recurrent_size": 8}, ("recurrent",)),
}
# combinations that must be supported
REQUIRED = {
    name: {"dict, discrete", "masks", "gru", "lstm", "stack", "dict, stack"}
    for name in ("ppo", "a2c", "dqn", "double_dqn", "dueling_dqn", "qmix")
}
ACTIONS = {"dict, bits", "dict, hybrid", "masks, hybrid"}
for name in ("a2c", "a3c", "ac", "bc", "dagger", "gail", "impala", "ippo", "mappo", "pg", "ppg", "ppo", "trpo"):
    REQUIRED[name] = REQUIRED.get(name, set()) | ACTIONS


class StopAt(zx.Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        if loop.steps >= self.steps:
            loop.stop("interrupted")


def short_settings(algorithm: str) -> dict[str, Any]:
    model = zx.algorithms.get(algorithm).settings
    short: dict[str, Any] = {
        "env_steps": 128,
        "log_every": 20,
        "eval_every": 0,
        "num_threads": 1,
        "vector__backend": "serial",
    }
    if model.scheme == "off_policy":
        short |= {"learning_starts": 64, "updates_per_step": 0.2, "replay__sequence_length": 4, "replay__burn_in": 2}
    else:
        short |= {"rollout_steps": 15}  # a stop after 45 steps is in the middle of all episodes
    return short | {name: 2 for name in ("epochs", "critic_epochs") if name in model.model_fields}


@pytest.mark.parametrize("ability", ABILITIES)
def test_ability_is_supported_or_rejected_by_name(
    algorithm: str, ability: str, short_config: Callable, tmp_path: Path
) -> None:
    env_name, settings, keywords = ABILITIES[ability]
    if env_name is None:
        env_name = toy_env(algorithm, supports_discrete(algorithm))
    elif multi_agent(algorithm):
        settings = {**settings, "env__agents": 2}
    model = zx.algorithms.get(algorithm).settings
    try:
        cfg = short_config(algorithm, env_name, **(short_settings(algorithm) | settings))
        session = zx.Session(cfg, tmp_path / "whole", quiet=True)
    except zx.UserError as error:
        message = str(error)
        assert algorithm in message
        assert any(keyword in message for keyword in (*keywords, "game")), message
        assert ability not in REQUIRED.get(algorithm, set()), f"{algorithm} must support {ability}"
        assert not (tmp_path / "whole").exists()
        return
    result = session.run()
    assert result["updates"] > 0 or model.scheme == "play"
    assert len(zx.evaluate(tmp_path / "whole", episodes=3).episodes) == 3

    agent = zx.load(tmp_path / "whole")
    env = zx.envs.make_vector(env_name, 3, backend="serial", options=cfg.env.options)
    agent.policy.bind_env(env)
    obs, info = env.reset(seed=0)
    for _ in range(3):
        action = agent.act(obs, info.get("action_mask"))
        obs, _, _, _, info = env.step(action)
    agent.reset()
    if model.scheme != "play":  # tree search needs the whole vector of environments
        mask = None if "action_mask" not in info else info["action_mask"][0]
        action = agent.act(tree_map(lambda leaf: leaf[0], obs), mask)
        for index in range(env.spaces.num_agents):
            element = tree_map(lambda leaf, index=index: leaf[index, ...], action) if env.spaces.agents else action
            if not env.spaces.composite:  # environments get plain actions in the dtype of the space
                element = np.asarray(element).astype(env.spaces.action.dtype)
            assert env.spaces.action.contains(element)
    env.close()

    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [StopAt(80)], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")


# --- columns of the table in docs/algorithms.md ---

STEPS = 16  # per environment and iteration of `train_in_own_loop`, half of those of the built-in trainers
ITERATIONS: list[int] = []  # environment steps at the end of each


def train_in_own_loop(loop: zx.TrainingLoop) -> None:
    """A user's trainer: iterations of `STEPS` steps, each with one call of `update` as soon as there is a sample."""
    with loop.running():
        for _ in loop.iterations():
            experience = None if loop.offline else loop.collector.collect(steps=STEPS)
            if isinstance(loop.learner, MultiPolicy):
                update_policies(loop, loop.learner, experience.batch)
            elif loop.has_buffer:
                if experience is not None and len(experience.batch):  # no game of self-play may have finished
                    loop.buffer.add(experience.batch)
                update_from_samples(loop, 16, 1 if loop.buffer.ready else 0)
            elif loop.cfg.scheme != "play":
                loop.learner.update(experience.batch.to(loop.learner.device))
            loop.iteration_end([] if experience is None else experience.episodes, {})
            ITERATIONS.append(loop.env_steps)


def update_policies(loop: zx.TrainingLoop, learner: MultiPolicy, batch: zx.Batch) -> None:
    for name, part in learner.learners.items():
        buffer, steps = loop.replay.buffers.get(name), learner.view(name, batch)
        if buffer is None:
            part.update(steps.to(part.device))
            continue
        buffer.add(steps)
        if buffer.ready:
            part.update(buffer.sample(16, loop.rng))
    learner.count_updates()


def test_own_trainer_drives_the_algorithm(algorithm: str, short_config: Callable, tmp_path: Path) -> None:
    assert documented_features()[algorithm]["own trainer"] == "yes"
    env = toy_env(algorithm, supports_discrete(algorithm))
    settings = (
        short_settings(algorithm) | EVERY_OPTIMIZER | {"rollout_steps": 32, "trainer": f"{__name__}:train_in_own_loop"}
    )
    cfg = short_config(algorithm, env, **settings)
    ITERATIONS.clear()
    session = zx.Session(cfg, tmp_path, quiet=True)
    before = {name: weight.clone() for name, weight in session.learner.policy.named_parameters()}
    result = session.run()
    if session.loop.offline:
        assert result["updates"] == len(ITERATIONS) == cfg.offline_updates
    else:
        steps = STEPS * cfg.num_envs
        assert list(range(steps, result["env_steps"] + 1, steps)) == ITERATIONS
        assert result["env_steps"] - steps < cfg.env_steps <= result["env_steps"]
    if cfg.scheme != "play":
        assert result["updates"] > 0
        assert any(not torch.equal(before[name], weight) for name, weight in session.learner.policy.named_parameters())


class RecordingSGD(torch.optim.SGD):
    """Records its learning rate at each step, relative to the initial one."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.factors: list[float] = []

    def step(self) -> None:
        self.factors.append(self.param_groups[0]["lr"] / self.defaults["lr"])
        super().step()


class RecordFactors(zx.Callback):
    """Records the used fraction of the budget at each step of each optimizer, and the factor of its learning rate."""

    def __init__(self) -> None:
        self.factors: dict[str, list[tuple[float, float]]] = {}

    def iteration_begin(self, loop: zx.TrainingLoop) -> None:
        self.used = loop.progress

    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        for name, optimizer in loop.learner.optimizers().items():
            assert isinstance(optimizer.custom, CustomOptimizer)
            recorder = optimizer.custom.optimizer
            self.factors.setdefault(name, []).extend((self.used, factor) for factor in recorder.factors)
            recorder.factors.clear()


EVERY_OPTIMIZER = {"policy_delay": 1, "penalty_target": 1.0}  # with these settings, all of them step in a short run
OTHER_SCHEDULES = {("iql", "actor_optimizer"), ("gail", "discriminator_optimizer")}  # cosine and constant


def test_linear_schedule_of_the_learning_rate_is_followed(
    algorithm: str, short_config: Callable, tmp_path: Path
) -> None:
    cell = documented_features()[algorithm]["schedules"]
    env = toy_env(algorithm, supports_discrete(algorithm))
    schedule = {"lr_schedule": "linear", "optimizer": f"{__name__}:RecordingSGD"}
    settings = short_settings(algorithm) | EVERY_OPTIMIZER
    if cell == "–":
        with pytest.raises(zx.UserError, match="lr_schedule"):
            zx.config.load(algorithm=algorithm, env=env, lr_schedule="linear")
        return
    if cell == "as its policies":
        policies = short_policies(settings)
        settings["policies"] = {name: {**policy, **schedule} for name, policy in policies.items()}
    else:
        assert cell == "yes"
        settings |= schedule
    callback = RecordFactors()
    zx.Session(short_config(algorithm, env, **settings), tmp_path, callback, quiet=True).run()
    assert callback.factors
    for name, factors in callback.factors.items():
        assert factors, f"{name} made no step"
        if (algorithm, name) not in OTHER_SCHEDULES:
            assert [factor for _, factor in factors] == pytest.approx([1.0 - used for used, _ in factors])
            assert factors[-1][0] > 0.5
