"""Random streams for several kinds of spaces, and a naive reference recorder: lists of steps."""

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

SUCCESSORS = {"obs": "next_obs", "mask": "next_mask", "state": "next_state", "alive": "next_alive"}
KINDS = {
    "box": Spaces(Box(-np.inf, np.inf, (3,), np.float64), Box(np.float32([-2.0, 0.0]), np.float32([4.0, 10.0]))),
    "same scale": Spaces(Box(-1.0, 1.0, (2,), np.float32), Box(-1.0, 1.0, (2,), np.float32)),
    "unbounded": Spaces(Box(-1.0, 1.0, (2,), np.float32), Box(-np.inf, np.inf, (1,), np.float32)),
    "dict": Spaces(
        Dict(
            {
                "cue": Discrete(3, start=2),
                "nested": Dict({"image": Box(0, 255, (4, 3, 1), np.uint8), "choice": MultiDiscrete([2, 3])}),
                "bits": MultiBinary(3),
                "a name/with .. in it": Box(-1.0, 1.0, (), np.float32),
            }
        ),
        Discrete(3, start=5),
        mask=3,
    ),
    "multi-discrete": Spaces(Discrete(7), MultiDiscrete([3, 2], start=[1, 4])),
    "bits": Spaces(Box(0, 1, (2,), np.int8), MultiBinary(4)),
    "team": Spaces(Box(-1.0, 1.0, (2,), np.float32), Discrete(4), num_agents=3, mask=4, state=5, alive=True),
}


class Stream:
    """The steps of one environment, sampled from its spaces. With `jump` the stream is sometimes interrupted."""

    def __init__(self, spaces: Spaces, seed: int, end: float = 0.15, jump: float = 0.0) -> None:
        self.spaces, self.end, self.jump = spaces, end, jump
        self.rng = np.random.default_rng(seed)
        self.obs_space = copy.deepcopy(spaces.obs)
        self.obs_space.seed(seed)
        self.current = self.observe()

    def observe(self) -> dict[str, Tree]:
        samples = [self.obs_space.sample() for _ in range(self.spaces.num_agents)]
        obs = samples[0] if self.spaces.num_agents == 1 else tree_map(lambda *leaves: np.stack(leaves), *samples)
        spec = self.spaces.fields()
        fields = {"obs": tree_map(lambda field, leaf: np.asarray(leaf, field.dtype), spec["obs"], obs)}
        for name, field in self.spaces.extras().items():
            fields[name] = (self.rng.random(field.shape) < 0.5) if field.dtype == bool else self.sample_floats(field)
        return fields

    def sample_floats(self, field: Field) -> Any:
        return self.rng.normal(size=field.shape).astype(np.float32)

    def sample_action(self) -> Any:
        """Return an action in the policy's scale. Continuous ones may exceed it, like those of a Gaussian policy."""
        space, shape = self.spaces.action, self.spaces.fields()["action"].shape
        if isinstance(space, Box):
            return self.rng.uniform(-1.3, 1.3, shape).astype(np.float32)
        high = {Discrete: lambda: space.n, MultiDiscrete: lambda: space.nvec, MultiBinary: lambda: 2}[type(space)]()
        return self.rng.integers(0, high, shape).astype(self.spaces.fields()["action"].dtype)

    def step(self) -> dict[str, Tree]:
        if self.rng.random() < self.jump:
            self.current = self.observe()
        successor = self.observe()
        terminated, truncated = (self.rng.random(2) < self.end / 2).tolist()
        row = {
            **self.current,
            "action": self.sample_action(),
            "reward": self.sample_floats(self.spaces.fields()["reward"]),
            "terminated": np.bool_(terminated),
            "truncated": np.bool_(truncated),
            **{SUCCESSORS[name]: value for name, value in successor.items()},
        }
        self.current = self.observe() if terminated or truncated else successor
        return row


def stack(rows: list[Tree]) -> Tree:
    return tree_map(lambda *leaves: np.stack(leaves), *rows)


def block(streams: list[Stream], length: int) -> tuple[Batch, list[list[dict[str, Tree]]]]:
    """Return steps `[T,N]` with an extra field `logp`, and the same steps as lists."""
    rows = [[stream.step() for stream in streams] for _ in range(length)]
    batch = stack([stack(row) for row in rows])
    return Batch(**batch, logp=np.zeros((length, len(streams)), np.float32)), rows


class Naive:
    """The reference: episodes as lists of steps, in the order of their ends."""

    def __init__(self, max_steps: int | None = None) -> None:
        self.room = max_steps if max_steps is not None else 10**9
        self.unfinished: dict[int, list[dict[str, Tree]]] = {}
        self.episodes: list[list[dict[str, Tree]]] = []

    def add(self, rows: list[list[dict[str, Tree]]], columns: list[int]) -> None:
        for row in rows:
            for column, step in zip(columns, row, strict=True):
                if self.room == 0:
                    return
                self.room -= 1
                steps = self.unfinished.setdefault(column, [])
                if steps and not continues(steps[-1], step):
                    self.flush(column)
                    steps = self.unfinished.setdefault(column, [])
                steps.append(step)
                if step["terminated"] or step["truncated"]:
                    self.flush(column)

    def flush(self, column: int) -> None:
        self.episodes.append(self.unfinished.pop(column))

    def finish(self) -> None:
        for column in sorted(self.unfinished):
            self.flush(column)


def continues(before: dict[str, Tree], step: dict[str, Tree]) -> bool:
    return all(equal(before[next_name], step[name]) for name, next_name in SUCCESSORS.items() if name in step)


def equal(a: Tree, b: Tree) -> bool:
    return all(tree_leaves(tree_map(np.array_equal, a, b)))


def clip_action(spaces: Spaces, action: Any) -> Any:
    """Return an action of the policy as it is recorded: clipped to the bounds of the action space."""
    box = spaces.action
    return np.clip(action, -1.0, 1.0) if isinstance(box, Box) and box.is_bounded() else action


def assert_episode(batch: Batch, steps: list[dict[str, Tree]], spaces: Spaces) -> None:
    expected = stack(steps)
    assert set(batch.fields) == set(expected)
    for name in batch.fields:
        actual = getattr(batch, name)
        if name == "action":
            clipped = clip_action(spaces, expected[name])
            assert actual.dtype == clipped.dtype
            np.testing.assert_allclose(actual, clipped, atol=1e-6)
        else:
            assert [leaf.dtype for leaf in tree_leaves(actual)] == [leaf.dtype for leaf in tree_leaves(expected[name])]
            assert equal(actual, expected[name]), name


def record_dataset(folder: Path, kind: str = "dict", steps: int = 60, seed: int = 0, **header: Any) -> Path:
    """Record a dataset of three streams in a new folder and return the folder."""
    spaces = KINDS[kind]
    streams = [Stream(spaces, 100 * seed + i) for i in range(3)]
    with Writer(folder, spaces, **header) as writer:
        for _ in range(steps // 30):
            writer.add(block(streams, 10)[0])
    return folder


def assert_same(actual: Dataset, expected: Dataset, action_tolerance: float = 0.0) -> None:
    assert actual.ends.tolist() == expected.ends.tolist()
    for a, b in ((actual.arrays, expected.arrays), (actual.final_fields, expected.final_fields)):
        assert list(a) == list(b)
        for name in a:
            if name == "action" and action_tolerance:
                np.testing.assert_allclose(a[name], b[name], atol=action_tolerance)
            else:
                assert equal(a[name], b[name]), name


def small_dataset(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a dataset of two episodes with 3 and 2 steps, with some of them replaced."""
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
        "final_fields": {"obs": np.float32([[3], [12]])},
        "ends": np.array([2, 4]),
    }
    return parts | changes
