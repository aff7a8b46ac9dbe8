"""Read, write and reproduce crash reports: JSON files that describe a crash of an environment.

A crash report names the environment and holds the seed and random state at the start of the episode, all actions up to
the failure, and the error. Reading one executes nothing. It may name code of its author, as an environment such as
`my.module:MyEnv` or in the environment's options. `reproduce` imports such code only if the caller confirms the name or
trusts the report.
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
from zhixing.envs.vector.process import ProcessVectorEnv
from zhixing.envs.vector.step_buffers import Array
from zhixing.errors import EnvCrashError, UserError
from zhixing.utils.files import parse_json, write_atomically
from zhixing.utils.importing import check_names, names_in, restricted_to

REPRODUCE_HINT = "reproduce it with:"
FORMAT = 2  # older formats stay readable
MAX_BYTES = 32 * 2**20
MAX_FILES = 100  # per folder, so an environment that keeps failing doesn't fill the disk
GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class EnvReference(_Strict):
    name: str
    options: dict[str, Any]


class Origin(_Strict):
    """How the episode started: from a seed, or from the random state that the previous episode left."""

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
    env: EnvReference
    backend: str
    step_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    call_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # since format 2
    index: Annotated[int, Field(ge=0)]
    seed: Seed | None  # of the environment's last seeded reset
    origin: Origin
    actions: list[Any] | None  # None if there were too many to record
    error: Failure


class Reproduction(NamedTuple):
    same: bool  # whether an error of the same type with the same message was raised at the same step
    message: str
    traceback: str


def write(folder: Path, fields: dict[str, Any]) -> str:
    """Write a crash report to the next free file in `folder`. Return a message with the command to reproduce it."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"crash-{number:03d}.json" for number in range(1, MAX_FILES + 1)]
    path = next((path for path in paths if not path.exists()), None)
    if path is None:
        return f"{folder} already contains {MAX_FILES} crash reports; no report is written for this crash"
    versions = {
        "zhixing": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "numpy": np.__version__,
        "gymnasium": gym.__version__,
    }
    report = {"format": FORMAT, "kind": "crash", "versions": versions, **_to_json(fields)}
    text = json.dumps(report, indent=1)
    if len(text) > MAX_BYTES:
        text = json.dumps({**report, "actions": None}, indent=1)
    write_atomically(path, lambda out: out.write(text.encode()))
    env = fields["env"]
    flags = (f" --env {env['name']}" if ":" in env["name"] else "") + (" --trust" if names_in(env["options"]) else "")
    return f"{REPRODUCE_HINT} zhixing reproduce {path}{flags}"


def _to_json(tree: Any) -> Any:
    """Convert a tree to values that JSON can store. Objects without an equivalent become their `repr`."""
    if isinstance(tree, dict):
        return {str(key): _to_json(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_to_json(value) for value in tree]
    if isinstance(tree, (np.ndarray, np.generic)):
        return tree.tolist()
    return tree if tree is None or isinstance(tree, (bool, int, float, str)) else repr(tree)


def read(path: str | Path) -> CrashReport:
    """Read and validate a crash report. Raises `UserError` if it is missing or invalid."""
    try:
        if Path(path).stat().st_size > MAX_BYTES:
            raise _invalid(path, f"it is larger than {MAX_BYTES // 2**20} MB")
        tree = parse_json(Path(path).read_text(encoding="utf-8"), parse_constant=_reject_constant)
    except FileNotFoundError:
        raise UserError(f"crash report {path} doesn't exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _invalid(path, str(error).split("\n")[0] or type(error).__name__) from None
    version = tree.get("format") if isinstance(tree, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise UserError(f"{path} has format {version}; this version of zhixing reads formats up to {FORMAT}")
    try:
        report = CrashReport.model_validate(tree)
        _check_generator(report.origin.rng)
    except ValidationError as error:
        first = error.errors()[0]
        raise _invalid(path, f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise _invalid(path, error) from None
    return report


def _invalid(path: str | Path, reason: object) -> UserError:
    return UserError(f"{path} is damaged or not a crash report ({reason})")


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a valid number")


def _check_generator(state: dict[str, Any] | None) -> None:
    """Raise `ValueError` if the random state is invalid, which would otherwise fail only inside the environment."""
    if state is None:
        return
    if state.get("bit_generator") not in GENERATORS:
        raise ValueError("origin.rng: unknown generator")
    try:
        getattr(np.random, state["bit_generator"])(0).state = state
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError, IndexError) as error:
        raise ValueError(f"origin.rng: not a state of {state['bit_generator']}: {error}") from None


def reproduce(path: str | Path, env: str | None = None, *, trust: bool = False) -> Reproduction:
    """Make the environment of a crash report in a separate process and repeat its episode.

    Imports the code that the report names only if `env` is that name, or if `trust` is true.
    """
    report = read(path)
    name = report.env.name
    if env is not None and env != name:
        raise UserError(f"{path} is a crash report of {name}, not of {env}")
    try:
        names = check_names(report.env.model_dump(), trust or ([] if env is None else [env]))
    except UserError as error:
        raise UserError(f"{path}: {error}" + (f" or --env {name}" if ":" in name else "")) from None
    if report.actions is None:
        raise UserError(f"{path} can't be reproduced: its episode had too many actions to record")
    failure_policy = FailurePolicy(step_timeout=report.step_timeout, call_timeout=report.call_timeout)
    factory = RegisteredEnv(name, report.env.options)
    with (
        restricted_to(names),
        closing(ProcessVectorEnv(factory, 1, 1, failure_policy=failure_policy)) as vector,
    ):
        return _repeat_episode(report, _parse_actions(path, report.actions, vector), vector)


def _parse_actions(path: str | Path, actions: list[Any], vector: ProcessVectorEnv) -> Array:
    """Return the actions of a report as an array `[T, ...]`. Raises `UserError` if the environment can't take them."""
    expected = vector.buffers.action
    error = _invalid(path, f"actions: {vector.name} takes {vector.single_action_space}")
    try:
        array = np.array(actions) if actions else np.zeros((0, *expected.shape[1:]), expected.dtype)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise error from None
    kinds = "biuf" if expected.dtype.kind == "f" else "biu"
    if array.dtype.kind not in kinds or array.shape[1:] != expected.shape[1:]:
        raise error
    return array.astype(expected.dtype)


def _repeat_episode(report: CrashReport, actions: Array, vector: ProcessVectorEnv) -> Reproduction:
    expected = report.error
    step = 0
    try:
        vector.start_recorded_episode(report.seed, report.origin.model_dump())
        for step, action in enumerate(actions, 1):
            *_, info = vector.step(vector.spaces.unflatten_action(action[None]))
            if "final_info" in info:
                reason = "the environment depends on more than its seed and its actions"
                return Reproduction(False, f"the episode ended without an error at step {step}; {reason}", "")
    except EnvCrashError as crash:
        if crash.report is None:
            raise
        actual = Failure.model_validate(crash.report["error"])
        same = (actual.type, actual.message) == (expected.type, expected.message) and step == len(actions)
        when = f"step {step}" if step else "the reset"
        message = f"at {when}: {actual.type}: {actual.message}"
        if same:
            message = f"reproduced the same error {message}"
        else:
            message = f"got another error than {expected.type}: {expected.message} {message}"
        return Reproduction(same, message, actual.traceback)
    return Reproduction(False, f"no error was raised in {step} steps; the report has {expected.type}", "")
