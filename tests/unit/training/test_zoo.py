"""Exported agents: they act like their run, are small, and reach their measured returns."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import pytest
from conftest import Command

import zhixing as zx
from zhixing import config
from zhixing.training.run_folder import RunFolder
from zhixing.training.zoo import agents, export, train_command

ZOO = Path(__file__).parents[3] / "zoo"
MAX_BYTES = {"mario": 3_000_000}  # by environment family; 500,000 for others


@pytest.mark.parametrize("name", sorted(agents(ZOO)))
def test_zoo_agent_reaches_its_measured_return(name: str) -> None:
    card, folder = agents(ZOO)[name], RunFolder.open(ZOO / name)
    family = card["env"].split("/")[0]
    assert sum(file.stat().st_size for file in folder.path.iterdir()) < MAX_BYTES.get(family, 500_000)
    cfg = folder.read_config()
    assert (cfg.algorithm, cfg.env.name) == (card["algorithm"], card["env"])
    assert cfg.device == "auto"
    package = {"mario": "stable_retro", "pettingzoo": "pettingzoo"}.get(family)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{card['env']} isn't installed")
    evaluation = zx.evaluate(ZOO / name, episodes=3 if family == "mario" else 20, seed=1)
    # other episodes: allow four standard errors, and 5 % for rounding on other machines
    error = card["std_return"] / len(evaluation.episodes) ** 0.5
    assert evaluation.mean_return >= card["mean_return"] - 4 * error - 0.05 * abs(card["mean_return"])


@pytest.mark.parametrize("name", sorted(agents(ZOO)))
def test_training_command_gives_the_configuration_of_the_agent(name: str) -> None:
    arguments = shlex.split(agents(ZOO)[name]["trained_by"])
    assert arguments[:2] == ["zhixing", "train"]
    assert arguments[3:6:2] == ["--env", "--seed"]
    settings = {"algorithm": arguments[2], "env": arguments[4], "seed": int(arguments[6])}
    if arguments[7:8] == ["--init-from"]:
        settings["init_from"], arguments[7:9] = arguments[8], []
    cfg = config.build([settings], config.parse_overrides(arguments[7:]))
    assert train_command(cfg) == train_command(RunFolder.open(ZOO / name).read_config())


def test_exported_agent_acts_like_its_run_and_works_with_other_commands(
    run_cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["env_steps=512", "eval_episodes=2", "tensorboard=false", "lr=0.002", "net.hidden_sizes=[8,16]"]
    run_cli("train", "ppo", "--env", "CartPole-v1", "--seed", "3", "--out", "run", *settings)
    code, out, err = run_cli("export", "run", "-o", "zoo/one", "--episodes", "5")
    assert (code, err) == (0, "")
    assert "of 5 episodes" in out
    assert sorted(file.name for file in (tmp_path / "zoo/one").iterdir()) == [
        "agent.json",
        "agent.safetensors",
        "config.yaml",
        "spaces.json",
    ]
    expected, exported = zx.load("run").policy.state_dict(), zx.load("zoo/one").policy.state_dict()
    assert all(exported[key].equal(expected[key]) for key in expected)
    assert run_cli("eval", "zoo/one", "--episodes", "5", "--json") == run_cli(
        "eval", "run", "--episodes", "5", "--json"
    )
    assert zx.load("zoo/one", "best").act([0.0, 0.0, 0.0, 0.0]) in (0, 1)  # the only set of weights
    assert run_cli("video", "zoo/one", "-o", "one.mp4")[0] == 0
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert run_cli("play", "zoo/one", "--random", "--episodes", "1")[1].startswith("return ")
    code, out, _ = run_cli("zoo", "zoo")
    assert code == 0
    assert (
        "one: zhixing train ppo --env CartPole-v1 --seed 3 env_steps=512 eval_episodes=2 lr=0.002 "
        "'net.hidden_sizes=[8, 16]'" in out
    )
    for command, message in (
        (("export", "run", "-o", "zoo/one"), "already contains a run"),
        (("resume", "zoo/one"), "exported agent"),
        (("zoo", "nowhere"), "nowhere contains no exported agents"),
    ):
        code, _, err = run_cli(*command)
        assert code == 2
        assert message in err


def test_export_of_the_best_checkpoint(tmp_path: Path) -> None:
    short = {"env_steps": 1024, "eval_every": 256, "eval_episodes": 5, "tensorboard": False, "quiet": True}
    zx.train("ppo", "CartPole-v1", out=tmp_path / "run", seed=1, lr=0.05, **short)
    card = export(tmp_path / "run", tmp_path / "best", episodes=3, checkpoint="best")
    best = RunFolder.open(tmp_path / "run").load_agent("best")
    exported = RunFolder.open(tmp_path / "best").load_agent()
    assert card["steps"] == best["steps"] == exported["steps"]
    assert all(best["policy"][key].equal(exported["policy"][key]) for key in best["policy"])


def test_bundled_agents_are_found_from_any_folder(run_cli: Command, tmp_path: Path) -> None:
    code, out, _ = run_cli("zoo")  # in an empty folder
    assert code == 0
    assert "cartpole" in out
    code, out, err = run_cli("eval", "cartpole", "--episodes", "2")
    assert (code, err) == (0, "")
    assert "mean return" in out
    code, _, err = run_cli("eval", "cartpool")
    assert code == 2
    assert "no run folder cartpool" in err
