"""Settings of `multi_policy`: short forms, and errors for each policy by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zhixing as zx
from zhixing.config import dump, policy_config
from zhixing.errors import UserError


def load(**settings: Any) -> Any:
    return zx.config.load(algorithm="multi_policy", env="toy/team-match", **settings)


def test_default_is_ppo_for_all_agents() -> None:
    cfg = load()
    assert cfg.agents == {"*": "ppo"}
    assert list(cfg.policies) == ["ppo"]
    assert cfg.policies["ppo"]["algorithm"] == "ppo"
    assert cfg.policies["ppo"]["frozen"] is False


def test_algorithms_and_random_need_no_entry_in_policies() -> None:
    cfg = load(agents={"agent_0": "dqn", "*": "random"})
    assert cfg.policies["dqn"]["target_update_interval"] == 200
    assert cfg.policies["random"] == {"script": "random"}


def test_names_of_policies_may_stand_for_code() -> None:
    assert load(policies={"one": "my.module:Mine"}, agents={"*": "one"}).policies["one"] == {"script": "my.module:Mine"}


def test_policies_have_the_settings_of_the_run_and_their_own() -> None:
    policies = {"one": {"algorithm": "ppo", "lr": 0.5, "net": {"hidden_sizes": [7]}}, "two": {"algorithm": "a2c"}}
    cfg = load(policies=policies, agents={"agent_0": "one", "agent_1": "two"}, gamma=0.5, env_steps=777)
    one, two = (policy_config(cfg, name, num_envs=6, seed=3) for name in ("one", "two"))
    assert (one.lr, one.gamma, one.env_steps, one.num_envs, one.seed) == (0.5, 0.5, 777, 6, 3)
    assert one.net.hidden_sizes == [7]
    assert one.net.activation == "tanh"  # the default, because a group of settings may be partial
    assert (two.algorithm, two.gamma) == ("a2c", 0.5)


def test_written_configuration_gives_the_same_policies(tmp_path: Path) -> None:
    policies = {"one": {"algorithm": "ppo", "gamma": 0.9}, "past": {"league": "one", "size": 2}}
    cfg = load(policies=policies, agents={"agent_0": "one", "agent_1": "past"})
    (tmp_path / "config.yaml").write_text(dump(cfg))
    assert zx.config.load(tmp_path / "config.yaml") == cfg


ERRORS = {
    "unknown policy": ({"agents": {"*": "randon"}}, "unknown policy 'randon': did you mean 'random'"),
    "unknown setting": ({"policies": {"a": {"algorithm": "ppo", "clip_rang": 1}}}, "policies.a: unknown setting"),
    "setting of the run": ({"policies": {"a": {"algorithm": "ppo", "num_envs": 2}}}, "num_envs applies to the whole"),
    "no kind": ({"policies": {"a": {"lr": 0.1}}}, "exactly one of algorithm, run, script, league"),
    "two kinds": ({"policies": {"a": {"algorithm": "ppo", "league": "a"}}}, "exactly one of"),
    "wrong name": ({"policies": {"a.b": "random"}}, "name of a policy may have letters"),
    "scheme": ({"policies": {"a": "impala"}}, "its training scheme is asynchronous"),
    "search": ({"policies": {"a": "alphazero"}}, "alphazero plans by search"),
    "expert": ({"policies": {"a": "dagger"}}, "needs expert"),
    "frozen without weights": ({"policies": {"a": {"algorithm": "ppo", "frozen": True}}}, "set init_from=RUN"),
    "policy without run": ({"policies": {"a": {"algorithm": "ppo", "init_policy": "b"}}}, "set init_from=RUN"),
    "no run": ({"policies": {"a": {"run": "nowhere"}}}, "run='nowhere' is not a run"),
    "unsupported replay": ({"policies": {"a": {"algorithm": "dqn", "async_collect": True}}}, "async_collect isn't"),
    "unknown league": ({"policies": {"a": {"league": "b"}, "c": "ppo"}}, "unknown league in policies.a"),
    "league of a script": ({"policies": {"a": {"league": "b"}, "b": "random"}}, "no learning policy 'b'"),
    "setting of a league": ({"policies": {"a": {"league": "b", "evry": 3}, "b": "ppo"}}, "unknown setting 'evry'"),
    "value of a league": ({"policies": {"a": {"league": "b", "size": 0}, "b": "ppo"}}, "policies.a: size=0"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_invalid_policies_are_rejected(case: str) -> None:
    settings, message = ERRORS[case]
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        load(**settings)
