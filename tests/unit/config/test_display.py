"""Settings as text."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from zhixing.algorithms.c51 import C51Config, RainbowConfig
from zhixing.algorithms.ppo import PPOConfig
from zhixing.config import Finite, Fraction, Group, NetConfig, Positive, PositiveFloat, Threads
from zhixing.config.display import describe, format_type, format_value, list_settings


class ShortRollouts(PPOConfig):
    rollout_steps: Positive = 8


class OwnDescription(PPOConfig):
    rollout_steps: Positive = 8
    """Length of a rollout in steps."""
    hidden: Positive = 3
    """Number of hidden units."""


def test_description_is_the_docstring_of_the_attribute() -> None:
    assert describe(PPOConfig, "clip_range") == "Clip range of the probability ratio."
    assert describe(NetConfig, "recurrent_size") == "Units of the recurrent layer."


def test_class_that_only_changes_a_default_inherits_description_and_group() -> None:
    assert describe(PPOConfig, "rollout_steps") == "Steps per environment between updates."
    assert describe(ShortRollouts, "rollout_steps") == "Steps per environment between updates."
    assert describe(OwnDescription, "rollout_steps") == "Length of a rollout in steps."
    settings = {setting.name: setting for setting in list_settings(RainbowConfig)}
    (noise,) = (setting for setting in list_settings(C51Config) if setting.name == "noise")
    assert settings["noise"] == noise._replace(default="0.5")
    assert noise.group is Group.COLLECTION


def test_group_of_a_setting() -> None:
    groups = {setting.name: setting.group for setting in list_settings(OwnDescription)}
    assert groups["seed"] is Group.RUN  # of its class
    assert groups["gamma"] is Group.OPTIMIZATION  # annotated
    assert groups["rollout_steps"] is Group.COLLECTION  # inherited
    assert groups["net.hidden_sizes"] is Group.NETWORK  # of the field `net`
    assert groups["hidden"] is Group.OPTIMIZATION  # of the class that it inherits from


def test_settings_are_ordered_by_group_with_the_defaults_of_nested_classes() -> None:
    settings = list_settings(RainbowConfig)
    assert list(dict.fromkeys(setting.group for setting in settings)) == list(Group)
    defaults = {setting.name: setting.default for setting in settings}
    assert defaults["replay.n_step"] == "3"
    assert defaults["net.hidden_sizes"] == "[128, 128]"
    assert defaults["env.name"] == "required"
    assert defaults["stop_return"] == "none"


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Positive, "int > 0"),
        (Threads, "int > 0 and <= 1024"),
        (Fraction, "float 0 to 1"),
        (Finite | None, "float or none"),
        (str | PositiveFloat | None, "str or float > 0 or none"),
        (Literal["adam", "rmsprop"], "adam | rmsprop"),
        (list[Positive], "list of int > 0"),
        (dict[str, Any], "options"),
        (bool, "bool"),
    ],
)
def test_types(annotation: Any, expected: str) -> None:
    assert format_type(annotation) == expected


def test_values() -> None:
    assert [format_value(value) for value in (None, True, 3e-4, [8, 8], "tanh")] == [
        "none",
        "true",
        "0.0003",
        "[8, 8]",
        "tanh",
    ]
