"""`zx.evaluate` and `zhixing eval`: checkpoints by step, exploration, and the number of environments."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zhixing as zx
from zhixing.cli import main
from zhixing.training.builders import build_evaluation_env
from zhixing.training.run_folder import RunFolder


@pytest.fixture
def train(short_config: Callable, tmp_path: Path) -> Callable[..., Path]:
    def train(name: str, algorithm: str = "ppo", **settings: Any) -> Path:
        zx.Session(short_config(algorithm, "toy/match", **settings), tmp_path / name, quiet=True).run()
        return tmp_path / name

    return train


def returns(run: Path, **options: Any) -> list[float]:
    return zx.evaluate(run, episodes=20, **options).returns.tolist()


def test_checkpoint_of_a_step_has_the_weights_of_that_step(train: Callable[..., Path]) -> None:
    """Checkpoints of the whole run are those that a run with a smaller budget ends with."""
    run = train("whole", checkpoint_every=200, keep_checkpoints=9)
    part = train("part", env_steps=832)
    weights, expected = zx.load(run, "832").policy.state_dict(), zx.load(part).policy.state_dict()
    assert all(weights[name].equal(expected[name]) for name in expected)
    assert not all(weights[name].equal(value) for name, value in zx.load(run).policy.state_dict().items())
    assert returns(run, checkpoint=832) == returns(part)
    kept = "256, 448, 640, 832, 1024, 1216"
    for missing in ("833", "first", -1, "٣"):
        with pytest.raises(zx.UserError, match=rf"no checkpoint .*: use last or best, or the step .*: {kept}"):
            zx.load(run, missing)


def test_stochastic_and_greedy_override_the_setting(train: Callable[..., Path]) -> None:
    run, sampling = train("run", env_steps=128), train("sampling", env_steps=128, eval_stochastic=True)
    assert returns(run) == returns(run, stochastic=False) == returns(sampling, stochastic=False)
    assert returns(run, stochastic=True) == returns(sampling) == returns(sampling, stochastic=True)
    assert returns(run) != returns(sampling)


def test_stochastic_q_learning_acts_with_the_final_exploration_rate(train: Callable[..., Path]) -> None:
    """With an exploration rate of 1, actions are random: 10 steps with a reward in a quarter of them."""
    run = train("run", "dqn", epsilon_end=1.0, eval_epsilon=1.0)
    greedy = zx.evaluate(run, episodes=200, stochastic=False).mean_return
    assert zx.evaluate(run, episodes=200, stochastic=True).mean_return == pytest.approx(2.5, abs=0.3)
    assert zx.evaluate(run, episodes=200).mean_return == pytest.approx(2.5, abs=0.3)
    assert greedy > 3.0


def test_number_of_evaluation_environments(short_config: Callable, train: Callable[..., Path], tmp_path: Path) -> None:
    for setting, num in ((None, 10), (3, 3), (25, 25)):
        settings = {} if setting is None else {"eval_num_envs": setting}
        env = build_evaluation_env(short_config("ppo", "toy/match", eval_episodes=20, **settings), RunFolder(tmp_path))
        assert env.num_envs == num
        env.close()
    run = train("run", env_steps=128, eval_num_envs=4, eval_stochastic=True)
    assert returns(run) == returns(run, num_envs=4) != returns(run, num_envs=1)


def test_command_has_these_options(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train("run", env_steps=128)
    options = ["--stochastic", "--num-envs", "2", "--checkpoint", "128"]
    monkeypatch.setattr(sys, "argv", ["zhixing", "eval", str(run), "--episodes", "20", "--json", *options])
    capsys.readouterr()
    main()
    expected = zx.evaluate(run, 20, stochastic=True, num_envs=2).summary()
    assert json.loads(capsys.readouterr().out) == pytest.approx(expected)
