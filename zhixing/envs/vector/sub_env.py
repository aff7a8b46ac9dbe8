"""One environment of a vector: validates its results, records its actions, saves and restores its state."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from zhixing.core.tree import tree_leaves, tree_map
from zhixing.envs.adapters.gymnasium_ids import missing_package_error
from zhixing.envs.api import MisbehaviorError, parse_flag, parse_reward
from zhixing.envs.crash.failure_policy import make_crash_error
from zhixing.envs.crash.validation import all_finite, describe_path, obs_validators
from zhixing.envs.env_spec import INFO_KEYS, MASK, EnvSpec, get_leaf
from zhixing.envs.info_fields import write_fields
from zhixing.envs.vector.action_log import ActionLog, max_recorded_actions
from zhixing.envs.vector.step_buffers import StepBuffers
from zhixing.errors import EnvCrashError, UserError

State = dict[str, Any]
ScalarInfo = dict[str, int | float | bool]  # the numbers in an info
MUST_BE_FINITE = "numbers must be finite"


def sub_env_seed(seed: int, index: int) -> int:
    """Return the seed of environment `index` of a vector, the same in every back end."""
    # some environments accept only 31 bits
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) & 0x7FFFFFFF


def replacement_seed(seed: int | None, num_restarts: int) -> int | None:
    """Return the seed of an environment that replaces a failed one. The old seed might lead to the same failure."""
    return None if seed is None else sub_env_seed(seed, num_restarts)


class SubEnv:
    """An environment that reads its action from and writes its results to row `row` of the buffers.

    `index` is its index in the whole vector. With an `action_log`, the parent process can read the current episode.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        env_spec: EnvSpec,
        buffers: StepBuffers,
        row: int,
        index: int,
        name: str,
        action_log: ActionLog | None = None,
    ) -> None:
        self.env, self.buffers, self.row, self.index, self.name = env, buffers, row, index, name
        self.env_spec, self.action_log = env_spec, action_log
        self.validators = obs_validators(env_spec)
        self.layout = env_spec.spaces.layout if env_spec.spaces.composite else None
        self.discrete = isinstance(env_spec.spaces.action, gym.spaces.Discrete) and not env_spec.spaces.agents
        self.obs_leaves, self.final_obs_leaves = tree_leaves(buffers.obs), tree_leaves(buffers.final_obs)
        self.single_agent = not env_spec.spaces.agents  # so its reward is one number
        self.single_array = env_spec.paths == ((),)  # the observation is one array, without keys
        self.has_state = hasattr(env, "state_dict") and hasattr(env, "load_state_dict")
        # `origin` and `actions` reproduce the state of the current episode; longer episodes aren't recorded
        self.origin: State = {}
        self.actions: list[Any] = []
        self.max_actions = max_recorded_actions(env_spec.spaces)
        self.num_actions = 0  # in the current episode, recorded or not
        self.seed: int | None = None
        self.num_restarts = 0  # how often a failed environment was replaced
        self.consecutive_failures = 0  # since the last completed episode

    def step(self) -> ScalarInfo | None:
        """Take the action in this row. If the episode ends, return the numbers of its last info; call `reset` next."""
        buffers, row = self.buffers, self.row
        action = self._copy_action(buffers.action[row])
        self.num_actions += 1
        if self.num_actions <= self.max_actions:
            self.actions.append(action if self.discrete else action.copy())
        elif self.actions:
            self.actions = []
        if self.action_log is not None:
            self.action_log.append(self.index, self.num_actions, action)
        try:
            reward: Any
            taken = action if self.layout is None else self.layout.unflatten(action)
            obs, reward, terminated, truncated, info = self.env.step(taken)
            try:
                if self.single_agent and reward * 0.0 != 0.0:
                    raise MisbehaviorError(f"its reward is {reward}; rewards must be finite numbers")
                buffers.reward[row] = reward
                buffers.terminated[row] = terminated
                buffers.truncated[row] = truncated
            except (TypeError, ValueError):  # rarely needed: checking the types first would slow down every step
                buffers.reward[row] = parse_reward(reward, self.env_spec.spaces.agents)
                buffers.terminated[row] = terminated = parse_flag(terminated, "terminated")
                buffers.truncated[row] = truncated = parse_flag(truncated, "truncated")
            if buffers.info:
                write_fields(buffers.info, row, info)
            if not (terminated or truncated):
                self._write(obs, info)
                return None
            self._write_final(obs, info)
            self._check_finite(self.final_obs_leaves)
            return scalar_info(info)
        except Exception as error:
            raise self._crash_error(error) from error

    def reset(self, seed: int | None, options: State | None) -> None:
        try:
            self._reset(seed, options)
        except Exception as error:
            raise self._crash_error(error) from error

    def check(self) -> None:
        """Raise `EnvCrashError` if the row contains NaN or Inf, or a mask that forbids every action."""
        try:
            self._check_finite(self.obs_leaves)
            for name, array in self.buffers.extras.items():
                if name == "state" and not all_finite(array[self.row]):
                    raise MisbehaviorError(f"its state contains {_first_nonfinite(array[self.row])}; {MUST_BE_FINITE}")
                if name == "mask" and not array[self.row].any(-1).all():
                    raise MisbehaviorError("its action mask forbids every action; at least one must be allowed")
        except MisbehaviorError as error:
            raise self._crash_error(error) from error

    def _check_finite(self, obs_leaves: list[Any]) -> None:
        row = self.row
        for leaf, path in zip(obs_leaves, self.env_spec.paths, strict=True):
            if leaf.dtype.kind == "f" and not all_finite(leaf[row].reshape(-1)):
                where = describe_path(path)
                raise MisbehaviorError(
                    f"its observation{where} contains {_first_nonfinite(leaf[row])}; {MUST_BE_FINITE}"
                )
        rewards = self.buffers.reward[row]
        if not self.single_agent and not all_finite(rewards):
            raise MisbehaviorError(f"its rewards contain {_first_nonfinite(rewards)}; {MUST_BE_FINITE}")

    def replace_env(self, env: gym.Env[Any, Any]) -> None:
        """Replace the failed environment by a new one and start an episode."""
        self.env, self.num_restarts = env, self.num_restarts + 1
        self.restart(self.seed, self.num_restarts)

    def restart(self, seed: int | None, num_restarts: int) -> None:
        """Start the first episode of a replacement. `seed` is that of the failed environment."""
        self.seed, self.num_restarts = seed, num_restarts
        self.reset(replacement_seed(seed, num_restarts), None)
        self.check()

    def start_recorded_episode(self, seed: int | None, origin: State) -> None:
        """Start an episode in the same way as a recorded one."""
        if origin["rng"] is not None:
            self.env.reset(seed=seed)  # restores what the environment generates from its seed, such as levels
            _set_rng_state(self.env, origin["rng"])
        self.reset(origin["seed"], origin["options"])
        self.check()

    def _copy_action(self, action: Any) -> Any:
        """Copy an action: the environment may keep or change it, and the next step overwrites the row."""
        return int(action) if self.discrete else action.copy()

    def _reset(self, seed: int | None = None, options: State | None = None) -> None:
        if seed is not None:
            self.seed = seed
        rng = None if seed is not None else _rng_state(self.env)
        self.origin = {"seed": seed, "rng": rng, "options": options}
        self.actions.clear()
        self.num_actions = 0
        if self.action_log is not None:
            self._log_episode()
        self._write(*self.env.reset(seed=seed, options=options))

    def _write(self, obs: Any, info: State) -> None:
        row = self.row
        if self.single_array:
            self.validators[0](obs)
            self.obs_leaves[0][row] = obs
        else:
            self._write_leaves(self.obs_leaves, obs)
        for name, array in self.buffers.extras.items():
            key = INFO_KEYS[name]
            values = obs if name == "mask" and self.env_spec.mask_in_obs else info
            if key not in values:
                raise MisbehaviorError(f"it returned no {key}, but its first reset did; return it always")
            value = values[key]
            if getattr(value, "shape", None) != array.shape[1:] and np.shape(value) != array.shape[1:]:
                raise MisbehaviorError(f"its {key} has shape {np.shape(value)}; at the first reset: {array.shape[1:]}")
            array[row] = value

    def _write_leaves(self, leaves: list[Any], obs: Any) -> None:
        for leaf, path, validate in zip(leaves, self.env_spec.paths, self.validators, strict=True):
            value = get_leaf(obs, path)
            validate(value)
            leaf[self.row] = value

    def _write_final(self, obs: Any, info: State) -> None:
        self._write_leaves(self.final_obs_leaves, obs)
        for name, array in self.buffers.final_extras.items():
            if name == "mask" and self.env_spec.mask_in_obs:
                array[self.row] = obs[MASK]
            else:  # many environments return no mask at the end of an episode: then all actions are allowed
                array[self.row] = info.get(MASK, True) if name == "mask" else info[INFO_KEYS[name]]

    def state(self) -> State:
        if not self.origin:
            raise RuntimeError("reset the environments before you save their state")
        row = self.buffers.rows(self.row)
        state: State = {
            "obs": tree_map(np.copy, row.obs),
            "extras": {name: array.copy() for name, array in row.extras.items()},
            "seed": self.seed,
            "num_restarts": self.num_restarts,
            "origin": dict(self.origin),
            "actions": self._recorded_actions(row.action),
        }
        if self.has_state:
            return {**state, "env_state": self.env.state_dict()}  # type: ignore[attr-defined]
        return {**state, "rng": _rng_state(self.env)}

    def _recorded_actions(self, like: Any) -> Any:
        """Return the actions of this episode as an array, or None if they were too many to record."""
        if self.num_actions > self.max_actions:
            return None
        return np.array(self.actions, like.dtype).reshape(-1, *like.shape)

    def load(self, state: State) -> bool:
        """Restore a saved state. If it can't be restored exactly, start a new episode and return False."""
        self.seed, self.num_restarts = state["seed"], state["num_restarts"]
        try:
            exact = self._restore_env(state)
        except Exception:  # repeated actions may be invalid if the episode takes another course
            exact = False
        if exact:
            self.origin = dict(state["origin"])
            recorded = state["actions"]
            self.actions = [] if recorded is None else [self._copy_action(action) for action in recorded]
            self.num_actions = self.max_actions + 1 if recorded is None else len(self.actions)
            for leaf, saved in zip(self.obs_leaves, tree_leaves(state["obs"]), strict=True):
                leaf[self.row] = saved
            for name, array in self.buffers.extras.items():
                array[self.row] = state["extras"][name]
            if self.action_log is not None:
                self._log_episode()
            return True
        _set_rng_state(self.env, state.get("rng"))
        self.reset(None, None)
        return False

    def _restore_env(self, state: State) -> bool:
        """Load the environment's own state, or repeat its actions. Return whether the result matches `state`."""
        if self.has_state:
            self.env.load_state_dict(state["env_state"])  # type: ignore[attr-defined]
            return True
        if state["actions"] is None:
            return False
        origin = state["origin"]
        if origin["rng"] is not None:
            self.env.reset(seed=state["seed"])  # restores what the environment generates from its seed, such as levels
            _set_rng_state(self.env, origin["rng"])
        obs, info = self.env.reset(seed=origin["seed"], options=origin["options"])
        for recorded in state["actions"]:
            action = self._copy_action(recorded)
            taken = action if self.layout is None else self.layout.unflatten(action)
            obs, _, terminated, truncated, info = self.env.step(taken)
            if terminated or truncated:
                return False
        self._write(obs, info)
        same = [
            leaf[self.row].tobytes() == saved.tobytes()
            for leaf, saved in zip(self.obs_leaves, tree_leaves(state["obs"]), strict=True)
        ]
        return all(same) and bool(_rng_state(self.env) == state["rng"])

    def render(self) -> np.ndarray[Any, Any]:
        try:
            frame = self.env.render()
        except gym.error.DependencyNotInstalled as error:
            raise missing_package_error(self.name, error) from error
        except Exception as error:
            raise make_crash_error(self.name, self.index, "rendering", error, None) from error
        if frame is None:
            raise UserError(f"{self.name} renders no image; make it with render_mode='rgb_array'")
        return np.asarray(frame)

    def _crash_error(self, error: Exception) -> EnvCrashError:
        when = f"step {self.num_actions} of an episode" if self.num_actions else "a reset"
        actions = None if self.num_actions > self.max_actions else np.array(self.actions).tolist()
        episode = {"seed": self.seed, "origin": dict(self.origin), "actions": actions}
        return make_crash_error(self.name, self.index, when, error, episode)

    def _log_episode(self) -> None:
        """Write the whole current episode to the action log."""
        assert self.action_log is not None
        origin = {"seed": self.seed, "num_restarts": self.num_restarts, "origin": self.origin}
        self.action_log.start_episode(self.index, origin)
        for count, action in enumerate(self.actions, 1):
            self.action_log.append(self.index, count, action)
        self.action_log.counts[self.index] = self.num_actions


def _rng_state(env: gym.Env[Any, Any]) -> State | None:
    """Return the state of the environment's NumPy generator, or None if it has none."""
    try:
        return dict(env.unwrapped.np_random.bit_generator.state)
    except AttributeError:
        return None


def _set_rng_state(env: gym.Env[Any, Any], state: State | None) -> None:
    if state is not None:
        env.unwrapped.np_random.bit_generator.state = state


def scalar_info(info: State) -> ScalarInfo:
    """Return the entries of an info that are single numbers, as Python numbers."""
    scalars: ScalarInfo = {}
    for key, value in info.items():
        if isinstance(value, (bool, int, float)):
            scalars[key] = value
        elif isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0 and value.dtype.kind in "biuf":
            scalars[key] = value.item()
    return scalars


def _first_nonfinite(numbers: Any) -> str:
    flat = np.asarray(numbers).reshape(-1)
    return str(flat[~np.isfinite(flat)][0])
