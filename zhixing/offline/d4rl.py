"""D4RL's HDF5 files: `observations actions rewards terminals`, often `timeouts`, sometimes `next_observations`.

With `next_observations` every successor is known, and a segment is also over where they aren't the next row. Without,
what followed an episode's last step is unknown. After a terminal nobody asks for it: it is zeros. A last step that
timed out, or after which the file ends, is dropped: its observation is what followed the step before it, which becomes
the end of its segment, truncated if the dropped one had timed out. (An episode of that one step is dropped whole.)

Without `timeouts` and `next_observations` episodes end at terminals and, if the task is named and has one, at its time
limit; other ends can't be seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box

from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field
from zhixing.envs.env_spec import describe
from zhixing.envs.registry import make
from zhixing.errors import UserError
from zhixing.offline.dataset import Dataset
from zhixing.offline.recording import Array, Chunk, Header, cast, chunk_rows, from_extra

MOST_TIMES = 1_100  # that packed data grows when it is read; deflate reaches 1,032
FIELDS = {"obs": "observations", "action": "actions", "reward": "rewards"}


class Steps(NamedTuple):
    """What becomes of each row of a file, [S]."""

    terminated: Array
    truncated: Array
    ends: Array
    keep: Array


def read(path: str | Path, env: str | None = None, options: Mapping[str, Any] | None = None) -> Dataset:
    """All of a file, in memory. Its arrays are read as the spaces of the task `env`, or as what they look like."""
    return Dataset.gather(*recording(path, env, options))


def recording(
    path: str | Path, env: str | None = None, options: Mapping[str, Any] | None = None
) -> tuple[Header, Iterator[Chunk]]:
    """A file's header, and its steps by chunks."""
    who, h5py = str(path), from_extra("h5py", str(path))
    task = None if env is None else _of_task(env, dict(options or {}))
    with _opened(h5py, who) as file:
        arrays = _arrays(h5py, file, who)
        num_steps = arrays["rewards"].shape[0]
        spaces, limit = task or (_guess(who, arrays), None)
        if spaces.num_agents > 1 or spaces.extras():
            raise UserError(f"{who}: D4RL's files hold steps of one agent without masks, not such as {env}")
        for name, theirs in FIELDS.items():
            _check_fits(who, theirs, arrays[theirs], num_steps, spaces.fields()[name])
        if "next_observations" in arrays:
            after = arrays["next_observations"]
            _check_fits(who, "next_observations", after, num_steps, spaces.fields()["obs"])
            steps = _with_successors(who, arrays, _breaks(arrays["observations"], after))
        else:
            steps = _without_successors(who, arrays, limit)
    header = Header(spaces=spaces, env=env, options=dict(options or {}) if env else {}, name=who)
    return header, _chunks(h5py, header, steps)


def _chunks(h5py: Any, header: Header, steps: Steps) -> Iterator[Chunk]:
    who, spec = header.name, header.spaces.fields()
    size = chunk_rows(spec)
    with _opened(h5py, who) as file:
        for start in range(0, len(steps.keep), size):
            rows = slice(start, start + size)
            keep, ends = steps.keep[rows], steps.ends[rows]
            num = len(keep)
            values = {
                name: cast(who, theirs, spec[name], file[theirs][rows], num, start) for name, theirs in FIELDS.items()
            }
            if "next_observations" in file:
                after = cast(who, "next_observations", spec["obs"], file["next_observations"][rows], num, start)
            else:
                after = np.zeros_like(values["obs"])
                following = file["observations"][start + 1 : start + size + 1]
                after[: len(following)] = cast(who, "observations", spec["obs"], following, len(following))
                after[steps.terminated[rows]] = 0
            kept = {name: value[keep] for name, value in values.items()}
            flags = {"terminated": steps.terminated[rows][keep], "truncated": steps.truncated[rows][keep]}
            yield Chunk(kept | flags, np.flatnonzero(ends[keep]), {"obs": after[ends]})


# -------------------------------------------------------------------- episodes


def _with_successors(who: str, arrays: dict[str, Any], breaks: Array) -> Steps:
    terminated = _flags(who, arrays, "terminals")
    truncated = _flags(who, arrays, "timeouts") if "timeouts" in arrays else np.zeros_like(terminated)
    return Steps(terminated, truncated, terminated | truncated | breaks, np.ones_like(terminated))


def _without_successors(who: str, arrays: dict[str, Any], limit: int | None) -> Steps:
    terminated = _flags(who, arrays, "terminals")
    timeouts = _flags(who, arrays, "timeouts") if "timeouts" in arrays else _by_limit(terminated, limit)
    over = terminated | timeouts
    over[-1] = True
    dropped = over & ~terminated
    before = np.flatnonzero(dropped[1:] & ~over[:-1])  # rows whose next one, of the same episode, is dropped
    ends, truncated = terminated.copy(), terminated & timeouts
    ends[before] = True
    truncated[before] = timeouts[before + 1]
    if not ends.any():
        raise UserError(f"{who} has no step whose successor is known: one row only, or each of them timed out")
    return Steps(terminated, truncated, ends, ~dropped)


def _by_limit(terminated: Array, limit: int | None) -> Array:
    """Time-outs that weren't written down: every `limit` steps since the last terminal."""
    if limit is None:
        return np.zeros_like(terminated)
    rows = np.arange(len(terminated))
    first = np.maximum.accumulate(np.where(np.append(True, terminated[:-1]), rows, 0))
    return ((rows - first) % limit == limit - 1) & ~terminated


def _breaks(obs: Any, after: Any) -> Array:
    """Rows that the next one doesn't follow, by chunks."""
    num_steps = obs.shape[0]
    breaks = np.ones(num_steps, bool)  # after the last row comes nothing
    size = chunk_rows({"obs": Field(obs.shape[1:], obs.dtype)})
    for start in range(0, num_steps - 1, size):
        stop = min(start + size, num_steps - 1)
        differs = after[start:stop] != obs[start + 1 : stop + 1]
        breaks[start:stop] = differs.reshape(stop - start, -1).any(1)
    return breaks


def _flags(who: str, arrays: dict[str, Any], name: str) -> Array:
    values = arrays[name][:]
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if len(wrong):
        raise UserError(f"{who}: field {name!r} is {values[wrong[0]]} at row {wrong[0]}, expected 0 or 1")
    return np.asarray(values.astype(bool))


# ---------------------------------------------------------------------- arrays


@contextmanager
def _opened(h5py: Any, who: str) -> Iterator[Any]:
    try:
        with h5py.File(who, "r") as file:
            yield file
    except UserError:
        raise
    except Exception as error:  # what is damaged fails in many ways
        raise UserError(f"{who} is damaged or no HDF5 file: {error}") from None


def _arrays(h5py: Any, file: Any, who: str) -> dict[str, Any]:
    """The datasets of the file by name, of equal length and all numbers."""
    needed, found = ("observations", "actions", "rewards", "terminals"), {}
    for name in (*needed, "timeouts", "next_observations"):
        if name not in file:
            if name in needed:
                raise UserError(f"{who} lacks the field {name!r} of D4RL's files; it has {', '.join(file) or 'none'}")
            continue
        if not isinstance(file.get(name, getlink=True), h5py.HardLink):
            raise UserError(
                f"{who}: field {name!r} is a link to elsewhere, which isn't followed: copy it into the file"
            )
        array = file[name]
        if not isinstance(array, h5py.Dataset) or array.dtype.kind not in "biuf" or not array.shape:
            raise UserError(f"{who}: field {name!r} is no array of numbers")
        if array.external or array.is_virtual:
            raise UserError(
                f"{who}: field {name!r} has its numbers in other files, which aren't read: copy them into it"
            )
        if array.nbytes > MOST_TIMES * Path(who).stat().st_size:
            raise UserError(
                f"{who}: field {name!r} claims {array.nbytes:,} bytes, more than a file of its size can hold"
            )
        found[name] = array
    num_steps = found["rewards"].shape[0]
    if num_steps == 0:
        raise UserError(f"{who} has no steps")
    for name in found:
        flat = name in ("rewards", "terminals", "timeouts")
        if found[name].shape[0] != num_steps or (flat and found[name].ndim != 1):
            expected = f"[{num_steps}]" if flat else f"[{num_steps}, ...], as many as rewards"
            raise UserError(f"{who}: field {name!r} has shape {list(found[name].shape)}, expected {expected}")
    return found


def _check_fits(who: str, name: str, array: Any, num_steps: int, field: Any) -> None:
    if not isinstance(field, Field):
        raise UserError(f"{who}: field {name!r} is one array, the task's is made of the parts {sorted(field)}")
    if array.shape != (num_steps, *field.shape):
        raise UserError(f"{who}: field {name!r} has shape {list(array.shape)}, expected {[num_steps, *field.shape]}")


def _guess(who: str, arrays: dict[str, Any]) -> Spaces:
    obs, action = arrays["observations"], arrays["actions"]
    if action.dtype.kind != "f":
        raise UserError(f"{who}: field 'actions' holds {action.dtype}, not floats from -1 to 1: name the task with env")
    if obs.dtype.kind == "f":
        seen = Box(-np.inf, np.inf, obs.shape[1:], np.float32)
    else:
        limits = np.iinfo(np.uint8 if obs.dtype.kind == "b" else obs.dtype)
        seen = Box(limits.min, limits.max, obs.shape[1:], limits.dtype.type)
    return Spaces(seen, Box(-1.0, 1.0, action.shape[1:], np.float32))


def _of_task(env: str, options: dict[str, Any]) -> tuple[Spaces, int | None]:
    """The spaces of a task, and its limit of steps."""
    task = make(env, **options)
    try:
        limit = None if task.spec is None else task.spec.max_episode_steps
        return describe(task, env).spaces, limit
    finally:
        task.close()
