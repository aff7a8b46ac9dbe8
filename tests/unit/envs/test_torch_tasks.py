"""Users' torch tasks: spaces, checks, runs and the same results as a single environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor

import zhixing as zx
from zhixing.envs import make_vector
from zhixing.envs.torch_native import TorchEnv, TorchVectorEnv, Transition, uniform
from zhixing.errors import UserError

SHORT: dict[str, Any] = {"num_envs": 4, "rollout_steps": 8, "eval_episodes": 4, "tensorboard": False, "quiet": True}


class Line(TorchEnv):
    """A point on a line, pushed by a continuous action; leaving [-1, 1] terminates."""

    observation_space = Box(-9.0, 9.0, (1,), np.float32)
    action_space: gym.Space[Any] = Box(-0.5, 0.5, (1,), np.float32)
    max_episode_steps = 6

    def __init__(self, drift: float = 0.0) -> None:
        self.drift = drift

    def initial_state(self, num_envs: int, rng: torch.Generator) -> Tensor:
        return uniform(-0.5, 0.5, (1, num_envs), rng)

    def transition(self, state: Tensor, action: Tensor) -> Transition:
        after = state + action.T + self.drift
        return Transition(after, -after[0].abs(), after[0].abs() > 1.0)

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        return {"obs": state.T}


class Pair(Line):
    """Two agents with a mask, a state, the flag alive and a shared reward."""

    action_space = Discrete(3)
    num_agents = 2
    reward_kind = "shared"

    def transition(self, state: Tensor, action: Tensor) -> Transition:
        after = state + 0.1 * (action.sum(-1) - 2)
        return Transition(after, -after[0].abs().unsqueeze(-1).expand(-1, 2), after[0].abs() > 1.0)

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        num = state.shape[1]
        mask = torch.ones(num, 2, 3, dtype=torch.bool)
        return {
            "obs": state.T.unsqueeze(1).expand(-1, 2, -1),
            "mask": mask,
            "state": state.T,
            "alive": torch.ones(num, 2, dtype=torch.bool),
        }


def test_task_is_stepped_as_written() -> None:
    env = make_vector(Line, 5, options={"drift": 0.1, "max_episode_steps": 3})
    assert isinstance(env, TorchVectorEnv)
    assert (env.backend, env.max_episode_steps, env.spaces.obs) == ("torch", 3, Line.observation_space)
    obs = env.reset(seed=0)[0].copy()
    ends = 0
    for _ in range(12):
        actions = np.linspace(-0.5, 0.5, 5, dtype=np.float32)[:, None]
        after, reward, terminated, truncated, info = env.step(actions)
        successors = np.where((terminated | truncated)[:, None], info.get("final_obs", after), after)
        np.testing.assert_allclose(successors, obs + actions + np.float32(0.1), atol=1e-6)
        np.testing.assert_allclose(reward, -np.abs(successors[:, 0]))
        np.testing.assert_array_equal(terminated, np.abs(successors[:, 0]) > 1)
        ends += int((terminated | truncated).sum())
        obs = after.copy()
    assert ends >= 20


def test_agents_masks_and_state_become_spaces() -> None:
    spaces = make_vector(Pair, 2).spaces
    assert (spaces.num_agents, spaces.mask, spaces.state, spaces.alive) == (2, 3, 1, True)
    assert spaces.reward_kind == "shared"


@pytest.mark.parametrize(("name", "task"), [("ppo", Line), ("sac", Line), ("mappo", Pair), ("qmix", Pair)])
def test_algorithms_train_evaluate_and_resume_exactly(name: str, task: type[TorchEnv], tmp_path: Path) -> None:
    settings = {key: value for key, value in SHORT.items() if name in ("ppo", "mappo") or key != "rollout_steps"}
    settings |= {"learning_starts": 16, "updates_per_step": 0.1} if name in ("sac", "qmix") else {}
    zx.train(name, task, out=tmp_path / "whole", env_steps=64, **settings)
    zx.train(name, task, out=tmp_path / "parts", env_steps=32, **settings)
    zx.Session.resume(tmp_path / "parts", env_steps=64, quiet=True).run()
    if name in ("ppo", "mappo"):  # the exploration of the others follows the budget
        whole, parts = (zx.load(tmp_path / run).policy.state_dict() for run in ("whole", "parts"))
        assert all(whole[key].equal(parts[key]) for key in whole)
    assert zx.evaluate(tmp_path / "whole", 3).summary()["mean_length"] <= 6
    assert zx.config.read_yaml(tmp_path / "whole" / "config.yaml")["vector"]["backend"] == "torch"


def test_task_of_an_example_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zhixing.reports.video import record_video

    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    zx.train("ppo", "torch_task:Dock", out=tmp_path / "run", env_steps=32, **SHORT)
    record_video(str(tmp_path / "run"), str(tmp_path / "v.mp4"))
    assert (tmp_path / "v.mp4").stat().st_size > 0


def broken(**members: Any) -> type[TorchEnv]:
    return type("Wrong", (Line,), members)


def in_place(self: Line, state: Tensor, action: Tensor) -> Transition:
    state += action.T
    return Transition(state, -state[0].abs(), state[0] > 1)


def mixes_rows(self: Line, state: Tensor, action: Tensor) -> Transition:
    after = state + action.T + state.mean()
    return Transition(after, -after[0].abs(), after[0] > 1)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"observation_space": None}, "observation_space is None; set it to a Box"),
    ({"observation_space": Dict({"x": Box(0, 1)})}, "observation_space is Dict"),
    ({"action_space": Box(-np.inf, np.inf, (1,))}, "is unbounded; set finite bounds"),
    ({"max_episode_steps": 0}, "max_episode_steps is 0; set it to a positive number"),
    ({"initial_state": lambda self, num, rng: torch.rand(num)}, r"initial_state\(3, rng\) is \(3,\)"),
    ({"initial_state": lambda self, num, rng: torch.rand(1, num)}, "differs with the same generator"),
    ({"observe": lambda self, state: state.T}, r"observe\(\) returned Tensor"),
    ({"observe": lambda self, state: {"obs": state.T, "speed": state}}, r"observe\(\) returned obs, speed"),
    ({"observe": lambda self, state: {"obs": state}}, r"observe\(\)\['obs'\] is \(1, 3\)"),
    ({"observe": lambda self, state: {"obs": state.T.long()}}, "return a floating-point dtype"),
    ({"observe": lambda self, state: {"obs": state.T / 0.0}}, "contains NaN or Inf"),
    ({"transition": lambda self, state, action: (state, state[0])}, r"transition\(\) returned tuple"),
    ({"transition": lambda self, state, action: Transition(state, state, state[0] > 1)}, r"reward is \(1, 3\)"),
    ({"transition": lambda self, state, action: Transition(state, state[0], state[0])}, "return dtype bool"),
    ({"transition": lambda self, state, action: state.missing}, "raised AttributeError"),
    ({"transition": in_place}, "changed the state in place"),
    ({"transition": mixes_rows}, "depends on the others"),
    ({"logged_info_keys": ("speed",)}, "has no speed, which logged_info_keys lists"),
]


@pytest.mark.parametrize(("members", "message"), WRONG)
def test_wrong_tasks_are_rejected(members: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_vector(broken(**members), 2)


def test_wrong_arguments_are_rejected() -> None:
    with pytest.raises(UserError, match=r"backend=process needs single environments, but .* is a torch task"):
        make_vector(Line, 2, "process")
    with pytest.raises(UserError, match="has no option 'drfit'"):
        make_vector(Line, 2, options={"drfit": 1})
    with pytest.raises(UserError, match=r"step together, but this needs a gymnasium\.Env"):
        zx.envs.make(f"{__name__}:Line")
    env = make_vector(Line, 2)
    env.reset(seed=0)
    with pytest.raises(UserError, match=r"can't render; implement render\(state\)"):
        env.render()
