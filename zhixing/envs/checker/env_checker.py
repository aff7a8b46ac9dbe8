"""`zhixing check`: what is wrong with a task, found by playing it before anything is trained."""

from __future__ import annotations

import itertools
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from zhixing.core.tree import tree_leaves
from zhixing.envs.api import MisbehaviorError, check_spaces, check_type, first_reset, problem_of
from zhixing.envs.checker import trial
from zhixing.envs.checker.step_rules import Look
from zhixing.envs.checker.trial import Shown, again, difference, episodes, stepped
from zhixing.envs.env_spec import EnvSpec, describe, is_text
from zhixing.envs.registry import RegisteredEnv
from zhixing.envs.vector.backend_choice import choose_backend, default_workers, probe, random_action
from zhixing.envs.vector.native import auto_uses_native
from zhixing.envs.vector.serial import EnvFn, env_name_of
from zhixing.envs.vector.step_buffers import StepBuffers, allocate
from zhixing.envs.vector.sub_env import scalar_info
from zhixing.envs.vector.sub_env_group import SubEnvGroup
from zhixing.errors import EnvCrashError, UserError

SEED = 7
PLAYED_STEPS, PLAYED_SECONDS = 1_000, 5.0  # looked at one by one
REPEATED_STEPS = 200  # done again, to compare
COPIES = 8  # whose back end is named
OWN_FILES = (__file__, trial.__file__)  # left out of tracebacks
CHECKS = {  # with what is said where nothing is wrong
    "spaces": "can be stored as arrays",
    "steps": "none raised",
    "observations": "finite, of the shape, kind and bounds that the space says",
    "rewards": "finite numbers",
    "ends": "told as bools",
    "time limit": "there is one",
    "masks": "of the right shape, and always leave an action",
    "info": "a dict",
    "seeding": "the same seed gives the same episodes",
    "determinism": "nothing survives a reset with a seed",
    "copies": "share nothing",
    "restore": "goes on from the middle of an episode, exactly",
    "render": "gives pictures",
}


class Finding(NamedTuple):
    check: str
    status: str  # ok, note or wrong
    message: str


def check_env(task: str | EnvFn, /, **options: Any) -> list[Finding]:
    """Play a task, given by its name or by what makes it, and tell of each check how it went.

    A name that doesn't exist is an error, not a finding. Pictures are looked at if `render_mode` is among the options.
    """
    factory: Any = RegisteredEnv(task, options) if isinstance(task, str) else partial(task, **options)
    if not isinstance(task, str):
        factory.name = env_name_of(task)
    checker = _Checker(factory, options)
    checker.run()
    return checker.findings()


class _Checker:
    def __init__(self, factory: Any, options: dict[str, Any]) -> None:
        self.factory, self.options, self.name = factory, options, env_name_of(factory)
        self.found: dict[str, Finding] = {}
        self.done: list[str] = []  # checks that were made

    def say(self, check: str, mark: str, words: str) -> None:
        """The first word of a kind counts, and what is wrong more than a note."""
        before = self.found.get(check)
        if before is None or (before.status == "note" and mark == "wrong"):
            self.found[check] = Finding(check, mark, words)

    def findings(self) -> list[Finding]:
        made = [Finding(name, "ok", words) for name, words in CHECKS.items() if name in self.done]
        order = [*CHECKS, "speed"]
        told = {finding.check: finding for finding in made} | self.found
        return sorted(told.values(), key=lambda finding: order.index(finding.check))

    def wrong(self, *checks: str) -> bool:
        return any(self.found[name].status == "wrong" for name in checks if name in self.found)

    def run(self) -> None:
        env = self.factory()
        check_type(env, self.name)
        try:
            if not self._spaces(env):
                return
            trace = self._guarded("steps", partial(self._play, env))
            if trace is None:
                return
            if "render_mode" in self.options:
                self._guarded("render", partial(self._render, env))
        finally:
            env.close()
        short = trace[: REPEATED_STEPS + 1]
        self._guarded("seeding", lambda: self._repeats("seeding", short, SEEDING))
        shows = ("observations", "rewards", "masks")
        first: dict[str, tuple[str, ...]] = {
            "determinism": ("seeding",),
            "copies": ("seeding",),
            "restore": (*shows, "seeding", "determinism", "copies"),
            "speed": shows,
        }
        for name, before in first.items():
            if self.wrong(*before):
                self.say(name, "note", "can't be told before the rest is right")
            else:
                self._guarded(name, partial(getattr(self, f"_{name}"), short))

    def _guarded(self, name: str, work: Callable[[], Any]) -> Any:
        """What the work gives; None if it raised."""
        self.done.append(name)
        try:
            return work()
        except (EnvCrashError, MisbehaviorError, UserError) as error:
            self.say(name, "wrong", str(error))
        except Exception as error:
            problem = problem_of(error)
            if problem is not None:
                self.say(name, "wrong", problem)
                return None
            where = error.__traceback__
            while where is not None and where.tb_frame.f_code.co_filename in OWN_FILES:
                where = where.tb_next
            text = "".join(traceback.format_exception(type(error), error, where))
            self.say(name, "wrong", f"it raised {type(error).__name__}: {error}\n{text}")
        return None

    # --- one episode after the other ---

    def _spaces(self, env: gym.Env[Any, Any]) -> bool:
        self.done.append("spaces")
        try:
            check_spaces(env, self.name)
            if self._guarded("steps", partial(first_reset, env, self.name)) is None:
                return False
            self.env_spec: EnvSpec = describe(env, self.name)
        except UserError as error:
            self.say("spaces", "wrong", str(error))
            return False
        text = [str(key) for key, part in _parts(env.observation_space) if is_text(part)]
        if text:
            self.say("spaces", "note", f"{', '.join(text)} of the observation is text, which is left out")
        action = env.action_space
        if isinstance(action, Box) and not action.is_bounded():
            self.say("spaces", "note", f"actions {action} have no bounds; give some, so that policies know the scale")
        self.spaces = self.env_spec.spaces
        return True

    def _play(self, env: gym.Env[Any, Any]) -> list[Shown] | None:
        """Any actions, for a while. Each thing shown is looked at; None if nothing more can be."""
        look = Look(self.env_spec, self.say)
        end_at = time.monotonic() + PLAYED_SECONDS
        trace: list[Shown] = []
        for shown in episodes(env, self.env_spec, self._actions(), SEED):
            trace.append(shown)
            when = f"after {sum(one.action is not None for one in trace)} steps"
            if not isinstance(shown.info, dict):
                self.say("info", "wrong", f"it is of {type(shown.info).__name__} {when}; it must be a dict")
                return None
            look.at_step(shown, when)
            if len(trace) > PLAYED_STEPS or time.monotonic() > end_at:
                break
        ends = [shown for shown in trace if shown.ended]
        limit = self.env_spec.max_episode_steps
        if not ends and limit is None:
            self.say("time limit", "note", f"no episode ended within {len(trace) - 1} steps; {NO_LIMIT}")
        elif limit is None and not any(shown.truncated for shown in ends):
            self.say("time limit", "note", f"episodes ended, but no time limit was found; {NO_LIMIT}")
        if ends:
            self._after_end()
        self.done += ["observations", "rewards", "ends", "time limit", "info"]
        self.done += ["masks"] * (self.spaces.mask is not None)
        names = {name for shown in ends for name in scalar_info(shown.info)}
        lacking = sorted(set(self.env_spec.logged_info_keys) - names)
        if ends and lacking:
            self.say("info", "note", f"metadata names {', '.join(lacking)}, which no last info holds")
        return trace

    def _actions(self) -> Callable[[Any], Any]:
        space = self.spaces.action
        space.seed(SEED)
        return lambda mask: random_action(space, mask, self.spaces.num_agents)

    def _after_end(self) -> None:
        """Nothing here steps a task that has ended, but a task that goes on then may have forgotten its end."""
        env = self.factory()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some say so in words
                for shown in itertools.islice(episodes(env, self.env_spec, self._actions(), SEED), 2 * PLAYED_STEPS):
                    if shown.ended and not stepped(env, shown.action).ended:
                        self.say("ends", "note", "a step after the end of an episode goes on as if there had been none")
                    if shown.ended:
                        return
        except Exception:  # to refuse such a step is right as well
            return
        finally:
            env.close()

    def _render(self, env: gym.Env[Any, Any]) -> None:
        frame: Any = env.render()
        if self.options["render_mode"] != "rgb_array":
            return
        found = np.asarray(frame)
        if found.dtype != np.uint8 or found.ndim != 3 or found.shape[-1] != 3:
            what = f"{found.dtype} of shape {found.shape}" if frame is not None else "None"
            self.say("render", "wrong", f"it gives {what}; an array of uint8 [height, width, 3] is meant")

    # --- the same again ---

    def _repeats(self, name: str, trace: list[Shown], advice: str, before: Callable[[Any], Any] | None = None) -> None:
        """A fresh copy, `before` done to it, must go through the same again."""
        env = self.factory()
        try:
            if before is not None:
                before(env)
            self._compare(name, trace, again(env, trace, SEED), advice)
        finally:
            env.close()

    def _compare(self, name: str, trace: list[Shown], again: Iterator[Shown], advice: str) -> None:
        for step, (one, other) in enumerate(zip(trace, again, strict=False)):
            what = difference(one, other, self.env_spec)
            if what is not None:
                self.say(name, "wrong", f"{what} differs after {step} steps; {advice}")
                return

    def _determinism(self, trace: list[Shown]) -> None:
        def used(env: gym.Env[Any, Any]) -> None:
            for _ in itertools.islice(episodes(env, self.env_spec, self._actions(), SEED + 1), REPEATED_STEPS // 2):
                pass

        self._repeats("determinism", trace, DETERMINISM, used)

    def _copies(self, trace: list[Shown]) -> None:
        other = self.factory()
        try:

            def interleave(same: Iterator[Shown]) -> Iterator[Shown]:
                neighbour = episodes(other, self.env_spec, self._actions(), SEED + 1)
                for shown, _ in zip(same, neighbour, strict=False):
                    yield shown

            env = self.factory()
            self._compare("copies", trace, interleave(again(env, trace, SEED)), COPIES_ADVICE)
            env.close()
        finally:
            other.close()

    def _restore(self, trace: list[Shown]) -> None:
        """Save in the middle, load into another copy, and let both go on."""
        actions = [shown.action for shown in trace if shown.action is not None]
        half = len(actions) // 2
        pair = []
        for _ in range(2):
            arrays = allocate(self.spaces, 1)
            pair.append((SubEnvGroup([self.factory], self.env_spec, arrays, 0, self.name), arrays))
        (first, shown), (second, other) = pair
        try:
            first.reset([SEED], None)
            for action in actions[:half]:
                shown.action[0] = action
                first.step()
            if second.load(first.state()):
                self.say("restore", "note", RESTORE)
                return
            for step, action in enumerate(actions[half:], half + 1):
                for group, arrays in pair:
                    arrays.action[0] = action
                    group.step()
                if any(one.tobytes() != two.tobytes() for one, two in zip(_now(shown), _now(other), strict=True)):
                    words = f"put back after {half} steps, it goes on otherwise at step {step}"
                    self.say("restore", "wrong", f"{words}; state_dict must hold all that matters, also chance")
                    return
        finally:
            first.close()
            second.close()

    def _speed(self, trace: list[Shown]) -> None:
        found = probe(self.factory)
        workers = default_workers(COPIES, found.waits)
        if isinstance(self.factory, RegisteredEnv) and auto_uses_native(self.name, self.options):
            backend = "native"
        else:
            backend = choose_backend(COPIES, found, workers, idle=True)
            backend += "" if backend == "serial" else f" with {workers} workers"
        self.say("speed", "ok", f"{1 / found.step_seconds:,.0f} steps/s of one copy; {COPIES} would run {backend}")


NO_LIMIT = (
    "a policy may never end one, and evaluations then stop only at eval_max_steps; set env.max_episode_steps=... to "
    "truncate episodes"
)
SEEDING = "begin reset with super().reset(seed=seed) and take all chance from self.np_random"
DETERMINISM = "reset must forget all of the episodes before"
COPIES_ADVICE = "what a copy changes must belong to it alone, not to its class, its module or another process"
RESTORE = (
    "can't be put back into the middle of an episode: a resumed run would begin a new one; give the task state_dict "
    "and load_state_dict, or take all chance from self.np_random"
)


def _parts(space: gym.Space[Any]) -> list[tuple[Any, gym.Space[Any]]]:
    return list(space.spaces.items()) if isinstance(space, gym.spaces.Dict) else []


def _now(arrays: StepBuffers) -> list[Any]:
    return tree_leaves((arrays.obs, arrays.reward, arrays.terminated, arrays.truncated, arrays.extras))
