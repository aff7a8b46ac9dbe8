"""Recorded arrays read in place show the same as a buffer that the same steps were added to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from buffer_streams import SPEC, Naive, Stream, assert_equal, step

from zhixing.buffers import Buffer, Episode, NStep, Prioritized, Sequence, Uniform
from zhixing.buffers.ring import Ring
from zhixing.core.batch import Batch
from zhixing.core.tree import tree_map
from zhixing.errors import UserError

LENGTH = 60


def recorded(seed: int = 3) -> tuple[Ring, Buffer, Naive]:
    """One stream with ends, as arrays and as added to a buffer of just that size."""
    stream = Stream(seed, end=0.2)
    buffer, naive = Buffer(SPEC, LENGTH), Naive(LENGTH, 1)
    rows = []
    for _ in range(LENGTH):
        batch, added = step([stream])
        buffer.add(batch)
        naive.add(added)
        rows.append({name: getattr(batch, name) for name in batch.fields})
    ended = np.array([bool(row["terminated"][0] or row["truncated"][0]) for row in rows])
    ended[-1] = True
    ends = np.flatnonzero(ended)

    def stacked(name: str, chosen: np.ndarray) -> object:
        return tree_map(lambda *leaves: np.stack([leaf[0] for leaf in leaves]), *(rows[i][name] for i in chosen))

    arrays = {name: stacked(name, np.arange(LENGTH)) for name in SPEC}
    final_obs_pool = {"obs": stacked("next_obs", ends), "mask": stacked("next_mask", ends)}
    return Ring.over(SPEC, arrays, final_obs_pool, ends), buffer, naive


@pytest.mark.parametrize("view", [NStep(1, 0.9), NStep(4, 0.9), Sequence(5, 2), Episode()])
def test_samples_are_those_of_a_buffer_with_the_same_steps(view: object) -> None:
    ring, filled, _ = recorded()
    over = Buffer.over(ring, sampler=Uniform(), view=view)
    filled.view = view
    index = np.arange(LENGTH - view.ahead) if not isinstance(view, Episode) else view.candidates(filled.storage)
    if isinstance(view, Episode):  # the piece at the end is no whole episode
        assert np.array_equal(view.candidates(ring), index)
    mine, theirs = Batch(**view.gather(ring, index)), Batch(**view.gather(filled.storage, index))
    assert mine.fields == theirs.fields
    for name in mine.fields:
        assert_equal(getattr(mine, name), getattr(theirs, name), name)
    rng, again = np.random.default_rng(0), np.random.default_rng(0)
    assert torch.equal(over.sample(50, rng).index, filled.sample(50, again).index)


def test_every_row_is_as_likely_as_any_other_until_priorities_are_set() -> None:
    ring, _, _ = recorded()
    buffer = Buffer.over(ring, sampler=Prioritized(alpha=1.0), view=NStep(1, 0.9))
    rng = np.random.default_rng(0)
    drawn = np.bincount(buffer.sample(60_000, rng).index.numpy(), minlength=LENGTH)
    assert drawn.min() > 900  # 1000 each, drawn from equal parts
    buffer.set_priority(np.arange(LENGTH), np.where(np.arange(LENGTH) == 7, 59.0, 1.0))
    drawn = np.bincount(buffer.sample(60_000, rng).index.numpy(), minlength=LENGTH)
    assert drawn[7] / 60_000 == pytest.approx(0.5, abs=0.01)


def test_it_is_only_read_and_saves_nothing_but_priorities(tmp_path: object) -> None:
    ring, _, _ = recorded()
    buffer = Buffer.over(ring, sampler=Prioritized(), view=NStep(1, 0.9))
    with pytest.raises(UserError, match="takes no new steps"):
        buffer.add(step([Stream(9)])[0])
    buffer.set_priority(np.arange(10), np.arange(10.0))
    state = buffer.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    other = Buffer.over(recorded()[0], sampler=Prioritized(), view=NStep(1, 0.9))
    other.load(state, tmp_path)
    first, second = (b.sample(30, np.random.default_rng(1)).index for b in (buffer, other))
    assert torch.equal(first, second)
    assert len(buffer) == LENGTH
    assert buffer.full


def test_data_too_short_for_a_window_is_told() -> None:
    with pytest.raises(UserError, match="holds 60 steps"):
        Buffer.over(recorded()[0], sampler=Uniform(), view=Sequence(61))
