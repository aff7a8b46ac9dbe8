"""SMAX (package jaxmarl): StarCraft-like battles against a scripted enemy in JAX, such as `smax/3m`.

Each allied unit is an agent. The team is rewarded for damage and for winning. As in JaxMARL, dead units still receive
the team's reward.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Tree
from zhixing.envs.env_spec import INFO_KEYS
from zhixing.envs.options import construct_env
from zhixing.envs.vector.base import Info, Result
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import State
from zhixing.utils.extras import require_extra

MAPS = (
    "3m", "2s3z", "25m", "3s5z", "8m", "5m_vs_6m", "10m_vs_11m", "27m_vs_30m", "3s5z_vs_3s6z", "3s_vs_5z", "6h_vs_8z",
    "smacv2_5_units", "smacv2_10_units", "smacv2_20_units",
)  # fmt: skip
STOP = 4  # JaxMARL's no-op action
PIXELS = 320  # side of a rendered image
ALLY, ENEMY, GROUND = (90, 140, 240), (230, 90, 80), (40, 40, 40)


def names() -> list[str]:
    return [f"smax/{map_name}" for map_name in MAPS]


def supports(name: str) -> bool:
    return name in names()


def make(name: str, options: dict[str, Any]) -> SmaxEnv:
    constructor = partial(SmaxEnv, name)
    env: SmaxEnv = construct_env(name, constructor, options, signature=partial(_options, name))
    return env


def _options(
    name: str,
    /,
    max_steps: int = 100,
    enemy_shoots: bool = True,
    attack_mode: str = "closest",
    see_enemy_actions: bool = True,
    walls_cause_death: bool = True,
    won_battle_bonus: float = 1.0,
    observation_type: str = "unit_list",
    render_mode: str | None = None,
) -> None:
    """Declare the options, so that they can be checked without importing JAX."""


@contextlib.contextmanager
def _silence_import() -> Iterator[None]:
    """Hide JaxMARL's messages about missing parts, and undo its replacement of `sys.stdout` and `sys.stderr`."""
    streams = {name: vars(sys)[name] for name in ("stdout", "stderr", "__stdout__")}
    vars(sys).update(stdout=io.StringIO(), __stdout__=io.StringIO())
    try:
        yield
    finally:
        vars(sys).update(streams)


class Battle:
    """One battle as pure functions, which JAX can compile and vectorize.

    `reset` and `step` return the next random key, the state, and a dict of `obs`, `mask`, `state` and `alive`.
    """

    def __init__(self, name: str, options: State) -> None:
        with require_extra(name, "smax"):
            import jax

            with _silence_import():
                from jaxmarl.environments.smax import HeuristicEnemySMAX, map_name_to_scenario
        self.jax, self.jnp = jax, jax.numpy
        self.env = HeuristicEnemySMAX(scenario=map_name_to_scenario(name.removeprefix("smax/")), **options)
        self.num_agents = int(self.env.num_allies)
        self.spaces = Spaces(
            # features are scaled to about [-1, 1], but JaxMARL doesn't enforce these bounds
            Box(-np.inf, np.inf, (int(self.env.obs_size),), np.float32),
            Discrete(int(self.env.num_ally_actions)),
            num_agents=self.num_agents,
            mask=int(self.env.num_ally_actions),
            state=int(self.env.state_size),
            alive=True,
            reward_kind="shared",
        )

    def reset(self, key: Any) -> tuple[Any, Any, dict[str, Any]]:
        key, reset_key = self.jax.random.split(key)
        obs, state = self.env.reset(reset_key)
        return key, self._strengthen_types(state), self._observe(obs, state)

    def step(self, key: Any, state: Any, actions: Any) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
        """Also return a dict of `reward`, `terminated`, `truncated` and `won`."""
        jnp, env = self.jnp, self.env
        key, step_key = self.jax.random.split(key)
        actions = jnp.where(self._alive(state), actions, STOP)
        obs, state, rewards, dones, _ = env.step_env(step_key, state, dict(zip(env.agents, actions, strict=True)))
        allies_alive, enemies_alive = self._alive(state).any(), state.state.unit_alive[self.num_agents :].any()
        terminated = ~(allies_alive & enemies_alive)
        results = {
            "reward": jnp.stack([rewards[agent] for agent in env.agents]),
            "terminated": terminated,
            "truncated": dones["__all__"] & ~terminated,  # JaxMARL reports both as done; its limit is max_steps + 1
            "won": allies_alive & ~enemies_alive,
        }
        return key, self._strengthen_types(state), self._observe(obs, state), results

    def _strengthen_types(self, state: Any) -> Any:
        """Remove JAX's weak types, which differ between `reset` and `step`: `step` would be compiled twice."""
        return self.jax.tree.map(lambda leaf: leaf.astype(leaf.dtype), state)

    def _alive(self, state: Any) -> Any:
        return state.state.unit_alive[: self.num_agents]

    def _observe(self, obs: dict[str, Any], state: Any) -> dict[str, Any]:
        jnp, agents = self.jnp, self.env.agents
        alive = self._alive(state)
        available = self.env.get_avail_actions(state)
        mask = jnp.stack([available[agent] for agent in agents]).astype(bool)
        only_first = jnp.arange(mask.shape[1]) == 0  # dead units have only action 0 here, but STOP in JaxMARL
        return {
            "obs": jnp.stack([obs[agent] for agent in agents]),
            "mask": jnp.where(alive[:, None], mask, only_first),
            "state": obs["world_state"],
            "alive": alive,
        }


class SmaxEnv(gym.Env[Any, Any]):
    """One battle. `info["won"]` is true if all enemies are dead and an ally is alive."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8, "logged_info_keys": ("won",)}  # noqa: RUF012  (as in gym.Env)
    reward_kind = "shared"

    def __init__(self, name: str, /, render_mode: str | None = None, **options: Any) -> None:
        self.battle = Battle(name, options)
        self.render_mode = render_mode
        spaces = self.battle.spaces
        self.num_agents, self.observation_space, self.action_space = spaces.num_agents, spaces.obs, spaces.action
        self._reset, self._step = self.battle.jax.jit(self.battle.reset), self.battle.jax.jit(self.battle.step)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        # a new key for every episode makes `np_random` the only source of randomness
        key = self.battle.jax.random.PRNGKey(int(self.np_random.integers(2**31)))
        self.key, self.state, outputs = self._reset(key)
        return _to_numpy(outputs)

    def step(self, action: Any) -> tuple[Any, Array, bool, bool, dict[str, Any]]:
        self.key, self.state, outputs, results = self._step(self.key, self.state, np.asarray(action, np.int32))
        obs, info = _to_numpy(outputs)
        info["won"] = bool(results["won"])
        return obs, np.array(results["reward"]), bool(results["terminated"]), bool(results["truncated"]), info

    def render(self) -> Array:
        return _render(self.battle, self.state.state)


class NativeSmax:
    """N battles on one map. One compiled call steps them all and resets those that end."""

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset(_options.__annotations__) - {"name", "return", "render_mode"}
    logged_info_keys = ("won",)

    def __init__(self, num: int, **options: Any) -> None:
        self.battle: Battle = construct_env(self.name, partial(Battle, self.name, options), {}, signature=_options)
        self.num, self.spaces = num, self.battle.spaces
        jax = self.battle.jax
        self.keys = jax.random.split(jax.random.PRNGKey(int(np.random.SeedSequence().generate_state(1)[0] >> 1)), num)
        self._reset_all, self._step_all = jax.jit(jax.vmap(self.battle.reset)), jax.jit(self._step_and_autoreset)
        self.state_shapes = jax.eval_shape(self._reset_all, self.keys)[1]

    def reset(self, seed: int | None) -> tuple[Tree, Info]:
        if seed is not None:
            self.keys = self.battle.jax.random.split(self.battle.jax.random.PRNGKey(seed), self.num)
        self.keys, self.state, self.outputs = self._reset_all(self.keys)
        return _to_numpy(self.outputs)

    def step(self, actions: Array) -> Result:
        step = self._step_all(self.keys, self.state, actions.astype(np.int32))
        self.keys, self.state, self.outputs, final_outputs, step_results = step
        results = {name: np.array(value) for name, value in step_results.items()}
        obs, info = _to_numpy(self.outputs)
        ended = (results["terminated"] | results["truncated"]).nonzero()[0].tolist()
        if ended:
            info |= {f"final_{name}": np.array(value) for name, value in final_outputs.items()}
            info["final_info"] = {index: {"won": bool(results["won"][index])} for index in ended}
        return obs, results["reward"], results["terminated"], results["truncated"], info

    def _step_and_autoreset(self, keys: Any, state: Any, actions: Any) -> tuple[Any, ...]:
        """Return keys, state and outputs after the resets, the outputs before the resets, and the results."""
        jax = self.battle.jax
        keys, state, outputs, results = jax.vmap(self.battle.step)(keys, state, actions)
        ended = results["terminated"] | results["truncated"]

        def reset_ended() -> tuple[Any, ...]:
            def select(new: Any, old: Any) -> Any:
                return self.battle.jnp.where(ended.reshape(-1, *[1] * (new.ndim - 1)), new, old)

            merged: tuple[Any, ...] = jax.tree.map(select, jax.vmap(self.battle.reset)(keys), (keys, state, outputs))
            return merged

        # most steps end no battle, so resets are computed only if one ended
        return *jax.lax.cond(ended.any(), reset_ended, lambda: (keys, state, outputs)), outputs, results

    def state_dict(self) -> State:
        leaves = self.battle.jax.tree.leaves
        outputs = {name: np.array(value) for name, value in self.outputs.items()}
        state = [np.array(leaf) for leaf in leaves(self.state)]
        return {"keys": np.array(self.keys), "state": state, "outputs": outputs}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        jax, jnp = self.battle.jax, self.battle.jnp
        self.keys = jnp.array(state["keys"])
        leaves = [jnp.array(leaf) for leaf in state["state"]]
        self.state = jax.tree.unflatten(jax.tree.structure(self.state_shapes), leaves)
        self.outputs = {name: jnp.array(value) for name, value in state["outputs"].items()}
        return _to_numpy(self.outputs)

    def render(self, index: int) -> Array | None:
        return _render(self.battle, self.battle.jax.tree.map(lambda leaf: leaf[index], self.state.state))

    def close(self) -> None:
        pass


# one class per map, because a native environment is constructed with only the number of environments and options
NATIVE: dict[str, type[NativeSmax]] = {name: type("NativeSmax", (NativeSmax,), {"name": name}) for name in names()}


def _to_numpy(outputs: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
    """Return the observation and the info as copies, because JAX arrays are read-only."""
    arrays = {name: np.array(value) for name, value in outputs.items()}
    return arrays.pop("obs"), {INFO_KEYS[name]: value for name, value in arrays.items()}


def _render(battle: Battle, state: Any) -> Array:
    """Draw living units as discs, allies blue and enemies red, darker with less health."""
    env = battle.env
    image = np.full((PIXELS, PIXELS, 3), GROUND, np.uint8)
    y, x = np.mgrid[PIXELS:0:-1, 0:PIXELS] / PIXELS
    positions = np.array(state.unit_positions) / [env.map_width, env.map_height]
    types = np.array(state.unit_types)
    radii = np.array(env.unit_type_radiuses)[types] / env.map_width
    health = np.array(state.unit_health) / np.array(env.unit_type_health)[types]
    for unit in np.flatnonzero(np.array(state.unit_alive)):
        inside = np.square(x - positions[unit, 0]) + np.square(y - positions[unit, 1]) < radii[unit] ** 2
        color = np.array(ALLY if unit < battle.num_agents else ENEMY)
        image[inside] = (0.4 + 0.6 * health[unit]) * color
    return image
