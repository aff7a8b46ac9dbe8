"""Crash capsules: one JSON file that holds what repeats a crash of an environment. Reading one executes nothing.

A capsule names its task, the seed and random state that its episode began with, all actions up to the failure, and what
came out. It may name code of whoever wrote it, as a task of the kind `my.module:MyEnv` or in the task's options.
`replay` imports such a task only if the person who asks names it a second time, or trusts the capsule.
"""

from __future__ import annotations

import json
import platform
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zhixing import __version__
from zhixing.envs.crash.failure_policy import FailurePolicy
from zhixing.envs.registry import RegisteredEnv
from zhixing.envs.vector.action_log import plain
from zhixing.envs.vector.process import ProcessVectorEnv
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import EnvCrashError, UserError
from zhixing.utils.files import write_atomically
from zhixing.utils.importing import check_names, names_in, restricted_to

ADVICE = "repeat it with:"
FORMAT = 2  # readers keep understanding older ones
MAX_BYTES = 32 * 2**20
MAX_FILES = 100  # in one folder; a task that keeps failing must not fill the disk
GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Named(_Strict):
    name: str
    options: dict[str, Any]


class Origin(_Strict):
    """How the episode began: by a seed, or by the random state that the one before left."""

    seed: Seed | None
    rng: dict[str, Any] | None
    options: dict[str, Any] | None


class Failure(_Strict):
    type: str
    message: str
    traceback: str


class CrashReport(_Strict):
    format: int
    kind: Literal["crash"]
    versions: dict[str, str]
    env: Named
    backend: str
    step_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    call_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # since format 2
    index: Annotated[int, Field(ge=0)]
    seed: Seed | None  # of the environment's last reset with one
    origin: Origin
    actions: list[Any] | None  # none where they were too many to keep
    error: Failure


class Replayed(NamedTuple):
    same: bool  # the error came out again, with the same type and message
    words: str
    traceback: str


def write(folder: Path, told: dict[str, Any]) -> str:
    """Into the next free file of the folder; gives a sentence that says how to repeat the crash."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"crash-{number:03d}.json" for number in range(1, MAX_FILES + 1)]
    free = [file for file in files if not file.exists()]
    if not free:
        return f"{folder} holds {MAX_FILES} capsules already; this crash isn't kept"
    named = {"zhixing": __version__, "python": platform.python_version(), "system": platform.platform()}
    versions = {**named, "numpy": np.__version__, "gymnasium": gym.__version__}
    whole = {"format": FORMAT, "kind": "crash", "versions": versions, **plain(told)}
    text = json.dumps(whole, indent=1)
    if len(text) > MAX_BYTES:
        text = json.dumps({**whole, "actions": None}, indent=1)
    write_atomically(free[0], lambda out: out.write(text.encode()))
    own = f" --env {told['env']['name']}" if ":" in told["env"]["name"] else ""
    own += " --trust" if names_in(told["env"]["options"]) else ""
    return f"{ADVICE} zhixing replay {free[0]}{own}"


def read(path: str | Path) -> CrashReport:
    def damaged(reason: object) -> UserError:
        return UserError(f"{path} is damaged or no crash capsule ({reason})")

    try:
        if Path(path).stat().st_size > MAX_BYTES:
            raise damaged(f"it is larger than {MAX_BYTES // 2**20} MB")
        tree = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_no_constant)
    except FileNotFoundError:
        raise UserError(f"there is no capsule {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(str(error).split("\n")[0] or type(error).__name__) from None
    version = tree.get("format") if isinstance(tree, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise UserError(f"{path} has format {version}; this version reads up to {FORMAT}")
    try:
        capsule = CrashReport.model_validate(tree)
        _check_generator(capsule.origin.rng)
    except ValidationError as error:
        first = error.errors()[0]
        raise damaged(f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise damaged(error) from None
    return capsule


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _check_generator(state: dict[str, Any] | None) -> None:
    """A state that no generator takes would only be noticed inside the task."""
    if state is None:
        return
    if state.get("bit_generator") not in GENERATORS:
        raise ValueError("origin.rng: unknown generator")
    try:
        getattr(np.random, state["bit_generator"])(0).state = state
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError, IndexError) as error:
        raise ValueError(f"origin.rng: no state of {state['bit_generator']}: {error}") from None


def replay(path: str | Path, env: str | None = None, *, trust: bool = False) -> Replayed:
    """Make the task of a capsule again and repeat its episode, in a process of its own. It imports the code that the
    capsule names if `env` is that name, or with `trust`."""
    capsule = read(path)
    name = capsule.env.name
    if env is not None and env != name:
        raise UserError(f"{path} is of {name}, not of {env}")
    try:
        names = check_names(capsule.env.model_dump(), trust or ([] if env is None else [env]))
    except UserError as error:
        raise UserError(f"{path}: {error}" + (f", or with --env {name}" if ":" in name else "")) from None
    if capsule.actions is None:
        raise UserError(f"{path} can't be repeated: its episode had too many actions to keep")
    faults = FailurePolicy(step_timeout=capsule.step_timeout, call_timeout=capsule.call_timeout)
    with (
        restricted_to(names),
        closing(ProcessVectorEnv(RegisteredEnv(name, capsule.env.options), 1, 1, faults=faults)) as vector,
    ):
        return _repeat(capsule, _actions(path, capsule.actions, vector), vector)


def _actions(path: str | Path, given: list[Any], vector: ProcessVectorEnv) -> Array:
    wanted = vector.arrays.action
    problem = f"{path} is damaged or no crash capsule (actions: {vector.name} takes {vector.single_action_space})"
    try:
        found = np.array(given) if given else np.zeros((0, *wanted.shape[1:]), wanted.dtype)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise UserError(problem) from None
    kinds = "biuf" if wanted.dtype.kind == "f" else "biu"
    if found.dtype.kind not in kinds or found.shape[1:] != wanted.shape[1:]:
        raise UserError(problem)
    return found.astype(wanted.dtype)


def _repeat(capsule: CrashReport, actions: Array, vector: ProcessVectorEnv) -> Replayed:
    step = 0
    try:
        vector.start_recorded_episode(capsule.seed, capsule.origin.model_dump())
        for step, action in enumerate(actions, 1):
            *_, info = vector.step(action[None])
            if "final_info" in info:
                again = "what it does depends on more than its seed and its actions"
                return Replayed(False, f"the episode ended by itself at step {step}; {again}", "")
    except EnvCrashError as crash:
        if crash.report is None:
            raise
        came = Failure.model_validate(crash.report["error"])
        same = (came.type, came.message) == (capsule.error.type, capsule.error.message) and step == len(actions)
        which = "the same error" if same else f"another error than {capsule.error.type}: {capsule.error.message}"
        when = f"step {step}" if step else "the reset"
        return Replayed(same, f"{which} came out at {when}: {came.type}: {came.message}", came.traceback)
    return Replayed(False, f"no error came out in {step} steps; then it was {capsule.error.type}", "")
