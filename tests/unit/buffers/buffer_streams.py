"""Random streams of experience, and a naive reference buffer: a list of transitions per environment."""

from __future__ import annotations

from typing import Any

import numpy as np

from zhixing.core.batch import Batch
from zhixing.core.tree import Field

F32, BOOL, I64, U8 = (np.dtype(kind) for kind in (np.float32, bool, np.int64, np.uint8))
FLAG = Field((), BOOL)
SPEC = {
    "obs": {"pos": Field((2,), F32), "id": Field((), I64)},
    "action": Field((), I64),
    "reward": Field((), F32),
    "terminated": FLAG,
    "truncated": FLAG,
    "mask": Field((3,), BOOL),
    "hidden": (Field((2,), F32), Field((1,), F32)),
}
SIMPLE = {"obs": Field((1,), F32), "reward": Field((), F32), "terminated": FLAG, "truncated": FLAG}
SUCCESSORS = {"obs": "next_obs", "mask": "next_mask"}


class Stream:
    """The steps of one environment. Every observation has a unique number `id`."""

    def __init__(self, seed: int, end: float = 0.2, jump: float = 0.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.number = seed * 1_000_000
        self.end, self.jump = end, jump
        self.obs, self.mask = self.observe()

    def observe(self) -> tuple[Any, Any]:
        self.number += 1
        pos = self.rng.random(2).astype(np.float32)
        return {"pos": pos, "id": np.int64(self.number)}, self.rng.random(3) < 0.5

    def step(self) -> dict[str, Any]:
        if self.rng.random() < self.jump:  # an interrupted stream: a row that doesn't continue the one before
            self.obs, self.mask = self.observe()
        next_obs, next_mask = self.observe()
        terminated, truncated = (self.rng.random(2) < self.end / 2).tolist()
        row = {
            "obs": self.obs,
            "action": np.int64(self.rng.integers(4)),
            "reward": np.float32(self.rng.normal()),
            "terminated": np.bool_(terminated),
            "truncated": np.bool_(truncated),
            "mask": self.mask,
            "hidden": (self.rng.random(2).astype(np.float32), self.rng.random(1).astype(np.float32)),
            "next_obs": next_obs,
            "next_mask": next_mask,
        }
        self.obs, self.mask = self.observe() if terminated or truncated else (next_obs, next_mask)
        return row


def stack(rows: list[Any]) -> Any:
    """Stack rows (trees) along a new first dimension."""
    first = rows[0]
    if isinstance(first, dict):
        return {key: stack([row[key] for row in rows]) for key in first}
    if isinstance(first, tuple):
        return tuple(stack(list(parts)) for parts in zip(*rows, strict=True))
    return np.stack(rows)


def step(streams: list[Stream]) -> tuple[Batch, list[dict[str, Any]]]:
    rows = [stream.step() for stream in streams]
    return Batch(**stack(rows)), rows


def block(streams: list[Stream], length: int) -> tuple[Batch, list[list[dict[str, Any]]]]:
    rows = [[stream.step() for stream in streams] for _ in range(length)]
    return Batch(**stack([stack(row) for row in rows])), rows


class Naive:
    """The reference: the newest `rows` transitions of each environment and their positions."""

    def __init__(self, rows: int, num_envs: int) -> None:
        self.rows = rows
        self.columns: list[list[dict[str, Any]]] = [[] for _ in range(num_envs)]

    def add(self, rows: list[dict[str, Any]], env_ids: Any = None) -> None:
        for column, row in zip(range(len(rows)) if env_ids is None else env_ids, rows, strict=True):
            self.columns[column].append(row)

    def stored(self) -> dict[int, dict[str, Any]]:
        """Return the stored transitions by index = position * N + column."""
        N = len(self.columns)
        return {
            position * N + c: column[position]
            for c, column in enumerate(self.columns)
            for position in range(max(0, len(column) - self.rows), len(column))
        }

    def continues(self, column: int, position: int) -> bool:
        """Return whether the row after `position` continues it."""
        rows = self.columns[column]
        row = rows[position]
        if position + 1 >= len(rows) or row["terminated"] or row["truncated"]:
            return False
        return bool(row["next_obs"]["id"] == rows[position + 1]["obs"]["id"])


def assert_equal(actual: Any, expected: Any, at: str = "") -> None:
    """Assert that trees of tensors or arrays are equal, bit for bit."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected), at
        for key in expected:
            assert_equal(actual[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, tuple):
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_equal(a, b, f"{at}.{i}")
    else:
        a, b = np.asarray(actual), np.asarray(expected)
        assert a.dtype == b.dtype, at
        assert a.shape == b.shape, at
        assert np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), f"{at}: {a} {b}"


def assert_same_batch(a: Batch, b: Batch) -> None:
    assert set(a.fields) == set(b.fields)
    for name in a.fields:
        assert_equal(getattr(a, name), getattr(b, name), name)


def simple(obs: list[float], reward: list[float], terminated: int = -1, truncated: int = -1) -> Batch:
    """Return a stream [T,1] through the observations `obs`, one more than rewards, that may end at one row."""
    T = len(reward)
    values = np.array(obs, np.float32)[:, None, None]
    ends = [np.arange(T)[:, None] == at for at in (terminated, truncated)]
    return Batch(
        obs=values[:-1],
        reward=np.array(reward, np.float32)[:, None],
        terminated=ends[0],
        truncated=ends[1],
        next_obs=values[1:],
    )
