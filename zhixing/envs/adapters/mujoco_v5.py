"""What Gymnasium's MuJoCo tasks get here: pictures instead of numbers, and states that can be saved.

Without these a resumed run would step through the episode again, and with pictures draw each of its steps.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import registry
from gymnasium.spaces import Box
from gymnasium.wrappers import TimeLimit

from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.headless import choose_renderer, drawn
from zhixing.envs.wrappers.pixels import wrap_pixels
from zhixing.errors import UserError

State = dict[str, Any]
HOME = "gymnasium.envs.mujoco"
OBSERVATIONS = ("state", "pixels")
PIXELS = ("size", "grey", "stack")  # options that go with obs=pixels
OPTIONS = ("obs", *PIXELS)
# what a step leaves behind and the next one reads: places and forces as they were before its last part
LEFT = (
    "xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "subtree_com",
    "cinert", "cvel", "cacc", "cfrc_int", "cfrc_ext", "qacc", "qfrc_actuator", "actuator_force", "sensordata",
)  # fmt: skip


def is_mujoco(name: str) -> bool:
    return str(registry[name].entry_point).startswith(HOME)


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    """`obs=pixels` shows the task in `size` by `size`, in colours or `grey`, the last `stack` pictures together."""
    options = dict(options)
    obs = options.pop("obs", "state")
    pixels = {key: options.pop(key) for key in PIXELS if key in options}
    if obs not in OBSERVATIONS:
        raise UserError(f"{name}: obs={obs!r} is none of {', '.join(OBSERVATIONS)}")
    if pixels and obs == "state":
        raise UserError(f"{name}: {', '.join(pixels)} go with obs=pixels, which is not set")
    if obs == "pixels":
        side = pixels.pop("size", 84)
        options |= {"render_mode": "rgb_array", "width": side, "height": side}
    if options.get("render_mode") is not None:
        choose_renderer()
        if not options.keys() & {"camera_id", "camera_name", "default_camera_config"}:
            options["camera_name"] = "track"  # follows the body; models without one are seen from where it starts
    env: gym.Env[Any, Any] = Saved(gym.make(name, disable_env_checker=True, **options))
    if obs == "state":
        return env
    return wrap_pixels(
        Seen(env, name, side),
        skip=1,
        pool="last",
        size=None,
        grey=pixels.get("grey", False),
        stack=pixels.get("stack", 3),
    )


class Saved(gym.Wrapper[Any, Any, Any, Any]):
    """A task that can be put back into the middle of an episode, to the bit."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        import mujoco

        self.mujoco, self.task = mujoco, env.unwrapped
        self.spec_of_state = mujoco.mjtState.mjSTATE_INTEGRATION  # with what the solver starts from
        self.limit: Any = env
        while not isinstance(self.limit, (TimeLimit, type(None))):
            self.limit = getattr(self.limit, "env", None)

    def state_dict(self) -> State:
        task: Any = self.task
        physics = np.empty(self.mujoco.mj_stateSize(task.model, self.spec_of_state))
        self.mujoco.mj_getState(task.model, task.data, physics, self.spec_of_state)
        return {
            "physics": physics,
            "left": {key: getattr(task.data, key).copy() for key in LEFT},
            "rng": dict(task.np_random.bit_generator.state),
            "steps": 0 if self.limit is None else self.limit._elapsed_steps,
        }

    def load_state_dict(self, state: State) -> None:
        task: Any = self.task
        self.env.reset()  # some wrappers want one before the first step
        self.mujoco.mj_setState(task.model, task.data, state["physics"], self.spec_of_state)
        for key in LEFT:  # never names from a file
            getattr(task.data, key)[...] = state["left"][key]
        task.np_random.bit_generator.state = state["rng"]
        if self.limit is not None:
            self.limit._elapsed_steps = state["steps"]


class Seen(gym.Wrapper[Any, Any, Any, Any]):
    """A task whose observations are its pictures."""

    def __init__(self, env: gym.Env[Any, Any], name: str, side: int) -> None:
        super().__init__(env)
        self.name = name
        self.observation_space = Box(0, 255, (side, side, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        _, info = self.env.reset(seed=seed, options=options)
        return self._picture(), info

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, info = self.env.step(action)
        return self._picture(), float(reward), terminated, truncated, info

    def state_dict(self) -> State:
        return {"task": self.env.state_dict(), "lookat": self._lookat().copy()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: State) -> None:
        self.env.load_state_dict(state["task"])  # type: ignore[attr-defined]
        self._lookat()[:] = state["lookat"]

    def _lookat(self) -> Array:
        """Where a camera that doesn't follow looks: at what stood there when the first picture was drawn."""
        renderer = self.env.get_wrapper_attr("mujoco_renderer")
        if renderer.viewer is None:
            self._picture()
        return renderer.viewer.cam.lookat

    def _picture(self) -> Array:
        picture: Any = drawn(self.name, self.env.render)
        return np.asarray(picture)
