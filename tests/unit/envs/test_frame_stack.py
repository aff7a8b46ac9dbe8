"""The option `stack`: every environment accepts it, in every back end, and resumes in the middle of an episode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import differing_tensors
from gymnasium.spaces import Box, Discrete
from sample_envs import Counter

import zhixing as zx
from zhixing import envs
from zhixing.collectors.actor import Actor
from zhixing.collectors.torch_collector import TorchActor
from zhixing.core.stack import ObsStack
from zhixing.core.tree import tree_leaves, tree_map
from zhixing.envs.torch_native import TORCH_ENVS
from zhixing.envs.vector import backend_choice
from zhixing.envs.wrappers.frame_stack import FrameStack, stack_of
from zhixing.envs.wrappers.time_limit import StatefulTimeLimit

ENVS: dict[str, dict[str, Any]] = {
    "toy/reach": {},
    "toy/team-match": {},
    "skirmish/3m": {},
    "CartPole-v1": {},
    "pettingzoo/tictactoe": {},
    "dummy_envs:DictObsEnv": {},
    "dummy_envs:FixedLengthEnv": {"agents": 2},
    "sample_envs:PettingZooStyle": {},
}


def make(name: str, backend: str = "serial", num_envs: int = 3, **options: Any) -> envs.VectorEnv:
    workers = 2 if backend in ("process", "mixed") else None
    return envs.make_vector(name, num_envs, backend=backend, workers=workers, options={**ENVS.get(name, {}), **options})


def random_actions(vector: envs.VectorEnv, info: dict[str, Any]) -> np.ndarray:
    mask = info.get("action_mask")
    masks = [None if mask is None else mask[i] for i in range(vector.num_envs)]
    return np.array([vector.spaces.flatten_action(backend_choice.random_action(vector.spaces, row)) for row in masks])


def record(vector: envs.VectorEnv, steps: int) -> list[list[tuple[Any, Any]]]:
    """Take random steps. Return for each step, per environment, its observation and the final one, or None."""
    vector.spaces.action.seed(0)
    obs, info = vector.reset(seed=4)
    records = [[(take(obs, i), None) for i in range(vector.num_envs)]]
    for _ in range(steps):
        obs, _, terminated, truncated, info = vector.step(random_actions(vector, info))
        ended = terminated | truncated
        records.append([(take(obs, i), take(info["final_obs"], i) if ended[i] else None) for i in range(len(ended))])
    vector.close()
    return records


def take(tree: Any, row: int) -> Any:
    return tree_map(lambda leaf: leaf[row].copy(), tree)


def stacked_by_hand(records: list[list[tuple[Any, Any]]], stack: ObsStack) -> list[list[tuple[Any, Any]]]:
    """Return what environments with a stack return where others return `records`."""
    stacks = [stack.start(obs) for obs, _ in records[0]]
    result = [[(obs, None) for obs in stacks]]
    for row in records[1:]:
        finals = [None if final is None else stack.push(stacks[i], final) for i, (_, final) in enumerate(row)]
        stacks = [
            stack.push(stacks[i], obs) if final is None else stack.start(obs) for i, (obs, final) in enumerate(row)
        ]
        result.append(list(zip(stacks, finals, strict=True)))
    return result


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    for row, other in zip(actual, expected, strict=True):
        for (obs, final), (other_obs, other_final) in zip(row, other, strict=True):
            assert (final is None) == (other_final is None)
            for a, b in zip(tree_leaves((obs, final)), tree_leaves((other_obs, other_final)), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backend", ["serial", "torch"])
@pytest.mark.parametrize("name", ENVS)
def test_every_env_accepts_a_stack(name: str, backend: str) -> None:
    if backend == "torch" and name not in TORCH_ENVS:
        pytest.skip(f"there is no {name} in torch")
    single, stacked = make(name, backend), make(name, backend, stack=2)
    by_hand = ObsStack(single.spaces.obs, 2, single.spaces.agents)
    assert (single.spaces.stack, stacked.spaces.stack) == (1, 2)
    assert stacked.spaces.obs == by_hand.space
    assert single.spaces.extras() == stacked.spaces.extras()  # masks and the like stay single
    records = record(single, 70)
    assert any(final is not None for row in records for _, final in row)
    assert_same(record(stacked, 70), stacked_by_hand(records, by_hand))


def test_stack_follows_the_episode() -> None:
    # Counter observes [episode, step]; the first reset of the probe is episode 0 of another instance
    vector = envs.SerialVectorEnv(lambda: FrameStack(Counter(death=3), 3), 1)
    obs, _ = vector.reset(seed=0)
    assert obs.tolist() == [[0, 0, 0, 0, 0, 0]]
    assert vector.step(np.zeros(1, int))[0].tolist() == [[0, 0, 0, 0, 0, 1]]
    assert vector.step(np.zeros(1, int))[0].tolist() == [[0, 0, 0, 1, 0, 2]]
    obs, _, terminated, _, info = vector.step(np.zeros(1, int))
    assert terminated.tolist() == [True]
    assert info["final_obs"].tolist() == [[0, 1, 0, 2, 0, 3]]
    assert obs.tolist() == [[1, 0, 1, 0, 1, 0]]  # only the new episode
    vector.close()


@pytest.mark.parametrize("name", ["dummy_envs:DictObsEnv", "skirmish/3m"])
def test_back_ends_return_the_same_stacks(name: str) -> None:
    expected = record(make(name, stack=2), 80)
    for backend in ("process", "mixed"):
        assert_same(record(make(name, backend, stack=2), 80), expected)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("CartPole-v1", "serial"), ("toy/reach", "process"), ("sample_envs:Stateful", "serial"), ("CartPole-v1", "torch")],
)
def test_stack_is_restored_in_the_middle_of_an_episode(name: str, backend: str) -> None:
    first, second = (make(name, backend, stack=4) for _ in range(2))
    first.reset(seed=2)
    first.spaces.action.seed(0)
    for _ in range(7):
        first.step(random_actions(first, {}))
    second.load_state_dict(first.state_dict())
    assert second.inexact == []
    for _ in range(20):
        actions = random_actions(first, {})
        for one, other in zip(first.step(actions)[:4], second.step(actions)[:4], strict=True):
            assert one.tobytes() == other.tobytes()
    first.close()
    second.close()


def recurrent_learner(env: envs.VectorEnv) -> zx.Learner:
    cfg = zx.config.load(algorithm="ppo", env="CartPole-v1", net__recurrent="lstm", net__recurrent_size=5)
    return zx.algorithms.get("ppo").make(cfg, env.spaces)


def test_recurrent_actors_collect_the_same_bits_in_all_back_ends() -> None:
    """Hidden states are reset with the stacks, and `next_obs` has the final ones."""
    batches = []
    for backend in ("serial", "process", "mixed"):
        env = make("CartPole-v1", backend, stack=3)
        learner = recurrent_learner(env)
        actor = Actor(learner.policy, env, learner.extra_fields, seed=1)
        batches.append(actor.collect(steps=90).batch)
        leaves = tree_map(np.copy, {name: getattr(batches[-1], name) for name in batches[-1].fields})
        batches[-1] = leaves
        env.close()
    expected = batches[0]
    ended = expected["terminated"][:-1]
    assert ended.any()
    first_of_next = expected["obs"][1:][ended]
    assert (first_of_next[:, :4] == first_of_next[:, 8:]).all()  # the first frame, repeated
    assert all((leaf[1:][ended] == 0).all() for leaf in tree_leaves(expected["hidden"]))
    assert (expected["next_obs"][:-1][ended] != first_of_next).any()
    for batch in batches[1:]:
        for one, other in zip(tree_leaves(expected), tree_leaves(batch), strict=True):
            assert one.tobytes() == other.tobytes()


def test_recurrent_torch_actor_equals_the_actor() -> None:
    collected = []
    for actor_class in (Actor, TorchActor):
        env = make("CartPole-v1", "torch", stack=3)
        learner = recurrent_learner(env)
        batch = actor_class(learner.policy, env, learner.extra_fields, seed=1).collect(steps=60).batch
        collected.append({name: tree_map(torch.as_tensor, getattr(batch, name)) for name in batch.fields})
    actor, torch_actor = collected
    assert actor["terminated"].any()
    for name in actor:
        for one, other in zip(tree_leaves(actor[name]), tree_leaves(torch_actor[name]), strict=True):
            assert torch.equal(one, other), name


class OwnStack(gym.Env):
    """Has a parameter of this name, which means something else."""

    observation_space, action_space = Box(0, 9, (1,)), Discrete(2)

    def __init__(self, stack: int = 2) -> None:
        self.observation_space = Box(0, 9, (stack,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return np.zeros(self.observation_space.shape, np.float32), {}


def test_own_parameters_of_an_env_have_priority() -> None:
    env = envs.make(f"{__name__}:OwnStack", stack=5)
    assert env.observation_space.shape == (5,)
    assert stack_of(env) == 1


def test_stacks_are_recognized_only_if_no_other_wrapper_may_change_them() -> None:
    stack = FrameStack(Counter(), 3)
    assert stack_of(StatefulTimeLimit(stack, 5)) == 3
    assert stack_of(gym.wrappers.TransformObservation(stack, lambda obs: 2 * obs, stack.observation_space)) == 1
    assert stack_of(Counter()) == 1


@pytest.mark.parametrize("stack", [0, -1, 2.5, True, "four"])
def test_invalid_stacks_are_rejected(stack: Any) -> None:
    for name in ("CartPole-v1", "toy/reach", "sample_envs:Counter"):
        with pytest.raises(zx.UserError, match=r"env.stack=.*: must be an integer of at least 1"):
            envs.make(name, stack=stack)


def test_native_back_end_without_the_option_is_rejected() -> None:
    with pytest.raises(zx.UserError, match="native CartPole-v1 has no option stack"):
        make("CartPole-v1", "native", stack=2)


def test_wrong_observations_are_explained() -> None:
    class Growing(Counter):
        def step(self, action: Any) -> Any:
            return np.zeros(3), 0.0, False, False, {}

    vector = envs.SerialVectorEnv(lambda: FrameStack(Growing(), 2), 1)
    vector.reset(seed=0)
    with pytest.raises(zx.errors.EnvCrashError, match=r"misbehaved .* has shape \(3,\); its space has shape \(2,\)"):
        vector.step(np.zeros(1, int))


def test_replay_stores_the_frames_of_a_run_once(tmp_path: Path) -> None:
    """`env.stack` alone configures the replay buffer, and a run resumed in the middle of episodes is the same."""
    settings = {
        "env_steps": 300, "learning_starts": 50, "replay__capacity": 100, "replay__n_step": 2, "num_envs": 2,
        "train_every": 2, "updates_per_step": 0.2, "eval_every": 0, "tensorboard": False, "vector__backend": "serial",
    }  # fmt: skip
    cfg = zx.config.load(algorithm="dqn", env="CartPole-v1", env__stack=4, **settings)
    session = zx.Session(cfg, tmp_path / "run", quiet=True)
    session.run()
    ring = session.loop.buffer.ring
    assert ring.frame_stack == 4
    assert ring.store.arrays["obs"][0].shape == (102, 4)
    agent = zx.load(tmp_path / "run")
    env = envs.make("CartPole-v1")
    frame, _ = env.reset(seed=0)
    obs = agent.preprocess(frame)
    assert obs.tolist() == frame.tolist() * 4
    later = env.step(int(agent.act(obs)))[0]
    assert agent.preprocess(later).tolist() == frame.tolist() * 3 + later.tolist()
    agent.reset()
    assert agent.preprocess(later).tolist() == later.tolist() * 4
    with pytest.raises(zx.UserError, match=r"doesn't fit one of a stack of 4: its observation has shape \(16,\)"):
        agent.preprocess(np.zeros(16))


def test_recorded_stacks_start_a_replay_and_are_exported(tmp_path: Path) -> None:
    from zhixing import offline
    from zhixing.training.collect_data import collect_from_agent, export_replay

    short = {"env_steps": 60, "learning_starts": 50, "eval_every": 0, "tensorboard": False, "num_envs": 2}
    short |= {"replay__capacity": 40, "vector__backend": "serial", "env__stack": 3}
    zx.train("dqn", "CartPole-v1", out=tmp_path / "run", quiet=True, **short)
    collect_from_agent(tmp_path / "run", str(tmp_path / "data"), 100)
    data = offline.open(tmp_path / "data")
    assert data.spaces.stack == 3
    zx.train("dqn", "CartPole-v1", out=tmp_path / "next", quiet=True, **short, replay__start=str(tmp_path / "data"))
    exported = export_replay(tmp_path / "run", str(tmp_path / "replay"))
    obs, next_obs = exported.arrays["obs"], exported.arrays["obs"][1:]
    follows = np.setdiff1d(np.arange(len(obs) - 1), exported.ends)
    assert (obs[follows, 4:] == next_obs[follows, :8]).all()  # all stacks are whole


class StopInTheMiddle(zx.Callback):
    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        if loop.steps >= 60:
            loop.stop("interrupted")


@pytest.mark.parametrize("kind", ["ppo", "dqn"])
def test_recurrent_runs_with_stacks_are_the_same_in_all_back_ends_and_after_a_resume(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "env_steps": 120, "num_envs": 2, "eval_every": 0, "eval_episodes": 1, "tensorboard": False, "num_threads": 1,
        "net__recurrent": "gru", "net__recurrent_size": 6, "net__hidden_sizes": [8], "env__stack": 3,
        "env__max_episode_steps": 17,
    }  # fmt: skip
    if kind == "ppo":
        settings |= {"rollout_steps": 10, "minibatch_size": 20, "epochs": 1}
    else:
        settings |= {"learning_starts": 30, "updates_per_step": 0.2, "train_every": 5, "batch_size": 4}
        settings |= {"replay__sequence_length": 4, "replay__burn_in": 2}
    for backend, workers in (("serial", "auto"), ("process", 2), ("mixed", 2)):
        zx.train(
            kind, "CartPole-v1", out=tmp_path / backend, quiet=True, vector__backend=backend, vector__workers=workers,
            **settings,
        )  # fmt: skip
    cfg = zx.config.load(algorithm=kind, env="CartPole-v1", vector__backend="serial", **settings)
    with pytest.raises(KeyboardInterrupt):
        zx.Session(cfg, tmp_path / "parts", StopInTheMiddle(), quiet=True).run()
    zx.Session.resume(tmp_path / "parts", quiet=True).run()
    for other in ("process", "mixed", "parts"):
        assert differing_tensors(tmp_path / "serial", tmp_path / other) == []
