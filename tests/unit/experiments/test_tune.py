"""Tests of tuning without Optuna: arguments, rejected spaces, the table and best.yaml."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml

import zhixing as zx
from zhixing.errors import UserError
from zhixing.experiments.tune import (
    Choice,
    Range,
    TrialResult,
    best_trial,
    check_spaces,
    match_field_type,
    parse_search_spaces,
    table_rows,
    trial_settings,
    tune,
    write_best,
)
from zhixing.utils.extras import install_hint

PPO = [{"algorithm": "ppo", "env": "toy/match"}]


def test_ranges_and_choices_are_parsed_and_fixed_settings_kept() -> None:
    arguments = ["lr=1e-4..1e-2:log", "gamma=0.9..0.999", "num_envs=4,8", "net.hidden_sizes=[64,64]", "epochs=1..10"]
    arguments += ["init_from=../there", "env.note=a..b", "net.activation=tanh,relu"]
    spaces, fixed = parse_search_spaces(arguments)
    assert spaces == {
        "lr": Range(1e-4, 1e-2, log=True),
        "gamma": Range(0.9, 0.999),
        "num_envs": Choice(["4", "8"]),
        "epochs": Range(1, 10, integer=True),
        "net.activation": Choice(["tanh", "relu"]),
    }
    assert fixed == ["net.hidden_sizes=[64,64]", "init_from=../there", "env.note=a..b"]


def test_last_argument_for_a_setting_wins() -> None:
    assert parse_search_spaces(["lr=1e-4..1e-2", "lr=3e-4"]) == ({}, ["lr=3e-4"])
    assert parse_search_spaces(["lr=3e-4", "lr=1,2"]) == ({"lr": Choice(["1", "2"])}, [])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("lr=1e-2..1e-4", "from the lower to the higher"),
        ("lr=0..1:log", "must start above 0"),
        ("lr=1e-4..1e-2:lg", "is not a range"),
        ("lr=1..", "is not a range"),
        ("lr=1,1", "once"),
        ("lr=1,", "once"),
    ],
)
def test_invalid_ranges_are_rejected(argument: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_search_spaces([argument])


def test_range_is_integer_if_the_setting_is() -> None:
    model = zx.algorithms.get("ppo").settings
    assert match_field_type(Range(1, 8, integer=True), model, "num_envs") == Range(1, 8, integer=True)
    assert match_field_type(Range(10.0, 1e3), model, "env_steps").extremes == [10, 1000]
    assert match_field_type(Range(0, 1, integer=True), model, "gamma").extremes == [0.0, 1.0]
    assert not match_field_type(Range(0, 1, integer=True), model, "gamma").integer  # type: ignore[union-attr]
    assert match_field_type(Range(1, 3, integer=True), model, "env.level").extremes == [
        1,
        3,
    ]  # env options stay as written
    assert match_field_type(Choice(["1", "2"]), model, "gamma") == Choice(["1", "2"])
    with pytest.raises(UserError, match="takes integers"):
        match_field_type(Range(0.5, 4.0), model, "num_envs")


def test_trial_params_become_nested_settings() -> None:
    spaces = {"lr": Range(1e-4, 1e-2), "net.hidden_sizes": Choice(["[8]", "[8,8]"]), "net.cnn": Choice(["nature", "x"])}
    settings = trial_settings({"lr": 3e-3, "net.hidden_sizes": "[8,8]", "net.cnn": "nature"}, spaces)
    assert settings == {"lr": 3e-3, "net": {"hidden_sizes": [8, 8], "cnn": "nature"}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lr=3e-4"], "no setting to search"),
        (["seed=1,2"], "seed can't be searched"),
        (["lr=-1.0..1.0"], "lr=-1.0: should be greater than 0"),
        (["gamma=0.9..1.5"], "gamma=1.5"),
        (["lrr=1..2"], "did you mean 'lr'"),
        (["lr=1e-3,fast"], "lr='fast'"),
        (
            ["num_envs=1,3", "minibatch_size=64", "rollout_steps=64", "vector.workers=2"],
            "workers is 2",
        ),
        (["lr=1..2", "env=none"], "--env"),
    ],
)
def test_invalid_spaces_are_rejected_before_the_first_trial(arguments: list[str], message: str) -> None:
    spaces, fixed = parse_search_spaces(arguments)
    with pytest.raises(UserError) as error:
        check_spaces([*PPO, zx.config.parse_overrides(fixed)], spaces)
    assert message in str(error.value)


TRIALS = [
    TrialResult(0, "complete", 5.0, {"lr": 1e-3}),
    TrialResult(1, "pruned", 6.0, {"lr": 1e-4}),
    TrialResult(2, "failed", math.nan, {"lr": 1e-2}, "broken"),
    TrialResult(3, "complete", 9.0, {"lr": 2e-3}),
    TrialResult(4, "running", math.nan, {"lr": 4e-3}),
]


def test_best_complete_trial_comes_first() -> None:
    assert best_trial(TRIALS) == TRIALS[3]
    assert best_trial(TRIALS[1:3]) is None
    rows = table_rows(TRIALS)
    assert [row["trial"] for row in rows] == [3, 0, 1, 4, 2]
    assert rows[0] == {"trial": 3, "state": "complete", "return": 9.0, "lr": 2e-3}


def test_best_yaml_is_a_loadable_config(tmp_path: Path) -> None:
    layers = [*PPO, {"seed": 3, "env": {"name": "toy/match"}, "net": {"activation": "relu"}, "env_steps": 500}]
    spaces = {"lr": Range(1e-6, 1e-2), "net.hidden_sizes": Choice(["[8]", "[8,8]"])}
    best = TrialResult(7, "complete", 9.0, {"lr": 1e-5, "net.hidden_sizes": "[8,8]"})
    write_best(best, layers, spaces, tmp_path / "best.yaml")
    assert (tmp_path / "best.yaml").read_text().startswith("# trial 7: return 9\n")
    assert "seed" not in yaml.safe_load((tmp_path / "best.yaml").read_text())
    cfg = zx.config.load(tmp_path / "best.yaml")
    assert (cfg.algorithm, cfg.env.name, cfg.env_steps, cfg.lr) == ("ppo", "toy/match", 500, 1e-5)  # type: ignore[attr-defined]
    assert cfg.net.hidden_sizes == [8, 8]  # type: ignore[attr-defined]
    assert cfg.net.activation == "relu"  # type: ignore[attr-defined]


def test_missing_optuna_is_reported_with_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)  # as if not installed
    monkeypatch.delitem(__import__("sys").modules, "zhixing.experiments.optuna_study", raising=False)
    with pytest.raises(UserError, match=re.escape(install_hint("tune"))):
        tune("ppo", {"lr": Range(1e-4, 1e-2)}, 1, env="toy/match", out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
