"""One copy of a task and its row of arrays: what it shows is checked, its actions are kept, its state is saved."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from zhixing.core.tree import tree_leaves, tree_map
from zhixing.envs.adapters.gymnasium_ids import missing_package
from zhixing.envs.api import MisbehaviorError, flag_of, reward_of
from zhixing.envs.crash.failure_policy import make_crash_error
from zhixing.envs.crash.validation import all_finite, describe_path, obs_validators
from zhixing.envs.env_spec import INFO_KEYS, MASK, EnvSpec, follow
from zhixing.envs.vector.action_log import ActionLog, max_recorded_actions
from zhixing.envs.vector.step_buffers import StepBuffers
from zhixing.errors import EnvCrashError, UserError

State = dict[str, Any]
ScalarInfo = dict[str, int | float | bool]


def sub_env_seed(seed: int, index: int) -> int:
    """The seed of environment `index`: a stream of its own, the same in every back end."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) & 0x7FFFFFFF  # some tasks take 31 bits


def replacement_seed(seed: int | None, num_restarts: int) -> int | None:
    """The seed of the copy that replaces one: with the old one it might fail at the same step again."""
    return None if seed is None else sub_env_seed(seed, num_restarts)


class SubEnv:
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
        self.fits = obs_validators(env_spec)
        self.discrete = isinstance(env_spec.spaces.action, gym.spaces.Discrete) and not env_spec.spaces.agents
        self.leaves, self.final_leaves = tree_leaves(buffers.obs), tree_leaves(buffers.final_obs)
        self.alone = not env_spec.spaces.agents  # so that its reward is one number
        self.single = env_spec.paths == ((),)  # the observation is one array: no keys to follow
        self.has_state = hasattr(env, "state_dict") and hasattr(env, "load_state_dict")
        self.log: list[Any] = []  # the actions of this episode: with `origin` they give its state again
        self.room = max_recorded_actions(
            env_spec.spaces
        )  # longer episodes aren't recorded: they would fill memory and disk
        self.count = 0  # actions of this episode
        self.origin: State = {}
        self.seed: int | None = None
        self.num_restarts = 0  # how often this is another copy because the one before failed
        self.consecutive_failures = 0  # and how often since an episode has ended by itself

    def step(self) -> ScalarInfo | None:
        """Act as this row says. At the end of an episode: the numbers of its last info; a reset must follow."""
        buffers, row = self.buffers, self.row
        action = self._own(buffers.action[row])
        self.count += 1
        if self.count <= self.room:
            self.log.append(action if self.discrete else action.copy())
        elif self.log:
            self.log = []
        if self.action_log is not None:
            self.action_log.add(self.index, self.count, action)
        try:
            reward: Any
            obs, reward, terminated, truncated, info = self.env.step(action)
            try:
                if self.alone and reward * 0.0 != 0.0:
                    raise MisbehaviorError(f"its reward is {reward}; rewards must be finite numbers")
                buffers.reward[row] = reward
                buffers.terminated[row] = terminated
                buffers.truncated[row] = truncated
            except (TypeError, ValueError):  # not plain numbers, which most are: asking first would cost each step
                buffers.reward[row] = reward_of(reward, self.env_spec.spaces.agents)
                buffers.terminated[row] = terminated = flag_of(terminated, "terminated")
                buffers.truncated[row] = truncated = flag_of(truncated, "truncated")
            if not (terminated or truncated):
                self._write(obs, info)
                return None
            self._write_final(obs, info)
            self._check(self.final_leaves)
            return scalar_info(info)
        except Exception as error:
            raise self._crash(error) from error

    def reset(self, seed: int | None, options: State | None) -> None:
        try:
            self._reset(seed, options)
        except Exception as error:
            raise self._crash(error) from error

    def check(self) -> None:
        """Raise if the row holds what nobody can learn from."""
        try:
            self._check(self.leaves)
            for name, array in self.buffers.extras.items():
                if name == "state" and not all_finite(array[self.row]):
                    raise MisbehaviorError(f"its state holds {_odd(array[self.row])}; numbers must be finite")
                if name == "mask" and not array[self.row].any(-1).all():
                    raise MisbehaviorError("its action mask forbids every action; at least one must be allowed")
        except MisbehaviorError as error:
            raise self._crash(error) from error

    def _check(self, leaves: list[Any]) -> None:
        row = self.row
        for leaf, path in zip(leaves, self.env_spec.paths, strict=True):
            if leaf.dtype.kind == "f" and not all_finite(leaf[row].reshape(-1)):
                raise MisbehaviorError(
                    f"its observation{describe_path(path)} holds {_odd(leaf[row])}; numbers must be finite"
                )
        if not self.alone and not all_finite(self.buffers.reward[row]):
            raise MisbehaviorError(f"its rewards hold {_odd(self.buffers.reward[row])}; numbers must be finite")

    def replace_env(self, env: gym.Env[Any, Any]) -> None:
        """Another copy of the task, which begins an episode of its own."""
        self.env, self.num_restarts = env, self.num_restarts + 1
        self.restart(self.seed, self.num_restarts)

    def restart(self, seed: int | None, num_restarts: int) -> None:
        """As `renew`, where copy and process are new already."""
        self.seed, self.num_restarts = seed, num_restarts
        self.reset(replacement_seed(seed, num_restarts), None)
        self.check()

    def start_recorded_episode(self, seed: int | None, origin: State) -> None:
        """Begin an episode as one began that is to be repeated."""
        if origin["rng"] is not None:
            self.env.reset(seed=seed)  # what the task once built from its seed must be there too
            _set_rng(self.env, origin["rng"])
        self.reset(origin["seed"], origin["options"])
        self.check()

    def _own(self, action: Any) -> Any:
        """A copy: the task may keep or change what it gets, the row is written again at the next step."""
        return int(action) if self.discrete else action.copy()

    def _reset(self, seed: int | None = None, options: State | None = None) -> None:
        if seed is not None:
            self.seed = seed
        rng = None if seed is not None else _rng_state(self.env)
        self.origin = {"seed": seed, "rng": rng, "options": options}
        self.log.clear()
        self.count = 0
        if self.action_log is not None:
            self._tell_tape()
        self._write(*self.env.reset(seed=seed, options=options))

    def _write(self, obs: Any, info: State) -> None:
        row = self.row
        if self.single:
            self.fits[0](obs)
            self.leaves[0][row] = obs
        else:
            self._write_parts(self.leaves, obs)
        for name, array in self.buffers.extras.items():
            shown = obs if name == "mask" and self.env_spec.mask_in_obs else info
            if INFO_KEYS[name] not in shown:
                raise MisbehaviorError(f"it showed no {INFO_KEYS[name]}, which its first reset did")
            array[row] = _shaped(shown[INFO_KEYS[name]], array.shape[1:], INFO_KEYS[name])

    def _write_parts(self, leaves: list[Any], obs: Any) -> None:
        for leaf, path, fit in zip(leaves, self.env_spec.paths, self.fits, strict=True):
            value = follow(obs, path)
            fit(value)
            leaf[self.row] = value

    def _write_final(self, obs: Any, info: State) -> None:
        self._write_parts(self.final_leaves, obs)
        for name, array in self.buffers.final_extras.items():
            if name == "mask" and self.env_spec.mask_in_obs:
                array[self.row] = obs[MASK]
            else:  # many tasks give no mask once the episode is over: nothing is forbidden then
                array[self.row] = info.get(MASK, True) if name == "mask" else info[INFO_KEYS[name]]

    def state(self) -> State:
        if not self.origin:
            raise RuntimeError("reset the environments before asking for their state")
        here = self.buffers.rows(self.row)
        state: State = {
            "obs": tree_map(np.copy, here.obs),
            "extras": {name: array.copy() for name, array in here.extras.items()},
            "seed": self.seed,
            "num_restarts": self.num_restarts,
            "origin": dict(self.origin),
            "actions": self._recorded(here.action),
        }
        if self.has_state:
            return {**state, "env_state": self.env.state_dict()}  # type: ignore[attr-defined]
        return {**state, "rng": _rng_state(self.env)}

    def _recorded(self, like: Any) -> Any:
        """Return the actions of this episode as an array, or None if they were too many to record."""
        return None if self.count > self.room else np.array(self.log, like.dtype).reshape(-1, *like.shape)

    def load(self, state: State) -> bool:
        """Whether the task is now exactly where it was; if not, a new episode has begun."""
        self.seed = state["seed"]
        self.num_restarts = state["num_restarts"]
        try:
            exact = self._replay(state)
        except Exception:  # a replay that went astray may do what the task forbids
            exact = False
        if exact:
            self.origin = dict(state["origin"])
            recorded = state["actions"]
            self.log = [] if recorded is None else [self._own(action) for action in recorded]
            self.count = self.room + 1 if recorded is None else len(self.log)
            for leaf, saved in zip(self.leaves, tree_leaves(state["obs"]), strict=True):
                leaf[self.row] = saved
            for name, array in self.buffers.extras.items():
                array[self.row] = state["extras"][name]
            if self.action_log is not None:
                self._tell_tape()
            return True
        _set_rng(self.env, state.get("rng"))
        self.reset(None, None)
        return False

    def _replay(self, state: State) -> bool:
        if self.has_state:
            self.env.load_state_dict(state["env_state"])  # type: ignore[attr-defined]
            return True
        if state["actions"] is None:
            return False
        origin = state["origin"]
        if origin["rng"] is not None:
            # what the task once built from its seed (levels, generators of its own) must be there too
            self.env.reset(seed=state["seed"])
            _set_rng(self.env, origin["rng"])
        obs, info = self.env.reset(seed=origin["seed"], options=origin["options"])
        for action in state["actions"]:
            obs, _, terminated, truncated, info = self.env.step(self._own(action))
            if terminated or truncated:
                return False
        self._write(obs, info)
        same = [
            leaf[self.row].tobytes() == saved.tobytes()
            for leaf, saved in zip(self.leaves, tree_leaves(state["obs"]), strict=True)
        ]
        return all(same) and bool(_rng_state(self.env) == state["rng"])

    def render(self) -> np.ndarray[Any, Any]:
        try:
            frame = self.env.render()
        except gym.error.DependencyNotInstalled as error:
            raise missing_package(self.name, error) from error
        except Exception as error:
            raise make_crash_error(self.name, self.index, "rendering", error, None) from error
        if frame is None:
            raise UserError(f"{self.name} gives no picture; make it with render_mode='rgb_array'")
        return np.asarray(frame)

    def _crash(self, error: Exception) -> EnvCrashError:
        when = f"step {self.count} of an episode" if self.count else "a reset"
        actions = None if self.count > self.room else np.array(self.log).tolist()
        story = {"seed": self.seed, "origin": dict(self.origin), "actions": actions}
        return make_crash_error(self.name, self.index, when, error, story)

    def _tell_tape(self) -> None:
        assert self.action_log is not None
        self.action_log.begin(self.index, {"seed": self.seed, "num_restarts": self.num_restarts, "origin": self.origin})
        for count, action in enumerate(self.log, 1):
            self.action_log.add(self.index, count, action)
        self.action_log.counts[self.index] = self.count


def _rng_state(env: gym.Env[Any, Any]) -> State | None:
    """None for a task that keeps no NumPy generator; replay then starts from its seed alone."""
    try:
        return dict(env.unwrapped.np_random.bit_generator.state)
    except AttributeError:
        return None


def _set_rng(env: gym.Env[Any, Any], state: State | None) -> None:
    if state is not None:
        env.unwrapped.np_random.bit_generator.state = state


def scalar_info(info: State) -> ScalarInfo:
    kept: ScalarInfo = {}
    for key, value in info.items():
        if isinstance(value, (bool, int, float)):
            kept[key] = value
        elif isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0 and value.dtype.kind in "biuf":
            kept[key] = value.item()
    return kept


def _odd(numbers: Any) -> str:
    """The first that isn't finite."""
    flat = np.asarray(numbers).reshape(-1)
    return str(flat[~np.isfinite(flat)][0])


def _shaped(value: Any, shape: tuple[int, ...], name: str) -> Any:
    if getattr(value, "shape", None) != shape and np.shape(value) != shape:
        raise MisbehaviorError(f"its {name} has shape {np.shape(value)}; it was {shape} at the first reset")
    return value
