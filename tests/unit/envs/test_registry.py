"""Names, options and back ends of environments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import pytest

from zhixing import envs
from zhixing.envs import make, make_vector, names
from zhixing.envs.options import check_options
from zhixing.envs.vector import backend_choice
from zhixing.envs.vector.serial import infer_env_spec
from zhixing.errors import UserError
from zhixing.utils.extras import install_hint


def error_of(name: str, **options: object) -> str:
    """Return the message of the `UserError` that `make` raises."""
    with pytest.raises(UserError) as caught:
        make(name, **options)
    return str(caught.value)


def test_names_are_the_newest_versions() -> None:
    known = names()
    assert {"CartPole-v1", "Taxi-v4", "HalfCheetah-v5", "toy/match", "toy/reach"} <= set(known)
    assert not {"CartPole-v0", "HalfCheetah-v4", "GymV21Environment-v0"} & set(known)
    assert not any(name.startswith(("phys2d/", "tabular/")) for name in known)


def test_unknown_name_suggests_the_closest_name() -> None:
    assert "did you mean 'CartPole-v1'" in error_of("CartPol-v1")
    assert "did you mean 'toy/match'" in error_of("toy/mach")
    assert "unknown environment" in error_of("nowhere/walk")


def test_wrong_version_suggests_the_newest_version() -> None:
    for wrong in ("CartPole-v7", "CartPole"):
        assert error_of(wrong) == f"there is no {wrong}; the newest version is 'CartPole-v1'"
    assert "'LunarLander-v3'" in error_of("LunarLander-v2")
    assert "'HalfCheetah-v5'" in error_of("HalfCheetah-v2")


def test_unknown_option_lists_the_allowed_ones_and_suggests_the_closest() -> None:
    message = error_of("CartPole-v1", sutton_reward=True)
    assert "CartPole-v1 has no option 'sutton_reward', allowed: sutton_barto_reward, render_mode" in message
    assert message.endswith("did you mean 'sutton_barto_reward'?")
    assert "toy/match has no option 'size'" in error_of("toy/match", size=3)
    with pytest.raises(UserError, match="no option 'size'"):
        make_vector("CartPole-v1", 2, options={"size": 3})


def test_option_of_wrong_type_is_rejected() -> None:
    assert error_of("CartPole-v1", sutton_barto_reward="maybe") == (
        "CartPole-v1: option sutton_barto_reward='maybe' is of type str; allowed is bool, such as False"
    )
    assert "option g='heavy' is of type str; allowed is float, such as 10.0" in error_of("Pendulum-v1", g="heavy")
    assert "allowed is list[str] | None" in error_of("FrozenLake-v1", desc=3)
    assert "option death='late' is of type str; allowed is int" in error_of("sample_envs:Counter", death="late")
    with pytest.raises(UserError, match="allowed is bool"):  # the native back end has the same rules
        make_vector("CartPole-v1", 4, "native", options={"sutton_barto_reward": "maybe"})


def test_option_types_are_checked_against_annotations_and_defaults() -> None:
    def constructor(
        flag=False, size=3, scale: float = 1.0, count: int = 1, shape: tuple[int, int] = (1, 1),  # type: ignore
        env_spec: list[str] | None = None, mode: Literal["a", "b"] = "a", where: str = "", later: Unheard = 0,  # noqa: F821
        wrong: int = "1", **rest: object,
    ) -> None: ...  # fmt: skip

    valid: list[dict[str, Any]] = [
        {"flag": True, "size": 2.5, "scale": 1, "count": 1e3, "shape": [2, 2], "layout": ["SF"], "mode": "b"},
        {"flag": 0, "size": np.int64(3), "scale": np.float32(1), "count": np.int32(2), "shape": np.array([1, 2])},
        {"flag": None, "scale": None, "count": None, "layout": None, "where": Path("here"), "later": "anything"},
        {"wrong": "2", "rest": object(), "unknown": "accepted by **rest"},
    ]
    for options in valid:
        check_options("name", constructor, options)
    for wrong in (
        {"flag": 2},
        {"flag": "no"},
        {"size": "big"},
        {"count": 1.5},
        {"shape": 3},
        {"mode": "c"},
        {"where": 1},
    ):
        with pytest.raises(UserError, match=f"option {next(iter(wrong))}="):
            check_options("name", constructor, wrong)


def test_error_contains_the_options_that_the_constructor_rejected() -> None:
    assert "FrozenLake-v1 can't be made with (map_name='9x9')" in error_of("FrozenLake-v1", map_name="9x9")


def test_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_missing(*_: object, **__: object) -> None:
        raise gym.error.DependencyNotInstalled("run something else")

    for name, extra in (("HalfCheetah-v5", "mujoco"), ("LunarLander-v3", "box2d"), ("Taxi-v4", "toy-text")):
        with monkeypatch.context() as patch:
            patch.setattr("zhixing.envs.adapters.gymnasium_ids.load_env_creator", raise_missing)
            assert error_of(name) == f"{name} needs the extra '{extra}': {install_hint(extra)}"


def test_missing_package_for_rendering_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_vector("Taxi-v4", 1, "serial", render_mode="rgb_array")
    env.reset(seed=0)

    def raise_missing() -> None:
        raise gym.error.DependencyNotInstalled("pygame")

    monkeypatch.setattr(env.group.sub_envs[0].env, "render", raise_missing)
    with pytest.raises(UserError, match=re.escape(install_hint("toy-text"))):
        env.render()


def test_user_env_is_imported_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_env_module.py").write_text(
        "from zhixing.envs.toy import Match\nclass Mine(Match):\n    cues = 3\ndef build(): return Mine()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    assert make("my_env_module:build").action_space.n == 3
    env = make_vector("my_env_module:Mine", 2, "process", 2)
    assert env.reset(seed=0)[0].shape == (2, 3)
    env.close()


def test_errors_in_user_envs_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_broken_env.py").write_text("def helper():\n    return 1 / 0\nhelper()\n")
    (tmp_path / "my_env_with_missing_import.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "there is no module 'nowhere'" in error_of("nowhere.at_all:Env")
    assert "did you mean 'Counter'" in error_of("sample_envs:Conter")
    assert "sample_envs:not_an_env returned an instance of int, not a gymnasium.Env" in error_of(
        "sample_envs:not_an_env"
    )
    assert "is a int, not a class or function" in error_of("sample_envs:number")
    misspelled = error_of("sample_envs:Counter", deth=3)
    assert "has no option 'deth', allowed: death, limit, action_repeat, info_fields, max_episode_steps" in misspelled
    assert misspelled.endswith("did you mean 'death'?")
    broken = error_of("my_broken_env:Env")
    assert "return 1 / 0" in broken
    assert "ZeroDivisionError" in broken
    assert "No module named 'no_such_package'" in error_of("my_env_with_missing_import:Env")


def test_unknown_backend_suggests_the_closest() -> None:
    with pytest.raises(UserError, match="did you mean 'process'"):
        make_vector("toy/match", 2, "proces")


def test_auto_selects_native_if_available() -> None:
    assert make_vector("CartPole-v1", 2).backend == "native"
    assert make_vector("CartPole-v1", 1).backend == "serial"


def test_auto_selects_serial_for_cheap_envs_and_workers_for_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_choice, "cpu_count", lambda: 2)
    # higher than the defaults, because coverage and a busy machine slow down the steps
    monkeypatch.setattr(backend_choice, "WAKE_SECONDS", {"process": 2e-3, "mixed": 2e-3})
    env = make_vector("toy/match", 8)
    assert (env.backend, env.workers) == ("serial", 1)
    env = make_vector("sample_envs:Sleeper", 5, options={"always": 0.002})
    assert (env.backend, env.workers) == ("process", 5)  # it sleeps, so more workers than CPUs help
    env.close()
    monkeypatch.setattr(backend_choice, "WAKE_SECONDS", {"process": 1.0, "mixed": 0.0})
    env = make_vector("toy/match", 4)
    assert (env.backend, env.workers) == ("mixed", 2)  # one of the two workers is this process
    env.close()
    assert make_vector("toy/match", 4, idle=False).backend == "serial"
    monkeypatch.setattr(backend_choice, "cpu_count", lambda: 1)
    assert make_vector("sample_envs:Sleeper", 4, options={"always": 0.002}).backend == "serial"


def test_auto_compares_saved_time_with_wake_up_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_choice, "cpu_count", lambda: 2)
    env_spec = infer_env_spec(envs.RegisteredEnv("toy/match"))

    def choose(num: int, step_seconds: float, workers: int = 2, waits: bool = False, idle: bool = True) -> str:
        return backend_choice.choose_backend(num, backend_choice.Probe(env_spec, step_seconds, waits), workers, idle)

    # two workers save half the time of 8 steps: 400, 120 and 40 us for steps of 100, 30 and 10 us
    assert choose(8, 100e-6) == choose(8, 30e-6) == "mixed"
    assert choose(8, 10e-6) == "serial"
    assert choose(8, 100e-6, idle=False) == "process"
    assert choose(8, 30e-6, idle=False) == "serial"
    assert choose(8, 1e-3, workers=8, waits=True) == "process"
    assert choose(1, 1.0, workers=1) == "serial"


@pytest.mark.parametrize(
    ("name", "best", "best_return", "random_return"),
    [
        ("toy/match", lambda obs: obs.argmax(-1), 10.0, 2.5),
        ("toy/reach", lambda obs: np.clip((obs[:, 1:] - obs[:, :1]) / 0.3, -1, 1), -0.80, -14.0),
        ("toy/throw", lambda obs: {"basket": obs[:, :4].argmax(-1), "distance": obs[:, 4]}, 10.0, 1.04),
    ],
)
def test_toy_returns_are_as_documented(name: str, best: object, best_return: float, random_return: float) -> None:
    env = make_vector(name, 50, "serial")
    env.action_space.seed(0)
    for policy, expected in ((best, best_return), (lambda _: env.action_space.sample(), random_return)):
        obs, _ = env.reset(seed=0)
        returns, done = np.zeros(50), []
        while len(done) < 500:
            obs, reward, terminated, truncated, _ = env.step(policy(obs))
            returns += reward
            assert not terminated.any()
            if truncated.all():
                done += returns.tolist()
                returns[:] = 0
        assert np.mean(done) == pytest.approx(expected, abs=4 * np.std(done) / len(done) ** 0.5 + 1e-6)


@pytest.mark.parametrize("name", ["toy/match", "toy/reach", "CartPole-v1"])
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_rendered_images_change_with_the_state(name: str, backend: str) -> None:
    env = make_vector(name, 2, backend, workers=1, render_mode="rgb_array")
    env.reset(seed=0)
    frames = []
    for _ in range(8):
        env.step(np.ones_like(env.action_space.sample()))
        frames.append(env.render(1))
    assert frames[0].dtype == np.uint8
    assert frames[0].shape[2] == 3
    assert any(not np.array_equal(frames[0], frame) for frame in frames)
    env.close()


def test_rendering_without_render_mode_is_rejected() -> None:
    for backend in ("serial", "native"):
        env = make_vector("CartPole-v1", 2, backend)
        env.reset(seed=0)
        with pytest.raises(UserError, match="render_mode='rgb_array'"):
            env.render()
