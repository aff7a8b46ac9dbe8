from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from zhixing.envs import make_vector
from zhixing.envs.adapters import atari
from zhixing.envs.registry import find_adapter
from zhixing.errors import UserError
from zhixing.utils.extras import install_hint

PONG = "ALE/Pong-v5"
STACK = 4


def make(name: str = PONG, **options: Any) -> Any:
    pytest.importorskip("ale_py")
    return atari.make(name, options)


# --- without ale-py ---


class FakeAtariVectorEnv:
    """Replaces ALE's vector environment. Frames count up, episodes end after `LIMIT` steps and restart in the same
    step, and stacks start with black frames."""

    LIMIT = 6

    def __init__(self, game: str, num: int, stack_num: int, img_height: int, img_width: int, **settings: Any) -> None:
        self.game, self.num, self.settings = game, num, settings
        self.single_observation_space = Box(0, 255, (stack_num, img_height, img_width), np.uint8)
        self.single_action_space = Discrete(3)
        self.frames = np.zeros((num, *self.single_observation_space.shape), np.uint8)
        self.seeds: list[Any] = []

    def reset(self, seed: Any) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        self.steps = np.arange(self.num)  # episodes end one after the other
        self.frames[:] = 0
        self.frames[:, -1] = (100 + 10 * np.arange(self.num))[:, None, None]
        return self.frames.copy(), {}

    def step(self, actions: Any) -> tuple[Any, ...]:
        self.frames[:, :-1] = self.frames[:, 1:].copy()
        self.frames[:, -1] += 1
        self.steps += 1
        ended = self.steps >= self.LIMIT
        info = {"final_obs": self.frames.copy()} if ended.any() else {}
        self.frames[ended] = 0
        self.frames[ended, -1] = 200
        self.steps[ended] = 0
        return self.frames.copy(), np.array(actions, np.int32), ended, np.zeros(self.num, bool), info

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def native_pong(monkeypatch: pytest.MonkeyPatch) -> type[atari.NativeAtari]:
    module = ModuleType("ale_py.vector_env")
    module.AtariVectorEnv = FakeAtariVectorEnv  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ale_py", ModuleType("ale_py"))
    monkeypatch.setitem(sys.modules, "ale_py.vector_env", module)
    monkeypatch.setattr(atari, "games", lambda: {PONG: "pong"})
    return type("NativePong", (atari.NativeAtari,), {"name": PONG})


def test_native_stacks_start_with_the_first_frame_repeated(native_pong: Any) -> None:
    env = native_pong(2, size=[3, 5])
    assert env.spaces.obs.shape == (STACK, 3, 5)
    obs, info = env.reset(1)
    assert info == {}
    assert obs[..., 0, 0].tolist() == [[100] * 4, [110] * 4]
    expected_frames = [  # the stacks of both environments after every step
        ([100, 100, 100, 101], [110, 110, 110, 111]),
        ([100, 100, 101, 102], [110, 110, 111, 112]),
        ([100, 101, 102, 103], [110, 111, 112, 113]),
        ([101, 102, 103, 104], [111, 112, 113, 114]),
        ([102, 103, 104, 105], [200, 200, 200, 200]),  # the second episode ended, one step before the first
        ([200, 200, 200, 200], [200, 200, 200, 201]),
        ([200, 200, 200, 201], [200, 200, 201, 202]),
    ]
    for step, frames in enumerate(expected_frames):
        obs, reward, terminated, truncated, info = env.step(np.array([2, 0]))
        assert tuple(obs[..., 0, 0].tolist()) == frames
        assert (reward.tolist(), reward.dtype) == ([2.0, 0.0], np.float32)
        assert terminated.tolist() == [step == 5, step == 4]
        assert not truncated.any()
        assert list(info.get("final_info", {})) == ([1] if step == 4 else [0] if step == 5 else [])
        if step == 4:
            assert info["final_obs"][1, :, 0, 0].tolist() == [112, 113, 114, 115]
    env.close()


def test_native_final_stack_of_a_short_episode_is_filled(native_pong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeAtariVectorEnv, "LIMIT", 2)
    env = native_pong(1)
    env.reset(0)
    env.step(np.array([0]))
    *_, info = env.step(np.array([0]))
    assert info["final_obs"][0, :, 0, 0].tolist() == [100, 100, 101, 102]


def test_native_env_loads_a_state_by_starting_the_same_new_episodes(native_pong: Any) -> None:
    env = native_pong(3)
    env.reset(1)
    state = env.state_dict()
    for _ in range(2):
        obs, _ = env.load_state_dict(state)
        assert obs[:, 0, 0, 0].tolist() == [100, 110, 120]
    assert env.inexact == [0, 1, 2]
    first, second, third = env.env.seeds
    assert second.tolist() == third.tolist() != first.tolist()


def test_native_options_are_passed_to_ale(native_pong: Any) -> None:
    env = native_pong(1, action_repeat=3, pool="last", sticky=0.5, noops=7, clip_reward=True, max_episode_steps=100)
    settings = env.env.settings
    assert (settings["frameskip"], settings["maxpool"], settings["repeat_action_probability"]) == (3, False, 0.5)
    assert (settings["noop_max"], settings["reward_clipping"], settings["max_num_frames_per_episode"]) == (7, True, 300)
    assert settings["use_fire_reset"] is False
    assert native_pong(1, max_episode_steps=None).env.settings["max_num_frames_per_episode"] == 2**31 - 1
    with pytest.raises(UserError, match=r"ALE/Pong-v5: env.size=null isn't available with vector.backend=native"):
        native_pong(1, size=None)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    monkeypatch.setitem(sys.modules, "ale_py.vector_env", None)
    monkeypatch.setattr(atari, "games", dict)
    assert find_adapter(PONG) is atari
    assert atari.supports(PONG)
    assert not atari.supports("ALE/Pong-v4")
    native = type("NativePong", (atari.NativeAtari,), {"name": PONG})
    for create in (lambda: atari.make(PONG, {}), lambda: native(2)):
        with pytest.raises(UserError) as caught:
            create()
        assert str(caught.value) == f"{PONG} needs the extra 'atari': {install_hint('atari')}"


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(
        UserError, match=r"ALE/Pong-v5 has no option 'frameskip', allowed: full_action_space, .*action_repeat"
    ):
        atari.make(PONG, {"frameskip": 2})


# --- with ale-py ---


def test_names_are_those_of_ale_py() -> None:
    ale_py = pytest.importorskip("ale_py")
    gym.register_envs(ale_py)
    assert set(atari.names()) == {id for id in gym.registry if id.startswith("ALE/")}
    assert not atari.supports("ALE/Pingpong-v5")


def test_observations_and_rewards_equal_gymnasiums_preprocessing() -> None:
    ale_py = pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    gym.register_envs(ale_py)
    reference = gym.make(PONG, frameskip=1, repeat_action_probability=0.0)
    reference = gym.wrappers.AtariPreprocessing(reference, noop_max=0, frame_skip=4, screen_size=84)
    reference = gym.wrappers.FrameStackObservation(reference, STACK)
    env = make(sticky=0.0, noops=0)
    assert env.observation_space == reference.observation_space
    rng = np.random.default_rng(0)
    obs, _ = env.reset(seed=0)
    expected_obs, _ = reference.reset(seed=0)
    np.testing.assert_array_equal(obs[-1], expected_obs[-1])
    total = 0.0
    for _ in range(150):
        action = int(rng.integers(6))
        obs, reward, *ends, _ = env.step(action)
        expected_obs, expected_reward, *expected_ends, _ = reference.step(action)
        np.testing.assert_array_equal(obs, expected_obs)
        assert (reward, ends) == (expected_reward, expected_ends)
        total += reward
    assert total <= -2.0  # some points were lost


def test_defaults_and_actions() -> None:
    env = make()
    assert env.observation_space == Box(0, 255, (STACK, 84, 84), np.uint8)
    assert env.action_space.n == 6
    assert make(full_action_space=True).action_space.n == 18
    obs, info = env.reset(seed=0)
    assert (obs == obs[-1]).all()
    assert info["lives"] == 0
    assert env.metadata["render_fps"] == 15
    assert make(grayscale=False).observation_space.shape == (12, 84, 84)
    assert make(render_mode="rgb_array").render().shape == (210, 160, 3)
    with pytest.raises(UserError, match=r"ALE/Pong-v5: env.difficulty=7: allowed are 0, 1"):
        make(difficulty=7)
    make(mode=0, difficulty=1)


def test_reset_with_a_seed_does_not_depend_on_earlier_episodes() -> None:
    """Without reloading its ROM, Beam Rider starts differently after another episode."""
    env = make("ALE/BeamRider-v5", size=None, stack=1)

    def play() -> list[Any]:
        return [env.reset(seed=3)[0], *(env.step(action % 9)[0] for action in range(30))]

    first = play()
    for _ in range(20):
        env.step(1)
    np.testing.assert_array_equal(np.stack(first), np.stack(play()))


@pytest.mark.parametrize(
    ("name", "options"),
    [(PONG, {"max_episode_steps": 45}), ("ALE/Breakout-v5", {"end_on_life_loss": True, "clip_reward": True})],
)
def test_state_is_restored_exactly(name: str, options: dict[str, Any]) -> None:
    pytest.importorskip("ale_py")
    first, second = (make_vector(name, 2, "serial", options=options) for _ in range(2))
    rng = np.random.default_rng(0)
    first.reset(seed=1)
    second.reset(seed=2)
    for _ in range(25):
        first.step(rng.integers(0, 4, 2))
    obs, _ = second.load_state_dict(first.state_dict())
    assert second.inexact == []
    np.testing.assert_array_equal(obs, first.buffers.obs)
    num_ends = 0
    for _ in range(70):
        actions = rng.integers(0, 4, 2)
        expected_step, step = first.step(actions), second.step(actions)
        for expected, actual in zip(expected_step[:4], step[:4], strict=True):
            assert actual.tobytes() == expected.tobytes()
        num_ends += int((step[2] | step[3]).sum())
    assert num_ends >= 2


def test_native_games_equal_serial_games() -> None:
    pytest.importorskip("ale_py")
    options = {"sticky": 0.0, "noops": 0, "max_episode_steps": 40}
    native, serial = (make_vector(PONG, 2, backend, options=options) for backend in ("native", "serial"))
    assert native.spaces == serial.spaces
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(native.reset(seed=0)[0], serial.reset(seed=0)[0])
    ends = 0
    for _ in range(100):
        actions = rng.integers(0, 6, 2)
        obs, reward, terminated, truncated, info = native.step(actions)
        expected_obs, expected_reward, expected_terminated, expected_truncated, expected_info = serial.step(actions)
        np.testing.assert_array_equal(obs, expected_obs)
        assert (reward.tolist(), reward.dtype) == (expected_reward.tolist(), np.float32)
        assert (terminated.tolist(), truncated.tolist()) == (expected_terminated.tolist(), expected_truncated.tolist())
        if truncated.any():
            ends += 1
            assert sorted(info["final_info"]) == sorted(expected_info["final_info"]) == [0, 1]
            differs = info["final_obs"] != expected_info["final_obs"]
            assert not differs[:, :-1].any()
            assert differs.mean() < 0.01  # ALE's last frame is slightly older
            assert (obs == obs[:, -1:]).all()
    assert ends == 2
    state = native.state_dict()
    native.load_state_dict(state)
    assert native.inexact == [0, 1]
    native.close()
