from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest

from zhixing import envs
from zhixing.envs import make_vector
from zhixing.envs.adapters import dm_control_suite
from zhixing.envs.registry import find_adapter
from zhixing.envs.wrappers import headless
from zhixing.errors import UserError
from zhixing.utils.extras import install_hint

WALKER = "dmc/walker-walk"


def make(name: str, **options: Any) -> Any:
    pytest.importorskip("dm_control")
    return dm_control_suite.make(name, options)


def skip_without_egl() -> None:
    if not headless.has_egl():
        pytest.skip(headless.INSTALL)


# --- without dm_control ---


@pytest.fixture
def no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")


@pytest.mark.usefixtures("no_display")
def test_egl_is_chosen_without_a_display_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headless, "has_egl", lambda: False)
    assert not headless.choose_egl()
    assert "MUJOCO_GL" not in os.environ
    monkeypatch.setattr(headless, "has_egl", lambda: True)
    assert headless.choose_egl()
    assert os.environ["MUJOCO_GL"] == "egl"
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert not headless.choose_egl()  # the user's choice has priority
    assert os.environ["MUJOCO_GL"] == "osmesa"
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.setenv("DISPLAY", ":0")
    assert not headless.choose_egl()


@pytest.mark.usefixtures("no_display")
def test_import_falls_back_to_no_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headless, "has_egl", lambda: True)

    def load() -> str:
        if os.environ.get("MUJOCO_GL") == "egl":
            raise ImportError("no device to render with")
        return "imported"

    assert headless.import_with_egl(load) == "imported"
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(ImportError, match="no device"):
        headless.import_with_egl(load)


@pytest.mark.usefixtures("no_display")
def test_missing_egl_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("gladLoadGL error")

    monkeypatch.setattr(headless, "has_egl", lambda: False)
    with pytest.raises(UserError) as caught:
        headless.render_with_hint(WALKER, broken)
    message = "needs EGL to render without a display: apt-get install libegl1 libgl1-mesa-dri"
    assert str(caught.value) == f"{WALKER} {message}"
    assert headless.render_with_hint(WALKER, lambda: 3) == 3
    monkeypatch.setattr(headless, "has_egl", lambda: True)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(RuntimeError, match="gladLoadGL"):
        headless.render_with_hint(WALKER, broken)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_adapter(WALKER) is dm_control_suite
    for name in ("mujoco", "dm_control"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as caught:
        dm_control_suite.make(WALKER, {})
    assert str(caught.value) == f"{WALKER} needs the extra 'dmc': {install_hint('dmc')}"


def test_invalid_options_are_rejected() -> None:
    def error_of(**options: Any) -> str:
        with pytest.raises(UserError) as caught:
            dm_control_suite.make(WALKER, options)
        return str(caught.value)

    assert error_of(obs="picture") == f"{WALKER}: env.obs='picture': allowed are state, pixels, both"
    assert error_of(size=0) == f"{WALKER}: env.size=0 must be at least 1"
    assert error_of(grayscale=True) == f"{WALKER}: grayscale needs env.obs=pixels, not state"
    assert "has no option 'repeat', allowed: obs, size, camera, " in error_of(repeat=2)


def test_names_need_no_package() -> None:
    assert {WALKER, "dmc/cartpole-balance", "dmc/ball_in_cup-catch"} <= set(dm_control_suite.names())
    assert not dm_control_suite.supports("dmc/walker-fly")


# --- with dm_control ---


def test_names_are_those_of_the_suite() -> None:
    make("dmc/pendulum-swingup")  # chooses the renderer before the suite is imported
    from dm_control import suite

    assert sorted(dm_control_suite.names()) == sorted(f"dmc/{domain}-{task}" for domain, task in suite.ALL_TASKS)


def test_observations_equal_the_suites_in_its_order() -> None:
    env = make(WALKER)
    from dm_control import suite

    reference = suite.load("walker", "walk", task_kwargs={"random": 0})
    reference.task.random.seed(7)
    time_step = reference.reset()
    obs, info = env.reset(seed=7)
    rng = np.random.default_rng(0)
    assert info == {}
    for _ in range(20):
        expected = np.concatenate(
            [np.ravel(time_step.observation[key]) for key in ("orientations", "height", "velocity")]
        )
        np.testing.assert_array_equal(obs, expected.astype(np.float32))
        assert obs.dtype == np.float32
        action = rng.uniform(-1, 1, 6).astype(np.float32)
        obs, reward, terminated, truncated, _ = env.step(action)
        time_step = reference.step(action)
        assert reward == time_step.reward
        assert (terminated, truncated) == (False, False)


def test_time_limit_truncates_and_zero_discount_terminates() -> None:
    env = make("dmc/cartpole-balance", time_limit=0.05)  # steps of 10 ms
    env.reset(seed=0)
    ends = [env.step(np.zeros(1))[2:4] for _ in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]
    env = make("dmc/lqr-lqr_2_1", time_limit=1.0)
    env.reset(seed=0)
    with env.env.physics.reset_context():  # at rest at the goal
        env.env.physics.data.qpos[:], env.env.physics.data.qvel[:] = 0.0, 0.0
    assert env.step(np.zeros(1))[2:4] == (True, False)


def test_action_repeat_adds_rewards() -> None:
    pytest.importorskip("dm_control")
    once, thrice = envs.make(WALKER), envs.make(WALKER, action_repeat=3, time_limit=0.25)  # ten steps of 25 ms
    once.reset(seed=0)
    thrice.reset(seed=0)
    for steps in (3, 3, 3, 1):
        single_steps = [once.step(np.ones(6)) for _ in range(steps)]
        obs, reward, terminated, truncated, _ = thrice.step(np.ones(6))
        assert reward == sum(step[1] for step in single_steps)
        np.testing.assert_array_equal(obs, single_steps[-1][0])
        assert (terminated, truncated) == (False, steps == 1)
    assert thrice.metadata["render_fps"] == pytest.approx(40 / 3)


# `changed` lists the model arrays that a task changes
@pytest.mark.parametrize(
    ("task", "changed"),
    [
        ("walker-walk", set()),
        ("cheetah-run", set()),
        ("finger-spin", {"dof_damping", "site_rgba"}),
        ("reacher-hard", {"geom_pos", "geom_size"}),
        ("point_mass-hard", {"wrap_prm"}),
        ("manipulator-bring_ball", {"body_pos", "body_quat"}),
        ("humanoid-run", set()),
    ],
)
def test_state_is_restored_exactly(task: str, changed: set[str]) -> None:
    pytest.importorskip("dm_control")
    first, second = (make_vector(f"dmc/{task}", 1, "serial", options={"time_limit": 0.5}) for _ in range(2))
    rng = np.random.default_rng(0)
    first.reset(seed=1)
    second.reset(seed=2)
    space = first.single_action_space
    for steps in (0, 7):  # at the start and in the middle of an episode
        for _ in range(steps):
            first.step(rng.uniform(space.low, space.high)[None])
        state = first.state_dict()
        assert set(state["envs"][0]["env_state"]["model"]) == changed
        second.load_state_dict(state)
        assert second.inexact == []
        num_ends = 0
        for _ in range(60):  # past the end of an episode
            action = rng.uniform(space.low, space.high)[None]
            expected_step, step = first.step(action), second.step(action)
            for expected, actual in zip(expected_step[:4], step[:4], strict=True):
                assert actual.tobytes() == expected.tobytes()
            num_ends += int(step[3].sum())
        assert num_ends >= 1


def test_envs_without_a_seed_differ() -> None:
    first, second = make(WALKER), make(WALKER)
    assert not np.array_equal(first.reset()[0], second.reset()[0])
    assert first.render() is None


def test_pixels_are_stacked_and_restored() -> None:
    skip_without_egl()
    first, second = (make("dmc/cartpole-swingup", obs="pixels", size=32, action_repeat=4) for _ in range(2))
    obs, _ = first.reset(seed=0)
    assert (obs.shape, obs.dtype) == ((9, 32, 32), np.uint8)
    assert (obs[:3] == obs[6:]).all()
    obs = first.step(np.ones(1))[0]
    assert (obs[3:6] != obs[6:]).any()
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        np.testing.assert_array_equal(first.step(-np.ones(1))[0], second.step(-np.ones(1))[0])
    assert make("dmc/cartpole-swingup", obs="pixels", grayscale=True, stack=4).observation_space.shape == (4, 84, 84)


def test_obs_both_is_a_dict_of_state_and_image() -> None:
    skip_without_egl()
    env = make("dmc/cartpole-swingup", obs="both", size=24, render_mode="rgb_array")
    obs, _ = env.reset(seed=0)
    assert {key: value.shape for key, value in obs.items()} == {"state": (5,), "pixels": (24, 24, 3)}
    assert env.observation_space.contains(obs)
    assert env.render().shape == (240, 320, 3)
    env.close()
