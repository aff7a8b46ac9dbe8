"""Contract 5: invalid input is rejected immediately with one message and exit code 2, and no file is written."""

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
    "fraction above one": (
        ["train", "ppo", "--env", "CartPole-v1", "gamma=1.5"],
        "gamma=1.5: should be less than or equal to 1",
    ),
    "not a number": (["train", "ppo", "--env", "CartPole-v1", "lr=.nan"], "finite"),
    "bool for a number": (["train", "ppo", "--env", "CartPole-v1", "lr=true"], "lr=True"),
    "wrong choice": (
        ["train", "ppo", "--env", "CartPole-v1", "vector.backend=threads"],
        "'auto', 'serial', 'process', 'mixed', 'native', 'envpool', 'torch' or 'ray'",
    ),
    "not a setting": (["train", "ppo", "--env", "CartPole-v1", "fast"], "'fast' is not a setting; write name=value"),
    "fraction for an integer": (["train", "ppo", "--env", "CartPole-v1", "env_steps=10.5"], "env_steps=10.5"),
    "invalid duration": (["train", "ppo", "--env", "CartPole-v1", "duration=soon"], "'soon' is not a duration"),
    "settings that exclude each other": (
        ["train", "ppo", "--env", "CartPole-v1", "shared_network=true", "critic_lr=1e-3"],
        "shared_network=true has one optimizer for actor and critic: leave critic_lr",
    ),
    "continuous actions": (["train", "dqn", "--env", "Pendulum-v1"], "dqn needs Discrete actions"),
    "environment option": (["train", "ppo", "--env", "CartPole-v1", "env.gravty=3"], "gravty"),
    "negative seed": (["train", "ppo", "--env", "CartPole-v1", "--seed", "-1"], "seed=-1"),
    "device": (["train", "ppo", "--env", "CartPole-v1", "device=warp"], "device='warp' can't be used here"),
    "missing file": (
        ["train", "ppo", "--env", "CartPole-v1", "--config", "none.yaml"],
        "there is no configuration file",
    ),
    "missing run for init-from": (
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
    "missing run to record": (["video", "nowhere", "-o", "a.mp4"], "there is no run folder nowhere"),
    "missing run to plot": (["plot", "nowhere", "-o", "a.png"], "nowhere"),
    "custom environment in a missing module": (["train", "ppo", "--env", "no_such_module:Env"], "no_such_module"),
    "misspelled custom environment": (
        ["train", "ppo", "--env", "dummy_envs:TruncatngEnv"],
        "did you mean 'TruncatingEnv'",
    ),
    "custom learner in a missing module": (
        ["train", "no_such_module:Learner", "--env", "CartPole-v1"],
        "no_such_module",
    ),
    "invalid value in a sweep": (
        ["sweep", "ppo", "--env", "CartPole-v1", "lr=1e-3,-1", "--out", "all"],
        "lr=-1: lr=-1: should be greater than 0",
    ),
    "invalid seeds": (["sweep", "ppo", "--env", "CartPole-v1", "--seeds", "4-0", "--out", "all"], "--seeds '4-0'"),
    "too many updates per step": (
        ["train", "dqn", "--env", "toy/match", "updates_per_step=1e9"],
        "updates_per_step=1000000000.0: should be less than or equal to 1000",
    ),
    "replay shorter than n_step": (
        ["train", "dqn", "--env", "toy/match", "num_envs=2", "replay.capacity=4", "replay.n_step=3"],
        "needs 3: raise replay.capacity to at least 6",
    ),
    "too long folder name": (["train", "ppo", "--env", "toy/match", "--out", "x" * 400], "File name too long"),
    "too many threads": (
        ["train", "ppo", "--env", "toy/match", "num_threads=1e9"],
        "num_threads=1000000000",
    ),
    "ambiguous seeds": (
        ["sweep", "ppo", "--env", "CartPole-v1", "--seeds", "5", "--out", "all"],
        "--seeds 5 is ambiguous: write --seeds 0-4 for 5 seeds, or --seeds 5-5 for the seed 5 alone",
    ),
    "sweep without folder": (["sweep", "ppo", "--env", "CartPole-v1"], "--out"),
    "missing grid": (
        ["sweep", "ppo", "--env", "toy/match", "--grid", "a.yaml", "--out", "all"],
        "no configuration file",
    ),
    "no algorithm to profile": (["profile", "--env", "CartPole-v1"], "no algorithm is given"),
    "unknown kind to list": (["list", "algos"], "did you mean 'algorithms'"),
    "unknown algorithm to show": (["show", "dqnn"], "did you mean 'dqn'"),
    "unknown environment to show": (["show", "dqn", "--env", "CartPol-v1"], "did you mean 'CartPole-v1'"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_invalid_arguments_are_rejected_and_write_nothing(
    arguments: list[str], message: str, run_cli: Command, tmp_path: Path
) -> None:
    code, out, err = run_cli(*arguments)
    assert code == 2
    assert message in err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_missing_extra_error_names_the_install_command(
    run_cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mujoco", None)  # imports fail as if it weren't installed
    code, _, err = run_cli("train", "ppo", "--env", "HalfCheetah-v5")
    assert code == 2
    assert install_hint("mujoco") in err
    assert list(tmp_path.iterdir()) == []


def test_invalid_yaml_error_names_the_line(run_cli: Command, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("lr: 1e-3\nnet: [1, 2\ngamma: 0.9\n")
    code, _, err = run_cli("train", "ppo", "--env", "CartPole-v1", "--config", "my.yaml")
    assert code == 2
    assert "my.yaml is not valid YAML at line 3" in err
    (tmp_path / "my.yaml").write_text("no settings")
    assert "must contain settings" in run_cli("train", "ppo", "--env", "CartPole-v1", "--config", "my.yaml")[2]


def test_existing_run_folder_is_rejected(run_cli: Command, tmp_path: Path) -> None:
    arguments = ["train", "ppo", "--env", "toy/match", "env_steps=256", "--out", "run"]
    assert run_cli(*arguments)[0] == 0
    before = (tmp_path / "run" / "metrics.csv").read_bytes()
    code, _, err = run_cli(*arguments)
    assert code == 2
    assert "run already contains a run; continue it with `zhixing resume run`" in err
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == before


def test_damaged_run_folder_is_rejected(run_cli: Command, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    assert "photos is not a run" in run_cli("resume", "photos")[2]
    run_cli("train", "ppo", "--env", "toy/match", "env_steps=256", "--out", "run")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("0*.safetensors")
    content = checkpoint.read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 1):
        checkpoint.write_bytes(content[:length])
        for command in ("resume", "eval"):
            code, _, err = run_cli(command, "run")
            assert code == 2
            assert "is damaged or not a checkpoint" in err
    checkpoint.unlink()
    assert "has no checkpoint" in run_cli("resume", "run")[2]
    (tmp_path / "run" / "config.yaml").write_text("algorithm: ppo\nenv: CartPole-v1\nlr: [")
    assert "run/config.yaml" in run_cli("eval", "run")[2]


def test_weights_of_another_shape_are_rejected(run_cli: Command) -> None:
    run_cli("train", "ppo", "--env", "toy/match", "env_steps=256", "--out", "run")
    code, _, err = run_cli("train", "ppo", "--env", "CartPole-v1", "--init-from", "run", "env_steps=256")
    assert code == 2
    assert "run don't fit this network" in err


def test_crash_of_an_environment_prints_its_traceback(run_cli: Command) -> None:
    for backend in ("serial", "process"):
        code, _, err = run_cli(
            "train", "ppo", "--env", "dummy_envs:RaisingEnv", f"vector.backend={backend}", "--out", backend
        )
        assert code == 1
        assert "ZeroDivisionError: the third step is broken" in err
        assert "dummy_envs.py" in err


def test_nonfinite_loss_error_names_the_loss_and_step(run_cli: Command) -> None:
    code, _, err = run_cli("train", "ppo", "--env", "dummy_envs:HugeRewardEnv", "--out", "run")
    assert code == 2
    assert "loss is inf" in err or "loss is nan" in err
    assert "environment step 2048, update" in err


def test_agent_rejects_invalid_observations(short_config: Callable, tmp_path: Path) -> None:
    zx.Session(short_config("ppo"), tmp_path / "run", quiet=True).run()
    agent = zx.load(tmp_path / "run")
    with pytest.raises(zx.UserError, match="observation"):
        agent.act([1.0, 2.0])
    with pytest.raises(zx.UserError, match="observation"):
        agent.act("left")
