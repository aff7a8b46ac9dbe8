"""Contract 6: every setting of an algorithm is read in some run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zhixing as zx
from zhixing import config


def setting_names(model: type[config.StrictModel], prefix: str = "") -> set[str]:
    """Return names such as `lr` and, for nested classes, `NetConfig.activation`."""
    names = set()
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, config.StrictModel):
            names |= setting_names(field.annotation, f"{field.annotation.__name__}.")
        else:
            names.add(f"{prefix}{name}")
    return names


def test_every_setting_is_read(
    algorithm: str, short_config: Callable, random_dataset: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zx.algorithms.get(algorithm).settings
    common = set(config.RunConfig.model_fields)
    read: set[str] = set()

    def record_read(self: config.StrictModel, name: str) -> object:
        if name in type(self).model_fields:
            # reads by pydantic itself don't count
            caller = sys._getframe(1).f_code.co_filename
            if "pydantic" not in caller:
                nested = not isinstance(self, config.RunConfig)
                read.add(f"{type(self).__name__}.{name}" if nested else name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(config.StrictModel, "__getattribute__", record_read)
    # some settings are only read together with others, or after several updates
    always = {"target_update_interval": 5} if "target_update_interval" in model.model_fields else {}
    variants: list[dict[str, Any]] = [{}]
    if model.scheme == "off_policy":
        variants.append({"replay__prioritized": True})
        variants.append({"dataset": random_dataset(short_config(algorithm).env.name), "offline_updates": 20})
    if "noise_kind" in model.model_fields:
        variants.append({"noise_kind": "ou", "target_policy_noise": 0.1})
    if model.scheme == "play":
        variants.append({"env": "toy/match"})
    if "net" in model.model_fields:
        variants.append({"net__recurrent": "gru"} | ({"replay__n_step": 1} if model.scheme == "off_policy" else {}))
    for i, variant in enumerate(variants):
        try:
            zx.Session(short_config(algorithm, env_steps=250, **always, **variant), tmp_path / str(i), quiet=True).run()
        except zx.UserError as error:
            implied = {  # settings that only have an effect with the rejected one
                "recurrent": {"NetConfig.recurrent_size"},
                "replay.prioritized": {"ReplayConfig.alpha", "ReplayConfig.beta_start"},
                "dataset": {"offline_updates"},
            }
            rejected = [name for name in implied if name in str(error)]
            assert rejected, f"the message doesn't name the setting: {error}"
            read |= implied[rejected[0]]
    read.add("preset")  # read before there is a configuration, see tests/unit/config
    if model.scheme == "self_play":
        read |= {"eval_env", "eval_num_envs"}  # only read by evaluations that aren't matches
        read.add("full_share")  # only read with fast_simulations, see tests/unit/search
    if "ReplayConfig.her" in read:
        read.add("ReplayConfig.her_ratio")  # only read in goal environments, see tests/unit/buffers/test_her.py
    if model.scheme == "offline":
        read |= {"env_steps", "VectorConfig.workers"}  # only read if training steps an environment
    unread = setting_names(model) - read
    assert not unread, f"{algorithm} never reads {sorted(unread)} (its own settings: {sorted(unread - common)})"


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
    """They differ only in the time limit, 200 and 500 steps. It truncates, so it doesn't change the values."""
    presets = [config.preset(algorithm, env) for env in ("CartPole-v0", "CartPole-v1")]
    assert presets[0] == presets[1]
    if algorithm in ("ppo", "dqn", "a2c", "a3c", "c51", "rainbow"):
        assert presets[0]


@pytest.mark.parametrize("name", ["c51", "rainbow"])
def test_atoms_cover_the_values_of_cartpole(name: str) -> None:
    cfg: Any = config.load(algorithm=name, env="CartPole-v0")
    assert cfg.v_min <= 0.0
    assert cfg.v_max == pytest.approx(1.0 / (1.0 - cfg.gamma))  # a reward of 1 per step forever
