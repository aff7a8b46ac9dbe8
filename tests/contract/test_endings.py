"""Contract 1: a terminated step has no future value, a truncated one bootstraps. Exact values are derived below."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import multi_agent, supports_discrete

import zhixing as zx

GAMMA = 0.8
# TruncatingEnv pays 1 per step forever: V = 1 / (1 - 0.8) = 5. A time limit truncates it every 5 steps.
# An algorithm that treats truncation as termination learns 5 times the mean of 1 - 0.8^k over k = 1..5: 2.31.
TRUNCATING_VALUE = 5.0
# TerminatingEnv pays 1 per step and terminates after the fifth: V_i = 1 + 0.8 + ... (5 - i terms).
# An algorithm that bootstraps past the terminal state overestimates them.
TERMINATING_VALUES = [3.3616, 2.952, 2.44, 1.8, 1.0]


def test_reference_values_match_their_formulas() -> None:
    assert pytest.approx(1 / (1 - GAMMA)) == TRUNCATING_VALUE
    assert pytest.approx([sum(GAMMA**k for k in range(5 - i)) for i in range(5)]) == TERMINATING_VALUES
    assert np.mean([TRUNCATING_VALUE * (1 - GAMMA**k) for k in range(1, 6)]) == pytest.approx(2.31, abs=0.01)


@pytest.mark.parametrize("env", ["TruncatingEnv", "TerminatingEnv"])
def test_learned_values_match_the_exact_values(
    algorithm: str, env: str, short_config: Callable, tmp_path: Path
) -> None:
    scheme = zx.algorithms.get(algorithm).settings.scheme
    if scheme in ("self_play", "play"):
        pytest.skip(f"{algorithm} uses tree search; tests/unit/search checks its returns")
    settings = {"gamma": GAMMA, "env__continuous": not supports_discrete(algorithm), "net__hidden_sizes": [32]}
    settings |= {"env_steps": 4000, "eval_every": 0, "checkpoint_every": 0, "log_every": 1000}
    if scheme == "off_policy":
        settings |= {"env_steps": 2000, "updates_per_step": 0.5, "lr": 3e-3}
    else:
        settings |= {"rollout_steps": 8, "lr": 1e-2}
    fields = zx.algorithms.get(algorithm).settings.model_fields
    if "horizon" in fields:
        settings["updates_per_step"] = 0.4
    if scheme in ("on_policy", "asynchronous") and "epochs" not in fields:
        settings["env_steps"] = 6000  # they use each step for one update only
    if "tau" in fields and fields["tau"].default < 0.1:
        settings["tau"] = 0.05  # slow targets need more updates than this test runs
    if "target_update_interval" in fields:
        settings["target_update_interval"] = 10
    if "target_entropy" in fields:
        settings["alpha"] = 1e-6  # otherwise values include an entropy bonus
    if "temperature" in fields:
        settings["temperature"] = 1e-6  # likewise
    if "penalty" in fields:
        settings["penalty"] = 1e-6  # the penalty lowers values on purpose
    if "normalize_reward" in fields:
        settings["normalize_reward"] = False  # otherwise values refer to scaled rewards
    if "renorm_warmup" in fields:
        # small batches have noisy statistics; before the correction begins, those of evaluations are others
        settings |= {"batch_size": 128, "renorm_warmup": 200, "lr_schedule": "linear"}
    if multi_agent(algorithm):
        settings |= {"env__agents": 2, "net__recurrent": "none", "last_action": False, "epochs": 4}
        settings = {name: value for name, value in settings.items() if "__" in name or name in fields}
    session = zx.Session(short_config(algorithm, f"dummy_envs:{env}", **settings), tmp_path / "run", quiet=True)
    obs = torch.ones(1, 5) if env == "TruncatingEnv" else torch.eye(5)
    if multi_agent(algorithm):
        obs = obs.unsqueeze(1).expand(-1, 2, -1)
    if session.learner.value(obs) is None:
        session.close()
        pytest.skip(f"{algorithm} does not estimate values")
    session.run()
    with torch.no_grad():
        value = session.learner.value(obs)
    assert value is not None
    exact = torch.tensor([TRUNCATING_VALUE] if env == "TruncatingEnv" else TERMINATING_VALUES)
    if value.ndim == 2:  # [states, agents]
        exact = exact.unsqueeze(1).expand_as(value)
    assert torch.allclose(value, exact, rtol=0.05), f"{value.tolist()} is not {exact.tolist()}"


# LeavingAgentEnv pays both agents 1 per step and terminates after five steps; the second agent leaves after two.
# With individual rewards the second agent's values are 1 + 0.8 and 1. With shared rewards they are those of
# TerminatingEnv.
LEAVING_AGENT_VALUES = [1.8, 1.0]


@pytest.mark.parametrize("kind", ["individual", "shared"])
@pytest.mark.parametrize("name", ["idqn", "ippo", "maddpg"])
def test_values_of_a_leaving_agent_match_the_exact_values(
    name: str, kind: str, short_config: Callable, tmp_path: Path
) -> None:
    settings = {"gamma": GAMMA, "env__kind": kind, "net__hidden_sizes": [32], "eval_every": 0}
    settings |= {"checkpoint_every": 0, "log_every": 1000}
    extra_settings = {
        "idqn": {"td_lambda": 0.5, "target_update_interval": 10, "net__recurrent": "none", "last_action": False},
        "maddpg": {"replay__n_step": 3, "tau": 0.05},
    }
    if name in extra_settings:
        settings |= {"env_steps": 2000, "updates_per_step": 0.5, "lr": 3e-3} | extra_settings[name]
    else:
        settings |= {"env_steps": 3000, "rollout_steps": 8, "lr": 1e-2, "epochs": 4}
    session = zx.Session(short_config(name, "dummy_envs:LeavingAgentEnv", **settings), tmp_path / "run", quiet=True)
    session.run()
    with torch.no_grad():
        value = session.learner.value(torch.eye(5)[:2].unsqueeze(1).expand(-1, 2, -1))  # both agents are alive
    assert value is not None
    second = LEAVING_AGENT_VALUES if kind == "individual" else TERMINATING_VALUES[:2]
    exact = torch.tensor([TERMINATING_VALUES[:2], second]).T
    assert torch.allclose(value, exact, rtol=0.05), f"{value.tolist()} is not {exact.tolist()}"
