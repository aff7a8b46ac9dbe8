"""The DeepMind Control Suite (package dm-control): `dmc/walker-walk` is the task walk of the domain walker.

Observations are concatenated into one vector, in the suite's order. The suite's time limit truncates an episode; a
discount of 0 terminates it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict

from zhixing.envs.options import construct_env
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import State
from zhixing.envs.wrappers.headless import import_with_egl, render_with_hint
from zhixing.envs.wrappers.pixels import wrap_pixels
from zhixing.errors import UserError
from zhixing.utils.extras import require_extra

DOMAINS = {
    "acrobot": "swingup swingup_sparse",
    "ball_in_cup": "catch",
    "cartpole": "balance balance_sparse swingup swingup_sparse two_poles three_poles",
    "cheetah": "run",
    "dog": "stand walk trot run fetch",
    "finger": "spin turn_easy turn_hard",
    "fish": "upright swim",
    "hopper": "stand hop",
    "humanoid": "stand walk run run_pure_state",
    "humanoid_CMU": "stand walk run",
    "lqr": "lqr_2_1 lqr_6_2",
    "manipulator": "bring_ball bring_peg insert_ball insert_peg",
    "pendulum": "swingup",
    "point_mass": "easy hard",
    "quadruped": "walk run escape fetch",
    "reacher": "easy hard",
    "stacker": "stack_2 stack_4",
    "swimmer": "swimmer6 swimmer15",
    "walker": "stand walk run",
}
OBSERVATIONS = ("state", "pixels", "both")
STATE_TYPES = (bool, int, float, np.ndarray)  # attributes of a dm_control task that are saved
RENDER_SIZE = (240, 320)  # height and width
CONSTANT_FIELDS = ("bvh", "flex", "mesh", "name", "oct", "skin", "tex", "text")  # large model arrays no task changes


def names() -> list[str]:
    return [f"dmc/{domain}-{task}" for domain, tasks in DOMAINS.items() for task in tasks.split()]


def supports(name: str) -> bool:
    return name in names()


def own_options(name: str, options: dict[str, Any]) -> set[str]:
    return {"stack", "action_repeat"} if options.get("obs") == "pixels" else set()


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    constructor = partial(make_env, name)
    env: gym.Env[Any, Any] = construct_env(name, constructor, options)
    return env


def make_env(
    name: str,
    /,
    obs: str = "state",
    size: int = 84,
    camera: int | str = 0,
    grayscale: bool = False,
    stack: int = 3,
    action_repeat: int = 1,
    time_limit: float | None = None,
    render_mode: str | None = None,
) -> gym.Env[Any, Any]:
    """Make an environment.

    `obs` is "state" (a vector), "pixels" (the last `stack` images of `size` x `size` pixels, rendered by `camera`), or
    "both" (a dict of the vector and one image). Each action is repeated for `action_repeat` steps, whose rewards are
    summed. `time_limit` is in seconds.
    """
    if obs not in OBSERVATIONS:
        raise UserError(f"{name}: env.obs={obs!r}: allowed are {', '.join(OBSERVATIONS)}")
    if size < 1:
        raise UserError(f"{name}: env.size={size} must be at least 1")
    if obs != "pixels" and grayscale:
        raise UserError(f"{name}: grayscale needs env.obs=pixels, not {obs}")
    env = DMControlEnv(name, obs, size, camera, time_limit, render_mode)
    if obs != "pixels":
        return env
    return wrap_pixels(env, action_repeat=action_repeat, pool="last", grayscale=grayscale, size=None, stack=stack)


def _import_packages() -> tuple[Any, Any]:
    import mujoco
    from dm_control import suite

    return mujoco, suite


class DMControlEnv(gym.Env[Any, Any]):
    """One task. Observations are a state vector, an image [size, size, 3], or a dict of both."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 40}  # noqa: RUF012  (as in gym.Env)

    def __init__(
        self,
        name: str,
        obs: str,
        size: int,
        camera: int | str,
        time_limit: float | None,
        render_mode: str | None,
    ) -> None:
        with require_extra(name, "dmc"):
            mujoco, suite = import_with_egl(_import_packages)
        self.mujoco = mujoco
        domain, task = name.removeprefix("dmc/").split("-")
        # lqr builds its model with this seed, so all environments have the same model; `reset` seeds the episodes
        task_kwargs: State = {"random": 0} if time_limit is None else {"random": 0, "time_limit": time_limit}
        with _silence_absl():
            self.env: Any = suite.load(domain, task, task_kwargs=task_kwargs)
        self.name, self.obs_kind, self.size, self.camera = name, obs, size, camera
        self.render_mode, self.seeded = render_mode, False
        self.metadata = {**self.metadata, "render_fps": 1.0 / self.env.control_timestep()}
        action = self.env.action_spec()
        self.action_space = Box(action.minimum.astype(np.float32), action.maximum.astype(np.float32), dtype=np.float32)
        state_size = sum(int(np.prod(spec.shape)) for spec in self.env.observation_spec().values())
        spaces: dict[str, gym.Space[Any]] = {
            "state": Box(-np.inf, np.inf, (state_size,), np.float32),
            "pixels": Box(0, 255, (size, size, 3), np.uint8),
        }
        self.observation_space = Dict(spaces) if obs == "both" else spaces[obs]
        self.initial_model = {key: array.copy() for key, array in self._model_arrays().items()}
        self.state_spec = mujoco.mjtState.mjSTATE_INTEGRATION

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or not self.seeded:
            self.env.task.random.seed(seed)
            self.seeded = True
        return self._observe(self.env.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, terminated, truncated, info = self.step_without_obs(action)
        return self.get_obs(), reward, terminated, truncated, info

    def step_without_obs(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """Step without rendering an image."""
        self.time_step = self.env.step(action)
        terminated = bool(self.time_step.last() and self.time_step.discount == 0.0)
        return float(self.time_step.reward), terminated, bool(self.time_step.last() and not terminated), {}

    def get_obs(self) -> Any:
        return self._observe(self.time_step)

    def _observe(self, time_step: Any) -> Any:
        if self.obs_kind == "pixels":
            return self._render_image(self.size, self.size)
        state = np.concatenate([np.ravel(part) for part in time_step.observation.values()]).astype(np.float32)
        return (
            state if self.obs_kind == "state" else {"state": state, "pixels": self._render_image(self.size, self.size)}
        )

    def _render_image(self, height: int, width: int) -> Array:
        image: Array = render_with_hint(
            self.name, lambda: self.env.physics.render(height=height, width=width, camera_id=self.camera)
        )
        return image

    def render(self) -> Array | None:
        return None if self.render_mode is None else self._render_image(*RENDER_SIZE)

    def close(self) -> None:
        self.env.close()

    def state_dict(self) -> State:
        """Return the physics, the task's changes to the model, the task's variables and its random state."""
        physics, task = self.env.physics, self.env.task
        model, data = physics.model.ptr, physics.data.ptr
        state = np.empty(self.mujoco.mj_stateSize(model, self.state_spec))
        self.mujoco.mj_getState(model, data, state, self.state_spec)
        model_changes = {
            key: array.copy()
            for key, array in self._model_arrays().items()
            if not np.array_equal(array, self.initial_model[key])
        }
        return {
            "physics": state,
            "sensors": data.sensordata.copy(),
            "model": model_changes,
            "task": {key: np.array(value) for key, value in vars(task).items() if isinstance(value, STATE_TYPES)},
            "random": task.random.get_state(legacy=False),
            "steps": self.env._step_count,
            "over": self.env._reset_next_step,
        }

    def load_state_dict(self, state: State) -> None:
        physics, task = self.env.physics, self.env.task
        model, data = physics.model.ptr, physics.data.ptr
        for key, array in self._model_arrays().items():
            array[...] = state["model"].get(key, self.initial_model[key])
        self.mujoco.mj_setState(model, data, state["physics"], self.state_spec)
        # a dm_control step also ends with mj_step1: positions and velocities are propagated, forces are older
        self.mujoco.mj_step1(model, data)
        data.sensordata[:] = state["sensors"]
        variables = {key for key, value in vars(task).items() if value is None or isinstance(value, STATE_TYPES)}
        if not variables >= set(state["task"]):
            unknown_keys = sorted(set(state["task"]) - variables)
            raise UserError(f"{self.name}: the saved state has unknown task variables {unknown_keys}")
        vars(task).update({key: value.copy() if value.ndim else value.item() for key, value in state["task"].items()})
        task.random.set_state(state["random"])
        self.env._step_count, self.env._reset_next_step = state["steps"], state["over"]
        self.seeded = True

    def _model_arrays(self) -> dict[str, Array]:
        """Return views of the model's arrays. Tasks change them, such as target positions, gains and terrain."""
        model = self.env.physics.model.ptr
        fields = {key: getattr(model, key) for key in dir(model) if not key.startswith(("_", *CONSTANT_FIELDS))}
        return {key: value for key, value in fields.items() if isinstance(value, np.ndarray) and value.size}


@contextlib.contextmanager
def _silence_absl() -> Iterator[None]:
    """Hide MuJoCo's warnings about deprecated keywords in dm_control's models, which appear for every environment."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
