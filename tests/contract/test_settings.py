"""Contract 6: no dead setting. Each field of a configuration is read by code, in a run that can need it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zhixing as zx
from zhixing import config


def fields_of(model: type[config.StrictModel], prefix: str = "") -> set[str]:
    found = set()
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, config.StrictModel):
            found |= fields_of(field.annotation, f"{field.annotation.__name__}.")
        else:
            found.add(f"{prefix}{name}")
    return found


def test_every_setting_is_read(
    algorithm: str, short_config: Callable, random_dataset: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zx.algorithms.get(algorithm).settings
    base = set(config.RunConfig.model_fields)
    read: set[str] = set()

    def reading(self: config.StrictModel, name: str) -> object:
        if name in type(self).model_fields:
            # validators, dumps and the register of what is set don't count as use
            caller = sys._getframe(1).f_code.co_filename
            if "pydantic" not in caller:
                nested = not isinstance(self, config.RunConfig)
                read.add(f"{type(self).__name__}.{name}" if nested else name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(config.StrictModel, "__getattribute__", reading)
    # settings that only matter beside another, or that need some updates
    always = {"target_update_interval": 5} if "target_update_interval" in model.model_fields else {}
    ways: list[dict[str, Any]] = [{}]
    if model.scheme == "off_policy":
        ways.append({"replay__prioritized": True})
        ways.append({"dataset": random_dataset(short_config(algorithm).env.name), "offline_updates": 20})
    if "noise_kind" in model.model_fields:
        ways.append({"noise_kind": "ou", "target_policy_noise": 0.1})
    if model.scheme == "play":
        ways.append({"env": "toy/match"})
    if "net" in model.model_fields:
        ways.append({"net__recurrent": "gru"} | ({"replay__n_step": 1} if model.scheme == "off_policy" else {}))
    for i, way in enumerate(ways):
        try:
            zx.Session(short_config(algorithm, env_steps=250, **always, **way), tmp_path / str(i), quiet=True).run()
        except zx.UserError as refused:
            beside = {
                "recurrent": {"NetConfig.recurrent_size"},
                "replay.prioritized": {"ReplayConfig.alpha", "ReplayConfig.beta_start"},
                "dataset": {"offline_updates"},
            }
            named = [name for name in beside if name in str(refused)]
            assert named, f"not refused by name: {refused}"
            read |= beside[named[0]]
    read.add("preset")  # before there is a configuration: tests/unit/config
    if model.scheme == "self_play":
        read.add("eval_env")  # of evaluations that aren't matches
        read.add("full_share")  # beside fast_simulations: tests/unit/search
    if "ReplayConfig.her" in read:
        read.add("ReplayConfig.her_ratio")  # on tasks with goals: tests/unit/buffers/test_relabel.py
    if model.scheme == "offline":
        read |= {"env_steps", "VectorConfig.workers"}  # of those who step an environment
    missing = fields_of(model) - read
    assert not missing, f"{algorithm} never reads {sorted(missing)} (of which its own: {sorted(missing - base)})"


def test_every_setting_has_a_group_and_a_description(algorithm: str) -> None:
    for setting in config.list_settings(zx.algorithms.get(algorithm).settings):
        assert isinstance(setting.group, config.Group), setting.name
        assert len(setting.description.split()) >= 3, f"{setting.name}: {setting.description!r}"
        assert setting.description.endswith("."), f"{setting.name}: {setting.description!r}"
        assert setting.description[0].isupper(), f"{setting.name}: {setting.description!r}"


def test_every_preset_is_a_valid_configuration(algorithm: str) -> None:
    for pattern in config.presets(algorithm):
        config.load(algorithm=algorithm, env=pattern.replace("*", "1"))


def test_both_versions_of_cartpole_have_the_preset(algorithm: str) -> None:
    """They differ by the time limit alone, 200 and 500 steps. It truncates, so values don't depend on it."""
    presets = [config.preset(algorithm, env) for env in ("CartPole-v0", "CartPole-v1")]
    assert presets[0] == presets[1]
    if algorithm in ("ppo", "dqn", "a2c", "a3c", "c51", "rainbow"):
        assert presets[0]


@pytest.mark.parametrize("name", ["c51", "rainbow"])
def test_atoms_cover_the_values_of_cartpole(name: str) -> None:
    cfg: Any = config.load(algorithm=name, env="CartPole-v0")
    assert cfg.v_min <= 0.0
    assert cfg.v_max == pytest.approx(1.0 / (1.0 - cfg.gamma))  # a reward of 1 per step, without an end
