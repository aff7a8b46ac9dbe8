"""Contract 5: wrong input is told at once, in one message with exit code 2, and nothing is half-written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Command

import zhixing as zx
from zhixing.utils.extras import install_hint

WRONG = {
    "unknown algorithm": (["train", "pppo", "--env", "CartPole-v1"], "unknown algorithm 'pppo': did you mean 'ppo'"),
    "no algorithm": (["train", "--env", "CartPole-v1"], "no algorithm is given"),
    "no environment": (["train", "ppo"], "no environment is given"),
    "unknown environment": (["train", "ppo", "--env", "CartPoel-v1"], "did you mean 'CartPole-v1'"),
    "old version": (["train", "ppo", "--env", "CartPole-v7"], "CartPole-v1"),
    "unknown setting": (["train", "ppo", "--env", "CartPole-v1", "lrr=1"], "unknown setting 'lrr': did you mean 'lr'"),
    "unknown nested setting": (
        ["train", "ppo", "--env", "CartPole-v1", "vector.worker=1"],
        "unknown setting 'vector.worker': did you mean 'vector.workers'",
    ),
    "setting of another algorithm": (["train", "dqn", "--env", "CartPole-v1", "gae_lambda=1"], "'gae_lambda'"),
    "wrong type": (["train", "ppo", "--env", "CartPole-v1", "lr=fast"], "lr='fast': should be a valid number"),
    "wrong range": (["train", "ppo", "--env", "CartPole-v1", "lr=-1"], "lr=-1: should be greater than 0"),
    "a share above one": (
        ["train", "ppo", "--env", "CartPole-v1", "gamma=1.5"],
        "gamma=1.5: should be less than or equal to 1",
    ),
    "not a number": (["train", "ppo", "--env", "CartPole-v1", "lr=.nan"], "finite"),
    "a bool for a number": (["train", "ppo", "--env", "CartPole-v1", "lr=true"], "lr=True"),
    "wrong choice": (
        ["train", "ppo", "--env", "CartPole-v1", "vector.backend=threads"],
        "'auto', 'serial', 'process', 'mixed', 'native', 'envpool', 'torch' or 'ray'",
    ),
    "not a setting": (["train", "ppo", "--env", "CartPole-v1", "fast"], "'fast' is not a setting; write name=value"),
    "a half number": (["train", "ppo", "--env", "CartPole-v1", "env_steps=10.5"], "env_steps=10.5"),
    "no duration": (["train", "ppo", "--env", "CartPole-v1", "duration=soon"], "'soon' is not a duration"),
    "settings that exclude each other": (
        ["train", "ppo", "--env", "CartPole-v1", "shared_network=true", "critic_lr=1e-3"],
        "shared_network=true allows no critic_lr",
    ),
    "continuous actions": (["train", "dqn", "--env", "Pendulum-v1"], "dqn needs Discrete actions"),
    "environment option": (["train", "ppo", "--env", "CartPole-v1", "env.gravty=3"], "gravty"),
    "negative seed": (["train", "ppo", "--env", "CartPole-v1", "--seed", "-1"], "seed=-1"),
    "device": (["train", "ppo", "--env", "CartPole-v1", "device=warp"], "device='warp' can't be used here"),
    "missing file": (
        ["train", "ppo", "--env", "CartPole-v1", "--config", "none.yaml"],
        "there is no configuration file",
    ),
    "missing run to start from": (
        ["train", "ppo", "--env", "CartPole-v1", "--init-from", "nowhere"],
        "there is no run folder nowhere",
    ),
    "unknown option": (["train", "ppo", "--env", "CartPole-v1", "--frobnicate", "3"], "'frobnicate'"),
    "misspelled option": (["train", "ppo", "--evn", "CartPole-v1"], "unknown option --evn: did you mean --env?"),
    "misspelled option of eval": (["eval", "nowhere", "--episods", "3"], "--episodes"),
    "misspelled setting as an option": (
        ["train", "ppo", "--env", "CartPole-v1", "--lrr", "1"],
        "unknown setting 'lrr': did you mean 'lr'",
    ),
    "option without its value": (["train", "ppo", "--env"], "option --env needs a value"),
    "setting without its value": (["train", "ppo", "--env", "CartPole-v1", "--lr"], "--lr needs a value"),
    "option of another library": (
        ["train", "ppo", "--env", "CartPole-v1", "--num-minibatches", "4"],
        "`num_minibatches` (CleanRL) is `minibatch_size` here: minibatch_size = rollout_steps * num_envs",
    ),
    "environment without --env": (["train", "ppo", "CartPole-v1"], "set the environment with --env"),
    "missing run": (["resume", "nowhere"], "there is no run folder nowhere"),
    "missing run to evaluate": (["eval", "nowhere"], "there is no run folder nowhere"),
    "missing run to video": (["video", "nowhere", "-o", "a.mp4"], "there is no run folder nowhere"),
    "missing run to plot": (["plot", "nowhere", "-o", "a.png"], "nowhere"),
    "own task that isn't there": (["train", "ppo", "--env", "no_such_module:Env"], "no_such_module"),
    "own task without that name": (
        ["train", "ppo", "--env", "dummy_envs:TruncatngEnv"],
        "did you mean 'TruncatingEnv'",
    ),
    "own learner that isn't there": (["train", "no_such_module:It", "--env", "CartPole-v1"], "no_such_module"),
    "one of several values": (
        ["sweep", "ppo", "--env", "CartPole-v1", "lr=1e-3,-1", "--out", "all"],
        "lr=-1: lr=-1: should be greater than 0",
    ),
    "seeds": (["sweep", "ppo", "--env", "CartPole-v1", "--seeds", "4-0", "--out", "all"], "--seeds '4-0'"),
    "updates without end": (
        ["train", "dqn", "--env", "toy/match", "updates_per_step=1e9"],
        "updates_per_step=1000000000.0: should be less than or equal to 1000",
    ),
    "a replay shorter than n_step": (
        ["train", "dqn", "--env", "toy/match", "num_envs=2", "replay.capacity=4", "replay.n_step=3"],
        "needs 3: raise replay.capacity to at least 6",
    ),
    "a name that is too long": (["train", "ppo", "--env", "toy/match", "--out", "x" * 400], "File name too long"),
    "more threads than any machine has": (
        ["train", "ppo", "--env", "toy/match", "num_threads=1e9"],
        "num_threads=1000000000",
    ),
    "one number of seeds": (
        ["sweep", "ppo", "--env", "CartPole-v1", "--seeds", "5", "--out", "all"],
        "--seeds 5 is ambiguous: write --seeds 0-4 for 5 seeds, or --seeds 5-5 for the seed 5 alone",
    ),
    "no folder for a sweep": (["sweep", "ppo", "--env", "CartPole-v1"], "--out"),
    "missing grid": (
        ["sweep", "ppo", "--env", "toy/match", "--grid", "a.yaml", "--out", "all"],
        "no configuration file",
    ),
    "no algorithm to profile": (["profile", "--env", "CartPole-v1"], "no algorithm is given"),
    "what to list": (["list", "algos"], "did you mean 'algorithms'"),
    "unknown algorithm to show": (["show", "dqnn"], "did you mean 'dqn'"),
    "unknown environment to show": (["show", "dqn", "--env", "CartPol-v1"], "did you mean 'CartPole-v1'"),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_words_are_told_and_leave_nothing(
    words: list[str], message: str, run_cli: Command, tmp_path: Path
) -> None:
    code, out, err = run_cli(*words)
    assert code == 2
    assert message in err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_missing_extra_is_named_with_its_command(
    run_cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mujoco", None)  # as where it isn't installed
    code, _, err = run_cli("train", "ppo", "--env", "HalfCheetah-v5")
    assert code == 2
    assert install_hint("mujoco") in err
    assert list(tmp_path.iterdir()) == []


def test_broken_yaml_names_the_line(run_cli: Command, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("lr: 1e-3\nnet: [1, 2\ngamma: 0.9\n")
    code, _, err = run_cli("train", "ppo", "--env", "CartPole-v1", "--config", "my.yaml")
    assert code == 2
    assert "my.yaml is not valid YAML at line 3" in err
    (tmp_path / "my.yaml").write_text("just words")
    assert "must contain settings" in run_cli("train", "ppo", "--env", "CartPole-v1", "--config", "my.yaml")[2]


def test_out_that_holds_a_run_is_refused(run_cli: Command, tmp_path: Path) -> None:
    words = ["train", "ppo", "--env", "toy/match", "env_steps=256", "--out", "mine"]
    assert run_cli(*words)[0] == 0
    before = (tmp_path / "mine" / "metrics.csv").read_bytes()
    code, _, err = run_cli(*words)
    assert code == 2
    assert "mine already holds a run; go on with `zhixing resume mine`" in err
    assert (tmp_path / "mine" / "metrics.csv").read_bytes() == before


def test_foreign_and_damaged_run_folders_are_told(run_cli: Command, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    assert "photos is no run" in run_cli("resume", "photos")[2]
    run_cli("train", "ppo", "--env", "toy/match", "env_steps=256", "--out", "mine")
    (checkpoint,) = (tmp_path / "mine" / "checkpoints").glob("0*.safetensors")
    whole = checkpoint.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        checkpoint.write_bytes(whole[:cut])
        for command in ("resume", "eval"):
            code, _, err = run_cli(command, "mine")
            assert code == 2
            assert "is damaged or no checkpoint" in err
    checkpoint.unlink()
    assert "has no checkpoint" in run_cli("resume", "mine")[2]
    (tmp_path / "mine" / "config.yaml").write_text("algorithm: ppo\nenv: CartPole-v1\nlr: [")
    assert "mine/config.yaml" in run_cli("eval", "mine")[2]


def test_weights_of_another_shape_are_told(run_cli: Command) -> None:
    run_cli("train", "ppo", "--env", "toy/match", "env_steps=256", "--out", "mine")
    code, _, err = run_cli("train", "ppo", "--env", "CartPole-v1", "--init-from", "mine", "env_steps=256")
    assert code == 2
    assert "mine don't fit this network" in err


def test_crash_inside_an_environment_shows_its_own_traceback(run_cli: Command) -> None:
    for backend in ("serial", "process"):
        code, _, err = run_cli(
            "train", "ppo", "--env", "dummy_envs:RaisingEnv", f"vector.backend={backend}", "--out", backend
        )
        assert code == 1
        assert "ZeroDivisionError: the third step is broken" in err
        assert "dummy_envs.py" in err


def test_exploding_rewards_stop_the_run_with_the_name_of_the_loss(run_cli: Command) -> None:
    code, _, err = run_cli("train", "ppo", "--env", "dummy_envs:HugeRewardEnv", "--out", "mine")
    assert code == 2
    assert "loss is inf" in err or "loss is nan" in err
    assert "environment step 2048, update" in err


def test_agent_tells_a_wrong_observation(short_config: Callable, tmp_path: Path) -> None:
    zx.Session(short_config("ppo"), tmp_path / "run", quiet=True).run()
    agent = zx.load(tmp_path / "run")
    with pytest.raises(zx.UserError, match="observation"):
        agent.act([1.0, 2.0])
    with pytest.raises(zx.UserError, match="observation"):
        agent.act("left")
