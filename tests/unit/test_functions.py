"""Commands as functions: they take results, agents and configurations as well as names, and return typed results."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import Command

import zhixing as zx
from zhixing.training.run_folder import RunFolder

SHORT = {"env_steps": 256, "eval_episodes": 2, "tensorboard": False, "vector__backend": "serial"}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> zx.RunResult:
    cfg = zx.PPOConfig(
        env="toy/match", num_envs=2, rollout_steps=32, net=zx.NetConfig(hidden_sizes=[8]), lr=0.01, num_threads=1
    )
    return zx.train(cfg, out=tmp_path_factory.mktemp("functions") / "run", quiet=True, **SHORT)


# --- train, resume ---


def test_train_with_a_configuration_is_train_with_its_settings(tmp_path: Path, result: zx.RunResult) -> None:
    settings = {"num_envs": 2, "rollout_steps": 32, "net__hidden_sizes": [8], "lr": 0.01, "num_threads": 1}
    zx.train("ppo", env="toy/match", out=tmp_path / "named", quiet=True, **settings, **SHORT)
    configs = [(run / "config.yaml").read_text() for run in (result.run, tmp_path / "named")]
    assert configs[0] == configs[1]


def test_settings_override_a_configuration(tmp_path: Path) -> None:
    cfg = zx.PPOConfig(env="toy/match", rollout_steps=32, lr=0.5, net=zx.NetConfig(activation="relu"))
    zx.train(cfg, env="toy/recall", out=tmp_path / "run", quiet=True, lr=0.25, net__hidden_sizes=[8], **SHORT)
    saved = RunFolder.open(tmp_path / "run").read_config()
    assert isinstance(saved, zx.PPOConfig)
    assert (saved.env.name, saved.lr, saved.net.activation, saved.net.hidden_sizes) == ("toy/recall", 0.25, "relu", [8])


def test_train_takes_a_class_of_learners(tmp_path: Path) -> None:
    from zhixing.algorithms.pg import PG

    out = zx.train(PG, env="toy/match", out=tmp_path / "run", quiet=True, **SHORT)
    assert out["algorithm"] == "zhixing.algorithms.pg:PG"


def test_result_has_the_content_and_the_folder_of_the_run(result: zx.RunResult) -> None:
    assert result == json.loads((result.run / "result.json").read_text())
    assert json.loads(json.dumps(result)) == result
    assert os.fspath(result) == str(result.run)
    html = result._repr_html_()
    assert f"<td>{result.run}</td>" in html
    assert "<td>env steps</td><td>256</td>" in html


def test_resume_continues_the_run_of_a_result(tmp_path: Path) -> None:
    first = zx.train("ppo", env="toy/match", out=tmp_path / "run", quiet=True, rollout_steps=16, num_envs=2, **SHORT)
    resumed = zx.resume(first, env_steps=512, quiet=True)
    assert (resumed.run, resumed["env_steps"]) == (first.run, 512)
    assert json.loads((first.run / "result.json").read_text())["env_steps"] == 512
    with pytest.raises(zx.UserError, match="resume can't change lr"):
        zx.resume(first, lr=1.0)


# --- runs, results and agents ---


def test_evaluate_is_the_same_for_a_path_a_result_and_an_agent(result: zx.RunResult) -> None:
    expected = zx.evaluate(str(result.run), 5, seed=3)
    assert (zx.evaluate(result, 5, seed=3).returns == expected.returns).all()
    assert (zx.evaluate(zx.load(result), 5, seed=3).returns == expected.returns).all()
    assert "<td>mean return</td>" in expected._repr_html_()


def test_agent_acts_with_its_current_weights(result: zx.RunResult, tmp_path: Path) -> None:
    """The weights of an agent that was changed in Python aren't those of its run."""
    agent = zx.load(result)
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter.zero_()  # the action is always 0: it matches one cue of four
    returns = zx.evaluate(agent, 40).returns
    assert not np.array_equal(returns, zx.evaluate(result, 40).returns)
    zx.export(agent, tmp_path / "zeros", episodes=1)
    assert (zx.evaluate(tmp_path / "zeros", 40).returns == returns).all()
    actions = zx.collect(agent, tmp_path / "data", 40).arrays["action"]
    assert (np.asarray(actions) == 0).all()


def test_agent_without_a_run_takes_any_environment(result: zx.RunResult, tmp_path: Path) -> None:
    loaded = zx.load(result)
    agent = zx.Agent(loaded.policy, loaded.spaces, loaded.cfg)
    assert (zx.evaluate(agent, 5).returns == zx.evaluate(result, 5).returns).all()
    assert zx.evaluate(agent, 2, env={"name": "toy/match", "max_episode_steps": 3}).summary()["mean_length"] == 3.0
    zx.export(agent, tmp_path / "exported", episodes=2)
    assert zx.load(tmp_path / "exported").act(np.eye(4, dtype=np.float32)[1]) == agent.act(np.eye(4)[1])


def test_agent_with_code_that_is_not_approved_is_rejected(result: zx.RunResult) -> None:
    loaded = zx.load(result)
    cfg = loaded.cfg.model_copy(update={"env": zx.EnvConfig(name="no_such_module:Env")})
    with pytest.raises(zx.UserError, match="it names code to import"):
        zx.evaluate(zx.Agent(loaded.policy, loaded.spaces, cfg), 1)


def test_collect_takes_a_result(result: zx.RunResult, tmp_path: Path) -> None:
    data = zx.collect(result, tmp_path / "data", 50, seed=1)
    assert (len(data), data.env) == (50, "toy/match")
    with pytest.raises(zx.UserError, match="no replay buffer"):
        zx.collect(result, tmp_path / "more", replay=True)
    with pytest.raises(zx.UserError, match="an agent has no replay buffer"):
        zx.collect(zx.load(result), tmp_path / "more", replay=True)


# --- plot, video ---


def test_plot_returns_a_chart_and_writes_a_file_if_asked(result: zx.RunResult, tmp_path: Path) -> None:
    chart = zx.plot(result, x="steps")
    assert chart.path is None
    assert chart._repr_png_().startswith(b"\x89PNG")
    assert zx.plot([result, result.run], tmp_path / "a.png").path == tmp_path / "a.png"
    assert (tmp_path / "a.png").stat().st_size > 10_000
    chart.save(tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_bytes().startswith(b"<?xml")


def test_video_is_returned_and_written_if_asked(tmp_path: Path) -> None:
    run = zx.train("ppo", env="CartPole-v1", out=tmp_path / "run", quiet=True, **SHORT)
    video = zx.video(run, max_steps=5)
    assert (video.path, video.suffix, video.returns) == (None, ".mp4", [5.0])
    assert video.data[4:8] == b"ftyp"
    assert video._repr_html_().startswith("<video controls")
    video.save(tmp_path / "b.mp4")
    assert (tmp_path / "b.mp4").read_bytes() == video.data
    with pytest.raises(zx.UserError, match=r"must end in \.mp4"):
        video.save(tmp_path / "b.gif")
    gif = zx.video(zx.load(run), tmp_path / "a.gif", max_steps=5)
    assert gif.data == (tmp_path / "a.gif").read_bytes()
    assert gif._repr_html_().startswith('<img src="data:image/gif;base64,')


# --- sweep, tune ---


def test_sweep_is_the_command(run_cli: Command, tmp_path: Path) -> None:
    cfg = zx.PPOConfig(env="toy/match", rollout_steps=32, num_envs=2, net=zx.NetConfig(hidden_sizes=[8]))
    swept = zx.sweep(cfg, {"lr": [0.25, 0.125]}, seeds=[3], out=tmp_path / "all", workers=2, **SHORT)
    assert swept.failed == {}
    assert swept.best is not None
    assert [run.name for run in swept.best.runs] == [f"lr={swept.best.values['lr']}_seed=3"]
    assert "<th>return_mean</th>" in swept._repr_html_()
    assert (tmp_path / "all" / "sweep.png").is_file()
    table = (tmp_path / "all" / "sweep.csv").read_text()
    short = ["env_steps=256", "eval_episodes=2", "tensorboard=false", "vector.backend=serial", "net.hidden_sizes=[8]"]
    arguments = ["sweep", "ppo", "--env", "toy/match", "rollout_steps=32", "num_envs=2", "lr=0.25,0.125", *short]
    code, _, err = run_cli(*arguments, "--seeds", "3-3", "--out", "all")
    assert code == 0
    assert "2 runs in all, 2 already done" in err
    assert (tmp_path / "all" / "sweep.csv").read_text() == table


def test_tune_searches_ranges_and_lists(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    cfg = zx.PPOConfig(env="toy/match", rollout_steps=32, num_envs=2)
    spaces = {"lr": zx.Range(1e-4, 1e-2, log=True), "net.hidden_sizes": [[8], [8, 8]], "net.activation": ["relu"]}
    tuned = zx.tune(cfg, spaces, 1, out=tmp_path / "all", **SHORT)
    assert tuned.best is not None
    best = tuned.load_best(seed=5)
    assert isinstance(best, zx.PPOConfig)
    assert (best.lr, best.seed, best.net.activation) == (tuned.best.params["lr"], 5, "relu")
    assert best.net.hidden_sizes in ([8], [8, 8])
    assert "<th>net.hidden_sizes</th>" in tuned._repr_html_()
    assert (tmp_path / "all" / "trials.png").is_file()


@pytest.mark.parametrize("space", ["1e-4..1e-2", [], 3])
def test_tune_rejects_other_search_spaces(space: object, tmp_path: Path) -> None:
    with pytest.raises(zx.UserError, match=r"lr: .* is not a search space; write zx.Range\(low, high\)"):
        zx.tune("ppo", {"lr": space}, 1, env="toy/match", out=tmp_path / "all")  # type: ignore[dict-item]


def test_environments_are_objects_too(tmp_path: Path) -> None:
    run = zx.train("ppo", env=gym.make("CartPole-v1"), out=tmp_path / "run", quiet=True, **SHORT)
    assert run["env"] == "CartPole-v1"
