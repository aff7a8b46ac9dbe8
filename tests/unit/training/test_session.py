"""Sessions: written files, resuming and interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import cli_exit_code, differing_tensors, metrics_rows

import zhixing as zx
from zhixing.errors import UserError
from zhixing.training.run_folder import RunFolder

RESULT = [
    *("algorithm", "env", "seed", "env_steps", "updates", "seconds", "steps_per_second", "final_return"),
    *("best_return", "stop_return", "reached", "seconds_to_stop", "env_steps_to_stop"),
]


def run_session(cfg: Any, out: Path) -> dict[str, Any]:
    return zx.Session(cfg, out, quiet=True).run()


# --- written files ---


def test_result_json_has_the_documented_keys(short_config: Callable, tmp_path: Path) -> None:
    result = run_session(short_config("ppo", "toy/match", seed=4), tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    assert list(saved) == RESULT
    assert saved == result
    assert (saved["algorithm"], saved["env"], saved["seed"]) == ("ppo", "toy/match", 4)
    assert saved["env_steps"] == 1216  # 19 iterations of 64
    assert saved["updates"] == 19 * 10 * 2  # ten epochs of two minibatches
    assert saved["steps_per_second"] == pytest.approx(1216 / saved["seconds"], rel=0.02)
    assert saved["best_return"] >= saved["final_return"]
    assert (saved["stop_return"], saved["reached"], saved["seconds_to_stop"]) == (None, False, None)


def test_result_has_the_steps_at_which_stop_return_was_reached(short_config: Callable, tmp_path: Path) -> None:
    result = run_session(short_config("ppo", "toy/match", stop_return=0.0, env_steps=5000), tmp_path / "run")
    assert result["reached"]
    assert result["env_steps"] == result["env_steps_to_stop"] == 512  # the first evaluation is due at 500
    assert result["seconds_to_stop"] == result["seconds"]


def test_run_is_evaluated_at_the_end_without_other_evaluations(short_config: Callable, tmp_path: Path) -> None:
    result = run_session(short_config("ppo", "toy/match", eval_every=0), tmp_path / "run")
    assert 0 <= result["final_return"] == result["best_return"] <= 10


def test_actors_can_step_environments_in_processes(short_config: Callable, tmp_path: Path) -> None:
    """Two actors, each with two environments in two processes, give the same result as without processes."""
    cfg = short_config("a3c", num_envs=4, actors=2)
    run_session(cfg, tmp_path / "serial")
    run_session(cfg.model_copy(update={"vector": cfg.vector.model_copy(update={"workers": 2})}), tmp_path / "process")
    backends = [
        yaml.safe_load((tmp_path / run / "config.yaml").read_text())["vector"]["backend"]
        for run in ("serial", "process")
    ]
    assert backends == ["serial", "process"]
    assert differing_tensors(tmp_path / "serial", tmp_path / "process") == []


def test_auto_settings_are_resolved_and_written(tmp_path: Path) -> None:
    cfg = zx.config.load(algorithm="ppo", env="CartPole-v1", env_steps=256)
    assert (cfg.vector.backend, cfg.vector.workers, cfg.num_threads, cfg.device) == ("auto",) * 4
    run_session(cfg, tmp_path / "run")
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["vector"]["backend"] in ("serial", "process", "mixed", "native")
    assert isinstance(saved["vector"]["workers"], int)
    assert saved["num_threads"] == 1  # no images
    assert saved["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert zx.config.load(tmp_path / "run" / "config.yaml").num_envs == 8  # of the preset


def test_nothing_is_written_before_the_run(short_config: Callable, tmp_path: Path) -> None:
    session = zx.Session(short_config("dqn", "toy/match"), tmp_path / "run", quiet=True)
    session.close()
    assert list(tmp_path.iterdir()) == []


def test_default_folder_names_algorithm_environment_and_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = zx.config.load(algorithm="ppo", env="dummy_envs:DictObsEnv", seed=3)
    assert str(zx.training.resolve.default_out(cfg)).startswith("runs/ppo-dummy_envs-DictObsEnv-3-2")


def test_default_folders_are_reserved_and_removed_if_unused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda pattern: "20260101-000000")  # all start in the same second
    cfg = zx.config.load(algorithm="pg", env="toy/match", env_steps=200)
    sessions = [zx.Session(cfg, quiet=True) for _ in range(3)]
    assert [session.folder.path.name[-2:] for session in sessions] == ["00", "-2", "-3"]
    sessions[1].run()
    for session in sessions:
        session.close()
    with pytest.raises(zx.UserError):
        zx.Session(zx.config.load(algorithm="dqn", env="Pendulum-v1"), quiet=True)
    assert [folder.name[-2:] for folder in (tmp_path / "runs").iterdir()] == ["-2"]


def test_train_and_evaluate_functions(tmp_path: Path) -> None:
    short = {"env_steps": 512, "rollout_steps": 64, "num_envs": 2}
    result = zx.train("ppo", env="toy/match", seed=1, out=tmp_path / "run", quiet=True, **short)
    assert result["env_steps"] == 512
    evaluation = zx.evaluate(tmp_path / "run", episodes=7, seed=5)
    assert len(evaluation.episodes) == 7
    assert {episode.length for episode in evaluation.episodes} == {10}


# --- init_from ---


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_init_from_loads_the_networks_of_another_run(name: str, short_config: Callable, tmp_path: Path) -> None:
    # DQN makes 500 updates, so its target network differs from the online network at the end
    interval = {"target_update_interval": 300} if name == "dqn" else {}
    run_session(short_config(name, "toy/match", seed=1, **interval), tmp_path / "first")
    parts = RunFolder.open(tmp_path / "first").load()["loop"]["learner"]["parts"]
    session = zx.Session(
        short_config(name, "toy/match", seed=2, init_from=str(tmp_path / "first")), tmp_path / "second", quiet=True
    )
    for part in ("net", "target_net") if name == "dqn" else ("net",):
        weights = getattr(session.learner, part).state_dict()
        assert weights.keys() == parts[part].keys()
        assert all(torch.equal(weights[key], parts[part][key]) for key in weights)
    if name == "dqn":
        assert not torch.equal(parts["net"]["head.weight"], parts["target_net"]["head.weight"])
    assert (session.learner.updates, session.loop.env_steps) == (0, 0)
    result = session.run()
    assert result["env_steps"] >= 1200


def test_init_from_accepts_another_number_of_environments(short_config: Callable, tmp_path: Path) -> None:
    """Reward statistics are kept per environment and aren't loaded."""
    run_session(short_config("ppo", "toy/match", normalize_reward=True, num_envs=2), tmp_path / "first")
    cfg = short_config("ppo", "toy/match", normalize_reward=True, num_envs=4, init_from=str(tmp_path / "first"))
    zx.Session(cfg, tmp_path / "second", quiet=True).close()


# --- resuming ---


def test_finished_run_continues_with_a_larger_budget(short_config: Callable, tmp_path: Path) -> None:
    run_session(short_config("ppo", "toy/match", env_steps=2400, epochs=2), tmp_path / "whole")
    run_session(short_config("ppo", "toy/match", env_steps=1200, epochs=2), tmp_path / "parts")
    session = zx.Session.resume(tmp_path / "parts", quiet=True, env_steps=2400)
    assert not session.finished
    result = session.run()
    assert result["env_steps"] == 2432
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []
    assert json.loads((tmp_path / "parts" / "result.json").read_text())["env_steps"] == 2432
    assert zx.config.load(tmp_path / "parts" / "config.yaml").env_steps == 2400


def test_resuming_a_finished_run_returns_its_result(short_config: Callable, tmp_path: Path) -> None:
    result = run_session(short_config("dqn", "toy/match"), tmp_path / "run")
    session = zx.Session.resume(tmp_path / "run", quiet=True)
    assert session.finished
    assert session.run() == result


def test_run_that_reached_its_return_continues_to_a_higher_one(short_config: Callable, tmp_path: Path) -> None:
    run_session(short_config("ppo", "toy/match", stop_return=0.0, env_steps=2000), tmp_path / "run")
    session = zx.Session.resume(tmp_path / "run", quiet=True, stop_return=11.0)  # the maximum is 10
    result = session.run()
    assert result["env_steps"] >= 2000
    assert not result["reached"]


def test_checkpoint_that_does_not_fit_its_configuration_is_rejected(short_config: Callable, tmp_path: Path) -> None:
    run_session(short_config("ppo", "toy/match"), tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    settings = yaml.safe_load(file.read_text())
    settings["net"]["hidden_sizes"] = [7]
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(UserError, match=r"the checkpoint of .*run doesn't fit its configuration"):
        zx.Session.resume(tmp_path / "run", quiet=True)


def test_custom_callback_can_stop_training(short_config: Callable, tmp_path: Path) -> None:
    class Stop(zx.Callback):
        def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
            if loop.env_steps >= 300:
                loop.stop("enough steps")

    result = zx.Session(short_config("ppo", "toy/match"), tmp_path / "run", [Stop()], quiet=True).run()
    assert result["env_steps"] == 320  # five iterations of 64
    assert (tmp_path / "run" / "checkpoints" / "000000000320.safetensors").is_file()


@pytest.mark.parametrize("name", ["ppo", "ppg", "trpo", "mappo", "coma"])
def test_rollout_of_a_single_step(name: str, short_config: Callable, tmp_path: Path) -> None:
    """The returns of a single step have no variance, which the explained variance divides by."""
    cfg = short_config(name, env_steps=20, rollout_steps=1, minibatch_size=1, num_envs=1, eval_every=0)
    assert run_session(cfg, tmp_path / "run")["env_steps"] == 20


# --- signals ---


def test_signal_handlers_are_restored(short_config: Callable, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run_session(short_config("ppo", "toy/match"), tmp_path / "run")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_run_in_a_thread_sets_no_signal_handlers(short_config: Callable, tmp_path: Path) -> None:
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(run_session(short_config("ppo", "toy/match"), tmp_path / "run"))
    )
    thread.start()
    thread.join()
    assert results[0]["env_steps"] == 1216


def start_training(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "zhixing", "train", *arguments],
        cwd=cwd,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_until(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(("name", "number"), [("ppo", signal.SIGINT), ("dqn", signal.SIGTERM)])
def test_run_interrupted_by_a_signal_resumes_exactly(
    name: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [name, "--env", "toy/match", "--seed", "3", "log_every=100", "tensorboard=false", "num_envs=2"]
    if name == "ppo":
        arguments += ["env_steps=4000", "rollout_steps=32", "epochs=4"]
    else:
        arguments += ["env_steps=2000", "learning_starts=200", "updates_per_step=0.5", "batch_size=16"]
    process = start_training(tmp_path, *arguments, "--out", "parts")
    metrics = tmp_path / "parts" / "metrics.csv"
    wait_until(process, lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= 5)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert "stopping after this iteration" in err
    assert "continue with: zhixing resume parts" in err
    assert "Traceback" not in err
    assert not (tmp_path / "parts" / "result.json").exists()
    (checkpoint,) = (tmp_path / "parts" / "checkpoints").glob("0*.safetensors")
    assert 0 < int(checkpoint.stem) < (4000 if name == "ppo" else 2000)

    monkeypatch.chdir(tmp_path)
    assert cli_exit_code(monkeypatch, "train", *arguments, "--out", "whole") == 0
    assert cli_exit_code(monkeypatch, "resume", "parts") == 0
    assert differing_tensors("whole", "parts") == []
    assert metrics_rows("whole") == metrics_rows("parts")
    assert process.returncode == 130, err


SLOW = """
import time
from zhixing.envs.toy import Match
class Slow(Match):
    def step(self, action):
        time.sleep(0.02)
        return super().step(action)
"""


def test_second_interrupt_ends_training_immediately(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    # an iteration of 4096 steps of 20 ms takes more than a minute
    arguments = ["ppo", "--env", "slow:Slow", "rollout_steps=4096", "vector.backend=serial", "--out", "run"]
    process = start_training(tmp_path, *arguments, "tensorboard=false")
    wait_until(process, (tmp_path / "run" / "metrics.csv").is_file)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None  # it waits for the end of the iteration
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert "interrupt again to stop immediately" in err
    assert "Traceback" not in err
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert process.returncode == 130


def test_evaluations_do_not_count_as_training_time(short_config: Callable, tmp_path: Path) -> None:
    class Sleep(zx.Callback):
        def evaluation_end(self, loop: zx.TrainingLoop, evaluation: object) -> None:
            with loop.paused():
                time.sleep(0.3)

    started_at = time.perf_counter()
    result = zx.Session(short_config("ppo", "toy/match"), tmp_path / "run", [Sleep()], quiet=True).run()
    assert 0 < result["seconds"] < time.perf_counter() - started_at - 0.9  # three evaluations
    rows = np.genfromtxt(tmp_path / "run" / "metrics.csv", delimiter=",", names=True)
    assert (np.diff(rows["seconds"]) >= 0).all()
    assert rows["seconds"][-1] == pytest.approx(result["seconds"], abs=0.01)
