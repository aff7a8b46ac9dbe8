"""Gymnasium's MuJoCo environments with optional pixel observations and a state that can be saved.

Without the saved state, a resumed run would have to replay the episode, and with pixels also render each of its steps.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import registry
from gymnasium.spaces import Box
from gymnasium.wrappers import TimeLimit

from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.wrappers.headless import choose_egl, render_with_hint
from zhixing.envs.wrappers.pixels import wrap_pixels
from zhixing.errors import UserError

State = dict[str, Any]
MODULE = "gymnasium.envs.mujoco"
OBSERVATIONS = ("state", "pixels")
# without obs=pixels, the last two are those of every environment
IMAGE_OPTIONS = ("size", "grayscale", "stack", "action_repeat")
OPTIONS = ("obs", *IMAGE_OPTIONS)
# results of one step that the next one reads: positions and forces before its last substep
DERIVED_FIELDS = (
    "xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "subtree_com",
    "cinert", "cvel", "cacc", "cfrc_int", "cfrc_ext", "qacc", "qfrc_actuator", "actuator_force", "sensordata",
)  # fmt: skip


def is_mujoco(name: str) -> bool:
    return str(registry[name].entry_point).startswith(MODULE)


def makes_images(name: str, options: dict[str, Any]) -> bool:
    return is_mujoco(name) and options.get("obs") == "pixels"


def make(name: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    """Make an environment. With `obs=pixels`, an observation is the last `stack` images of `size` x `size` pixels."""
    options = dict(options)
    obs = options.pop("obs", "state")
    image_options = {key: options.pop(key) for key in IMAGE_OPTIONS if key in options}
    if obs not in OBSERVATIONS:
        raise UserError(f"{name}: env.obs={obs!r}: allowed are {', '.join(OBSERVATIONS)}")
    if image_options and obs == "state":
        raise UserError(f"{name}: {', '.join(image_options)} need env.obs=pixels")
    if obs == "pixels":
        size = image_options.pop("size", 84)
        options |= {"render_mode": "rgb_array", "width": size, "height": size}
    if options.get("render_mode") is not None:
        choose_egl()
        if not options.keys() & {"camera_id", "camera_name", "default_camera_config"}:
            options["camera_name"] = "track"  # follows the body; without such a camera, MuJoCo uses a fixed one
    env: gym.Env[Any, Any] = SavableMujoco(gym.make(name, disable_env_checker=True, **options))
    if obs == "state":
        return env
    return wrap_pixels(
        PixelObservation(env, name, size),
        action_repeat=image_options.get("action_repeat", 1),
        pool="last",
        size=None,
        grayscale=image_options.get("grayscale", False),
        stack=image_options.get("stack", 3),
    )


class SavableMujoco(gym.Wrapper[Any, Any, Any, Any]):
    """Save and restore an environment in the middle of an episode, bit for bit."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        import mujoco

        self.mujoco, self.base = mujoco, env.unwrapped
        self.state_spec = mujoco.mjtState.mjSTATE_INTEGRATION  # includes the solver's warm start
        self.time_limit: Any = env
        while not isinstance(self.time_limit, (TimeLimit, type(None))):
            self.time_limit = getattr(self.time_limit, "env", None)

    def state_dict(self) -> State:
        base: Any = self.base
        physics = np.empty(self.mujoco.mj_stateSize(base.model, self.state_spec))
        self.mujoco.mj_getState(base.model, base.data, physics, self.state_spec)
        return {
            "physics": physics,
            "derived": {key: getattr(base.data, key).copy() for key in DERIVED_FIELDS},
            "rng": dict(base.np_random.bit_generator.state),
            "steps": 0 if self.time_limit is None else self.time_limit._elapsed_steps,
        }

    def load_state_dict(self, state: State) -> None:
        base: Any = self.base
        self.env.reset()  # some wrappers require it before the first step
        self.mujoco.mj_setState(base.model, base.data, state["physics"], self.state_spec)
        for key in DERIVED_FIELDS:  # not the keys of `state`, which may come from an untrusted file
            getattr(base.data, key)[...] = state["derived"][key]
        base.np_random.bit_generator.state = state["rng"]
        if self.time_limit is not None:
            self.time_limit._elapsed_steps = state["steps"]


class PixelObservation(gym.Wrapper[Any, Any, Any, Any]):
    """Replace observations with rendered images."""

    def __init__(self, env: gym.Env[Any, Any], name: str, size: int) -> None:
        super().__init__(env)
        self.name = name
        self.observation_space = Box(0, 255, (size, size, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        _, info = self.env.reset(seed=seed, options=options)
        return self._render_image(), info

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, info = self.env.step(action)
        return self._render_image(), float(reward), terminated, truncated, info

    def step_without_obs(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """Step without rendering."""
        _, reward, terminated, truncated, info = self.env.step(action)
        return float(reward), terminated, truncated, info

    def get_obs(self) -> Array:
        return self._render_image()

    def state_dict(self) -> State:
        return {"env": self.env.state_dict(), "lookat": self._lookat().copy()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: State) -> None:
        self.env.load_state_dict(state["env"])  # type: ignore[attr-defined]
        self._lookat()[:] = state["lookat"]

    def _lookat(self) -> Array:
        """Return the point that a fixed camera looks at. The first rendered image determines it."""
        renderer = self.env.get_wrapper_attr("mujoco_renderer")
        if renderer.viewer is None:
            self._render_image()
        return renderer.viewer.cam.lookat

    def _render_image(self) -> Array:
        image: Any = render_with_hint(self.name, self.env.render)
        return np.asarray(image)
