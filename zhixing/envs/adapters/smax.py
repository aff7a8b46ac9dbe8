"""SMAX (package jaxmarl): battles like StarCraft's against a scripted enemy, in JAX: `smax/3m`, one agent per own unit.

The team is paid for damage and for winning; units that died are paid on with their team, as JaxMARL does it.
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
from zhixing.envs.vector.base import Info, Result
from zhixing.envs.vector.step_buffers import Array
from zhixing.envs.vector.sub_env import State
from zhixing.envs.wrappers.agents import construct_env
from zhixing.utils.extras import require_extra

MAPS = (
    "3m", "2s3z", "25m", "3s5z", "8m", "5m_vs_6m", "10m_vs_11m", "27m_vs_30m", "3s5z_vs_3s6z", "3s_vs_5z", "6h_vs_8z",
    "smacv2_5_units", "smacv2_10_units", "smacv2_20_units",
)  # fmt: skip
STOP = 4  # JaxMARL's action of a unit that does nothing
PIXELS = 320  # side of a picture
ALLY, ENEMY, GROUND = (90, 140, 240), (230, 90, 80), (40, 40, 40)


def names() -> list[str]:
    return [f"smax/{task}" for task in MAPS]


def supports(name: str) -> bool:
    return name in names()


def make(name: str, options: dict[str, Any]) -> Smax:
    constructor = partial(Smax, name)
    env: Smax = construct_env(name, constructor, options, named=partial(_named, name))
    return env


def _named(
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
    """The options, without JAX."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """JaxMARL prints which of its parts are missing, and sets the streams back to those that Python began with."""
    kept = {name: vars(sys)[name] for name in ("stdout", "stderr", "__stdout__")}
    vars(sys).update(stdout=io.StringIO(), __stdout__=io.StringIO())
    try:
        yield
    finally:
        vars(sys).update(kept)


class Battle:
    """A map as pure functions of one battle: they can be compiled, and mapped over many."""

    def __init__(self, name: str, options: State) -> None:
        with require_extra(name, "smax"):
            import jax

            with _quiet():
                from jaxmarl.environments.smax import HeuristicEnemySMAX, map_name_to_scenario
        self.jax, self.jnp = jax, jax.numpy
        self.env = HeuristicEnemySMAX(scenario=map_name_to_scenario(name.removeprefix("smax/")), **options)
        self.num_agents = int(self.env.num_allies)
        self.spaces = Spaces(
            # features are scaled to about [-1, 1], but JaxMARL doesn't hold to it
            Box(-np.inf, np.inf, (int(self.env.obs_size),), np.float32),
            Discrete(int(self.env.num_ally_actions)),
            num_agents=self.num_agents,
            mask=int(self.env.num_ally_actions),
            state=int(self.env.state_size),
            alive=True,
            reward_kind="shared",
        )

    def begin(self, key: Any) -> tuple[Any, Any, dict[str, Any]]:
        """The next key, the state of the battle, and what it shows: obs and what stands beside it."""
        key, own = self.jax.random.split(key)
        obs, state = self.env.reset(own)
        return key, self._typed(state), self._show(obs, state)

    def act(self, key: Any, state: Any, actions: Any) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
        """As `begin`, and what the step brought."""
        jnp, env = self.jnp, self.env
        key, own = self.jax.random.split(key)
        actions = jnp.where(self._alive(state), actions, STOP)
        obs, state, rewards, dones, _ = env.step_env(own, state, dict(zip(env.agents, actions, strict=True)))
        ours, theirs = self._alive(state).any(), state.state.unit_alive[self.num_agents :].any()
        terminated = ~(ours & theirs)
        brought = {
            "reward": jnp.stack([rewards[agent] for agent in env.agents]),
            "terminated": terminated,
            "truncated": dones["__all__"] & ~terminated,  # JaxMARL calls both done, this one after max_steps + 1
            "won": ours & ~theirs,
        }
        return key, self._typed(state), self._show(obs, state), brought

    def _typed(self, state: Any) -> Any:
        """Numbers written in code have weak types, those that come out of a step don't: it would be compiled twice."""
        return self.jax.tree.map(lambda leaf: leaf.astype(leaf.dtype), state)

    def _alive(self, state: Any) -> Any:
        return state.state.unit_alive[: self.num_agents]

    def _show(self, obs: dict[str, Any], state: Any) -> dict[str, Any]:
        jnp, agents = self.jnp, self.env.agents
        alive = self._alive(state)
        available = self.env.get_avail_actions(state)
        allowed = jnp.stack([available[agent] for agent in agents]).astype(bool)
        nothing = jnp.arange(allowed.shape[1]) == 0  # here the dead have action 0, in JaxMARL STOP
        return {
            "obs": jnp.stack([obs[agent] for agent in agents]),
            "mask": jnp.where(alive[:, None], allowed, nothing),
            "state": obs["world_state"],
            "alive": alive,
        }


class Smax(gym.Env[Any, Any]):
    """One battle. At its end `won` tells whether only units of ours were left."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8, "logged_info_keys": ("won",)}  # noqa: RUF012  (as in gym.Env)
    reward_kind = "shared"

    def __init__(self, name: str, /, render_mode: str | None = None, **options: Any) -> None:
        self.battle = Battle(name, options)
        self.render_mode = render_mode
        spaces = self.battle.spaces
        self.num_agents, self.observation_space, self.action_space = spaces.num_agents, spaces.obs, spaces.action
        self.begin, self.act = self.battle.jax.jit(self.battle.begin), self.battle.jax.jit(self.battle.act)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        # a key for every episode: our generator alone repeats it
        key = self.battle.jax.random.PRNGKey(int(self.np_random.integers(2**31)))
        self.key, self.state, shown = self.begin(key)
        return _told(shown)

    def step(self, action: Any) -> tuple[Any, Array, bool, bool, dict[str, Any]]:
        self.key, self.state, shown, brought = self.act(self.key, self.state, np.asarray(action, np.int32))
        obs, info = _told(shown)
        info["won"] = bool(brought["won"])
        return obs, np.array(brought["reward"]), bool(brought["terminated"]), bool(brought["truncated"]), info

    def render(self) -> Array:
        return _picture(self.battle, self.state.state)


class NativeSmax:
    """Battles of one map, stepped by one compiled call; those that ended begin anew in it."""

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset(_named.__annotations__) - {"name", "return", "render_mode"}
    logged_info_keys = ("won",)

    def __init__(self, num: int, **options: Any) -> None:
        self.battle: Battle = construct_env(self.name, partial(Battle, self.name, options), {}, named=_named)
        self.num, self.spaces = num, self.battle.spaces
        jax = self.battle.jax
        self.keys = jax.random.split(jax.random.PRNGKey(int(np.random.SeedSequence().generate_state(1)[0] >> 1)), num)
        self._begin_all, self._act_all = jax.jit(jax.vmap(self.battle.begin)), jax.jit(self._step)
        self.shapes = jax.eval_shape(self._begin_all, self.keys)[1]

    def reset(self, seed: int | None) -> tuple[Tree, Info]:
        if seed is not None:
            self.keys = self.battle.jax.random.split(self.battle.jax.random.PRNGKey(seed), self.num)
        self.keys, self.state, self.shown = self._begin_all(self.keys)
        return _told(self.shown)

    def step(self, actions: Array) -> Result:
        carried = self._act_all(self.keys, self.state, actions.astype(np.int32))
        self.keys, self.state, self.shown, last, brought = carried
        result = {name: np.array(value) for name, value in brought.items()}
        obs, info = _told(self.shown)
        ended = (result["terminated"] | result["truncated"]).nonzero()[0].tolist()
        if ended:
            info |= {f"final_{name}": np.array(value) for name, value in last.items()}
            info["final_info"] = {index: {"won": bool(result["won"][index])} for index in ended}
        return obs, result["reward"], result["terminated"], result["truncated"], info

    def _step(self, keys: Any, state: Any, actions: Any) -> tuple[Any, ...]:
        jax = self.battle.jax
        keys, state, last, brought = jax.vmap(self.battle.act)(keys, state, actions)
        ended = brought["terminated"] | brought["truncated"]

        def renewed() -> tuple[Any, ...]:
            def chosen(new: Any, old: Any) -> Any:
                return self.battle.jnp.where(ended.reshape(-1, *[1] * (new.ndim - 1)), new, old)

            fresh: tuple[Any, ...] = jax.tree.map(chosen, jax.vmap(self.battle.begin)(keys), (keys, state, last))
            return fresh

        # most steps end no battle: beginnings are worth computing only when one does
        return *jax.lax.cond(ended.any(), renewed, lambda: (keys, state, last)), last, brought

    def state_dict(self) -> State:
        leaves = self.battle.jax.tree.leaves
        shown = {name: np.array(value) for name, value in self.shown.items()}
        return {"keys": np.array(self.keys), "state": [np.array(leaf) for leaf in leaves(self.state)], "shown": shown}

    def load_state_dict(self, state: State) -> tuple[Tree, Info]:
        jax, jnp = self.battle.jax, self.battle.jnp
        self.keys = jnp.array(state["keys"])
        self.state = jax.tree.unflatten(jax.tree.structure(self.shapes), [jnp.array(leaf) for leaf in state["state"]])
        self.shown = {name: jnp.array(value) for name, value in state["shown"].items()}
        return _told(self.shown)

    def render(self, index: int) -> Array | None:
        return _picture(self.battle, self.battle.jax.tree.map(lambda leaf: leaf[index], self.state.state))

    def close(self) -> None:
        pass


# one class per map: a native task is made with nothing but the number of environments and options
NATIVE: dict[str, type[NativeSmax]] = {name: type("NativeSmax", (NativeSmax,), {"name": name}) for name in names()}


def _told(shown: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
    """Copies: JAX's own arrays can't be written to."""
    arrays = {name: np.array(value) for name, value in shown.items()}
    return arrays.pop("obs"), {INFO_KEYS[name]: value for name, value in arrays.items()}


def _picture(battle: Battle, state: Any) -> Array:
    """Living units as discs, ours blue, the enemy's red, paler where they are hurt."""
    env = battle.env
    picture = np.full((PIXELS, PIXELS, 3), GROUND, np.uint8)
    y, x = np.mgrid[PIXELS:0:-1, 0:PIXELS] / PIXELS
    places = np.array(state.unit_positions) / [env.map_width, env.map_height]
    kinds = np.array(state.unit_types)
    radii = np.array(env.unit_type_radiuses)[kinds] / env.map_width
    health = np.array(state.unit_health) / np.array(env.unit_type_health)[kinds]
    for unit in np.flatnonzero(np.array(state.unit_alive)):
        inside = np.square(x - places[unit, 0]) + np.square(y - places[unit, 1]) < radii[unit] ** 2
        colour = np.array(ALLY if unit < battle.num_agents else ENEMY)
        picture[inside] = (0.4 + 0.6 * health[unit]) * colour
    return picture
