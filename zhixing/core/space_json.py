"""Spaces as plain JSON and back. Input is validated first, so a file can't execute code or exhaust memory."""

from __future__ import annotations

import math
from typing import Any, get_args

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from zhixing.core.spaces import RewardKind, Spaces
from zhixing.core.tree import Field
from zhixing.errors import UserError

Json = Any
Array = np.ndarray[Any, np.dtype[Any]]

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES = ["bool", *INTEGERS, "float16", "float32", "float64"]
MAX_ELEMENTS = 1 << 24  # in one space


def encode(spaces: Spaces) -> dict[str, Json]:
    """Return spaces as JSON. Raise `UserError` for spaces that arrays can't store."""
    return {
        "obs": _encode(spaces.obs),
        "action": _encode(spaces.action),
        "num_agents": spaces.num_agents,
        "mask": spaces.mask,
        "state": spaces.state,
        "alive": spaces.alive,
        "reward_kind": spaces.reward_kind,
        "agent_names": list(spaces.agent_names),
        "agent_spaces": [[_encode(obs), _encode(action)] for obs, action in spaces.agent_spaces],
        "stack": spaces.stack,
        "info": {key: {"shape": list(field.shape), "dtype": str(field.dtype)} for key, field in spaces.info.items()},
    }


def decode(data: Json) -> Spaces:
    """Return spaces from JSON. Raise `ValueError` for what `encode` never writes."""
    if isinstance(data, dict):
        newer_values = {"agent_names": [], "stack": 1, "agent_spaces": [], "info": {}}
        data = {**newer_values, **data}  # older versions didn't write them
    newer = "agent_names", "stack", "agent_spaces", "info"
    _check_keys(data, "obs", "action", "num_agents", "mask", "state", "alive", "reward_kind", *newer)
    if type(data["alive"]) is not bool:
        raise ValueError(f"alive is {data['alive']!r}, expected true or false")
    if data["reward_kind"] not in get_args(RewardKind):
        raise ValueError(f"reward_kind is {data['reward_kind']!r}, expected one of {', '.join(get_args(RewardKind))}")
    names = data["agent_names"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"agent_names is {str(names)[:80]}, expected a list of strings")
    pairs = data["agent_spaces"]
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"agent_spaces is {str(pairs)[:80]}, expected a list of pairs")
    return Spaces(
        _decode(data["obs"]),
        _decode(data["action"]),
        _count(data, "num_agents"),
        None if data["mask"] is None else _count(data, "mask"),
        None if data["state"] is None else _count(data, "state"),
        data["alive"],
        data["reward_kind"],
        tuple(names),
        _count(data, "stack"),
        tuple((_decode(obs), _decode(action)) for obs, action in pairs),
        _info(data["info"]),
    )


def _info(data: Json) -> dict[str, Field]:
    if not isinstance(data, dict):
        raise ValueError(f"info is {str(data)[:80]}, expected the fields by name")
    for field in data.values():
        _check_keys(field, "shape", "dtype")
    return {key: Field(tuple(_shape(field["shape"])), _dtype(field)) for key, field in data.items()}


def _encode(space: gym.Space[Any]) -> dict[str, Json]:
    if isinstance(space, Dict):
        for key in space.spaces:
            if not isinstance(key, str):
                raise UserError(f"the parts of an observation need strings as names, not {key!r}")
        return {"type": "Dict", "parts": {key: _encode(part) for key, part in space.spaces.items()}}
    if isinstance(space, Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
    if isinstance(space, MultiDiscrete):
        parts = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return {"type": "MultiDiscrete", **parts, "dtype": str(space.dtype)}
    if isinstance(space, MultiBinary):
        return {"type": "MultiBinary", "n": [int(n) for n in space.n] if isinstance(space.n, tuple) else int(space.n)}
    if isinstance(space, Tuple):
        return {"type": "Tuple", "parts": [_encode(part) for part in space.spaces]}
    if not isinstance(space, Box):
        raise UserError(
            f"the space {space} can't be recorded; allowed are Box, Dict, Discrete, MultiBinary, "
            f"MultiDiscrete and Tuple"
        )
    shape = [int(n) for n in space.shape]
    if math.prod(shape) > MAX_ELEMENTS:
        raise UserError(f"the space {space} is too large to be recorded: at most {MAX_ELEMENTS} elements are allowed")
    return {
        "type": "Box",
        "shape": shape,
        "dtype": str(space.dtype),
        "low": _bound(space.low),
        "high": _bound(space.high),
    }


def _bound(values: Array) -> Json:
    """Return one number if all are equal, else a flat list. Infinities become strings."""
    flat = [str(value) if value in (math.inf, -math.inf) else value for value in values.ravel().tolist()]
    return flat[0] if flat and all(value == flat[0] for value in flat) else flat


def _decode(data: Json) -> gym.Space[Any]:
    kind = data.get("type") if isinstance(data, dict) else None
    if kind == "Dict":
        _check_keys(data, "type", "parts")
        if not isinstance(data["parts"], dict):
            raise ValueError("the parts of a Dict must be an object of spaces by name")
        return Dict([(key, _decode(part)) for key, part in data["parts"].items()])
    if kind == "Tuple":
        _check_keys(data, "type", "parts")
        if not isinstance(data["parts"], list):
            raise ValueError("the parts of a Tuple must be a list of spaces")
        return Tuple([_decode(part) for part in data["parts"]])
    if kind == "Discrete":
        _check_keys(data, "type", "n", "start", "dtype")
        start = data["start"]
        if type(start) is not int or not -(2**62) < start < 2**62:
            raise ValueError(f"start is {start!r}, expected an integer")
        dtype = _dtype(data)
        options: dict[str, Any] = {} if dtype == np.int64 else {"dtype": dtype.type}
        return Discrete(_count(data, "n"), start=start, **options)
    if kind == "MultiDiscrete":
        _check_keys(data, "type", "nvec", "start", "dtype")
        return MultiDiscrete(_integers(data["nvec"]), start=_integers(data["start"]), dtype=_dtype(data).type)
    if kind == "MultiBinary":
        _check_keys(data, "type", "n")
        return MultiBinary(_shape(data["n"]) if isinstance(data["n"], list) else _count(data, "n"))
    if kind == "Box":
        _check_keys(data, "type", "shape", "dtype", "low", "high")
        shape, dtype = _shape(data["shape"]), _dtype(data)
        return Box(_bounds(data["low"], shape, dtype), _bounds(data["high"], shape, dtype), tuple(shape), dtype.type)
    raise ValueError(
        f"a space has the type {kind!r}; allowed are Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple"
    )


def _bounds(data: Json, shape: list[int], dtype: np.dtype[Any]) -> Array:
    infinite = {"inf": math.inf, "-inf": -math.inf}
    flat = data if isinstance(data, list) else [data]
    if isinstance(data, list) and len(data) != math.prod(shape):
        raise ValueError(f"a box of shape {shape} has {len(data)} bounds")
    if not all(type(value) in (int, float) or (isinstance(value, str) and value in infinite) for value in flat):
        raise ValueError("the bounds of a box must be numbers, 'inf' or '-inf'")
    numbers = np.array([infinite[value] if isinstance(value, str) else value for value in flat], dtype)
    return numbers.reshape(shape) if isinstance(data, list) else np.full(shape, numbers[0], dtype)


def _check_keys(data: Json, *keys: str) -> None:
    if not isinstance(data, dict) or set(data) != set(keys):
        actual = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"spaces are described by {actual}, expected the keys {sorted(keys)}")


def _count(data: dict[str, Json], key: str) -> int:
    value = data[key]
    if type(value) is not int or not 0 < value < 2**62:
        raise ValueError(f"{key} is {value!r}, expected a positive integer")
    return value


def _shape(data: Json) -> list[int]:
    valid = isinstance(data, list) and len(data) <= 32 and all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in data)
    if not valid or math.prod(data) > MAX_ELEMENTS:
        raise ValueError(f"a space has the shape {str(data)[:80]}, expected at most {MAX_ELEMENTS} elements")
    return list(data)


def _dtype(data: dict[str, Json]) -> np.dtype[Any]:
    if data["dtype"] not in DTYPES:
        raise ValueError(f"a space has the dtype {str(data['dtype'])[:80]!r}; allowed are {', '.join(DTYPES)}")
    return np.dtype(data["dtype"])


def _integers(data: Json) -> Array:
    values = np.array(data)  # raises ValueError for ragged lists
    if values.dtype.kind not in "iu" and values.size:
        raise ValueError("nvec and start of a MultiDiscrete must be integers")
    return values
