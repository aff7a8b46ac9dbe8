"""Tuning without Optuna: what words mean, what is refused, the table and the file of the best."""

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
    Outcome,
    Range,
    best_of,
    check,
    fitted,
    parse_spaces,
    settings_of,
    table,
    tune,
    write_best,
)
from zhixing.utils.extras import install_hint

PPO = [{"algorithm": "ppo", "env": "toy/match"}]


def test_ranges_and_choices_are_told_from_settings() -> None:
    words = ["lr=1e-4..1e-2:log", "gamma=0.9..0.999", "num_envs=4,8", "net.hidden_sizes=[64,64]", "epochs=1..10"]
    words += ["init_from=../there", "env.note=a..b", "net.activation=tanh,relu"]
    spaces, others = parse_spaces(words)
    assert spaces == {
        "lr": Range(1e-4, 1e-2, log=True),
        "gamma": Range(0.9, 0.999),
        "num_envs": Choice(["4", "8"]),
        "epochs": Range(1, 10, whole=True),
        "net.activation": Choice(["tanh", "relu"]),
    }
    assert others == ["net.hidden_sizes=[64,64]", "init_from=../there", "env.note=a..b"]


def test_the_last_word_on_a_setting_wins() -> None:
    assert parse_spaces(["lr=1e-4..1e-2", "lr=3e-4"]) == ({}, ["lr=3e-4"])
    assert parse_spaces(["lr=3e-4", "lr=1,2"]) == ({"lr": Choice(["1", "2"])}, [])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("lr=1e-2..1e-4", "from the lower to the higher"),
        ("lr=0..1:log", "must begin above 0"),
        ("lr=1e-4..1e-2:lg", "is no range"),
        ("lr=1..", "is no range"),
        ("lr=1,1", "once"),
        ("lr=1,", "once"),
    ],
)
def test_wrong_ranges_are_told(word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_spaces([word])


def test_a_range_is_whole_where_the_setting_is() -> None:
    model = zx.algorithms.get("ppo").settings
    assert fitted(Range(1, 8, whole=True), model, "num_envs") == Range(1, 8, whole=True)
    assert fitted(Range(10.0, 1e3), model, "env_steps").ends == [10, 1000]
    assert fitted(Range(0, 1, whole=True), model, "gamma").ends == [0.0, 1.0]
    assert not fitted(Range(0, 1, whole=True), model, "gamma").whole  # type: ignore[union-attr]
    assert fitted(Range(1, 3, whole=True), model, "env.level").ends == [1, 3]  # as it is written
    assert fitted(Choice(["1", "2"]), model, "gamma") == Choice(["1", "2"])
    with pytest.raises(UserError, match="takes whole numbers"):
        fitted(Range(0.5, 4.0), model, "num_envs")


def test_what_a_trial_has_chosen_becomes_settings() -> None:
    spaces = {"lr": Range(1e-4, 1e-2), "net.hidden_sizes": Choice(["[8]", "[8,8]"]), "net.cnn": Choice(["nature", "x"])}
    chosen = settings_of({"lr": 3e-3, "net.hidden_sizes": "[8,8]", "net.cnn": "nature"}, spaces)
    assert chosen == {"lr": 3e-3, "net": {"hidden_sizes": [8, 8], "cnn": "nature"}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr=3e-4"], "nothing is to be searched"),
        (["seed=1,2"], "seed can't be searched"),
        (["lr=-1.0..1.0"], "lr=-1.0: should be greater than 0"),
        (["gamma=0.9..1.5"], "gamma=1.5"),
        (["lrr=1..2"], "did you mean 'lr'"),
        (["lr=1e-3,fast"], "lr='fast'"),
        (
            ["num_envs=1,3", "minibatch_size=64", "rollout_steps=64", "vector.workers=2"],
            "number of workers is 2",
        ),
        (["lr=1..2", "env=none"], "--env"),
    ],
)
def test_what_is_wrong_with_a_space_is_told_at_once(words: list[str], message: str) -> None:
    spaces, others = parse_spaces(words)
    with pytest.raises(UserError) as told:
        check([*PPO, zx.config.parse_overrides(others)], spaces)
    assert message in str(told.value)


TRIALS = [
    Outcome(0, "complete", 5.0, {"lr": 1e-3}),
    Outcome(1, "pruned", 6.0, {"lr": 1e-4}),
    Outcome(2, "failed", math.nan, {"lr": 1e-2}, "broken"),
    Outcome(3, "complete", 9.0, {"lr": 2e-3}),
    Outcome(4, "running", math.nan, {"lr": 4e-3}),
]


def test_the_best_complete_trial_comes_first() -> None:
    assert best_of(TRIALS) == TRIALS[3]
    assert best_of(TRIALS[1:3]) is None
    rows = table(TRIALS)
    assert [row["trial"] for row in rows] == [3, 0, 1, 4, 2]
    assert rows[0] == {"trial": 3, "state": "complete", "return": 9.0, "lr": 2e-3}


def test_the_file_of_the_best_is_a_configuration(tmp_path: Path) -> None:
    layers = [*PPO, {"seed": 3, "env": {"name": "toy/match"}, "net": {"activation": "relu"}, "env_steps": 500}]
    spaces = {"lr": Range(1e-6, 1e-2), "net.hidden_sizes": Choice(["[8]", "[8,8]"])}
    best = Outcome(7, "complete", 9.0, {"lr": 1e-5, "net.hidden_sizes": "[8,8]"})
    write_best(best, layers, spaces, tmp_path / "best.yaml")
    assert (tmp_path / "best.yaml").read_text().startswith("# trial 7: return 9\n")
    assert "seed" not in yaml.safe_load((tmp_path / "best.yaml").read_text())
    cfg = zx.config.load(tmp_path / "best.yaml")
    assert (cfg.algorithm, cfg.env.name, cfg.env_steps, cfg.lr) == ("ppo", "toy/match", 500, 1e-5)  # type: ignore[attr-defined]
    assert cfg.net.hidden_sizes == [8, 8]  # type: ignore[attr-defined]
    assert cfg.net.activation == "relu"  # type: ignore[attr-defined]


def test_a_missing_optuna_is_told_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)  # as where it isn't installed
    monkeypatch.delitem(__import__("sys").modules, "zhixing.experiments.optuna_study", raising=False)
    with pytest.raises(UserError, match=re.escape(install_hint("tune"))):
        tune(PPO, ["lr=1e-4..1e-2"], 1, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
