"""Stacked observations of any kind are stored once and rebuilt in samples, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from buffer_streams import FLAG, assert_equal
from gymnasium.spaces import Box, Dict, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

from zhixing.buffers import HER, Buffer, EpisodeView, NStep, Prioritized, SequenceView, Uniform
from zhixing.core.batch import Batch
from zhixing.core.spaces import Spaces
from zhixing.core.stack import ObsStack
from zhixing.core.tree import Field, tree_leaves, tree_map
from zhixing.errors import UserError

SINGLE = Dict(
    {
        "vector": Box(-9, 9, (2,), np.float32),
        "number": Discrete(100),
        "gray": Box(0, 255, (6, 5), np.uint8),
        "color": Box(0, 255, (20, 8, 3), np.uint8),
    }
)


def steps(seed: int, k: int, length: int, end: float, agents: int = 1) -> tuple[Spaces, list[dict[str, Any]]]:
    """Return the spaces and the steps of one environment. Every frame is random, so each is different."""
    rng = np.random.default_rng(seed)
    stack = ObsStack(SINGLE, k, (agents,) * (agents > 1))
    spaces = Spaces(stack.space, Discrete(2), agents, stack=k)

    def frame() -> Any:
        SINGLE.seed(int(rng.integers(2**31)))
        frames = [SINGLE.sample() for _ in range(agents)]
        return frames[0] if agents == 1 else tree_map(lambda *leaves: np.stack(leaves), *frames)

    rows = []
    obs = stack.start(frame())
    for t in range(length):
        next_obs = stack.push(obs, frame())
        terminated, truncated = rng.random(2) < end
        row = {"obs": obs, "next_obs": next_obs, "terminated": terminated, "truncated": truncated}
        row["action"] = np.zeros(spaces.agents, np.int64)
        rows.append({**row, "reward": np.full(spaces.agents, t, np.float32)})
        obs = stack.start(frame()) if terminated or truncated else next_obs
    return spaces, rows


def add(buffer: Buffer, rows: list[dict[str, Any]], at_once: bool) -> None:
    blocks = [rows] if at_once else [[row] for row in rows]
    for block in blocks:
        fields = {name: tree_map(lambda *leaves: np.stack(leaves)[:, None], *(row[name] for row in block))
                  for name in block[0]}  # fmt: skip
        buffer.add(Batch(**fields))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(2, 4),
    agents=st.sampled_from([1, 2]),
    capacity=st.integers(6, 14),
    end=st.sampled_from([0.0, 0.2, 1.0]),
    at_once=st.booleans(),
    prioritized=st.booleans(),
)
def test_samples_equal_the_added_stacks(
    seed: int, k: int, agents: int, capacity: int, end: float, at_once: bool, prioritized: bool
) -> None:
    spaces, rows = steps(seed, k, 30, end, agents)
    sampler = Prioritized() if prioritized else Uniform()
    buffer = Buffer(spaces.fields(), capacity, frame_stack=k, sampler=sampler)
    add(buffer, rows, at_once)
    batch = buffer.sample(40, np.random.default_rng(0))
    for i, position in enumerate(batch.index.tolist()):
        for name in ("obs", "next_obs", "reward", "terminated", "truncated"):
            assert_equal(tree_map(lambda leaf, i=i: leaf[i], getattr(batch, name)), rows[position][name], name)


def vector_buffer(view: Any, capacity: int, ends: tuple[int, ...], terminated: bool = True) -> Buffer:
    """Return a buffer of stacks of 3 numbers: frame t is t, and an episode ends with each step of `ends`.

    The final frame after step t is t + 100.
    """
    spec = {"obs": Field((3,), np.dtype(np.float32)), "reward": Field((), np.dtype(np.float32))}
    buffer = Buffer({**spec, "terminated": FLAG, "truncated": FLAG}, capacity, view=view, frame_stack=3)
    stack = ObsStack(Box(-np.inf, np.inf, (1,)), 3)
    obs = stack.start([0.0])
    for t in range(9):
        ended = t in ends
        next_obs = stack.push(obs, [t + 101.0 if ended else t + 1.0])
        flags = {"terminated": np.array([ended and terminated]), "truncated": np.array([ended and not terminated])}
        buffer.add(Batch(obs=obs[None], next_obs=next_obs[None], reward=np.array([2.0**t]), **flags))
        obs = stack.start([t + 1.0]) if ended else next_obs
    return buffer


def gather(buffer: Buffer, *positions: int) -> Batch:
    return Batch(**buffer.view.gather(buffer.ring, np.array(positions)))


def test_stacks_are_padded_at_starts_and_do_not_cross_ends() -> None:
    batch = gather(vector_buffer(NStep(1, 0.9), 20, ends=(3,)), 0, 1, 2, 3, 4, 5)
    assert batch.obs.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [4, 4, 4], [4, 4, 5]]
    # step 3 ends the episode: its successor ends with the final frame, not with the first one of the next episode
    assert batch.next_obs.tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 104], [4, 4, 5], [4, 5, 6]]


@pytest.mark.parametrize("terminated", [True, False])
def test_n_steps_stop_at_the_end_with_its_final_stack(terminated: bool) -> None:
    batch = gather(vector_buffer(NStep(3, 0.5), 20, ends=(3,), terminated=terminated), 1, 2, 3, 4, 8)
    assert batch.obs.tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [4, 4, 4], [6, 7, 8]]
    # from step 1: 2 + 4 / 2 + 8 / 4; step 2: 4 + 8 / 2; step 4: 16 + 32 / 2 + 64 / 4; step 8 is the newest
    assert batch.reward.tolist() == [6, 8, 8, 48, 256]
    assert batch.next_obs.tolist() == [[2, 3, 104], [2, 3, 104], [2, 3, 104], [5, 6, 7], [7, 8, 9]]
    assert batch.discount.tolist() == [0.125, 0.25, 0.5, 0.125, 0.5]
    assert batch.terminated.tolist() == [terminated] * 3 + [False] * 2
    assert batch.truncated.tolist() == [not terminated] * 3 + [False] * 2


def test_oldest_rows_without_their_frames_are_not_sampled() -> None:
    # 5 of 9 steps are stored, steps 4 to 8. Stack 4 needs frames 2 and 3, stack 5 frame 3
    buffer = vector_buffer(NStep(1, 0.9), 5, ends=())
    assert set(buffer.sample(99, np.random.default_rng(0)).index.tolist()) == {6, 7, 8}
    # if an episode begins with step 5, its stacks need nothing before; the final frame of step 4 is stored apart
    buffer = vector_buffer(NStep(1, 0.9), 5, ends=(4,))
    assert set(buffer.sample(99, np.random.default_rng(0)).index.tolist()) == {5, 6, 7, 8}
    batch = gather(buffer, 5, 6, 8)  # rows lie at 5, 0 and 2 of 6: the ring has wrapped around
    assert batch.obs.tolist() == [[5, 5, 5], [5, 5, 6], [6, 7, 8]]
    assert batch.next_obs.tolist() == [[5, 5, 6], [5, 6, 7], [7, 8, 9]]


def test_sequences_and_episodes_hold_stacks() -> None:
    batch = gather(vector_buffer(SequenceView(4), 20, ends=(3,)), 2)
    assert batch.obs.tolist() == [[[0, 1, 2], [1, 2, 3], [4, 4, 4], [4, 4, 5]]]
    assert batch.next_obs.tolist() == [[[1, 2, 3], [2, 3, 104], [4, 4, 5], [4, 5, 6]]]
    assert batch.is_first.tolist() == [[False, False, True, False]]
    batch = gather(vector_buffer(EpisodeView(), 20, ends=(3, 5)), 0, 4)
    assert batch.obs[1].tolist() == [[4, 4, 4], [4, 4, 5], [4, 4, 5], [4, 4, 5]]  # padding repeats the last row
    assert batch.next_obs[0].tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 104]]
    assert batch.valid.tolist() == [[True] * 4, [True, True, False, False]]


def test_frames_take_a_quarter_of_the_memory_of_stacks_of_four() -> None:
    spaces, _ = steps(0, 4, 1, 0.0)
    stacked, whole = (Buffer(spaces.fields(), 1000, frame_stack=k) for k in (4, 1))

    def obs_bytes(buffer: Buffer) -> int:
        return sum(array.nbytes for array in buffer.ring.store.arrays["obs"])

    # 2 floats, an integer of 8 bytes, 6 * 5 and 20 * 8 * 3 bytes; one row more than transitions
    assert obs_bytes(stacked) == 1001 * (2 * 4 + 8 + 30 + 480)
    assert obs_bytes(whole) == 4 * obs_bytes(stacked)


def test_saved_frames_are_restored() -> None:
    spaces, rows = steps(3, 3, 20, 0.2)
    first, second = (Buffer(spaces.fields(), 9, frame_stack=3) for _ in range(2))
    add(first, rows[:15], at_once=False)
    second.load_state_dict(first.state_dict())
    for buffer in (first, second):
        add(buffer, rows[15:], at_once=True)
    one, other = (buffer.sample(30, np.random.default_rng(0)) for buffer in (first, second))
    for name in one.fields:
        for a, b in zip(tree_leaves(getattr(one, name)), tree_leaves(getattr(other, name)), strict=True):
            assert torch.equal(a, b)


def test_hindsight_goals_reject_stacks() -> None:
    goals = {name: Field((2,), np.dtype(np.float32)) for name in ("achieved_goal", "desired_goal")}
    spec = {"obs": goals, "reward": Field((), np.dtype(np.float32)), "terminated": FLAG, "truncated": FLAG}
    with pytest.raises(UserError, match=r"env\.stack=1"):
        Buffer(spec, 10, her=HER(lambda achieved, desired, info: 0.0), frame_stack=2)
