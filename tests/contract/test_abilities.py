"""Contract 8: an algorithm supports an ability from training to resuming, or rejects it with a message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import differing_tensors, metrics_rows, multi_agent, supports_discrete, toy_env

import zhixing as zx
from zhixing.core.tree import tree_map


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
    short = {
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
    short |= {name: 2 for name in ("epochs", "critic_epochs") if name in model.model_fields}
    try:
        cfg = short_config(algorithm, env_name, **(short | settings))
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
