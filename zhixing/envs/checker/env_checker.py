"""Check that an environment follows the Gymnasium API and is fit for training, as `zhixing check` does."""

from __future__ import annotations

import itertools
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from zhixing.core.tree import tree_leaves
from zhixing.envs.api import MisbehaviorError, check_spaces, check_type, describe_api_error, reset_and_check
from zhixing.envs.checker import rollout
from zhixing.envs.checker.rollout import StepRecord, find_difference, repeat_trace, run_episodes, step_env
from zhixing.envs.checker.step_checker import StepChecker
from zhixing.envs.env_spec import EnvSpec, inspect_env, is_text
from zhixing.envs.registry import RegisteredEnv
from zhixing.envs.vector.backend_choice import choose_backend, default_workers, probe, random_action
from zhixing.envs.vector.native import auto_uses_native
from zhixing.envs.vector.serial import EnvFn, env_name_of
from zhixing.envs.vector.step_buffers import StepBuffers, allocate
from zhixing.envs.vector.sub_env import scalar_info
from zhixing.envs.vector.sub_env_group import SubEnvGroup
from zhixing.errors import EnvCrashError, UserError

SEED = 7
MAX_STEPS, MAX_SECONDS = 1_000, 5.0  # of the first run, in which every step is checked
REPEATED_STEPS = 200  # that later checks repeat and compare
NUM_ENVS = 8  # for which the speed check names a back end
OWN_FILES = (__file__, rollout.__file__)  # omitted from tracebacks
CHECKS = {  # with the message of a check that passes
    "spaces": "can be stored as arrays",
    "steps": "no reset and no step raised an error",
    "observations": "finite, with the shape, dtype and bounds of the observation space",
    "rewards": "finite numbers",
    "episode ends": "terminated and truncated are booleans",
    "time limit": "episodes have a time limit",
    "action masks": "have the right shape and always allow an action",
    "info": "a dict",
    "seeding": "the same seed and actions give the same episodes",
    "reset": "a seeded reset doesn't depend on earlier episodes",
    "isolation": "instances share no state",
    "restore": "an episode restored in the middle continues identically",
    "render": "returns RGB images",
}
DIFFERENCES = {  # how a second run differed from the first one, and advice
    "seeding": "in a new instance with the same seed and actions; start reset with super().reset(seed=seed) and draw "
    "all random numbers from self.np_random",
    "reset": "in an instance that has run other episodes before; reset must erase everything that they changed",
    "isolation": "in an instance that runs alongside another one; keep everything that changes in the instance, not in "
    "its class, its module or another process",
}
RESTORE_ADVICE = (
    "an episode can't be restored in the middle, so a resumed run starts a new one; implement state_dict and "
    "load_state_dict, or draw all random numbers from self.np_random"
)
LIMIT_ADVICE = (
    "a policy may never end an episode, and evaluations then stop only at eval_max_steps; set env.max_episode_steps=N "
    "to truncate episodes"
)


class CheckResult(NamedTuple):
    check: str
    status: str  # ok, warning, error or skipped
    message: str


def check_env(env: str | EnvFn, /, **options: Any) -> list[CheckResult]:
    """Check an environment by taking random actions, and return one result per check.

    `env` is a name, a class, or a function that returns a new environment; `options` are passed on to it. Rendering is
    checked only if `render_mode` is among them. Raises `UserError` if there is no environment of that name.
    """
    factory: Any = RegisteredEnv(env, options) if isinstance(env, str) else partial(env, **options)
    if not isinstance(env, str):
        factory.name = env_name_of(env)
    checker = _Checker(factory, options)
    checker.run()
    return checker.sorted_results()


class _Checker:
    def __init__(self, factory: Any, options: dict[str, Any]) -> None:
        self.factory, self.options, self.name = factory, options, env_name_of(factory)
        self.results: dict[str, CheckResult] = {}
        self.completed: list[str] = []  # checks that pass unless `results` has another result

    def report(self, check: str, status: str, message: str) -> None:
        """Keep the first result of a check, except that an error replaces a warning."""
        previous = self.results.get(check)
        if previous is None or (previous.status == "warning" and status == "error"):
            self.results[check] = CheckResult(check, status, message)

    def sorted_results(self) -> list[CheckResult]:
        passed = {name: CheckResult(name, "ok", text) for name, text in CHECKS.items() if name in self.completed}
        order = [*CHECKS, "speed"]
        return sorted((passed | self.results).values(), key=lambda result: order.index(result.check))

    def has_error(self, *checks: str) -> bool:
        return any(self.results[name].status == "error" for name in checks if name in self.results)

    def run(self) -> None:
        env = self.factory()
        check_type(env, self.name)
        with closing(env):
            if not self._check_spaces(env):
                return
            trace = self._guard("steps", partial(self._check_steps, env))
            if trace is None:
                return
            if "render_mode" in self.options:
                self._guard("render", partial(self._check_render, env))
        trace = trace[: REPEATED_STEPS + 1]
        self._guard("seeding", partial(self._check_seeding, trace))
        step_checks = ("observations", "rewards", "action masks")
        required: dict[str, tuple[str, ...]] = {
            "reset": ("seeding",),
            "isolation": ("seeding",),
            "restore": (*step_checks, "seeding", "reset", "isolation"),
            "speed": step_checks,
        }
        for name, earlier in required.items():
            if self.has_error(*earlier):
                self.report(name, "skipped", "not checked; fix the errors above first")
            else:
                self._guard(name, partial(getattr(self, f"_check_{name}"), trace))

    def _guard(self, name: str, check: Callable[[], Any]) -> Any:
        """Run a check and return its result. If it raises, report an error and return None."""
        self.completed.append(name)
        try:
            return check()
        except (EnvCrashError, MisbehaviorError, UserError) as error:
            self.report(name, "error", str(error))
        except Exception as error:
            problem = describe_api_error(error)
            if problem is not None:
                self.report(name, "error", problem)
                return None
            frame = error.__traceback__
            while frame is not None and frame.tb_frame.f_code.co_filename in OWN_FILES:
                frame = frame.tb_next
            text = "".join(traceback.format_exception(type(error), error, frame))
            self.report(name, "error", f"the environment raised {type(error).__name__}: {error}\n{text}")
        return None

    # --- checks of one run ---

    def _check_spaces(self, env: gym.Env[Any, Any]) -> bool:
        """Return whether the environment can be stepped."""
        self.completed.append("spaces")
        try:
            check_spaces(env, self.name)
            if self._guard("steps", partial(reset_and_check, env, self.name)) is None:
                return False
            self.env_spec: EnvSpec = inspect_env(env, self.name)
        except UserError as error:
            self.report("spaces", "error", str(error))
            return False
        if isinstance(env.observation_space, gym.spaces.Dict):
            text_keys = [str(key) for key, part in env.observation_space.spaces.items() if is_text(part)]
            if text_keys:
                message = f"{', '.join(text_keys)} of the observation is text, which policies don't receive"
                self.report("spaces", "warning", message)
        action = self.env_spec.spaces.action
        if not self.env_spec.spaces.layout.bounded:
            message = f"the action space {action} is unbounded; set finite bounds so that policies can scale actions"
            self.report("spaces", "warning", message)
        self.spaces = self.env_spec.spaces
        return True

    def _check_steps(self, env: gym.Env[Any, Any]) -> list[StepRecord] | None:
        """Check every step of some episodes and return them, or None if later checks are impossible."""
        step_checker = StepChecker(self.env_spec, self.report)
        deadline = time.monotonic() + MAX_SECONDS
        trace: list[StepRecord] = []
        for record in run_episodes(env, self.env_spec, self._action_sampler(), SEED):
            trace.append(record)
            if not isinstance(record.info, dict):
                self.report("info", "error", f"info is a {type(record.info).__name__} {record.when}; return a dict")
                return None
            step_checker.check(record)
            if len(trace) > MAX_STEPS or time.monotonic() > deadline:
                break
        last_steps = [record for record in trace if record.ended]
        if self.env_spec.max_episode_steps is None:
            if not last_steps:
                message = f"no episode ended within {trace[-1].step:,} steps; {LIMIT_ADVICE}"
                self.report("time limit", "warning", message)
            elif not any(record.truncated for record in last_steps):
                self.report("time limit", "warning", f"episodes end, but none was truncated; {LIMIT_ADVICE}")
        if last_steps:
            self._check_step_after_end()
        self.completed += ["observations", "rewards", "episode ends", "time limit", "info"]
        self.completed += ["action masks"] * (self.spaces.mask is not None)
        keys = {key for record in last_steps for key in scalar_info(record.info)}
        missing = sorted(set(self.env_spec.logged_info_keys) - keys)
        if last_steps and missing:
            message = f"metadata['logged_info_keys'] lists {', '.join(missing)}, but no episode's last info has it"
            self.report("info", "warning", message)
        return trace

    def _action_sampler(self) -> Callable[[Any], Any]:
        self.spaces.action.seed(SEED)
        return partial(random_action, self.spaces)

    def _check_step_after_end(self) -> None:
        """Warn if a step after the end of an episode is accepted as if the episode were still running.

        Training never takes such a step, but such an environment may not record the end of its episodes.
        """
        env = self.factory()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some environments warn of such a step
                episodes = run_episodes(env, self.env_spec, self._action_sampler(), SEED)
                for record in itertools.islice(episodes, 2 * MAX_STEPS):
                    if record.ended:
                        if not step_env(env, record.action, record.step + 1).ended:
                            message = "a step after the end of an episode continues it; raise an error, or end it again"
                            self.report("episode ends", "warning", message)
                        return
        except Exception:  # raising an error is also right
            return
        finally:
            env.close()

    def _check_render(self, env: gym.Env[Any, Any]) -> None:
        frame: Any = env.render()
        if self.options["render_mode"] != "rgb_array":
            return
        image = np.asarray(frame)
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
            actual = "None" if frame is None else f"an array of {image.dtype} with shape {image.shape}"
            self.report("render", "error", f"render() returned {actual}; return a uint8 array [height, width, 3]")

    # --- checks that compare two runs ---

    def _compare(self, name: str, trace: list[StepRecord], repetition: Iterator[StepRecord]) -> None:
        for expected, actual in zip(trace, repetition, strict=False):
            difference = find_difference(expected, actual, self.env_spec)
            if difference is not None:
                self.report(name, "error", f"{difference} differs {expected.when} {DIFFERENCES[name]}")
                return

    def _check_seeding(self, trace: list[StepRecord]) -> None:
        with closing(self.factory()) as env:
            self._compare("seeding", trace, repeat_trace(env, trace, SEED))

    def _check_reset(self, trace: list[StepRecord]) -> None:
        with closing(self.factory()) as env:
            for _ in itertools.islice(self._run_other_episodes(env), REPEATED_STEPS // 2):
                pass
            self._compare("reset", trace, repeat_trace(env, trace, SEED))

    def _check_isolation(self, trace: list[StepRecord]) -> None:
        with closing(self.factory()) as other, closing(self.factory()) as env:
            pairs = zip(repeat_trace(env, trace, SEED), self._run_other_episodes(other), strict=False)
            self._compare("isolation", trace, (record for record, _ in pairs))

    def _run_other_episodes(self, env: gym.Env[Any, Any]) -> Iterator[StepRecord]:
        return run_episodes(env, self.env_spec, self._action_sampler(), SEED + 1)

    def _check_restore(self, trace: list[StepRecord]) -> None:
        """Save the environment in the middle, load the state into another one, and compare how they continue."""
        actions = [record.action for record in trace if record.action is not None]
        middle = len(actions) // 2
        pair = []
        for _ in range(2):
            buffers = allocate(self.spaces, 1)
            pair.append((SubEnvGroup([self.factory], self.env_spec, buffers, 0, self.name), buffers))
        (original, expected), (restored, actual) = pair
        try:
            original.reset([SEED], None)
            for action in actions[:middle]:
                expected.action[0] = self.spaces.flatten_action(action)
                original.step()
            if restored.load(original.state()):
                self.report("restore", "warning", RESTORE_ADVICE)
                return
            for step, action in enumerate(actions[middle:], middle + 1):
                for group, buffers in pair:
                    buffers.action[0] = self.spaces.flatten_action(action)
                    group.step()
                arrays = zip(_step_arrays(expected), _step_arrays(actual), strict=True)
                if any(one.tobytes() != other.tobytes() for one, other in arrays):
                    message = f"an environment restored after {middle} steps continues differently at step {step}"
                    advice = "state_dict must contain the whole state, including that of random generators"
                    self.report("restore", "error", f"{message}; {advice}")
                    return
        finally:
            original.close()
            restored.close()

    def _check_speed(self, trace: list[StepRecord]) -> None:
        probed = probe(self.factory)
        workers = default_workers(NUM_ENVS, probed.waits)
        if isinstance(self.factory, RegisteredEnv) and auto_uses_native(self.name, self.options):
            backend = "native"
        else:
            backend = choose_backend(NUM_ENVS, probed, workers, idle=True)
            backend += "" if backend == "serial" else f" with {workers} workers"
        speed = f"{1 / probed.step_seconds:,.0f} steps/s in one environment"
        self.report("speed", "ok", f"{speed}; vector.backend=auto uses {backend} for {NUM_ENVS} environments")


def _step_arrays(buffers: StepBuffers) -> list[Any]:
    return tree_leaves((buffers.obs, buffers.reward, buffers.terminated, buffers.truncated, buffers.extras))
