"""DAgger: mixture of student and expert, labels, and runs as experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import zhixing as zx
from zhixing.algorithms.dagger import DAgger
from zhixing.core.batch import Batch
from zhixing.core.policy import Decision, Phase, Policy
from zhixing.core.spaces import Spaces

OBS = Box(-9.0, 9.0, (2,), np.float32)


class CountingPolicy(Policy):
    """A recurrent expert whose action is the number of steps in the episode, modulo 3."""

    def initial_hidden(self, num: int) -> Any:
        return torch.zeros(num, 1)

    def act(self, obs: Any, hidden: Any, mask: Any, phase: Phase, rng: Any, env_steps: int) -> Decision:
        return Decision(hidden[:, 0].long() % 3, hidden=hidden + 1)


def make_learner(**settings: Any) -> DAgger:
    cfg = zx.config.load(algorithm="dagger", env="Acrobot-v1", env_steps=1_000, **settings)
    spaces = Spaces(OBS, Discrete(3))
    learner = zx.algorithms.get("dagger").make(cfg, spaces)
    assert isinstance(learner, DAgger)
    learner.set_expert(CountingPolicy(spaces))
    return learner


def test_probability_of_the_expert_falls_linearly() -> None:
    learner = make_learner(expert_fraction=0.5)
    # from 1 to 0 over half of 1000 steps
    assert [learner.expert_probability(steps) for steps in (0, 250, 500, 900)] == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(("env_steps", "beta"), [(0, 1.0), (125, 0.5), (999, 0.0)])
def test_expert_acts_with_probability_beta_and_labels_every_step(env_steps: int, beta: float) -> None:
    learner = make_learner(expert_fraction=0.25)
    with torch.no_grad():
        learner.actor.layers.linears[-1].weight.zero_()
        learner.actor.layers.linears[-1].bias.copy_(torch.tensor([0.0, 0.0, 9.0]))  # the student always takes 2
    hidden = torch.ones(2_000, 1)  # the expert's action is 1
    decision = learner.policy.act(torch.zeros(2_000, 2), hidden, None, Phase.COLLECT, torch.Generator(), env_steps)
    assert (decision.extras["expert_action"] == 1).all()
    assert (decision.action == 1).float().mean().item() == pytest.approx(beta, abs=0.04)
    assert ((decision.action == 1) | (decision.action == 2)).all()
    assert (decision.hidden == 2).all()  # the expert's hidden state advances in every step
    decision = learner.policy.act(torch.zeros(5, 2), hidden[:5], None, Phase.EVAL, torch.Generator(), env_steps)
    assert (decision.action == 2).all()


def test_loss_uses_the_labels_and_not_the_actions_taken() -> None:
    learner = make_learner()
    steps = {
        "obs": torch.zeros(4, 2),
        "action": torch.tensor([2, 2, 2, 2]),
        "expert_action": torch.tensor([0, 0, 1, 1]),
    }
    with torch.no_grad():
        learner.actor.layers.linears[-1].weight.zero_()
        learner.actor.layers.linears[-1].bias.copy_(torch.log(torch.tensor([0.5, 0.25, 0.25])))
    # -(2 log 0.5 + 2 log 0.25) / 4
    expected = -(2 * np.log(0.5) + 2 * np.log(0.25)) / 4
    assert learner.loss(Batch(**steps)).item() == pytest.approx(expected, rel=1e-5)


class OutOfBoundsPolicy(Policy):
    """An expert with actions out of bounds, such as the mean of a Gaussian."""

    def act(self, obs: Any, hidden: Any, mask: Any, phase: Phase, rng: Any, env_steps: int) -> Decision:
        return Decision(torch.tensor([[3.0, -5.0, 0.25]]).expand(len(obs), 3))


def test_labels_are_clipped_to_the_bounds_of_actions() -> None:
    spaces = Spaces(OBS, Box(-2.0, 2.0, (3,), np.float32))
    learner = zx.algorithms.get("dagger").make(zx.config.load(algorithm="dagger", env="Pendulum-v1"), spaces)
    learner.set_expert(OutOfBoundsPolicy(spaces))
    decision = learner.policy.act(torch.zeros(2, 2), None, None, Phase.COLLECT, torch.Generator(), 0)
    assert decision.extras["expert_action"].tolist() == [[1.0, -1.0, 0.25]] * 2
    assert decision.action.tolist() == [[1.0, -1.0, 0.25]] * 2  # the expert acts in the first steps


@pytest.mark.parametrize("name", ["sac", "ppo"])
def test_runs_of_other_algorithms_can_be_experts(name: str, short_config: Callable, tmp_path: Path) -> None:
    zx.Session(short_config(name, "toy/reach", env_steps=200), tmp_path / "expert", quiet=True).run()
    expert = zx.load(tmp_path / "expert")
    cfg = short_config("dagger", "toy/reach", expert=str(tmp_path / "expert"), env_steps=400)
    session = zx.Session(cfg, tmp_path / "run", quiet=True)
    session.run()
    batch = session.loop.buffer.sample(20, np.random.default_rng(0))
    expected = session.spaces.from_env(expert.act(batch.obs.numpy()))
    assert np.allclose(batch.expert_action.numpy(), expected, atol=1e-5)
    # only the student is saved
    assert not any("expert" in name for name in zx.load(tmp_path / "run").policy.state_dict())


def test_missing_or_incompatible_expert_is_rejected(short_config: Callable, tmp_path: Path) -> None:
    with pytest.raises(zx.UserError, match="name its run with expert=RUN"):
        zx.train("dagger", env="CartPole-v1", out=tmp_path / "run", quiet=True)
    zx.Session(short_config("ppo", "toy/match", env_steps=64), tmp_path / "other", quiet=True).run()
    with pytest.raises(zx.UserError, match="is for toy/match, whose observations or actions differ from those of Cart"):
        zx.train("dagger", env="CartPole-v1", expert=str(tmp_path / "other"), out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
