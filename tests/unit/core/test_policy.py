"""Random actions over what is allowed, in the policy's scale, and one's own learner by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

import zhixing as zx
from zhixing.core.policy import Decision, Policy
from zhixing.core.spaces import Spaces
from zhixing.errors import UserError

OBS = Box(-1.0, 1.0, (2,), np.float32)


class Uniform(Policy):
    def act(self, obs: Any, hidden: Any, mask: Any, phase: Any, rng: Any, env_steps: int) -> Decision:
        return Decision(self.random_action(len(obs), mask, rng))


def drawn(action: Any, mask: torch.Tensor | None = None, num: int = 6000) -> torch.Tensor:
    policy = Uniform(Spaces(OBS, action))
    rows = None if mask is None else mask.expand(num, -1)
    return policy.random_action(num, rows, torch.Generator().manual_seed(0))


def test_random_choices_are_uniform_over_what_is_allowed() -> None:
    # three standard errors of a share of one third are 0.018
    share = drawn(Discrete(4, start=9), torch.tensor([True, False, True, True])).bincount(minlength=4) / 6000
    assert share.tolist() == pytest.approx([1 / 3, 0.0, 1 / 3, 1 / 3], abs=0.02)


def test_random_choices_of_several_kinds_are_independent() -> None:
    action = drawn(MultiDiscrete([2, 3]))
    share = (action[:, 0] * 3 + action[:, 1]).bincount(minlength=6) / 6000
    assert share.tolist() == pytest.approx([1 / 6] * 6, abs=0.02)


def test_random_choices_of_several_kinds_obey_the_mask() -> None:
    action = drawn(MultiDiscrete([2, 3]), torch.tensor([[False, True, True, False, True]]))
    assert set(action[:, 0].tolist()) == {1}
    assert set(action[:, 1].tolist()) == {0, 2}


def test_random_numbers_fill_the_policys_scale() -> None:
    action = drawn(Box(np.float32([-2.0, 0.0]), np.float32([4.0, 10.0])))
    assert action.shape == (6000, 2)
    assert action.min() >= -1.0
    assert action.max() <= 1.0
    assert action.mean(0).tolist() == pytest.approx([0.0, 0.0], abs=0.025)
    assert action.std(0).tolist() == pytest.approx([3**-0.5] * 2, abs=0.02)  # of a uniform number in [-1, 1]


LEARNER = '''
from zhixing.algorithms.ppo import PPO
class Mine(PPO):
    """My own.

    It differs in nothing."""
class NoLearner:
    pass
'''


def test_own_learner_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "learner_of_mine.py").write_text(LEARNER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    found = zx.algorithms.get("learner_of_mine:Mine")
    assert (found.name, found.summary) == ("learner_of_mine:Mine", "My own.")
    assert zx.config.load(algorithm="learner_of_mine:Mine", env="CartPole-v1", clip_range=0.3).clip_range == 0.3
    with pytest.raises(UserError, match="did you mean 'Mine'"):
        zx.algorithms.get("learner_of_mine:Mone")
    with pytest.raises(UserError, match=r"must be a zhixing.Learner"):
        zx.algorithms.get("learner_of_mine:NoLearner")


@pytest.mark.parametrize("source", ["raise OSError('broken')", "def"])
def test_own_learner_that_breaks_shows_why(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"broken_learner_{len(source)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"broken|SyntaxError"):
        zx.algorithms.get(f"{name}:It")


def test_names_that_are_not_there_are_told_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match="zhixing has no 'Trainer'; it has Actor"):
        _ = zx.Trainer  # type: ignore[attr-defined]
    assert {"Session", "load", "__version__"} <= set(dir(zx))
