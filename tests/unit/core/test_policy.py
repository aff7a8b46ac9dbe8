"""Random actions of policies, and loading of user-defined learners by name."""

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


def random_actions(space: Any, mask: torch.Tensor | None = None, num: int = 6000) -> torch.Tensor:
    policy = Uniform(Spaces(OBS, space))
    rows = None if mask is None else mask.expand(num, -1)
    return policy.random_action(num, rows, torch.Generator().manual_seed(0))


def test_random_discrete_actions_are_uniform_over_the_valid_ones() -> None:
    # three standard errors of a fraction of one third are 0.018
    action = random_actions(Discrete(4, start=9), torch.tensor([True, False, True, True]))
    assert (action.bincount(minlength=4) / 6000).tolist() == pytest.approx([1 / 3, 0.0, 1 / 3, 1 / 3], abs=0.02)


def test_random_multi_discrete_actions_are_independent() -> None:
    action = random_actions(MultiDiscrete([2, 3]))
    fractions = (action[:, 0] * 3 + action[:, 1]).bincount(minlength=6) / 6000
    assert fractions.tolist() == pytest.approx([1 / 6] * 6, abs=0.02)


def test_random_multi_discrete_actions_obey_the_mask() -> None:
    action = random_actions(MultiDiscrete([2, 3]), torch.tensor([[False, True, True, False, True]]))
    assert set(action[:, 0].tolist()) == {1}
    assert set(action[:, 1].tolist()) == {0, 2}


def test_random_continuous_actions_are_uniform_in_minus_one_to_one() -> None:
    action = random_actions(Box(np.float32([-2.0, 0.0]), np.float32([4.0, 10.0])))
    assert action.shape == (6000, 2)
    assert action.min() >= -1.0
    assert action.max() <= 1.0
    assert action.mean(0).tolist() == pytest.approx([0.0, 0.0], abs=0.025)
    assert action.std(0).tolist() == pytest.approx([3**-0.5] * 2, abs=0.02)  # std of a uniform number in [-1, 1]


LEARNER = '''
from zhixing.algorithms.ppo import PPO
class MyLearner(PPO):
    """A custom learner.

    It equals PPO."""
class NotALearner:
    pass
'''


def test_learner_in_the_current_folder_is_imported_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_learner.py").write_text(LEARNER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    algorithm = zx.algorithms.get("my_learner:MyLearner")
    assert (algorithm.name, algorithm.summary) == ("my_learner:MyLearner", "A custom learner.")
    assert zx.config.load(algorithm="my_learner:MyLearner", env="CartPole-v1", clip_range=0.3).clip_range == 0.3
    with pytest.raises(UserError, match="did you mean 'MyLearner'"):
        zx.algorithms.get("my_learner:MyLerner")
    with pytest.raises(UserError, match=r"must be a zhixing.Learner"):
        zx.algorithms.get("my_learner:NotALearner")


@pytest.mark.parametrize("source", ["raise OSError('broken')", "def"])
def test_error_in_the_module_of_a_learner_is_reported(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"broken_learner_{len(source)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"broken|SyntaxError"):
        zx.algorithms.get(f"{name}:It")


def test_unknown_attribute_of_the_package_raises_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Trainer'; it has .*Actor"):
        _ = zx.Trainer  # type: ignore[attr-defined]
    assert {"Session", "load", "__version__"} <= set(dir(zx))
