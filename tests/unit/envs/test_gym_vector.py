"""Users' vector environments in all autoreset modes, saved and restored, in training and evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sample_vectors
from conftest import cli_exit_code
from gymnasium.vector import VectorEnv
from sample_envs import MixedObs
from sample_vectors import PairSum, SavedWalks, ThreeWalks, Walks

import zhixing as zx
from zhixing.core.tree import tree_leaves
from zhixing.envs import GymVectorEnv, make_vector
from zhixing.envs.vector.sub_env import sub_env_seed
from zhixing.errors import EnvCrashError, UserError

SHORT: dict[str, Any] = {"env_steps": 200, "rollout_steps": 25, "num_envs": 4, "eval_episodes": 6, "tensorboard": False}


def copied(tree: Any) -> list[np.ndarray]:
    return [leaf.copy() for leaf in tree_leaves(tree)]


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_every_mode_becomes_same_step_autoreset_with_final_observations(mode: str) -> None:
    """The expected steps are those of single environments, which are reset right after their episodes."""
    num = 3
    env = make_vector(f"sample_vectors:{mode}", num)
    assert isinstance(env, GymVectorEnv)
    assert (env.backend, env.spaces.mask) == ("native", 4)
    obs, info = env.reset(seed=5)
    singles = [MixedObs() for _ in range(num)]
    seed = sub_env_seed(5, 0)  # SyncVectorEnv adds the row to it
    expected = [single.reset(seed=seed + row)[0] for row, single in enumerate(singles)]
    rng, ends = np.random.default_rng(0), []
    for _ in range(120):
        for row in range(num):
            np.testing.assert_array_equal(info["action_mask"][row], expected[row]["action_mask"])
            for key in ("image", "position", "kind"):
                np.testing.assert_array_equal(obs[key][row], np.asarray(expected[row][key], obs[key].dtype))
        actions = np.array([rng.choice(np.flatnonzero(mask)) for mask in info["action_mask"]])
        obs, reward, terminated, truncated, info = env.step(actions)
        for row, single in enumerate(singles):
            last, single_reward, *flags, last_info = single.step(int(actions[row]))
            assert reward[row] == np.float32(single_reward)
            assert [terminated[row], truncated[row]] == flags
            expected[row] = last
            if any(flags):
                ends.append(tuple(flags))
                np.testing.assert_array_equal(info["final_mask"][row], last["action_mask"])
                np.testing.assert_array_equal(info["final_obs"]["position"][row], last["position"].astype(np.float32))
                np.testing.assert_array_equal(info["final_obs"]["image"][row], last["image"])
                assert info["final_info"][row] == {"x": last_info["x"]}
                expected[row] = single.reset()[0]
        assert ("final_obs" in info) == (terminated | truncated).any()
    assert {(True, False), (False, True)} <= set(ends)
    env.close()


def test_next_step_without_a_reset_mask_runs_as_vectors_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    """As Gymnasium's own vector CartPole, which ignores reset masks."""
    env = make_vector("CartPole-v0", 3, "native")
    assert "autoreset mode NEXT_STEP: it runs as 3 vectors of one environment" in capsys.readouterr().err
    single = gym.make("CartPole-v0", disable_env_checker=True)
    single.reset(seed=0)
    obs, _ = env.reset(seed=0)
    num_ends, rng = 0, np.random.default_rng(0)
    for _ in range(80):
        before, actions = obs.copy(), rng.integers(0, 2, 3)
        obs, reward, terminated, _, info = env.step(actions)
        assert reward.tolist() == [1.0] * 3  # a step that only resets would return 0
        for row in range(3):
            single.unwrapped.state = before[row].astype(float)  # type: ignore[attr-defined]
            single.unwrapped.steps_beyond_terminated = None  # type: ignore[attr-defined]
            single._elapsed_steps = 0  # type: ignore[attr-defined]
            expected = single.step(int(actions[row]))[0]
            successor = info["final_obs"][row] if terminated[row] else obs[row]
            np.testing.assert_allclose(successor, expected, rtol=1e-5, atol=1e-5)
        num_ends += terminated.sum()
        assert (np.abs(obs[terminated]) <= 0.05).all()
    assert num_ends > 3
    env.close()


def test_dict_actions_reach_vectors_of_one() -> None:
    env = make_vector("sample_vectors:Pushes", 3)
    obs = env.reset(seed=0)[0].copy()
    actions = {"push": np.array([[0.4], [-0.3], [0.0]], np.float32), "twice": np.array([1, 0, 1])}
    num_ends = 0
    for _ in range(9):
        after, reward, terminated, _, info = env.step(actions)
        successors = np.where(terminated[:, None], info.get("final_obs", after), after)
        np.testing.assert_allclose(successors, obs + np.array([[0.8], [-0.3], [0.0]]), atol=1e-5)
        assert reward.tolist() == [1.0] * 3
        num_ends += terminated.sum()
        obs = after.copy()
    assert num_ends >= 4
    env.close()


def test_agents_masks_and_state_are_kept() -> None:
    with closing(make_vector(PairSum, 2)) as env:
        spaces = env.spaces
        assert (spaces.num_agents, spaces.mask, spaces.state, spaces.reward_kind) == (2, 3, 4, "shared")
        obs, info = env.reset(seed=0)
        for step in range(1, 5):
            assert obs[0, 0, 0] == info["state"][0, 0] == step - 1
            obs, reward, terminated, _, info = env.step(np.array([[0, 2], [1, 1]]))
            assert reward.tolist() == [[2.0, 2.0], [2.0, 2.0]]
        assert terminated.all()
        assert (obs == 0).all()
        assert (info["final_obs"] == 4).all()
        assert (info["final_state"] == 4).all()
        assert not info["final_mask"][:, 0, 2].any()
        assert info["final_info"] == {0: {"sum": 7}, 1: {"sum": 7}}


def test_seed_repeats_and_restored_state_continues_identically() -> None:
    rng = np.random.default_rng(0)
    with closing(make_vector(SavedWalks, 5)) as env, closing(make_vector(SavedWalks, 5)) as other:
        first = env.reset(seed=3)[0].copy()
        np.testing.assert_array_equal(first, other.reset(seed=3)[0])
        assert not np.array_equal(first, other.reset(seed=4)[0])
        for _ in range(17):
            env.step(rng.integers(0, 2, 5))
        saved, current = env.state_dict(), env.buffers.obs.copy()  # type: ignore[attr-defined]
        np.testing.assert_array_equal(other.load_state_dict(saved)[0], current)
        assert other.inexact == []
        for _ in range(30):
            actions = rng.integers(0, 2, 5)
            for mine, theirs in zip(env.step(actions)[:4], other.step(actions)[:4], strict=True):
                np.testing.assert_array_equal(mine, theirs)


def test_without_state_dict_all_episodes_start_again() -> None:
    with closing(make_vector(Walks, 3)) as env, closing(make_vector(Walks, 3)) as other:
        env.reset(seed=3)
        env.step(np.ones(3, int))
        saved = env.state_dict()
        restored = other.load_state_dict(saved)[0].copy()
        assert other.inexact == [0, 1, 2]
        assert (restored[:, 1] == 0).all()
        np.testing.assert_array_equal(restored, env.load_state_dict(saved)[0])  # the same new episodes


def test_resumed_run_is_identical_to_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = {**SHORT, "eval_every": 0, "quiet": True}
    zx.train("ppo", SavedWalks, out=tmp_path / "whole", **settings)
    zx.train("ppo", SavedWalks, out=tmp_path / "parts", **{**settings, "env_steps": 100})
    zx.Session.resume(tmp_path / "parts", env_steps=200, quiet=True).run()
    whole, parts = (zx.load(tmp_path / run).policy.state_dict() for run in ("whole", "parts"))
    assert all(whole[key].equal(parts[key]) for key in whole)


def test_resume_notes_that_episodes_start_again(tmp_path: Path) -> None:
    zx.train("ppo", Walks, out=tmp_path / "run", quiet=True, **{**SHORT, "env_steps": 100})
    session = zx.Session.resume(tmp_path / "run", env_steps=200, quiet=True)
    assert session.folder.notices[0].startswith("4 of 4 environments of sample_vectors:Walks start a new episode")
    session.close()


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_learns_from_a_user_vector_on_the_command_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "run")
    words = ["--env", "sample_vectors:SavedWalks", "env_steps=6000", "num_envs=8", "eval_every=0", "--out", out]
    extra = ["rollout_steps=32", "lr=3e-3"] if name == "ppo" else ["learning_starts=500"]
    assert cli_exit_code(monkeypatch, "train", name, *words, *extra) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["final_return"] > 0.2  # always right: 1 - 7 * 0.1; random actions: below 0
    assert zx.config.read_yaml(tmp_path / "run" / "config.yaml")["vector"]["backend"] == "native"
    assert "steps" in zx.evaluate(out, 5).summary()
    assert cli_exit_code(monkeypatch, "video", out, "-o", str(tmp_path / "v.mp4")) == 0
    assert (tmp_path / "v.mp4").stat().st_size > 0


@pytest.mark.parametrize(
    ("env", "num_envs"),
    [
        (lambda num_envs: SavedWalks(num_envs), 4),
        (SavedWalks(4), 4),
        (ThreeWalks, 3),
        ("OnlyWalks-v0", 4),
    ],
)
def test_functions_instances_and_ids_train_and_evaluate(env: Any, num_envs: int, tmp_path: Path) -> None:
    settings = {**SHORT, "num_envs": num_envs, "env_steps": 150}
    result = zx.train("ppo", env, out=tmp_path / "run", quiet=True, **settings)
    assert result["final_return"] is not None


def test_function_is_recognized_by_its_annotation(tmp_path: Path) -> None:
    def four() -> VectorEnv:
        return SavedWalks(4)

    with closing(make_vector(four, 4)) as env:
        assert isinstance(env, GymVectorEnv)


def test_workers_step_user_vectors(tmp_path: Path) -> None:
    result = zx.train("impala", SavedWalks, out=tmp_path / "run", quiet=True, actors=2, **SHORT)
    assert result["env_steps"] >= 200


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_vector(ThreeWalks, 4), r"num_envs is 4, but .*ThreeWalks has 3 environments; set num_envs=3"),
        (lambda: make_vector(SavedWalks, 4, "process"), "backend=process needs single environments"),
        (lambda: make_vector(SavedWalks, 4, workers=2), "backend native has no workers"),
        (lambda: make_vector(SavedWalks, 4, options={"num_envs": 2}), "no option 'num_envs': the number of"),
        (lambda: make_vector(SavedWalks, 4, options={"size": 2}), "has no option 'size'"),
        (lambda: make_vector("sample_vectors:not_a_vector", 4), "instance of MixedObs, not a gymnasium.vector"),
        (lambda: zx.envs.make("sample_vectors:Walks"), "makes environments that step together"),
    ],
)
def test_wrong_arguments_are_rejected(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("no mode", r"metadata\['autoreset_mode'\]=None; allowed are AutoresetMode.NEXT_STEP"),
        ("wrong mode", "='Sometimes'; allowed are"),
        ("no space", "has no single_action_space"),
        ("other number", "num_envs is 4, but sample_vectors:Broken has 5"),
        ("ignored mask", "doesn't only reset the rows of the mask"),
    ],
)
def test_broken_vectors_are_rejected(problem: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_vector("sample_vectors:Broken", 4, options={"problem": problem})


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("shape", r"its observation has shape \(4, 1\); it must have shape \(4, 2\)"),
        ("NaN", "its reward contains NaN or Inf"),
        ("flag", "its terminated contains values other than True and False"),
        ("no final_obs", r"without info\['final_obs'\]"),
    ],
)
def test_misbehavior_in_a_step_is_reported(problem: str, message: str) -> None:
    def run() -> None:
        env = make_vector("sample_vectors:Broken", 4, options={"problem": problem})
        env.reset(seed=0)
        for _ in range(20):
            env.step(np.ones(4, int))

    with pytest.raises(EnvCrashError, match=message):
        run()


def test_sample_module_is_importable_by_name() -> None:
    assert sample_vectors.same_step(2).num_envs == 2
