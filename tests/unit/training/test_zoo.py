"""Agents to give away: they act as their run does, are small, and reach what they were measured at."""

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
LARGEST = {"mario": 3_000_000}  # bytes, by the first word of the task; else half a megabyte


@pytest.mark.parametrize("name", sorted(agents(ZOO)))
def test_every_agent_of_the_zoo_reaches_what_it_was_measured_at(name: str) -> None:
    card, folder = agents(ZOO)[name], RunFolder.open(ZOO / name)
    family = card["env"].split("/")[0]
    assert sum(file.stat().st_size for file in folder.path.iterdir()) < LARGEST.get(family, 500_000)
    cfg = folder.read_config()
    assert (cfg.algorithm, cfg.env.name) == (card["algorithm"], card["env"])
    assert cfg.device == "auto"
    needed = {"mario": "stable_retro", "pettingzoo": "pettingzoo"}.get(family)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{card['env']} isn't installed")
    found = zx.evaluate(ZOO / name, episodes=3 if family == "mario" else 20, seed=1)
    # the mean of other and fewer episodes: within four standard errors, and some for other machines' rounding
    error = card["std_return"] / len(found.episodes) ** 0.5
    assert found.mean_return >= card["mean_return"] - 4 * error - 0.05 * abs(card["mean_return"])


@pytest.mark.parametrize("name", sorted(agents(ZOO)))
def test_the_command_of_an_agent_gives_its_configuration(name: str) -> None:
    words = shlex.split(agents(ZOO)[name]["trained_by"])
    assert words[:2] == ["zhixing", "train"]
    assert words[3:6:2] == ["--env", "--seed"]
    asked = {"algorithm": words[2], "env": words[4], "seed": int(words[6])}
    if words[7:8] == ["--init-from"]:
        asked["init_from"], words[7:9] = words[8], []
    made = config.build([asked], config.parse_overrides(words[7:]))
    assert train_command(made) == train_command(RunFolder.open(ZOO / name).read_config())


def test_an_exported_agent_acts_as_its_run_and_commands_take_it(
    run_cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["env_steps=512", "eval_episodes=2", "tensorboard=false", "lr=0.002", "net.hidden_sizes=[8,16]"]
    run_cli("train", "ppo", "--env", "CartPole-v1", "--seed", "3", "--out", "run", *words)
    code, out, err = run_cli("export", "run", "-o", "zoo/one", "--episodes", "5")
    assert (code, err) == (0, "")
    assert "of 5 episodes" in out
    assert sorted(file.name for file in (tmp_path / "zoo/one").iterdir()) == [
        "agent.json",
        "agent.safetensors",
        "config.yaml",
    ]
    mine, theirs = zx.load("run").policy.state_dict(), zx.load("zoo/one").policy.state_dict()
    assert all(mine[key].equal(theirs[key]) for key in mine)
    assert run_cli("eval", "zoo/one", "--episodes", "5", "--json") == run_cli(
        "eval", "run", "--episodes", "5", "--json"
    )
    assert zx.load("zoo/one", "best").act([0.0, 0.0, 0.0, 0.0]) in (0, 1)  # it has but one set of weights
    assert run_cli("video", "zoo/one", "-o", "one.mp4")[0] == 0
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert run_cli("play", "zoo/one", "--random", "--episodes", "1")[1].startswith("return ")
    code, out, _ = run_cli("zoo", "zoo")
    assert code == 0
    assert (
        "one: zhixing train ppo --env CartPole-v1 --seed 3 env_steps=512 eval_episodes=2 lr=0.002 "
        "'net.hidden_sizes=[8, 16]'" in out
    )
    for wrong, told in (
        (("export", "run", "-o", "zoo/one"), "already holds a run"),
        (("resume", "zoo/one"), "exported agent"),
        (("zoo", "nowhere"), "there are no agents in nowhere"),
    ):
        code, _, err = run_cli(*wrong)
        assert code == 2
        assert told in err


def test_export_takes_the_best_weights_where_asked(tmp_path: Path) -> None:
    short = {"env_steps": 1024, "eval_every_steps": 256, "eval_episodes": 5, "tensorboard": False, "quiet": True}
    zx.train("ppo", "CartPole-v1", out=tmp_path / "run", seed=1, lr=0.05, **short)
    card = export(tmp_path / "run", tmp_path / "best", episodes=3, checkpoint="best")
    best = RunFolder.open(tmp_path / "run").load_agent("best")
    kept = RunFolder.open(tmp_path / "best").load_agent()
    assert card["steps"] == best["steps"] == kept["steps"]
    assert all(best["policy"][key].equal(kept["policy"][key]) for key in best["policy"])


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
