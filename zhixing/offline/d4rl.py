"""HDF5 files of D4RL: `observations actions rewards terminals`, often `timeouts`, sometimes `next_observations`.

With `next_observations` every successor is known, and an episode also ends where the next row isn't the successor.
Without, the successor of an episode's last step is unknown. After a terminal it isn't needed and set to zeros. A last
step that timed out, or at the end of the file, is dropped: its observation becomes the final observation of the step
before, which is truncated if the dropped step had timed out. (An episode of only that step is dropped completely.)

Without `timeouts` and `next_observations` episodes end at terminals and at the time limit of the environment, if it is
named and has one. Other ends can't be detected.
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
from zhixing.envs.env_spec import inspect_env
from zhixing.envs.registry import make
from zhixing.errors import UserError
from zhixing.offline.chunks import Array, Chunk, Header, cast, chunk_rows
from zhixing.utils.extras import require_extra

MAX_COMPRESSION = 1_100  # accepted ratio of array size to file size; deflate reaches 1,032
FIELDS = {"obs": "observations", "action": "actions", "reward": "rewards"}


class Steps(NamedTuple):
    """Flags of each row of a file, [S]."""

    terminated: Array
    truncated: Array
    ends: Array
    keep: Array


def read_chunks(
    path: str | Path, env: str | None = None, options: Mapping[str, Any] | None = None
) -> tuple[Header, Iterator[Chunk]]:
    """Return the header of a file and its steps as chunks.

    Arrays are read as the spaces of the environment `env`. Without one, the spaces are guessed from the arrays.
    """
    source = str(path)
    with require_extra(source, "offline"):
        import h5py
    env_spaces = None if env is None else _spaces_and_limit(env, dict(options or {}))
    with _open(h5py, source) as file:
        arrays = _arrays(h5py, file, source)
        num_steps = arrays["rewards"].shape[0]
        spaces, limit = env_spaces or (_guess_spaces(source, arrays), None)
        if spaces.num_agents > 1 or spaces.extras():
            raise UserError(
                f"{source}: D4RL's files hold steps of one agent without masks, which {env} isn't; name another env"
            )
        for name, key in FIELDS.items():
            _check_shape(source, key, arrays[key], num_steps, spaces.fields()[name])
        if "next_observations" in arrays:
            next_obs = arrays["next_observations"]
            _check_shape(source, "next_observations", next_obs, num_steps, spaces.fields()["obs"])
            steps = _with_successors(source, arrays, _breaks(arrays["observations"], next_obs))
        else:
            steps = _without_successors(source, arrays, limit)
    header = Header(spaces=spaces, env=env, options=dict(options or {}) if env else {}, name=source)
    return header, _chunks(h5py, header, steps)


def _chunks(h5py: Any, header: Header, steps: Steps) -> Iterator[Chunk]:
    source, spec = header.name, header.spaces.fields()
    size = chunk_rows(spec)
    with _open(h5py, source) as file:
        for start in range(0, len(steps.keep), size):
            rows = slice(start, start + size)
            keep, ends = steps.keep[rows], steps.ends[rows]
            length = len(keep)
            values = {
                name: cast(source, key, spec[name], file[key][rows], length, start) for name, key in FIELDS.items()
            }
            if "next_observations" in file:
                next_obs = cast(
                    source, "next_observations", spec["obs"], file["next_observations"][rows], length, start
                )
            else:
                next_obs = np.zeros_like(values["obs"])
                next_rows = file["observations"][start + 1 : start + size + 1]
                next_obs[: len(next_rows)] = cast(source, "observations", spec["obs"], next_rows, len(next_rows))
                next_obs[steps.terminated[rows]] = 0
            fields = {name: value[keep] for name, value in values.items()}
            flags = {"terminated": steps.terminated[rows][keep], "truncated": steps.truncated[rows][keep]}
            yield Chunk(fields | flags, np.flatnonzero(ends[keep]), {"obs": next_obs[ends]})


# --- episodes ---


def _with_successors(source: str, arrays: dict[str, Any], breaks: Array) -> Steps:
    terminated = _flags(source, arrays, "terminals")
    truncated = _flags(source, arrays, "timeouts") if "timeouts" in arrays else np.zeros_like(terminated)
    return Steps(terminated, truncated, terminated | truncated | breaks, np.ones_like(terminated))


def _without_successors(source: str, arrays: dict[str, Any], limit: int | None) -> Steps:
    terminated = _flags(source, arrays, "terminals")
    timeouts = _flags(source, arrays, "timeouts") if "timeouts" in arrays else _timeouts_by_limit(terminated, limit)
    ended = terminated | timeouts
    ended[-1] = True
    dropped = ended & ~terminated
    before = np.flatnonzero(dropped[1:] & ~ended[:-1])  # rows whose next row, of the same episode, is dropped
    ends, truncated = terminated.copy(), terminated & timeouts
    ends[before] = True
    truncated[before] = timeouts[before + 1]
    if not ends.any():
        raise UserError(f"{source} has no step with a known successor: it has one row, or every row timed out")
    return Steps(terminated, truncated, ends, ~dropped)


def _timeouts_by_limit(terminated: Array, limit: int | None) -> Array:
    """Return timeouts that the file doesn't record: every `limit` steps since the last terminal."""
    if limit is None:
        return np.zeros_like(terminated)
    rows = np.arange(len(terminated))
    first = np.maximum.accumulate(np.where(np.append(True, terminated[:-1]), rows, 0))
    return ((rows - first) % limit == limit - 1) & ~terminated


def _breaks(obs: Any, next_obs: Any) -> Array:
    """Return which rows the next row doesn't continue, read in chunks."""
    num_steps = obs.shape[0]
    breaks = np.ones(num_steps, bool)  # the last row has no next row
    size = chunk_rows({"obs": Field(obs.shape[1:], obs.dtype)})
    for start in range(0, num_steps - 1, size):
        stop = min(start + size, num_steps - 1)
        differs = next_obs[start:stop] != obs[start + 1 : stop + 1]
        breaks[start:stop] = differs.reshape(stop - start, -1).any(1)
    return breaks


def _flags(source: str, arrays: dict[str, Any], name: str) -> Array:
    values = arrays[name][:]
    invalid = np.flatnonzero((values != 0) & (values != 1))
    if len(invalid):
        raise UserError(f"{source}: field {name!r} is {values[invalid[0]]} at row {invalid[0]}, expected 0 or 1")
    return np.asarray(values.astype(bool))


# --- arrays ---


@contextmanager
def _open(h5py: Any, source: str) -> Iterator[Any]:
    try:
        with h5py.File(source, "r") as file:
            yield file
    except UserError:
        raise
    except Exception as error:  # damaged files raise many kinds of errors
        raise UserError(f"{source} is damaged or not an HDF5 file: {error}") from None


def _arrays(h5py: Any, file: Any, source: str) -> dict[str, Any]:
    """Return the numeric arrays of the file by name, after checking that they have equal lengths."""
    required, arrays = ("observations", "actions", "rewards", "terminals"), {}
    for name in (*required, "timeouts", "next_observations"):
        if name not in file:
            if name in required:
                raise UserError(
                    f"{source} lacks the field {name!r} of D4RL's files; it has {', '.join(file) or 'none'}"
                )
            continue
        if not isinstance(file.get(name, getlink=True), h5py.HardLink):
            raise UserError(f"{source}: field {name!r} is a link, which isn't followed: copy the array into the file")
        array = file[name]
        if not isinstance(array, h5py.Dataset) or array.dtype.kind not in "biuf" or not array.shape:
            raise UserError(f"{source}: field {name!r} is not an array of numbers")
        if array.external or array.is_virtual:
            raise UserError(f"{source}: field {name!r} is stored in other files, which aren't read: copy it into this")
        if array.nbytes > MAX_COMPRESSION * Path(source).stat().st_size:
            raise UserError(
                f"{source}: field {name!r} claims {array.nbytes:,} bytes, more than a file of its size can hold"
            )
        arrays[name] = array
    num_steps = arrays["rewards"].shape[0]
    if num_steps == 0:
        raise UserError(f"{source} has no steps")
    for name, array in arrays.items():
        flat = name in ("rewards", "terminals", "timeouts")
        if array.shape[0] != num_steps or (flat and array.ndim != 1):
            expected = f"[{num_steps}]" if flat else f"[{num_steps}, ...], as many as rewards"
            raise UserError(f"{source}: field {name!r} has shape {list(array.shape)}, expected {expected}")
    return arrays


def _check_shape(source: str, name: str, array: Any, num_steps: int, field: Any) -> None:
    if not isinstance(field, Field):
        raise UserError(f"{source}: field {name!r} is one array, but the environment's has the parts {sorted(field)}")
    if array.shape != (num_steps, *field.shape):
        raise UserError(f"{source}: field {name!r} has shape {list(array.shape)}, expected {[num_steps, *field.shape]}")


def _guess_spaces(source: str, arrays: dict[str, Any]) -> Spaces:
    obs, action = arrays["observations"], arrays["actions"]
    if action.dtype.kind != "f":
        raise UserError(
            f"{source}: field 'actions' holds {action.dtype}, not floats from -1 to 1: name the environment with env"
        )
    if obs.dtype.kind == "f":
        obs_space = Box(-np.inf, np.inf, obs.shape[1:], np.float32)
    else:
        limits = np.iinfo(np.uint8 if obs.dtype.kind == "b" else obs.dtype)
        obs_space = Box(limits.min, limits.max, obs.shape[1:], limits.dtype.type)
    return Spaces(obs_space, Box(-1.0, 1.0, action.shape[1:], np.float32))


def _spaces_and_limit(name: str, options: dict[str, Any]) -> tuple[Spaces, int | None]:
    """Return the spaces and the time limit of an environment."""
    env = make(name, **options)
    try:
        limit = None if env.spec is None else env.spec.max_episode_steps
        return inspect_env(env, name).spaces, limit
    finally:
        env.close()
