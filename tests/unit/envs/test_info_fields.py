"""The option `info_fields`: values of `info` reach batches, buffers, datasets, hindsight rewards and callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

import zhixing as zx
from zhixing import envs, offline
from zhixing.buffers import HER, Buffer, NStep
from zhixing.collectors.actor import Actor
from zhixing.core import space_json
from zhixing.core.tree import Field, tree_leaves
from zhixing.training.collect_data import collect_from_agent

F32, I64, BOOL = (np.dtype(kind) for kind in (np.float32, np.int64, bool))
SHORT: dict[str, Any] = {"eval_every": 0, "eval_episodes": 1, "tensorboard": False, "vector__backend": "serial"}


class Meter(gym.Env):
    """Episodes of three steps. `info` has the step's number, a product, a flag and a vector; `broken` breaks one."""

    observation_space, action_space = Box(0, 9, (1,)), Discrete(4)

    def __init__(self, broken: str = "", crash: bool = False) -> None:
        self.broken, self.crash = broken, crash

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {"name": "reset"}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.steps += 1
        if self.crash and action == 3 and self.steps == 2:
            raise ZeroDivisionError
        info = {"number": self.steps, "product": 0.5 * int(action), "high": int(action) > 1, "name": "meter"}
        info["vector"] = np.array([self.steps, action])
        if self.steps == 2:
            info |= {"shape": {"vector": np.zeros(3)}, "type": {"number": 1.5}}.get(self.broken, {})
            if self.broken == "missing":
                del info["high"]
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 3, False, info


KEYS = ["number", "product", "high", "vector"]


def make(backend: str = "serial", num_envs: int = 2, keys: Any = KEYS, **options: Any) -> envs.VectorEnv:
    workers = 2 if backend in ("process", "mixed") else None
    return envs.make_vector(f"{__name__}:Meter", num_envs, backend, workers, {"info_fields": keys, **options})


def ppo(env: envs.VectorEnv) -> zx.Learner:
    cfg = zx.config.load(algorithm="ppo", env="CartPole-v1")
    return zx.algorithms.get("ppo").make(cfg, env.spaces)


def test_fields_are_inferred_from_the_first_step() -> None:
    env = make()
    expected = {
        "number": Field((), I64),
        "product": Field((), F32),
        "high": Field((), BOOL),
        "vector": Field((2,), I64),
    }
    assert env.spaces.info == expected
    assert env.spaces.fields()["info"] == expected
    assert space_json.decode(space_json.encode(env.spaces)).info == expected
    assert make(keys=[]).spaces.info == {}
    assert "info" not in make(keys=[]).spaces.fields()


@pytest.mark.parametrize("backend", ["serial", "process", "mixed"])
def test_values_are_those_of_the_step_that_ended_the_episode(backend: str) -> None:
    env = make(backend)
    env.reset(seed=0)
    for t in range(7):
        info = env.step(np.array([t % 4, 3]))[4]
        fields = info["info_fields"]
        assert fields["number"].tolist() == [t % 3 + 1] * 2  # 3 at the end, though the next episode has begun
        assert fields["product"].tolist() == [0.5 * (t % 4), 1.5]
        assert fields["high"].tolist() == [t % 4 > 1, True]
        assert fields["vector"].tolist() == [[t % 3 + 1, t % 4], [t % 3 + 1, 3]]
    env.send(np.array([1, 2]), np.arange(2))
    assert env.recv(2)[5]["info_fields"]["product"].tolist() == [0.5, 1.0]
    env.close()


def test_rollouts_have_the_values() -> None:
    env = make()
    learner = ppo(env)
    batch = Actor(learner.policy, env, learner.extra_fields).collect(steps=8).batch
    assert batch.info["number"][:, 0].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    np.testing.assert_array_equal(batch.info["product"], 0.5 * batch.action)
    np.testing.assert_array_equal(batch.info["vector"][..., 1], batch.action)
    learner.update(batch.to("cpu"))


def test_repeated_actions_have_the_info_of_the_last_step() -> None:
    env = make(action_repeat=2)
    env.reset(seed=0)
    assert env.step(np.array([1, 1]))[4]["info_fields"]["number"].tolist() == [2, 2]
    assert env.step(np.array([1, 1]))[4]["info_fields"]["number"].tolist() == [3, 3]


@pytest.mark.parametrize(("n", "expected"), [(1, [1, 2, 3]), (2, [1, 2, 3])])
def test_samples_have_the_values_of_their_first_step(n: int, expected: list[int]) -> None:
    env = make(num_envs=1)
    buffer = Buffer(env.spaces.fields(), 20, view=NStep(n, 0.9))
    learner = ppo(env)
    buffer.add(Actor(learner.policy, env).collect(steps=3).batch)
    batch = gather(buffer, [0, 1, 2])
    assert batch["info"]["number"].tolist() == expected


def gather(buffer: Buffer, positions: list[int]) -> dict[str, Any]:
    return buffer.view.gather(buffer.ring, np.array(positions))


def test_env_may_declare_its_fields() -> None:
    class Declaring(Meter):
        metadata = {"info_fields": ("product",)}  # noqa: RUF012  (as gym.Env declares it)

    assert list(envs.SerialVectorEnv(Declaring, 1).spaces.info) == ["product"]


def test_missing_keys_are_rejected_at_construction() -> None:
    with pytest.raises(
        zx.UserError, match=r"returned no 'cost' in info, only number, product, high, name, vector; name"
    ):
        make(keys=["cost"])
    with pytest.raises(zx.UserError, match=r"info\['name'\] of .* is 'meter'; allowed are numbers and arrays"):
        make(keys=["name"])
    for keys in ("number", [1], ["number", "number"], [""]):
        with pytest.raises(zx.UserError, match=r"env.info_fields=.*: must be a list of different keys"):
            make(keys=keys)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("missing", "its info has no 'high', which env.info_fields declares"),
        ("shape", r"its info\['vector'\] is float64 of shape \(3,\); in the first step it was int64 of shape \(2,\)"),
        ("type", r"its info\['number'\] is float64 of shape \(\); in the first step it was int64"),
    ],
)
def test_later_values_must_fit(broken: str, message: str) -> None:
    env = make(broken=broken)
    env.reset(seed=0)
    env.step(np.zeros(2, int))
    with pytest.raises(zx.errors.EnvCrashError, match=message):
        env.step(np.zeros(2, int))


def test_a_crash_leaves_zeros() -> None:
    policy = envs.FailurePolicy("replace")
    env = envs.SerialVectorEnv(envs.RegisteredEnv(f"{__name__}:Meter", {"info_fields": KEYS, "crash": True}), 1,
                               failure_policy=policy)  # fmt: skip
    env.reset(seed=0)
    env.step(np.array([3]))
    _, _, _, truncated, info = env.step(np.array([3]))
    assert truncated.tolist() == [True]
    assert [leaf.tolist() for leaf in tree_leaves(info["info_fields"])] == [[0], [0.0], [False], [[0, 0]]]


def test_back_ends_without_the_option_reject_it() -> None:
    for backend, words in (("native", "native CartPole-v1 has no option"), ("torch", "in torch has no option")):
        with pytest.raises(zx.UserError, match=words):
            envs.make_vector("CartPole-v1", 2, backend, options={"info_fields": []})


class Goals(gym.Env):
    """A point moves to a goal. The reward is minus the distance times `info["scale"]`, which differs in each step."""

    observation_space = Dict({name: Box(-9, 9, (1,)) for name in ("achieved_goal", "desired_goal", "observation")})
    action_space = Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.position, self.goal, self.steps = 0.0, float(self.np_random.integers(-3, 4)), 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.position += int(action) - 1
        self.steps += 1
        obs, info = self._obs(), {"scale": float(self.steps)}
        reward = self.compute_reward(obs["achieved_goal"], obs["desired_goal"], info)
        return obs, float(reward), False, self.steps == 5, info

    def _obs(self) -> dict[str, Any]:
        values = {"achieved_goal": self.position, "desired_goal": self.goal, "observation": self.position}
        return {name: np.array([value], np.float32) for name, value in values.items()}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -np.abs(achieved - desired).sum(-1) * info["scale"]


class GoalsOneByOne(Goals):
    """Rewards of one pair at a time."""

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        assert np.ndim(info["scale"]) in (0, 1)
        return -abs(float(achieved[0] - desired[0])) * info["scale"] if np.ndim(achieved) == 1 else np.zeros(0)


@pytest.mark.parametrize("backend", ["serial", "process"])
@pytest.mark.parametrize("kind", ["Goals", "GoalsOneByOne"])
def test_hindsight_rewards_get_the_info_of_their_step(kind: str, backend: str) -> None:
    from zhixing.envs.wrappers.goals import goal_functions

    env = envs.make_vector(f"{__name__}:{kind}", 1, backend, options={"info_fields": ["scale"]})
    her = HER(*goal_functions(env), ratio=1.0)  # type: ignore[arg-type]
    buffer = Buffer(env.spaces.fields(), 50, her=her)
    learner = ppo_for_dicts(env)
    buffer.add(Actor(learner.policy, env).collect(steps=20).batch)
    batch = buffer.sample(40, np.random.default_rng(0))
    distance = (batch.next_obs["achieved_goal"] - batch.next_obs["desired_goal"]).abs().sum(-1)
    assert (batch.reward == -distance * batch.info["scale"]).all()
    assert (batch.info["scale"] == batch.index % 5 + 1).all()
    assert distance.any()
    env.close()


def ppo_for_dicts(env: envs.VectorEnv) -> zx.Learner:
    cfg = zx.config.load(algorithm="ppo", env=f"{__name__}:Goals")
    return zx.algorithms.get("ppo").make(cfg, env.spaces)


class CountHigh(zx.Callback):
    """Reads the batch of the last update."""

    def __init__(self) -> None:
        self.means: list[float] = []

    def iteration_end(self, loop: zx.TrainingLoop, metrics: object) -> None:
        if loop.batch is not None:
            self.means.append(float(loop.batch.info["high"].float().mean()))


@pytest.mark.parametrize("kind", ["ppo", "dqn"])
def test_runs_record_resume_and_report_the_values(kind: str, tmp_path: Path) -> None:
    name = f"{__name__}:Meter"
    settings = {"rollout_steps": 8, "num_envs": 2} if kind == "ppo" else {"learning_starts": 8, "batch_size": 4}
    cfg = zx.config.load(algorithm=kind, env=name, env__info_fields=KEYS, env_steps=64, **SHORT, **settings)
    callback = CountHigh()
    zx.Session(cfg, tmp_path / "run", callback, quiet=True).run()
    assert callback.means
    assert 0 <= min(callback.means) <= max(callback.means) <= 1
    zx.Session.resume(tmp_path / "run", CountHigh(), quiet=True, env_steps=96).run()
    collect_from_agent(tmp_path / "run", str(tmp_path / "data"), 24)
    data = offline.open(tmp_path / "data")
    np.testing.assert_array_equal(data.arrays["info"]["product"], 0.5 * data.arrays["action"])
    if kind == "dqn":
        data_settings = {"dataset": str(tmp_path / "data"), "offline_updates": 5, "quiet": True, **SHORT}
        zx.train("dqn", name, out=tmp_path / "offline", env__info_fields=KEYS, **data_settings)
        with pytest.raises(zx.UserError, match="the dataset's info_fields don't fit"):
            zx.train("dqn", name, out=tmp_path / "other", **data_settings)
