from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box

from zhixing.envs import make, make_vector
from zhixing.envs.adapters import mujoco_v5
from zhixing.envs.wrappers import headless
from zhixing.errors import UserError
from zhixing.utils.extras import install_hint

ENVS = ("HalfCheetah-v5", "Ant-v5", "Hopper-v5", "Humanoid-v5", "Pusher-v5", "InvertedDoublePendulum-v5")


def error_of(name: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        make(name, **options)
    return str(caught.value)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("gymnasium.envs.mujoco", "mujoco"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    assert error_of("Hopper-v5") == f"Hopper-v5 needs the extra 'mujoco': {install_hint('mujoco')}"


@pytest.mark.parametrize("name", ENVS)
def test_state_is_restored_exactly(name: str) -> None:
    pytest.importorskip("mujoco")
    first, second = (make_vector(name, 1, "serial", options={"max_episode_steps": 40}) for _ in range(2))
    rng = np.random.default_rng(0)
    space = first.single_action_space
    first.reset(seed=1)
    second.reset(seed=2)
    for steps in (0, 7):
        for _ in range(steps):
            first.step(rng.uniform(space.low, space.high)[None])
        second.load_state_dict(first.state_dict())
        assert second.inexact == []
        num_ends = 0
        for _ in range(60):  # past the end of an episode
            action = rng.uniform(space.low, space.high)[None]
            expected_step, step = first.step(action), second.step(action)
            for expected, actual in zip(expected_step[:4], step[:4], strict=True):
                assert actual.tobytes() == expected.tobytes()
            num_ends += int((step[2] | step[3]).sum())
        assert num_ends >= 1


def test_checkpoint_without_an_env_state_starts_a_new_episode() -> None:
    """Checkpoints of older runs contain only actions to replay."""
    pytest.importorskip("mujoco")
    env = make_vector("Hopper-v5", 1, "serial")
    env.reset(seed=0)
    state = env.state_dict()
    del state["envs"][0]["env_state"]
    env.load_state_dict(state)
    assert env.inexact == [0]


def test_pixel_observations_are_restored_exactly() -> None:
    pytest.importorskip("mujoco")
    if not headless.has_egl():
        pytest.skip(headless.INSTALL)
    for name in ("Hopper-v5", "InvertedPendulum-v5"):  # with a tracking camera, and with a fixed one
        first, second = (make(name, obs="pixels", size=32, stack=2) for _ in range(2))
        obs, _ = first.reset(seed=0)
        assert (obs.shape, obs.dtype) == ((6, 32, 32), np.uint8)
        first.step(first.action_space.high)
        second.load_state_dict(first.state_dict())
        for _ in range(3):
            expected, actual = first.step(first.action_space.low), second.step(first.action_space.low)
            np.testing.assert_array_equal(actual[0], expected[0])
            assert actual[1:4] == expected[1:4]


def test_invalid_options_are_rejected() -> None:
    invalid_options = {
        "Hopper-v5: env.obs='ram': allowed are state, pixels": {"obs": "ram"},
        "Hopper-v5: size, stack need env.obs=pixels": {"size": 32, "stack": 3},
    }
    for message, options in invalid_options.items():
        with pytest.raises(UserError) as caught:
            mujoco_v5.make("Hopper-v5", options)
        assert str(caught.value) == message
    pytest.importorskip("mujoco")
    assert "Hopper-v5 has no option 'frames', allowed: " in error_of("Hopper-v5", frames=2)
    assert "obs, size, grayscale, stack" in error_of("Hopper-v5", frames=2)


class CountingEnv(gym.Env[Any, Any]):
    """Counts steps and renders the count plus the point that its camera looks at."""

    render_mode = "rgb_array"
    observation_space = Box(0.0, 9.0, (1,))
    action_space = Box(-1.0, 1.0, (1,))

    def __init__(self) -> None:
        self.count = 0
        self.mujoco_renderer = SimpleNamespace(viewer=None)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return np.ones(1), 1.0, self.count == 3, False, {}

    def render(self) -> Any:  # type: ignore[override]
        if self.mujoco_renderer.viewer is None:
            self.mujoco_renderer.viewer = SimpleNamespace(cam=SimpleNamespace(lookat=np.full(3, 10.0 * self.count)))
        return np.full((8, 8, 3), self.count + self.mujoco_renderer.viewer.cam.lookat[0], np.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_images_replace_observations_and_the_camera_is_restored() -> None:
    env, other = (mujoco_v5.PixelObservation(CountingEnv(), "counting", 8) for _ in range(2))
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    assert [int(env.step(None)[0][0, 0, 0]) for _ in range(2)] == [1, 2]
    other.load_state_dict(env.state_dict())  # `other` renders its first image only now, at count 2
    obs, reward, terminated, _, _ = other.step(None)
    assert (int(obs[0, 0, 0]), reward, terminated) == (3, 1.0, True)


@pytest.mark.parametrize(
    ("learner", "name"),
    [
        *((learner, "ALE/Pong-v5") for learner in ("ppo", "dqn", "rainbow")),
        *((learner, "procgen/bigfish") for learner in ("ppo", "ppg")),
        ("sac", "dmc/walker-walk"),
        *((learner, "Ant-v5") for learner in ("ppo", "sac", "td3", "ddpg")),
    ],
)
def test_presets_are_valid(learner: str, name: str) -> None:
    from zhixing import config

    preset = config.preset(learner, name)
    cfg = config.load(algorithm=learner, env=name)
    assert cfg.env_steps == preset["env_steps"]
    assert cfg.env.name == name
    assert cfg.env.options == preset.get("env", {})
