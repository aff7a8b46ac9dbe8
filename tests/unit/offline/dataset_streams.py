"""Random streams of several kinds of tasks, and a naive recorder to compare with: lists of steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.core.tree import Field, Tree, tree_leaves, tree_map
from zhixing.offline import Dataset, Writer

AFTER = {"obs": "next_obs", "mask": "next_mask", "state": "next_state", "alive": "next_alive"}
KINDS = {
    "box": Spaces(Box(-np.inf, np.inf, (3,), np.float64), Box(np.float32([-2.0, 0.0]), np.float32([4.0, 10.0]))),
    "same scale": Spaces(Box(-1.0, 1.0, (2,), np.float32), Box(-1.0, 1.0, (2,), np.float32)),
    "unbounded": Spaces(Box(-1.0, 1.0, (2,), np.float32), Box(-np.inf, np.inf, (1,), np.float32)),
    "dict": Spaces(
        Dict(
            {
                "cue": Discrete(3, start=2),
                "more": Dict({"picture": Box(0, 255, (4, 3, 1), np.uint8), "choice": MultiDiscrete([2, 3])}),
                "bits": MultiBinary(3),
                "a name/with .. in it": Box(-1.0, 1.0, (), np.float32),
            }
        ),
        Discrete(3, start=5),
        mask=3,
    ),
    "choices": Spaces(Discrete(7), MultiDiscrete([3, 2], start=[1, 4])),
    "bits": Spaces(Box(0, 1, (2,), np.int8), MultiBinary(4)),
    "team": Spaces(Box(-1.0, 1.0, (2,), np.float32), Discrete(4), num_agents=3, mask=4, state=5, alive=True),
}


class Stream:
    """One environment's steps, drawn from its spaces; with `jump` it sometimes goes on elsewhere without an end."""

    def __init__(self, spaces: Spaces, seed: int, end: float = 0.15, jump: float = 0.0) -> None:
        self.spaces, self.end, self.jump = spaces, end, jump
        self.rng = np.random.default_rng(seed)
        self.obs_space = copy.deepcopy(spaces.obs)
        self.obs_space.seed(seed)
        self.seen = self.see()

    def see(self) -> dict[str, Tree]:
        many = [self.obs_space.sample() for _ in range(self.spaces.num_agents)]
        obs = many[0] if self.spaces.num_agents == 1 else tree_map(lambda *leaves: np.stack(leaves), *many)
        spec = self.spaces.fields()
        seen = {"obs": tree_map(lambda field, leaf: np.asarray(leaf, field.dtype), spec["obs"], obs)}
        for name, field in self.spaces.extras().items():
            seen[name] = (self.rng.random(field.shape) < 0.5) if field.dtype == bool else self.floats(field)
        return seen

    def floats(self, field: Field) -> Any:
        return self.rng.normal(size=field.shape).astype(np.float32)

    def action(self) -> Any:
        """In the policy's scale; continuous ones are sometimes beyond it, as samples of a normal distribution are."""
        space, shape = self.spaces.action, self.spaces.fields()["action"].shape
        if isinstance(space, Box):
            return self.rng.uniform(-1.3, 1.3, shape).astype(np.float32)
        high = {Discrete: lambda: space.n, MultiDiscrete: lambda: space.nvec, MultiBinary: lambda: 2}[type(space)]()
        return self.rng.integers(0, high, shape).astype(self.spaces.fields()["action"].dtype)

    def step(self) -> dict[str, Tree]:
        if self.rng.random() < self.jump:
            self.seen = self.see()
        after = self.see()
        terminated, truncated = (self.rng.random(2) < self.end / 2).tolist()
        row = {
            **self.seen,
            "action": self.action(),
            "reward": self.floats(self.spaces.fields()["reward"]),
            "terminated": np.bool_(terminated),
            "truncated": np.bool_(truncated),
            **{AFTER[name]: value for name, value in after.items()},
        }
        self.seen = self.see() if terminated or truncated else after
        return row


def stack(rows: list[Tree]) -> Tree:
    return tree_map(lambda *leaves: np.stack(leaves), *rows)


def block(streams: list[Stream], length: int) -> tuple[Batch, list[list[dict[str, Tree]]]]:
    """Steps `[T,N]`, with a field more that nobody asked for, and the same as lists."""
    rows = [[stream.step() for stream in streams] for _ in range(length)]
    batch = stack([stack(row) for row in rows])
    return Batch(**batch, logp=np.zeros((length, len(streams)), np.float32)), rows


class Naive:
    """What a writer must write: segments as lists of steps, in the order of their ends."""

    def __init__(self, max_steps: int | None = None) -> None:
        self.left = max_steps if max_steps is not None else 10**9
        self.held: dict[int, list[dict[str, Tree]]] = {}
        self.segments: list[list[dict[str, Tree]]] = []

    def add(self, rows: list[list[dict[str, Tree]]], columns: list[int]) -> None:
        for row in rows:
            for column, step in zip(columns, row, strict=True):
                if self.left == 0:
                    return
                self.left -= 1
                held = self.held.setdefault(column, [])
                if held and not follows(held[-1], step):
                    self.flush(column)
                    held = self.held.setdefault(column, [])
                held.append(step)
                if step["terminated"] or step["truncated"]:
                    self.flush(column)

    def flush(self, column: int) -> None:
        self.segments.append(self.held.pop(column))

    def finish(self) -> None:
        for column in sorted(self.held):
            self.flush(column)


def follows(before: dict[str, Tree], step: dict[str, Tree]) -> bool:
    return all(equal(before[after], step[name]) for name, after in AFTER.items() if name in step)


def equal(a: Tree, b: Tree) -> bool:
    return all(tree_leaves(tree_map(np.array_equal, a, b)))


def kept_action(spaces: Spaces, action: Any) -> Any:
    """A policy's action after its way to the task and back: what is beyond the bounds is cut off."""
    box = spaces.action
    return np.clip(action, -1.0, 1.0) if isinstance(box, Box) and box.is_bounded() else action


def assert_segment(batch: Batch, steps: list[dict[str, Tree]], spaces: Spaces) -> None:
    expected = stack(steps)
    assert set(batch.fields) == set(expected)
    for name in batch.fields:
        given = getattr(batch, name)
        if name == "action":
            wanted = kept_action(spaces, expected[name])
            assert given.dtype == wanted.dtype
            np.testing.assert_allclose(given, wanted, atol=1e-6)
        else:
            assert [leaf.dtype for leaf in tree_leaves(given)] == [leaf.dtype for leaf in tree_leaves(expected[name])]
            assert equal(given, expected[name]), name


def recorded(folder: Path, kind: str = "dict", steps: int = 60, seed: int = 0, **described: Any) -> Path:
    """A dataset of three streams in a new folder."""
    spaces = KINDS[kind]
    streams = [Stream(spaces, 100 * seed + i) for i in range(3)]
    with Writer(folder, spaces, **described) as writer:
        for _ in range(steps // 30):
            writer.add(block(streams, 10)[0])
    return folder


def assert_same(a: Dataset, b: Dataset, action_tolerance: float = 0.0) -> None:
    assert a.ends.tolist() == b.ends.tolist()
    for one, other in ((a.arrays, b.arrays), (a.lasts, b.lasts)):
        assert list(one) == list(other)
        for name in one:
            if name == "action" and action_tolerance:
                np.testing.assert_allclose(one[name], other[name], atol=action_tolerance)
            else:
                assert equal(one[name], other[name]), name


def small(**changes: Any) -> dict[str, Any]:
    """The parts of a dataset of two episodes with 3 and 2 steps, one number as observation; for spoiling one part."""
    parts = {
        "name": "small",
        "spaces": Spaces(Box(-np.inf, np.inf, (1,), np.float32), Discrete(2)),
        "arrays": {
            "obs": np.float32([[0], [1], [2], [10], [11]]),
            "action": np.array([0, 1, 0, 1, 1]),
            "reward": np.float32([1, 2, 3, 10, 20]),
            "terminated": np.array([False, False, True, False, False]),
            "truncated": np.zeros(5, bool),
        },
        "lasts": {"obs": np.float32([[3], [12]])},
        "ends": np.array([2, 4]),
    }
    return parts | changes
