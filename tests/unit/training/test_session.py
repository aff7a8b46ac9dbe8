"""From a configuration to a run: what is written, how it goes on, and how it is interrupted."""

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
]  # in design.md


def run_of(cfg: Any, out: Path) -> dict[str, Any]:
    return zx.Session(cfg, out, quiet=True).run()


# --- what is written ---


def test_result_has_exactly_the_keys_of_the_design(short_config: Callable, tmp_path: Path) -> None:
    result = run_of(short_config("ppo", "toy/match", seed=4), tmp_path / "run")
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert list(written) == RESULT
    assert written == result
    assert (written["algorithm"], written["env"], written["seed"]) == ("ppo", "toy/match", 4)
    assert written["env_steps"] == 1216  # 19 iterations of 64
    assert written["updates"] == 19 * 10 * 2  # ten epochs of two minibatches
    assert written["steps_per_second"] == pytest.approx(1216 / written["seconds"], rel=0.02)
    assert written["best_return"] >= written["final_return"]
    assert (written["stop_return"], written["reached"], written["seconds_to_stop"]) == (None, False, None)


def test_reaching_the_return_is_written_with_its_steps(short_config: Callable, tmp_path: Path) -> None:
    result = run_of(short_config("ppo", "toy/match", stop_return=0.0, env_steps=5000), tmp_path / "run")
    assert result["reached"]
    assert result["env_steps"] == result["env_steps_to_stop"] == 512  # the first evaluation is due at 500
    assert result["seconds_to_stop"] == result["seconds"]


def test_a_run_that_was_never_evaluated_has_the_evaluation_at_its_end(short_config: Callable, tmp_path: Path) -> None:
    result = run_of(short_config("ppo", "toy/match", eval_every_steps=0), tmp_path / "run")
    assert 0 <= result["final_return"] == result["best_return"] <= 10


def test_environments_of_workers_have_processes_where_asked_for(short_config: Callable, tmp_path: Path) -> None:
    """Two actors that take turns, each with two environments in two processes: the same as in one."""
    cfg = short_config("a3c", num_envs=4, actors=2)
    run_of(cfg, tmp_path / "serial")
    run_of(cfg.model_copy(update={"vector": cfg.vector.model_copy(update={"workers": 2})}), tmp_path / "process")
    backends = [
        yaml.safe_load((tmp_path / way / "config.yaml").read_text())["vector"]["backend"]
        for way in ("serial", "process")
    ]
    assert backends == ["serial", "process"]
    assert differing_tensors(tmp_path / "serial", tmp_path / "process") == []


def test_what_is_auto_is_resolved_and_written(tmp_path: Path) -> None:
    cfg = zx.config.load(algorithm="ppo", env="CartPole-v1", env_steps=256)
    assert (cfg.vector.backend, cfg.vector.workers, cfg.num_threads, cfg.device) == ("auto",) * 4
    run_of(cfg, tmp_path / "run")
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["vector"]["backend"] in ("serial", "process", "mixed", "native")
    assert isinstance(written["vector"]["workers"], int)
    assert written["num_threads"] == 1  # no images
    assert written["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert zx.config.load(tmp_path / "run" / "config.yaml").num_envs == 8  # with the preset in it


def test_nothing_is_written_before_the_run(short_config: Callable, tmp_path: Path) -> None:
    session = zx.Session(short_config("dqn", "toy/match"), tmp_path / "run", quiet=True)
    session.close()
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_names_algorithm_task_and_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = zx.config.load(algorithm="ppo", env="dummy_envs:DictObsEnv", seed=3)
    assert str(zx.training.resolve.default_out(cfg)).startswith("runs/ppo-dummy_envs-DictObsEnv-3-2")


def test_default_folders_are_reserved_at_once_and_given_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda pattern: "20260101-000000")  # all in the same second
    cfg = zx.config.load(algorithm="pg", env="toy/match", env_steps=200)
    sessions = [zx.Session(cfg, quiet=True) for _ in range(3)]
    assert [session.folder.path.name[-2:] for session in sessions] == ["00", "-2", "-3"]
    sessions[1].run()
    for session in sessions:
        session.close()
    with pytest.raises(zx.UserError):
        zx.Session(zx.config.load(algorithm="dqn", env="Pendulum-v1"), quiet=True)
    assert [folder.name[-2:] for folder in (tmp_path / "runs").iterdir()] == ["-2"]


def test_one_line_trains_and_evaluates(tmp_path: Path) -> None:
    short = {"env_steps": 512, "rollout_steps": 64, "num_envs": 2}
    result = zx.train("ppo", env="toy/match", seed=1, out=tmp_path / "run", quiet=True, **short)
    assert result["env_steps"] == 512
    evaluation = zx.evaluate(tmp_path / "run", episodes=7, seed=5)
    assert len(evaluation.episodes) == 7
    assert {episode.length for episode in evaluation.episodes} == {10}


# --- starting from another run ---


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_init_starts_from_another_runs_networks(name: str, short_config: Callable, tmp_path: Path) -> None:
    # with 500 updates and a copy every 300 dqn's target network lags behind
    lag = {"target_update_interval": 300} if name == "dqn" else {}
    run_of(short_config(name, "toy/match", seed=1, **lag), tmp_path / "first")
    parts = RunFolder.open(tmp_path / "first").load()["loop"]["learner"]["parts"]
    session = zx.Session(
        short_config(name, "toy/match", seed=2, init_from=str(tmp_path / "first")), tmp_path / "second", quiet=True
    )
    for part in ("net", "target") if name == "dqn" else ("net",):
        mine = getattr(session.learner, part).state_dict()
        assert mine.keys() == parts[part].keys()
        assert all(torch.equal(mine[key], parts[part][key]) for key in mine)
    if name == "dqn":
        assert not torch.equal(parts["net"]["head.weight"], parts["target"]["head.weight"])
    assert (session.learner.updates, session.loop.env_steps) == (0, 0)
    result = session.run()
    assert result["env_steps"] >= 1200


def test_init_does_not_depend_on_the_number_of_copies(short_config: Callable, tmp_path: Path) -> None:
    """The statistics of rewards follow each copy; another number of copies is no reason to refuse the networks."""
    run_of(short_config("ppo", "toy/match", normalize_reward=True, num_envs=2), tmp_path / "first")
    cfg = short_config("ppo", "toy/match", normalize_reward=True, num_envs=4, init_from=str(tmp_path / "first"))
    zx.Session(cfg, tmp_path / "second", quiet=True).close()


# --- resuming ---


def test_a_finished_run_goes_on_with_a_longer_budget(short_config: Callable, tmp_path: Path) -> None:
    run_of(short_config("ppo", "toy/match", env_steps=2400, epochs=2), tmp_path / "whole")
    run_of(short_config("ppo", "toy/match", env_steps=1200, epochs=2), tmp_path / "parts")
    session = zx.Session.resume(tmp_path / "parts", quiet=True, env_steps=2400)
    assert not session.finished
    result = session.run()
    assert result["env_steps"] == 2432
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []
    assert json.loads((tmp_path / "parts" / "result.json").read_text())["env_steps"] == 2432
    assert zx.config.load(tmp_path / "parts" / "config.yaml").env_steps == 2400


def test_resuming_a_finished_run_trains_nothing(short_config: Callable, tmp_path: Path) -> None:
    result = run_of(short_config("dqn", "toy/match"), tmp_path / "run")
    session = zx.Session.resume(tmp_path / "run", quiet=True)
    assert session.finished
    assert session.run() == result


def test_a_run_that_reached_its_return_goes_on_to_a_higher_one(short_config: Callable, tmp_path: Path) -> None:
    run_of(short_config("ppo", "toy/match", stop_return=0.0, env_steps=2000), tmp_path / "run")
    session = zx.Session.resume(tmp_path / "run", quiet=True, stop_return=11.0)  # more than there is
    result = session.run()
    assert result["env_steps"] >= 2000
    assert not result["reached"]


def test_a_checkpoint_that_does_not_fit_is_told(short_config: Callable, tmp_path: Path) -> None:
    run_of(short_config("ppo", "toy/match"), tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    settings = yaml.safe_load(file.read_text())
    settings["net"]["hidden_sizes"] = [7]
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(UserError, match=r"the checkpoint of .*run doesn't fit its configuration"):
        zx.Session.resume(tmp_path / "run", quiet=True)


def test_users_callbacks_are_called_and_may_stop(short_config: Callable, tmp_path: Path) -> None:
    class Stop(zx.Callback):
        def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
            if loop.env_steps >= 300:
                loop.stop("seen enough")

    result = zx.Session(short_config("ppo", "toy/match"), tmp_path / "run", [Stop()], quiet=True).run()
    assert result["env_steps"] == 320  # five iterations of 64
    assert (tmp_path / "run" / "checkpoints" / "000000000320.safetensors").is_file()


@pytest.mark.parametrize("name", ["ppo", "ppg", "trpo", "mappo", "coma"])
def test_one_step_of_one_environment_is_a_rollout(name: str, short_config: Callable, tmp_path: Path) -> None:
    """Whose returns have no variance that could be explained."""
    cfg = short_config(name, env_steps=20, rollout_steps=1, minibatch_size=1, num_envs=1, eval_every_steps=0)
    assert run_of(cfg, tmp_path / "run")["env_steps"] == 20


# --- signals ---


def test_signal_handlers_are_put_back(short_config: Callable, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run_of(short_config("ppo", "toy/match"), tmp_path / "run")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_run_in_a_thread_needs_no_signals(short_config: Callable, tmp_path: Path) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run_of(short_config("ppo", "toy/match"), tmp_path / "run")))
    thread.start()
    thread.join()
    assert results[0]["env_steps"] == 1216


def started(cwd: Path, *words: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "zhixing", "train", *words],
        cwd=cwd,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_until(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not ready():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize(("name", "number"), [("ppo", signal.SIGINT), ("dqn", signal.SIGTERM)])
def test_a_signal_saves_and_the_resumed_run_ends_like_one_never_stopped(
    name: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [name, "--env", "toy/match", "--seed", "3", "log_every_steps=100", "tensorboard=false", "num_envs=2"]
    if name == "ppo":
        words += ["env_steps=4000", "rollout_steps=32", "epochs=4"]
    else:
        words += ["env_steps=2000", "learning_starts=200", "updates_per_step=0.5", "batch_size=16"]
    process = started(tmp_path, *words, "--out", "parts")
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
    assert cli_exit_code(monkeypatch, "train", *words, "--out", "whole") == 0
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


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    # 4096 steps of 20 ms: an iteration takes more than a minute
    words = ["ppo", "--env", "slow:Slow", "rollout_steps=4096", "vector.backend=serial", "--out", "mine"]
    process = started(tmp_path, *words, "tensorboard=false")
    wait_until(process, (tmp_path / "mine" / "metrics.csv").is_file)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None  # it waits for the iteration's end
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert "again to stop at once" in err
    assert "Traceback" not in err
    assert list((tmp_path / "mine" / "checkpoints").iterdir()) == []
    assert process.returncode == 130


def test_evaluations_do_not_count_as_training_time(short_config: Callable, tmp_path: Path) -> None:
    class Naps(zx.Callback):
        def evaluation_end(self, loop: zx.TrainingLoop, evaluation: object) -> None:
            with loop.paused():
                time.sleep(0.3)

    started_at = time.perf_counter()
    result = zx.Session(short_config("ppo", "toy/match"), tmp_path / "run", [Naps()], quiet=True).run()
    assert 0 < result["seconds"] < time.perf_counter() - started_at - 0.9  # at 500, 1000 and the end
    rows = np.genfromtxt(tmp_path / "run" / "metrics.csv", delimiter=",", names=True)
    assert (np.diff(rows["seconds"]) >= 0).all()
    assert rows["seconds"][-1] == pytest.approx(result["seconds"], abs=0.01)
