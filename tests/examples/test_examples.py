"""Every file in examples/ runs unchanged and reaches the mean return named in its GOAL."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hub_standin import Hub

import zhixing as zx
from zhixing.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
FIXTURES = Path(__file__).parents[1] / "fixtures"
OWN_TEST = {"onnx_inference", "import_agent", "hub", "trackers"}  # run by tests of their own
NAMES = sorted({file.stem for file in EXAMPLES.glob("*.py")} - OWN_TEST)

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder. Examples can be imported by name, as from their own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return tmp_path


@pytest.fixture
def run_cli(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command that must succeed. Returns its output and errors."""

    def run(*words: str) -> tuple[str, str]:
        monkeypatch.setattr("sys.argv", ["zhixing", *words])
        capsys.readouterr()
        main()
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", NAMES)
def test_example_reaches_its_goal(name: str, folder: Path) -> None:
    module = example(name)
    assert (module.__doc__ or "").strip()
    result = module.main()
    assert result["final_return"] >= module.GOAL
    # an example writes no files except runs and the configuration that it shows
    assert {file.name for file in folder.iterdir()} <= {"runs", "match.yaml"}
    if result.get("stop_return") is not None:
        assert result["reached"]


def test_exported_agent_runs_in_onnx_runtime_alone(run_cli: Command, folder: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run_cli("export", "cartpole", "-o", "exported", "--format", "onnx")
    without = "import sys; sys.modules['torch'] = sys.modules['zhixing'] = None; "  # imports of these fail
    script = f"{without}import runpy; runpy.run_path({str(EXAMPLES / 'onnx_inference.py')!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    action = zx.load("cartpole").act([0.0, 0.1, 0.02, -0.1])
    assert done.stdout.splitlines() == [f"step {step}: action {action}" for step in range(3)]


def test_stable_baselines3_agent_is_imported_filmed_and_trained_further(folder: Path) -> None:
    result = example("import_agent").main(str(FIXTURES / "foreign" / "ppo.zip"), "CartPole-v1")
    assert (folder / "runs" / "imported.mp4").stat().st_size > 0
    imported, further = (zx.load(run).policy.state_dict() for run in ("runs/imported", result))
    assert imported.keys() == further.keys()
    assert any(not torch.equal(imported[name], weight) for name, weight in further.items())


def test_agent_returns_from_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    run = example("hub").main("someone/cartpole-ppo")
    assert {"README.md", "agent.safetensors", "replay.mp4"} <= hub.repos["someone/cartpole-ppo"].keys()
    weights, pulled = (zx.load(folder).policy.state_dict() for folder in (run, "runs/pulled"))
    assert all(weights[name].equal(pulled[name]) for name in weights)


def test_trackers_have_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    folders = {f"WANDB_{name}_DIR": str(folder / "cache" / name) for name in ("CACHE", "CONFIG", "DATA")}
    for name, value in {**folders, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    wandb.teardown()  # forget the settings of other tests
    module = example("trackers")
    result = module.main()
    wandb.teardown()
    assert result["final_return"] >= module.GOAL
    evaluations = re.findall(r"^ *(\d+) steps: ([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert [int(steps) for steps, _ in evaluations] == [2_048, 4_096, 6_144, 8_192]
    assert float(evaluations[-1][1]) == pytest.approx(result["final_return"], abs=0.005)
    (log,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert b"eval/mean_return" in log.read_bytes()


def test_pole_without_velocity_requires_stacks(folder: Path) -> None:
    module = example("frame_stack")
    assert module.main(stack=1)["final_return"] < 0.5 * module.GOAL


def test_costs_in_info_change_what_is_learned(folder: Path) -> None:
    careful = example("custom_info_loss")
    result = careful.main(out="careful", quiet=True)
    assert careful.GOAL <= result["final_return"] < 8.5  # it walks on busy roads
    assert careful.main(out="reckless", quiet=True, cost_coef=0.0)["final_return"] > 9.5
    with pytest.raises(zx.UserError, match=r"needs info\['cost'\] of every step: set env.info_fields="):
        zx.train("custom_info_loss:Careful", env="custom_info_loss:Delivery", out="without", quiet=True)


def test_early_stopping_ends_training_and_survives_a_resume(folder: Path) -> None:
    early_stopping = example("custom_callback").EarlyStopping
    cfg = zx.config.load(algorithm="ppo", env="toy/match", env_steps=100_000, eval_every=256, lr=3e-3)
    session = zx.Session(cfg, "run", [early_stopping(2)], quiet=True)
    assert session.run()["env_steps"] < 100_000
    assert session.loop.stop_reason == "no improvement in 2 evaluations"
    callback = early_stopping(2)
    resumed = zx.Session.resume("run", [callback], quiet=True)
    assert (callback.best, callback.num_worse) == (10.0, 2)
    resumed.close()


def test_recall_requires_memory(folder: Path) -> None:
    """Without a recurrent network, the return stays near that of random actions, 1/4."""
    result = zx.train(
        "ppo", "custom_lstm:Recall", out="run", quiet=True, env_steps=6_000, num_envs=32, rollout_steps=15,
        minibatch_size=480, lr=5e-3, vector__backend="serial", eval_episodes=200, eval_every=0, tensorboard=False,
    )  # fmt: skip
    assert result["final_return"] < 0.5


def test_custom_environment_takes_its_option_and_is_recorded(run_cli: Command, folder: Path) -> None:
    run_cli("train", "ppo", "--env", "custom_environment:Room", "env.target=23", "env_steps=256", "--out", "room")
    assert zx.load("room").cfg.env.options == {"target": 23}
    assert "room.mp4: return" in run_cli("video", "room", "-o", "room.mp4")[0]
    assert (folder / "room.mp4").stat().st_size > 0


def test_commands_accept_the_custom_algorithm(run_cli: Command, folder: Path) -> None:
    name = "custom_algorithm:Reinforce"
    run_cli("train", name, "--env", "toy/match", "stop_return=9", "eval_every=1000", "--out", "run")
    summary = json.loads(run_cli("eval", "run", "--episodes", "50", "--json")[0])
    assert summary["mean_return"] >= 9.0
    assert summary["episodes"] == 50
    run_cli("video", "run", "-o", "run.mp4")
    run_cli("plot", "run", "-o", "run.png")
    assert (folder / "run.mp4").stat().st_size > 0
    assert (folder / "run.png").stat().st_size > 0
    settings = run_cli("show", name)[0]
    assert re.search(r"value_coef +float >= 0 +0\.5\s+Weight of the value loss\.", settings)


def test_resumed_run_of_the_custom_algorithm_equals_an_uninterrupted_one(run_cli: Command, folder: Path) -> None:
    words = ["train", "custom_algorithm:Reinforce", "--env", "CartPole-v1", "--seed", "2", "eval_every=0"]
    run_cli(*words, "env_steps=2048", "--out", "whole")
    run_cli(*words, "env_steps=1024", "--out", "parts")
    run_cli("resume", "parts", "env_steps=2048")
    whole, parts = (json.loads((folder / run / "result.json").read_text()) for run in ("whole", "parts"))
    assert whole["env_steps"] == parts["env_steps"] == 2048
    assert whole["final_return"] == parts["final_return"]
    weights, resumed_weights = zx.load("whole").policy.state_dict(), zx.load("parts").policy.state_dict()
    assert all(weights[key].equal(resumed_weights[key]) for key in weights)


def test_resumed_run_of_the_five_parts_equals_an_uninterrupted_one(run_cli: Command, folder: Path) -> None:
    """The collector saves its counts."""
    words = ["train", "five_parts:QLearning", "--env", "FrozenLake-v1", "env.is_slippery=false", "eval_every=0"]
    run_cli(*words, "env_steps=600", "--out", "whole")
    run_cli(*words, "env_steps=300", "--out", "parts")
    run_cli("resume", "parts", "env_steps=600")
    whole, parts = (zx.load(run).policy.state_dict() for run in ("whole", "parts"))
    assert all(whole[key].equal(parts[key]) for key in whole)


def test_built_in_algorithm_trains_with_the_trainer_of_an_example(run_cli: Command, folder: Path) -> None:
    """Every iteration is an episode of 10 steps, so training ends with the 21st episode."""
    settings = ["trainer=five_parts:train_after_episodes", "env_steps=205", "num_envs=1", "learning_starts=0"]
    run_cli("train", "dqn", "--env", "toy/match", *settings, "--out", "run")
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["env_steps"] == 210


def test_custom_algorithm_works_from_the_current_folder_under_another_name(run_cli: Command, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "custom_algorithm.py", tmp_path / "renamed.py")
    run_cli("train", "renamed:Reinforce", "--env", "CartPole-v1", "env_steps=256", "--out", "run")
    assert json.loads(run_cli("eval", "run", "--episodes", "2", "--json")[0])["episodes"] == 2


def test_custom_algorithm_bootstraps_truncated_episodes(folder: Path) -> None:
    """A reward of 1 per step without end, γ = 0.8: V = 1 / (1 - 0.8) = 5, though episodes are truncated at 5 steps."""
    cfg = zx.config.load(
        algorithm="custom_algorithm:Reinforce", env="dummy_envs:TruncatingEnv", gamma=0.8, env_steps=8_000,
        eval_every=0, tensorboard=False, vector__backend="serial",
    )  # fmt: skip
    session = zx.Session(cfg, "run", quiet=True)
    session.run()
    with torch.no_grad():
        assert float(session.learner.value(torch.ones(1, 5))) == pytest.approx(5.0, rel=0.05)
