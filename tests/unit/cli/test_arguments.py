"""Settings written as options, and lists that the shell has split."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from conftest import Command

from zhixing.cli.arguments import join_brackets, reorder_arguments, translate_options
from zhixing.errors import UserError

FLAGS = {"--env": False, "--out": False, "--trust": True, "--help": True, "-h": True}
SHORT = ["--env-steps", "64", "--eval-episodes=1", "--no-tensorboard", "rollout_steps=32", "num_threads=1"]


@pytest.mark.parametrize(
    ("args", "options", "others"),
    [
        (["ppo", "--env", "A", "lr=1"], ["--env", "A"], ["ppo", "lr=1"]),
        (["--lr", "1e-3", "ppo", "--trust"], ["--trust"], ["--lr=1e-3", "ppo"]),
        (["ppo", "--lr=1e-3", "--env=A"], ["--env=A"], ["ppo", "--lr=1e-3"]),
        (["ppo", "--stop-return", "-200"], [], ["ppo", "--stop-return=-200"]),  # a value may be negative
        (["ppo", "--compile", "--env", "A"], ["--env", "A"], ["ppo", "--compile"]),
        (["ppo", "--compile", "lr=1"], [], ["ppo", "--compile", "lr=1"]),
        (["ppo", "sizes=[64,", "64]", "lr=1"], [], ["ppo", "sizes=[64, 64]", "lr=1"]),
        (["ppo", "--sizes", "[64,", "64]"], [], ["ppo", "--sizes=[64, 64]"]),
        (["-h"], ["-h"], []),
    ],
)
def test_options_of_the_command_come_first(args: list[str], options: list[str], others: list[str]) -> None:
    assert reorder_arguments(args, FLAGS) == [*options, *(["--", *others] if others else [])]


def test_unclosed_bracket_joins_all_following_arguments() -> None:
    assert join_brackets(["a=[1,", "b=2"]) == ["a=[1, b=2"]


def test_misspelled_option_is_rejected() -> None:
    with pytest.raises(UserError, match=r"unknown option --outt: did you mean --out\?"):
        reorder_arguments(["ppo", "--outt", "a"], FLAGS)


def test_options_are_translated_to_settings_of_the_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--env-steps=9", "--num_envs=2", "lr=1", "--compile", "--no-tensorboard"]
    settings = ["env_steps=9", "num_envs=2", "lr=1", "compile=true", "tensorboard=false"]
    assert translate_options(options, "ppo") == settings
    assert capsys.readouterr().err == ""  # names of zhixing need no note
    assert translate_options(["--n-steps=9"], "ppo") == ["rollout_steps=9"]
    assert "note: `--n-steps` (Stable-Baselines3) is `rollout_steps` here" in capsys.readouterr().err
    assert translate_options(["--n-steps=9"], "dqn") == ["replay.n_step=9"]
    assert translate_options(["--batch-size=9"], "ppo") == ["minibatch_size=9"]
    assert translate_options(["--batch-size=9"], "dqn") == ["batch_size=9"]


def test_settings_with_another_meaning_are_not_translated() -> None:
    """The error for the unknown setting explains the difference."""
    assert translate_options(["--target-update-interval=9"], "dqn") == ["target_update_interval=9"]


def test_train_accepts_settings_as_options(run_cli: Command) -> None:
    command = ["train", "--learning-rate", "1e-3", "PPO", "--env-id", "toy/match", "--num-envs", "2", *SHORT]
    code, _, err = run_cli(*command, "--net.hidden_sizes", "[8,", "8]", "--out", "run")
    assert code == 0, err
    cfg = yaml.safe_load(Path("run/config.yaml").read_text())
    assert (cfg["algorithm"], cfg["lr"], cfg["env"]["name"], cfg["num_envs"]) == ("ppo", 1e-3, "toy/match", 2)
    assert (cfg["env_steps"], cfg["tensorboard"], cfg["net"]["hidden_sizes"]) == (64, False, [8, 8])
    assert "`--learning-rate` (Stable-Baselines3, CleanRL, MindSpore RL) is `lr` here" in err
    code, out, err = run_cli("resume", "run", "--total-timesteps", "128")
    assert code == 0, err
    assert "trained            128 steps" in out


def test_no_command_prints_the_help(run_cli: Command) -> None:
    code, out, err = run_cli()
    assert (code, err) == (0, "")
    assert "Usage:" in out
    assert "train" in out
