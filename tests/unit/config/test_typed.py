"""Classes of settings in Python: `zx.PPOConfig(env="CartPole-v1", lr=1e-3)`."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from dummy_envs import TruncatingEnv
from mypy import api as mypy
from torch import nn

import zhixing as zx


class Net(nn.Module):
    """A network in an importable module."""


def halved(fraction: float) -> float:
    return 1.0 if fraction < 0.5 else 0.5


def test_every_algorithm_has_a_class_of_settings_in_the_package(algorithm: str) -> None:
    """Its defaults are those of `config.load`, with the preset for CartPole if the algorithm has one."""
    model = zx.algorithms.get(algorithm).settings
    assert getattr(zx, model.__name__) is model
    assert model.__name__ in zx.__all__
    cfg = model(env="CartPole-v1")
    assert cfg.algorithm == algorithm
    assert cfg == zx.config.load(algorithm=algorithm, env="CartPole-v1")


def test_preset_applies_below_the_arguments() -> None:
    preset = zx.config.preset("ppo", "CartPole-v1")
    default = zx.PPOConfig(env="CartPole-v1", preset=False)
    assert preset["rollout_steps"] != default.rollout_steps
    cfg = zx.PPOConfig(env="CartPole-v1", lr=0.125)
    assert (cfg.rollout_steps, cfg.lr) == (preset["rollout_steps"], 0.125)
    assert zx.PPOConfig(env="CartPole-v1", rollout_steps=default.rollout_steps).rollout_steps == default.rollout_steps


def test_group_keeps_the_settings_that_it_does_not_name() -> None:
    cfg = zx.DQNConfig(env="CartPole-v1", net=zx.NetConfig(activation="tanh"), replay=zx.ReplayConfig(n_step=3))
    assert cfg == zx.config.load(algorithm="dqn", env="CartPole-v1", net__activation="tanh", replay__n_step=3)
    assert zx.DQNConfig(env="CartPole-v1", net=cfg.net).net == cfg.net


def test_objects_are_named_as_in_train() -> None:
    cfg = zx.PPOConfig(env=TruncatingEnv, lr_schedule=halved, net=zx.NetConfig(kind=Net))
    assert cfg.env.name == "dummy_envs:TruncatingEnv"
    assert (cfg.lr_schedule, cfg.net.kind) == (f"{__name__}:halved", f"{__name__}:Net")
    env = gym.make("CartPole-v1", max_episode_steps=20)
    assert zx.PPOConfig(env=env).env == zx.EnvConfig(name="CartPole-v1", max_episode_steps=20)


def test_configuration_can_be_copied_to_another_process() -> None:
    cfg = zx.DQNConfig(env=zx.EnvConfig(name="CartPole-v1", max_episode_steps=20), lr=0.125)
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    assert zx.config.build([cfg.model_dump(mode="json")], {}) == cfg


WRONG: dict[str, tuple[Any, str]] = {
    "unknown": (lambda: zx.PPOConfig(env="CartPole-v1", lrr=1.0), "unknown setting 'lrr': did you mean 'lr'?"),
    "value": (lambda: zx.PPOConfig(env="CartPole-v1", lr=-1.0), "lr=-1.0: should be greater than 0"),
    "several": (
        lambda: zx.PPOConfig(env="CartPole-v1", lr=-1.0, gamma=2.0),
        "equal to 1\nlr=-1.0: ",
    ),
    "group": (lambda: zx.NetConfig(kin="auto"), "unknown setting 'kin': did you mean 'kind'?"),
    "setting of a run in a group": (lambda: zx.NetConfig(lr=1.0), "unknown setting 'lr': allowed"),
    "part of a group": (lambda: zx.PPOConfig(env="CartPole-v1", net={"kin": 1}), "unknown setting 'net.kin'"),
    "underscores": (lambda: zx.PPOConfig(env="CartPole-v1", net__kind=1), "write net=NetConfig(kind=...)"),
    "no environment": (lambda: zx.PPOConfig(lr=1.0), "no environment is given"),
    "other algorithm": (lambda: zx.PPOConfig(algorithm="dqn", env="CartPole-v1"), "use DQNConfig"),
    "settings that exclude each other": (
        lambda: zx.PPOConfig(env="CartPole-v1", shared_network=True, critic_lr=1.0),
        "shared_network=true has one optimizer",
    ),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_invalid_settings_are_rejected_at_construction(make: Any, message: str) -> None:
    with pytest.raises(zx.UserError) as error:
        make()
    assert message in str(error.value)


def test_session_rejects_the_settings_of_a_derived_class(tmp_path: Path) -> None:
    class Derived(zx.PPOConfig):
        """Isn't the settings class of any algorithm, so a run couldn't be read again."""

    with pytest.raises(zx.UserError, match="Derived doesn't have the settings of algorithm=ppo: use PPOConfig"):
        zx.Session(Derived(env="toy/match"), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_package_imports_nothing_before_the_first_access() -> None:
    code = (
        "import sys, zhixing\n"
        "loaded = {name for name in sys.modules if name.startswith('zhixing.')}\n"
        "heavy = {'torch', 'numpy', 'gymnasium', 'pydantic', 'IPython'} & set(sys.modules)\n"
        "assert not loaded and not heavy, (loaded, heavy)\n"
        "assert zhixing.PPOConfig.__module__ == 'zhixing.algorithms.ppo'\n"
        "assert 'zhixing.algorithms.dqn' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


TYPED = """\
from typing import Any

import gymnasium as gym

import zhixing as zx


def make_env(**options: Any) -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1", **options)


for env in ("CartPole-v1", make_env, gym.make("CartPole-v1"), {"name": "CartPole-v1", "max_episode_steps": 20}):
    pass
cfg = zx.PPOConfig(env=make_env, lr=1e-3, lr_schedule=lambda fraction: 1.0 - fraction)
name: str = cfg.env.name
final: float | None = zx.train(cfg)["final_return"]
zx.PPOConfig(env=1)  # wrong
zx.PPOConfig(env="CartPole-v1", lr="fast")  # wrong
zx.PPOConfig(env="CartPole-v1", lrr=1e-3)  # wrong
zx.PPOConfig(lr=1e-3)  # wrong
zx.NetConfig(activation="rellu")  # wrong
steps: str = zx.train(cfg)["env_steps"]  # wrong
"""


def test_type_checkers_know_the_settings(tmp_path: Path) -> None:
    """Uses the cache of the test of the documentation's code."""
    file, root = tmp_path / "typed.py", Path(zx.__file__).parents[1]
    file.write_text(TYPED)
    out, err, _ = mypy.run(
        ["--strict", "--follow-imports=silent", "--config-file=", f"--cache-dir={root}/.mypy_cache/docs", str(file)]
    )
    lines = [int(match[1]) for match in re.finditer(r"typed\.py:(\d+): error", out)]
    expected = [i for i, line in enumerate(TYPED.splitlines(), 1) if line.endswith("# wrong")]
    assert sorted(set(lines)) == expected, out + err
