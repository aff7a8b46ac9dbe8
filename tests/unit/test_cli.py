"""The command line: quick help, what it prints, and whose word wins."""

from __future__ import annotations

import json
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


def written(run: str) -> dict:
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
    for words in (["--help"], ["train", "--help"]):
        answer = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr
        assert "Usage: zhixing" in answer.stdout


def test_help_names_every_command(run_cli: Command) -> None:
    code, out, _ = run_cli("--help")
    assert code == 0
    commands = (
        "train",
        "resume",
        "eval",
        "video",
        "plot",
        "sweep",
        "tune",
        "profile",
        "list",
        "show",
        "check",
        "reproduce",
    )
    for command in (*commands, "play", "watch", "collect"):
        assert command in out


def test_version(run_cli: Command) -> None:
    assert run_cli("--version") == (0, f"zhixing {zx.__version__}\n", "")


# --- train ---


def test_several_files_merge_and_overrides_win(run_cli: Command, tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(
        "env: {name: dummy_envs:DictObsEnv, kind: multi}\nseed: 1\nnet: {cnn: simple}\ngamma: 0.5\n"
    )
    (tmp_path / "algorithm.yaml").write_text("algorithm: ppo\nlr: 1e-3\nseed: 2\nnet: {hidden_sizes: [8]}\n")
    files = ["--config", "task.yaml", "--config", "algorithm.yaml"]
    code, out, err = run_cli("train", *files, "--seed", "3", "--out", "mine", "lr=2e-3", *SHORT, "lr=5e-3")
    assert code == 0, err
    found = written("mine")
    assert found["algorithm"] == "ppo"
    assert found["env"] == {"name": "dummy_envs:DictObsEnv", "kind": "multi"}
    assert found["net"]["cnn"] == "simple"
    assert found["net"]["hidden_sizes"] == [8]
    assert (found["gamma"], found["seed"], found["lr"]) == (0.5, 3, 5e-3)
    assert ["run", "mine"] in [line.split() for line in out.splitlines()]
    assert "trained            256 steps" in out


def test_the_algorithm_may_stand_in_the_file_and_on_the_line(run_cli: Command, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("algorithm: ppo\nenv: toy/match\n")
    assert run_cli("train", "--config", "a.yaml", "--out", "one", *SHORT)[0] == 0
    assert written("one")["algorithm"] == "ppo"
    short = ["env_steps=64", "learning_starts=32", "tensorboard=false", "eval_episodes=1"]
    assert run_cli("train", "dqn", "--config", "a.yaml", "--out", "two", *short)[0] == 0
    assert written("two")["algorithm"] == "dqn"


def test_another_task_on_the_line_does_not_inherit_options(run_cli: Command, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("algorithm: ppo\nenv: {name: dummy_envs:DictObsEnv, kind: multi}\n")
    assert run_cli("train", "--config", "a.yaml", "--env", "toy/match", "--out", "mine", *SHORT)[0] == 0
    assert written("mine")["env"] == {"name": "toy/match"}


def test_a_return_that_was_not_reached_is_told(run_cli: Command) -> None:
    code, out, err = run_cli("train", "ppo", "--env", "toy/match", "--out", "mine", *SHORT, "stop_return=99")
    assert code == 0
    assert "(stop_return: 99)" in out
    assert "stop_return was not reached within the budget" in err


def test_training_begins_with_what_is_trained_and_ends_with_both_returns(run_cli: Command) -> None:
    code, out, err = run_cli("train", "PPO", "--env", "toy/match", "--out", "mine", *SHORT, "vector.backend=serial")
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in err.splitlines()[:5])
    assert lines == {
        "run": "mine",
        "algorithm": "ppo, no preset",
        "env": "toy/match, 2 environments, serial back end",
        "device": "cpu, 1 thread, not compiled",
        "budget": "256 steps",
    }
    assert "training return" in out  # 10 steps to an episode: 25 have ended
    assert "(last 24 episodes)" in out
    assert "evaluation return" in out
    _, _, err = run_cli("resume", "mine", "env_steps=512", "duration=90s", "stop_return=99")
    assert "run        mine (resumed at 256 steps)" in err
    assert "budget     512 steps, 90 s, until the evaluation return is 99" in err


def test_the_header_names_the_preset_and_what_is_learned_from(tmp_path: Path) -> None:
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


def test_without_out_the_run_is_in_runs(run_cli: Command, tmp_path: Path) -> None:
    assert run_cli("train", "ppo", "--env", "toy/match", "--seed", "7", *SHORT)[0] == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("ppo-toy-match-7-")


def test_an_interrupt_is_130(run_cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(zx.Callback):
        def __init__(self, folder: Path) -> None: ...

        def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
            loop.stop("interrupted")

    monkeypatch.setattr("zhixing.training.builders.callbacks.Progress", Stop)  # a way to press Ctrl-C in this process
    code, _, err = run_cli("train", "ppo", "--env", "toy/match", "--out", "mine", *SHORT)
    assert "continue with: zhixing resume mine" in err
    assert code == 130


# --- resume, eval ---


@pytest.fixture
def run(run_cli: Command) -> str:
    assert run_cli("train", "ppo", "--env", "toy/match", "--out", "mine", *SHORT)[0] == 0
    return "mine"


def test_resume_says_that_a_run_is_finished_and_takes_a_longer_budget(run_cli: Command, run: str) -> None:
    code, out, _ = run_cli("resume", run)
    assert code == 0
    assert "mine is finished at 256 steps: env_steps=256 is used up; give it a longer env_steps" in out
    code, out, _ = run_cli("resume", run, "env_steps=512")
    assert code == 0
    assert "trained            512 steps" in out


def test_eval_json_has_exactly_the_keys_of_the_design(run_cli: Command, run: str) -> None:
    code, out, err = run_cli("eval", run, "--episodes", "5", "--seed", "3", "--json")
    assert (code, err) == (0, "")
    summary = json.loads(out)
    returns = ["mean_return", "std_return", "min_return", "max_return"]
    assert list(summary) == [*returns, "mean_length", "episodes", "cut_episodes"]
    assert (summary["episodes"], summary["cut_episodes"]) == (5, 0)
    assert summary["mean_length"] == 10.0
    assert 0 <= summary["min_return"] <= summary["mean_return"] <= summary["max_return"] <= 10
    assert run_cli("eval", run, "--episodes", "5", "--seed", "3", "--json")[1] == out


def test_eval_in_words_and_of_the_best(run_cli: Command, run: str) -> None:
    code, out, _ = run_cli("eval", run, "--episodes", "3", "--checkpoint", "best")
    assert code == 0
    assert out.startswith("mean return  ")
    assert len(out.splitlines()) == 7
    assert run_cli("eval", run, "--checkpoint", "first")[0] == 2
    assert run_cli("eval", run, "--episodes", "0")[0] == 2


# --- list, show ---


def test_lists(run_cli: Command) -> None:
    code, out, _ = run_cli("list")
    assert code == 0
    named = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()}
    assert list(named) == zx.algorithms.names()
    assert named["ppo"] == zx.algorithms.get("ppo").summary
    assert run_cli("list", "algorithms")[1] == out
    assert {"CartPole-v1", "toy/match", "dmc/walker-walk", "mario/1-1"} <= set(run_cli("list", "envs")[1].split())
    assert ["ppo", "CartPole-v*"] in [line.split() for line in run_cli("list", "presets")[1].splitlines()]


def test_environments_are_listed_by_family_with_what_they_need(
    run_cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"Box2D": True, "mujoco": False, "ale_py": False}
    monkeypatch.setattr("zhixing.envs.catalog.find_spec", lambda package: there.get(package) or None)
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


def shown_settings(run_cli: Command, *arguments: str) -> dict[str, str]:
    """Return the table of `zhixing show` as one line per setting."""
    code, out, err = run_cli("show", *arguments)
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 100
    rows: dict[str, str] = {}
    for line in out.splitlines():
        if line.startswith("   ") and line[3] != " ":
            name = line.split()[0]
            rows[name] = line
        elif line.startswith("    ") and line.strip():
            rows[name] += line
    return {name: " ".join(line.split()) for name, line in rows.items()}


def test_show_prints_every_setting_by_group(run_cli: Command) -> None:
    rows = shown_settings(run_cli, "ppo")
    assert list(rows) == [setting.name for setting in zx.config.list_settings(zx.algorithms.get("ppo").settings)]
    assert rows["clip_range"] == "clip_range float > 0 0.2 Clip range of the probability ratio."
    assert rows["stop_return"].startswith("stop_return float or none none Mean return")
    assert rows["net.hidden_sizes"].startswith("net.hidden_sizes list of int > 0 [64, 64] Units")
    assert rows["gamma"] == "gamma float 0 to 1 0.99 Discount factor per step."
    out = run_cli("show", "ppo")[1]
    headings = [line.strip() for line in out.splitlines() if line.startswith(" ") and line[1:2].isalpha()]
    assert headings[1:] == [group.value for group in zx.config.Group]
    assert "CartPole" not in out


def test_show_prints_the_preset_of_the_environment(run_cli: Command) -> None:
    rows = shown_settings(run_cli, "PPO", "--env", "CartPole-v1")
    gamma = zx.config.preset("ppo", "CartPole-v1")["gamma"]
    assert rows["gamma"] == f"gamma float 0 to 1 0.99 {gamma} Discount factor per step."
    assert rows["seed"].startswith("seed int >= 0 0 Seed")  # not in the preset
    title = f"ppo on CartPole-v1: preset {zx.config.preset_name('ppo', 'CartPole-v1')}"
    assert title in run_cli("show", "ppo", "--env", "CartPole-v1")[1]
    assert "ppo on toy/match: no preset" in run_cli("show", "ppo", "--env", "toy/match")[1]


def test_output_into_a_closed_pipe_is_no_crash(tmp_path: Path) -> None:
    command = f"{sys.executable} -m zhixing list envs | head -1"
    answer = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert len(answer.stdout.splitlines()) == 1
    assert "Traceback" not in answer.stderr
