"""The command line: help, output, and precedence of settings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import Command

import zhixing as zx
from zhixing.envs.catalog import families
from zhixing.training.callbacks.header import header
from zhixing.utils.extras import install_hint

SHORT = [
    "num_threads=1",
    "env_steps=256",
    "rollout_steps=32",
    "num_envs=2",
    "tensorboard=false",
    "eval_episodes=2",
]


def read_config(run: str) -> dict:
    return yaml.safe_load(Path(run, "config.yaml").read_text())


# --- help ---


def test_help_imports_neither_torch_nor_gymnasium() -> None:
    code = (
        "import sys; sys.argv = ['zhixing', *sys.argv[1:]]\n"
        "from zhixing.cli import main\n"
        "main()\n"
        "heavy = {'torch', 'gymnasium', 'numpy', 'matplotlib', 'tensorboard'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    for arguments in (["--help"], ["train", "--help"]):
        result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert "Usage: zhixing" in result.stdout


def test_help_names_every_command(run_cli: Command) -> None:
    code, out, _ = run_cli("--help")
    assert code == 0
    commands = "train resume eval collect video export push pull zoo watch play check reproduce plot sweep tune profile"
    commands += " list show"
    assert [line.split()[1] for line in out.splitlines() if re.match("│ [a-z]", line)] == commands.split()


def test_invalid_usage_names_the_help(run_cli: Command) -> None:
    assert run_cli("eval") == (2, "", "error: Missing argument 'RUN' (see `zhixing eval --help`)\n")
    assert run_cli("trian")[2] == "error: No such command 'trian'. Did you mean 'train'? (see `zhixing --help`)\n"


def test_version(run_cli: Command) -> None:
    assert run_cli("--version") == (0, f"zhixing {zx.__version__}\n", "")


# --- train ---


def test_overrides_take_precedence_over_files(run_cli: Command, tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text(
        "env: {name: dummy_envs:DictObsEnv, kind: multi}\nseed: 1\nnet: {cnn: simple}\ngamma: 0.5\n"
    )
    (tmp_path / "algorithm.yaml").write_text("algorithm: ppo\nlr: 1e-3\nseed: 2\nnet: {hidden_sizes: [8]}\n")
    files = ["--config", "env.yaml", "--config", "algorithm.yaml"]
    code, out, err = run_cli("train", *files, "--seed", "3", "--out", "run", "lr=2e-3", *SHORT, "lr=5e-3")
    assert code == 0, err
    cfg = read_config("run")
    assert cfg["algorithm"] == "ppo"
    assert cfg["env"] == {"name": "dummy_envs:DictObsEnv", "kind": "multi"}
    assert cfg["net"]["cnn"] == "simple"
    assert cfg["net"]["hidden_sizes"] == [8]
    assert (cfg["gamma"], cfg["seed"], cfg["lr"]) == (0.5, 3, 5e-3)
    assert ["run", "run"] in [line.split() for line in out.splitlines()]
    assert "trained            256 steps" in out


def test_file_or_argument_names_the_algorithm(run_cli: Command, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("algorithm: ppo\nenv: toy/match\n")
    assert run_cli("train", "--config", "a.yaml", "--out", "one", *SHORT)[0] == 0
    assert read_config("one")["algorithm"] == "ppo"
    short = ["env_steps=64", "learning_starts=32", "tensorboard=false", "eval_episodes=1"]
    assert run_cli("train", "dqn", "--config", "a.yaml", "--out", "two", *short)[0] == 0
    assert read_config("two")["algorithm"] == "dqn"


def test_env_option_drops_the_options_of_the_environment_in_the_file(run_cli: Command, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("algorithm: ppo\nenv: {name: dummy_envs:DictObsEnv, kind: multi}\n")
    assert run_cli("train", "--config", "a.yaml", "--env", "toy/match", "--out", "run", *SHORT)[0] == 0
    assert read_config("run")["env"] == {"name": "toy/match"}


def test_unreached_stop_return_is_reported(run_cli: Command) -> None:
    code, out, err = run_cli("train", "ppo", "--env", "toy/match", "--out", "run", *SHORT, "stop_return=99")
    assert code == 0
    assert "(stop_return: 99)" in out
    assert "stop_return was not reached within the budget" in err


def test_training_prints_a_header_and_final_returns(run_cli: Command) -> None:
    code, out, err = run_cli("train", "PPO", "--env", "toy/match", "--out", "run", *SHORT, "vector.backend=serial")
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in err.splitlines()[:5])
    assert lines == {
        "run": "run",
        "algorithm": "ppo, no preset",
        "env": "toy/match, 2 environments, serial back end",
        "device": "cpu, 1 thread, not compiled",
        "budget": "256 steps",
    }
    assert "training return" in out  # 256 steps in 2 environments, 10 steps per episode
    assert "(last 24 episodes)" in out
    assert "evaluation return" in out
    _, _, err = run_cli("resume", "run", "env_steps=512", "duration=90s", "stop_return=99")
    assert "run        run (resumed at 256 steps)" in err
    assert "budget     512 steps, 90 s, until the evaluation return is 99" in err


def test_header_names_the_preset_and_the_dataset(tmp_path: Path) -> None:
    cfg = zx.config.load(algorithm="ppo", env="CartPole-v1", num_threads=2, compile=True, vector__backend="native")
    assert header(cfg, tmp_path).splitlines()[1:4] == [
        f"algorithm  ppo, preset {zx.config.preset_name('ppo', 'CartPole-v1')}",
        "env        CartPole-v1, 8 environments, native back end",
        "device     auto, 2 threads, compiled at the first updates",
    ]
    cfg = zx.config.load(algorithm="dqn", env="toy/match", num_threads=1, dataset="data", offline_updates=1000)
    assert "toy/match, offline from data" in header(cfg, tmp_path)
    assert "budget     1,000 updates" in header(cfg, tmp_path)
    cfg = zx.config.load(algorithm="ppo", env="toy/match", num_threads=1, distributed__workers=2, num_envs=4)
    assert "4 environments, auto back end, 2 Ray workers" in header(cfg, tmp_path)


def test_default_run_folder_is_in_runs(run_cli: Command, tmp_path: Path) -> None:
    assert run_cli("train", "ppo", "--env", "toy/match", "--seed", "7", *SHORT)[0] == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("ppo-toy-match-7-")


def test_interrupt_exits_with_130(run_cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(zx.Callback):
        def __init__(self, folder: Path) -> None: ...

        def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
            loop.stop("interrupted")

    monkeypatch.setattr("zhixing.training.builders.callbacks.Progress", Stop)  # stands for Ctrl-C
    code, _, err = run_cli("train", "ppo", "--env", "toy/match", "--out", "run", *SHORT)
    assert "continue with: zhixing resume run" in err
    assert code == 130


# --- resume, eval ---


@pytest.fixture
def run(run_cli: Command) -> str:
    assert run_cli("train", "ppo", "--env", "toy/match", "--out", "run", *SHORT)[0] == 0
    return "run"


def test_finished_run_resumes_only_with_a_larger_budget(run_cli: Command, run: str) -> None:
    code, out, _ = run_cli("resume", run)
    assert code == 0
    assert "run has finished at 256 steps, because env_steps=256 is used up; to continue, raise env_steps" in out
    code, out, _ = run_cli("resume", run, "env_steps=512")
    assert code == 0
    assert "trained            512 steps" in out


def test_eval_json_has_the_documented_keys(run_cli: Command, run: str) -> None:
    code, out, err = run_cli("eval", run, "--episodes", "5", "--seed", "3", "--json")
    assert (code, err) == (0, "")
    summary = json.loads(out)
    returns = ["mean_return", "std_return", "min_return", "max_return"]
    assert list(summary) == [*returns, "mean_length", "episodes", "cut_episodes"]
    assert (summary["episodes"], summary["cut_episodes"]) == (5, 0)
    assert summary["mean_length"] == 10.0
    assert 0 <= summary["min_return"] <= summary["mean_return"] <= summary["max_return"] <= 10
    assert run_cli("eval", run, "--episodes", "5", "--seed", "3", "--json")[1] == out


def test_eval_prints_text_and_accepts_checkpoints(run_cli: Command, run: str) -> None:
    code, out, _ = run_cli("eval", run, "--episodes", "3", "--checkpoint", "best")
    assert code == 0
    assert out.startswith("mean return  ")
    assert len(out.splitlines()) == 7
    assert run_cli("eval", run, "--checkpoint", "first")[0] == 2
    assert run_cli("eval", run, "--episodes", "0")[0] == 2


# --- list, show ---


def test_list_prints_algorithms_environments_and_presets(run_cli: Command) -> None:
    code, out, _ = run_cli("list")
    assert code == 0
    summaries = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()}
    assert list(summaries) == zx.algorithms.names()
    assert summaries["ppo"] == zx.algorithms.get("ppo").summary
    assert run_cli("list", "algorithms")[1] == out
    assert {"CartPole-v1", "toy/match", "dmc/walker-walk", "mario/1-1"} <= set(run_cli("list", "envs")[1].split())
    assert ["ppo", "CartPole-v*"] in [line.split() for line in run_cli("list", "presets")[1].splitlines()]


def test_environments_are_listed_by_family_with_missing_extras(
    run_cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"Box2D": True, "mujoco": False, "ale_py": False}
    monkeypatch.setattr("zhixing.envs.catalog.find_spec", lambda package: installed.get(package) or None)
    monkeypatch.setattr("zhixing.envs.adapters.atari.games", list)
    lines = run_cli("list", "envs")[1].splitlines()
    assert "Gymnasium, Box2D - installed" in lines
    assert f"Gymnasium, MuJoCo - needs the extra 'mujoco': {install_hint('mujoco')}" in lines
    atari = lines.index(f"Atari - needs the extra 'atari': {install_hint('atari')}")
    assert lines[atari + 1] == "  ALE/Pong-v5 and others"
    classic = lines.index("Gymnasium, classic control - installed")
    assert lines[classic + 1].split()[:2] == ["Acrobot-v1", "CartPole-v1"]


def test_every_environment_is_in_one_family() -> None:
    listed = [name for family in families() for name in family.names if "and others" not in name]
    assert sorted(listed) == zx.envs.names()


def show_settings(run_cli: Command, *arguments: str) -> dict[str, str]:
    """Return the table of `zhixing show` as one line per setting."""
    code, out, err = run_cli("show", *arguments)
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 100
    rows: dict[str, str] = {}
    for line in out.splitlines()[4:]:
        if line.startswith("  ") and line[2] != " ":
            name = line.split()[0]
            rows[name] = line
        elif line.startswith("  "):
            rows[name] += line
    return {name: " ".join(line.split()) for name, line in rows.items()}


def test_show_prints_every_setting_by_group(run_cli: Command) -> None:
    rows = show_settings(run_cli, "ppo")
    assert list(rows) == [setting.name for setting in zx.config.list_settings(zx.algorithms.get("ppo").settings)]
    assert rows["clip_range"] == "clip_range float > 0 0.2 Clip range of the probability ratio."
    assert rows["stop_return"].startswith("stop_return float or none none Stop training when")
    assert rows["net.hidden_sizes"].startswith("net.hidden_sizes list of int > 0 [64, 64] Units")
    assert rows["gamma"] == "gamma float 0 to 1 0.99 Discount factor per step."
    out = run_cli("show", "ppo")[1]
    headings = [line for line in out.splitlines()[4:] if line[:1].isalpha()]
    assert headings == [group.value for group in zx.config.Group]
    assert "CartPole" not in out


def test_show_prints_the_preset_of_the_environment(run_cli: Command) -> None:
    rows = show_settings(run_cli, "PPO", "--env", "CartPole-v1")
    gamma = zx.config.preset("ppo", "CartPole-v1")["gamma"]
    assert rows["gamma"] == f"gamma float 0 to 1 0.99 {gamma} Discount factor per step."
    assert rows["seed"].startswith("seed int >= 0 0 Seed")  # not in the preset
    title = f"ppo on CartPole-v1: preset {zx.config.preset_name('ppo', 'CartPole-v1')}"
    assert title in run_cli("show", "ppo", "--env", "CartPole-v1")[1]
    assert "ppo on toy/match: no preset" in run_cli("show", "ppo", "--env", "toy/match")[1]


@pytest.mark.parametrize("columns", [80, 120])
def test_show_fits_the_terminal(run_cli: Command, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run_cli("show", "sac", "--env", "Pendulum-v1")
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    # below 100 columns, descriptions have their own lines
    assert ("\n      Learning rate of all networks." in out) == (columns == 80)


def test_closed_output_pipe_prints_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m zhixing list envs | head -1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert len(result.stdout.splitlines()) == 1
    assert "Traceback" not in result.stderr
