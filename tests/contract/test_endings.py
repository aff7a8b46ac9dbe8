"""Contract 1: termination stops the future, truncation doesn't. The values are exact, worked out below."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import many_agents, takes_discrete

import zhixing as zx

GAMMA = 0.8
# Forever pays 1 per step without end: V = 1 / (1 - 0.8) = 5, though a clock cuts it every 5 steps.
# An algorithm that took the cut for an end would find the mean of 1 - 0.8^k over k = 1..5, times 5: 2.31.
FOREVER = 5.0
# Dies pays 1 per step and terminates after the fifth: V_i = 1 + 0.8 + ... (5 - i terms).
# One that bootstrapped from beyond the end would find more.
DIES = [3.3616, 2.952, 2.44, 1.8, 1.0]


def test_the_values_above_are_right() -> None:
    assert pytest.approx(1 / (1 - GAMMA)) == FOREVER
    assert pytest.approx([sum(GAMMA**k for k in range(5 - i)) for i in range(5)]) == DIES
    assert np.mean([FOREVER * (1 - GAMMA**k) for k in range(1, 6)]) == pytest.approx(2.31, abs=0.01)


@pytest.mark.parametrize("task", ["Forever", "Dies"])
def test_value_estimates_meet_the_exact_values(algorithm: str, task: str, small: Callable, tmp_path: Path) -> None:
    scheme = zx.algorithms.get(algorithm).settings.scheme
    if scheme in ("self_play", "play"):
        pytest.skip(f"{algorithm} searches; its returns are worked out in tests/unit/search")
    settings = {"gamma": GAMMA, "env__continuous": not takes_discrete(algorithm), "net__hidden_sizes": [32]}
    settings |= {"env_steps": 4000, "eval_every_steps": 0, "checkpoint_every_steps": 0, "log_every_steps": 1000}
    if scheme == "off_policy":
        settings |= {"env_steps": 2000, "updates_per_step": 0.5, "lr": 3e-3}
    else:
        settings |= {"rollout_steps": 8, "lr": 1e-2}
    fields = zx.algorithms.get(algorithm).settings.model_fields
    if "horizon" in fields:
        settings["updates_per_step"] = 0.4
    if scheme in ("on_policy", "asynchronous") and "epochs" not in fields:
        settings["env_steps"] = 6000  # they learn once from each step
    if "tau" in fields and fields["tau"].default < 0.1:
        settings["tau"] = 0.05  # slow targets need longer than this test has
    if "target_update_interval" in fields:
        settings["target_update_interval"] = 10
    if "target_entropy" in fields:
        settings["alpha"] = 1e-6  # else the values hold a bonus for entropy
    if "temperature" in fields:
        settings["temperature"] = 1e-6  # likewise
    if "penalty" in fields:
        settings["penalty"] = 1e-6  # which holds values down on purpose
    if "normalize_reward" in fields:
        settings["normalize_reward"] = False  # else values are of scaled rewards
    if many_agents(algorithm):
        settings |= {"env__agents": 2, "net__recurrent": "none", "last_action": False, "epochs": 4}
        settings = {name: value for name, value in settings.items() if "__" in name or name in fields}
    session = zx.Session(small(algorithm, f"tasks:{task}", **settings), tmp_path / "run", quiet=True)
    obs = torch.ones(1, 5) if task == "Forever" else torch.eye(5)
    if many_agents(algorithm):
        obs = obs.unsqueeze(1).expand(-1, 2, -1)
    if session.learner.value(obs) is None:
        session.close()
        pytest.skip(f"{algorithm} estimates no values")
    session.run()
    with torch.no_grad():
        value = session.learner.value(obs)
    assert value is not None
    exact = torch.tensor([FOREVER] if task == "Forever" else DIES)
    if value.ndim == 2:  # of each agent
        exact = exact.unsqueeze(1).expand_as(value)
    assert torch.allclose(value, exact, rtol=0.05), f"{value.tolist()} is not {exact.tolist()}"


# Leaves pays both agents 1 per step, and terminates after the fifth; the second agent leaves by the second step.
# With rewards per agent its values are 1 + 0.8 and 1; with a reward that the team shares they are those of Dies.
LEFT = [1.8, 1.0]


@pytest.mark.parametrize("kind", ["individual", "shared"])
@pytest.mark.parametrize("name", ["idqn", "ippo", "maddpg"])
def test_values_of_an_agent_that_leaves_meet_the_exact_ones(
    name: str, kind: str, small: Callable, tmp_path: Path
) -> None:
    settings = {"gamma": GAMMA, "env__kind": kind, "net__hidden_sizes": [32], "eval_every_steps": 0}
    settings |= {"checkpoint_every_steps": 0, "log_every_steps": 1000}
    more = {
        "idqn": {"td_lambda": 0.5, "target_update_interval": 10, "net__recurrent": "none", "last_action": False},
        "maddpg": {"replay__n_step": 3, "tau": 0.05},
    }
    if name in more:
        settings |= {"env_steps": 2000, "updates_per_step": 0.5, "lr": 3e-3} | more[name]
    else:
        settings |= {"env_steps": 3000, "rollout_steps": 8, "lr": 1e-2, "epochs": 4}
    session = zx.Session(small(name, "tasks:Leaves", **settings), tmp_path / "run", quiet=True)
    session.run()
    with torch.no_grad():
        value = session.learner.value(torch.eye(5)[:2].unsqueeze(1).expand(-1, 2, -1))  # while both are there
    assert value is not None
    second = LEFT if kind == "individual" else DIES[:2]
    exact = torch.tensor([DIES[:2], second]).T
    assert torch.allclose(value, exact, rtol=0.05), f"{value.tolist()} is not {exact.tolist()}"
