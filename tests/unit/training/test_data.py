"""Recording datasets, training on them, and rejected settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import differing_tensors, metrics_rows

import zhixing as zx
from zhixing import offline
from zhixing.buffers import Buffer, NStep, Prioritized
from zhixing.cli import main
from zhixing.collectors.evaluation import normalized_score
from zhixing.reports.plots.runs import read_run
from zhixing.training.collect_data import collect_from_agent, export_replay
from zhixing.training.data import fill_buffer

SHORT = {"tensorboard": False, "quiet": True, "eval_episodes": 2, "num_threads": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of DQN in three environments, whose replay buffer holds all its steps."""
    out = tmp_path_factory.mktemp("run") / "dqn"
    settings = {"env_steps": 600, "learning_starts": 200, "train_every": 4, "num_envs": 3, "seed": 5}
    zx.train("dqn", env="CartPole-v1", out=out, eval_every=0, vector__backend="serial", **settings, **SHORT)
    return out


# --- recording ---


def test_collect_records_the_number_of_steps_in_consecutive_order(run: Path, tmp_path: Path) -> None:
    data = collect_from_agent(run, str(tmp_path / "data"), 500, noise=0.5, seed=3)
    assert len(data) == 500
    assert data.env == "CartPole-v1"
    assert "dqn with noise 0.5" in data.note.replace("of dqn ", "")
    assert data.returns().sum() == 500  # one per step
    for i in range(data.num_episodes):
        episode = data.episode(i)
        assert np.array_equal(episode.next_obs[:-1], episode.obs[1:])
        assert not episode.terminated[:-1].any()
    same = collect_from_agent(run, str(tmp_path / "same"), 500, noise=0.5, seed=3)
    assert np.array_equal(data.arrays["action"], same.arrays["action"])
    other = collect_from_agent(run, str(tmp_path / "other"), 500, noise=0.5, seed=4)
    assert not np.array_equal(data.arrays["obs"], other.arrays["obs"])


def test_noise_is_the_probability_of_a_random_action(run: Path, tmp_path: Path) -> None:
    greedy, noisy = (collect_from_agent(run, str(tmp_path / f"{x}"), 2_000, noise=x) for x in (0.0, 1.0))
    agent = zx.load(run)
    assert np.mean(agent.act(np.array(greedy.arrays["obs"])) == greedy.arrays["action"]) == 1.0
    agent.reset()
    equal = np.mean(agent.act(np.array(noisy.arrays["obs"])) == noisy.arrays["action"])
    assert equal == pytest.approx(0.5, abs=0.05)  # one of two actions


def test_export_replay_writes_all_steps(run: Path, tmp_path: Path) -> None:
    data = export_replay(run, str(tmp_path / "data"))
    session = zx.Session.resume(run, quiet=True)
    ring = session.loop.buffer.ring
    session.close()
    assert len(data) == len(ring) == 600
    positions = np.sort(np.array(data.arrays["obs"])[:, 0])
    assert np.array_equal(positions, np.sort(ring.store.take("obs", ring.indices()).numpy()[:, 0]))
    # at most the last episode of each of the three environments is unfinished
    finished = data.arrays["terminated"][data.ends] | data.arrays["truncated"][data.ends]
    assert (~finished).sum() <= 3


def test_export_replay_rejects_an_on_policy_run(short_config: Callable, tmp_path: Path) -> None:
    zx.Session(short_config("ppo", env_steps=128), tmp_path / "run", quiet=True).run()
    with pytest.raises(zx.UserError, match="has no replay buffer to export, because ppo doesn't use one"):
        export_replay(tmp_path / "run", str(tmp_path / "data"))
    assert not (tmp_path / "data").exists()


# --- training ---


def test_offline_training_counts_updates_and_steps_no_environment(random_dataset: Callable, tmp_path: Path) -> None:
    settings = {"offline_updates": 90, "log_every": 30, "eval_every": 45, "checkpoint_every": 60}
    result = zx.train("dqn", dataset=random_dataset("CartPole-v1"), out=tmp_path / "run", **settings, **SHORT)
    assert result["env"] == "CartPole-v1"
    assert result["env_steps"] == 0
    assert result["updates"] == 90
    columns = zx.reports.plots.metrics.read_metrics(tmp_path / "run" / "metrics.csv")
    assert list(columns["updates"]) == [30, 45, 60, 90]
    assert list(columns["episodes"]) == [0, 0, 0, 0]
    assert np.isfinite(columns["eval_return_mean"][[1, 3]]).all()
    assert sorted(file.name for file in (tmp_path / "run" / "checkpoints").glob("0*")) == [
        "000000000060.safetensors",
        "000000000090.safetensors",
    ]
    assert not list((tmp_path / "run").glob("replay/*"))
    assert read_run(tmp_path / "run").offline
    assert read_run(tmp_path / "run").num_steps == 90


class StopAt(zx.Callback):
    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        if loop.steps == 37:
            loop.stop("interrupted")


def test_offline_training_resumes_exactly(random_dataset: Callable, tmp_path: Path) -> None:
    settings = {"dataset": random_dataset("CartPole-v1"), "offline_updates": 80, "replay__prioritized": True}
    cfg = zx.config.load(algorithm="dqn", **settings, **{k: v for k, v in SHORT.items() if k != "quiet"})
    session = zx.Session(cfg, tmp_path / "whole", quiet=True)
    assert session.loop.buffer.sampler == Prioritized(0.6, 0.4, 1.0)
    session.run()
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", [StopAt()], quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    assert differing_tensors(tmp_path / "whole", tmp_path / "parts") == []
    assert metrics_rows(tmp_path / "whole") == metrics_rows(tmp_path / "parts")


def test_run_without_environment_is_not_evaluated(random_dataset: Callable, tmp_path: Path) -> None:
    data = random_dataset("CartPole-v1")
    result = zx.train("dqn", env="none", dataset=data, out=tmp_path / "run", offline_updates=20, **SHORT)
    assert result["final_return"] is None
    with pytest.raises(zx.UserError, match="was trained without an environment"):
        zx.evaluate(tmp_path / "run")


def test_normalizers_are_fitted_to_the_dataset_before_the_first_update(
    random_dataset: Callable, tmp_path: Path
) -> None:
    data = random_dataset("CartPole-v1")
    cfg = zx.config.load(algorithm="dqn", dataset=data, normalize_obs=True, tensorboard=False)
    session = zx.Session(cfg, tmp_path / "run", quiet=True)
    norm = session.learner.net.torso.encoder.norm
    assert norm.mean.numpy() == pytest.approx(offline.open(data).arrays["obs"].mean(0), abs=1e-4)
    session.close()


def test_replay_start_fills_the_buffer_before_online_training(random_dataset: Callable, tmp_path: Path) -> None:
    data = offline.open(random_dataset("CartPole-v1"))
    settings = {"env_steps": 30, "learning_starts": 0, "num_envs": 3, "vector__backend": "serial", "batch_size": 8}
    settings |= {"algorithm": "double_dqn", "env": "CartPole-v1", "replay__start": data.name, "tensorboard": False}
    cfg = zx.config.load(**settings)
    session = zx.Session(cfg, tmp_path / "run", quiet=True)
    assert len(session.loop.buffer) == 399  # 133 per environment
    session.run()
    assert len(session.loop.buffer) > 399


@pytest.mark.parametrize("num_envs", [1, 3])
def test_filled_buffer_keeps_the_successor_of_each_step(random_dataset: Callable, num_envs: int) -> None:
    data = offline.open(random_dataset("CartPole-v1"))
    buffer = Buffer(data.spaces.fields(), 120, num_envs, view=NStep(1, 0.9))
    fill_buffer(buffer, data, chunk_steps=17)
    assert len(buffer) == 120
    batch = buffer.sample(500, np.random.default_rng(0))
    successors = {}
    for part in data.batches(100):
        for obs, next_obs in zip(part.obs[:, 0], part.next_obs[:, 0], strict=True):
            successors[obs.tobytes()] = next_obs
    for obs, next_obs in zip(batch.obs.numpy(), batch.next_obs.numpy(), strict=True):
        assert np.array_equal(successors[obs.tobytes()], next_obs)
    newest = {row.tobytes() for row in np.array(data.arrays["obs"])[-120:]}
    assert {row.tobytes() for row in batch.obs.numpy()} <= newest


# --- scores ---


def test_score_is_computed_from_the_references_of_the_dataset(run: Path, tmp_path: Path) -> None:
    # 100 (150 - 50) / (250 - 50) = 50
    assert normalized_score(150.0, {"random": 50.0, "expert": 250.0}) == 50.0
    collect_from_agent(run, str(tmp_path / "data"), 200, references={"random": 20.0, "expert": 500.0})
    zx.train("dqn", dataset=str(tmp_path / "data"), out=tmp_path / "run", offline_updates=5, **SHORT)
    summary = zx.evaluate(tmp_path / "run", 3).summary()
    assert summary["score"] == pytest.approx(100 * (summary["mean_return"] - 20) / 480)
    (tmp_path / "run" / "dataset.json").write_text("{}")
    with pytest.raises(zx.UserError, match="can't be read"):
        zx.evaluate(tmp_path / "run", 3)


# --- settings rejected before anything is written ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "Pendulum-v1"}, "observations don't fit Pendulum-v1"),
        ({"net__recurrent": "gru"}, "set net.recurrent=none"),
        ({"episodes": 5}, "episodes=5 has no effect"),
        ({"replay__start": "other"}, "replay.start=other has no effect"),
        ({"dataset": "nowhere"}, "nowhere"),
    ],
)
def test_settings_that_do_not_fit_a_dataset_are_rejected(
    random_dataset: Callable, tmp_path: Path, settings: dict, message: str
) -> None:
    merged = {
        "dataset": random_dataset("CartPole-v1"),
        "env": "CartPole-v1",
        "out": tmp_path / "run",
        **SHORT,
        **settings,
    }
    with pytest.raises(zx.UserError, match=message.replace(".", r"\.")):
        zx.train("dqn", **merged)
    assert not (tmp_path / "run").exists()


def test_missing_or_unsupported_dataset_is_rejected(tmp_path: Path) -> None:
    for algorithm in ("bc", "gail"):
        with pytest.raises(zx.UserError, match=f"{algorithm} trains on a dataset: name one with --dataset"):
            zx.train(algorithm, env="CartPole-v1", out=tmp_path / "run", quiet=True)
    with pytest.raises(zx.UserError, match="ppo can't learn from a dataset because it is on-policy"):
        zx.train("ppo", env="CartPole-v1", dataset="data", out=tmp_path / "run", quiet=True)
    with pytest.raises(zx.UserError, match="--env none is for training on a dataset"):
        zx.train("ppo", env="none", out=tmp_path / "run", quiet=True)


# --- the command line ---


def test_collect_then_train_then_eval(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def run_cli(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["zhixing", *arguments])
        main()
        return capsys.readouterr().out

    assert "data: 300 steps in" in run_cli("collect", str(run), "-o", "data", "--steps", "300", "--noise", "0.2")
    assert "replay: 600 steps in" in run_cli("collect", str(run), "-o", "replay", "--replay")
    out = run_cli("train", "bc", "--dataset", "data", "--out", "run", "offline_updates=30", "tensorboard=false")
    assert "trained            30 updates" in out
    summary = json.loads(run_cli("eval", "run", "--episodes", "3", "--json"))
    assert summary["episodes"] == 3
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    name = "minari:test/cart-v0"
    assert f"{name}: 100 steps" in run_cli("collect", str(run), "-o", name, "--steps", "100")
    run_cli("train", "dqn", "--dataset", name, "--out", "third", "offline_updates=5", "tensorboard=false")


def test_recording_does_not_use_global_random_state(run: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    collect_from_agent(run, str(tmp_path / "data"), 50, noise=0.3)
    assert torch.equal(torch.get_rng_state(), before)
