"""Tasks of DM Control's suite (package dm-control): `dmc/walker-walk` is the task walk of the domain walker.

Observations are one vector of all that the task shows, in its own order. An episode ends by its time, which truncates;
only where the task says that nothing follows (its discount is 0) it terminates.
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

from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import State
from zhixing.envs.wrappers.agents import built
from zhixing.envs.wrappers.headless import drawn, imported
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
NUMBERS = (bool, int, float, np.ndarray)
PICTURE = (240, 320)  # height and width of what `render` gives
LOOKS = ("bvh", "flex", "mesh", "name", "oct", "skin", "tex", "text")  # large arrays of a model that no task changes


def names() -> list[str]:
    return [f"dmc/{domain}-{task}" for domain, tasks in DOMAINS.items() for task in tasks.split()]


def supports(name: str) -> bool:
    return name in names()


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    constructor = partial(shown, name)
    env: gym.Env[Any, Any] = built(name, constructor, options, named=constructor)
    return env


def shown(
    name: str,
    /,
    obs: str = "state",
    size: int = 84,
    camera: int | str = 0,
    grey: bool = False,
    stack: int | None = None,
    action_repeat: int = 1,
    time_limit: float | None = None,
    render_mode: str | None = None,
) -> gym.Env[Any, Any]:
    """`obs` is state, pixels (`size` by `size`, seen by `camera`, the last 3 or `stack` pictures together) or both: a
    dict of numbers and one picture. An action is held for `action_repeat` of the task's steps, whose rewards are added;
    `time_limit` is in seconds."""
    if obs not in OBSERVATIONS:
        raise UserError(f"{name}: obs={obs!r} is none of {', '.join(OBSERVATIONS)}")
    if action_repeat < 1 or size < 1:
        raise UserError(f"{name}: action_repeat={action_repeat} and size={size} must be at least 1")
    if obs != "pixels" and (grey or stack is not None):
        raise UserError(f"{name}: grey and stack go with obs=pixels, not with obs={obs}")
    env = Control(name, obs, size, camera, action_repeat, time_limit, render_mode)
    if obs != "pixels":
        return env
    return wrap_pixels(env, skip=1, pool="last", grey=grey, size=None, stack=3 if stack is None else stack)


def _packages() -> tuple[Any, Any]:
    import mujoco
    from dm_control import suite

    return mujoco, suite


class Control(gym.Env[Any, Any]):
    """One task, its observations a vector of numbers, a picture [size, size, 3], or both."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 40}  # noqa: RUF012  (as in gym.Env)

    def __init__(
        self,
        name: str,
        obs: str,
        size: int,
        camera: int | str,
        action_repeat: int,
        time_limit: float | None,
        render_mode: str | None,
    ) -> None:
        with require_extra(name, "dmc"):
            mujoco, suite = imported(_packages)
        self.mujoco = mujoco
        domain, task = name.removeprefix("dmc/").split("-")
        # lqr builds its model with this seed: one model for all copies; the first reset seeds the episodes
        settings: State = {"random": 0} if time_limit is None else {"random": 0, "time_limit": time_limit}
        with _quiet():
            self.env: Any = suite.load(domain, task, task_kwargs=settings)
        self.name, self.kind, self.size, self.camera, self.action_repeat = name, obs, size, camera, action_repeat
        self.render_mode, self.seeded = render_mode, False
        self.metadata = {**self.metadata, "render_fps": 1.0 / (self.env.control_timestep() * action_repeat)}
        action = self.env.action_spec()
        self.action_space = Box(action.minimum.astype(np.float32), action.maximum.astype(np.float32), dtype=np.float32)
        numbers = sum(int(np.prod(spec.shape)) for spec in self.env.observation_spec().values())
        spaces: dict[str, gym.Space[Any]] = {
            "state": Box(-np.inf, np.inf, (numbers,), np.float32),
            "pixels": Box(0, 255, (size, size, 3), np.uint8),
        }
        self.observation_space = Dict(spaces) if obs == "both" else spaces[obs]
        self.built = {key: value.copy() for key, value in self._model().items()}
        self.state_spec = mujoco.mjtState.mjSTATE_INTEGRATION

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or not self.seeded:
            self.env.task.random.seed(seed)
            self.seeded = True
        return self._observe(self.env.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = 0.0
        for _ in range(self.action_repeat):
            shown = self.env.step(action)
            reward += float(shown.reward)
            if shown.last():
                break
        terminated = bool(shown.last() and shown.discount == 0.0)
        return self._observe(shown), reward, terminated, bool(shown.last() and not terminated), {}

    def _observe(self, shown: Any) -> Any:
        if self.kind == "pixels":
            return self._picture(self.size, self.size)
        state = np.concatenate([np.ravel(part) for part in shown.observation.values()]).astype(np.float32)
        return state if self.kind == "state" else {"state": state, "pixels": self._picture(self.size, self.size)}

    def _picture(self, height: int, width: int) -> Array:
        picture: Array = drawn(
            self.name, lambda: self.env.physics.render(height=height, width=width, camera_id=self.camera)
        )
        return picture

    def render(self) -> Array | None:
        return None if self.render_mode is None else self._picture(*PICTURE)

    def close(self) -> None:
        self.env.close()

    # -------------------------------------------------------------- the middle of an episode

    def state_dict(self) -> State:
        """Physics with what the solver starts from, what the task changed of its model, its numbers and randomness."""
        physics, task = self.env.physics, self.env.task
        model, data = physics.model.ptr, physics.data.ptr
        state = np.empty(self.mujoco.mj_stateSize(model, self.state_spec))
        self.mujoco.mj_getState(model, data, state, self.state_spec)
        changed = {key: now.copy() for key, now in self._model().items() if not np.array_equal(now, self.built[key])}
        return {
            "physics": state,
            "sensors": data.sensordata.copy(),
            "model": changed,
            "task": {key: np.array(value) for key, value in vars(task).items() if isinstance(value, NUMBERS)},
            "random": task.random.get_state(legacy=False),
            "steps": self.env._step_count,
            "over": self.env._reset_next_step,
        }

    def load_state_dict(self, state: State) -> None:
        physics, task = self.env.physics, self.env.task
        model, data = physics.model.ptr, physics.data.ptr
        for key, now in self._model().items():
            now[...] = state["model"].get(key, self.built[key])
        self.mujoco.mj_setState(model, data, state["physics"], self.state_spec)
        # as after a step of DM Control: what follows from positions and speeds is there, forces are those before
        self.mujoco.mj_step1(model, data)
        data.sensordata[:] = state["sensors"]
        numbers = {key for key, value in vars(task).items() if value is None or isinstance(value, NUMBERS)}
        if not numbers >= set(state["task"]):
            raise UserError(
                f"the saved state names {sorted(set(state['task']) - numbers)}, which are no numbers of a task"
            )
        vars(task).update({key: value.copy() if value.ndim else value.item() for key, value in state["task"].items()})
        task.random.set_state(state["random"])
        self.env._step_count, self.env._reset_next_step = state["steps"], state["over"]
        self.seeded = True

    def _model(self) -> dict[str, Array]:
        """The arrays of the model, live: tasks move targets, tilt gains and raise hills in it."""
        model = self.env.physics.model.ptr
        found = {key: getattr(model, key) for key in dir(model) if not key.startswith(("_", *LOOKS))}
        return {key: value for key, value in found.items() if isinstance(value, np.ndarray) and value.size}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """MuJoCo warns of old words in DM Control's models, once for each copy of a task."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
