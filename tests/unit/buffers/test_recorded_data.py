"""Recorded arrays that are read in place give the same samples as a buffer with the same steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from buffer_streams import SPEC, Naive, Stream, assert_equal, step

from zhixing.buffers import Buffer, EpisodeView, NStep, Prioritized, SequenceView, Uniform
from zhixing.buffers.ring import Ring
from zhixing.core.batch import Batch
from zhixing.core.tree import tree_map
from zhixing.errors import UserError

LENGTH = 60


def make_recorded(seed: int = 3) -> tuple[Ring, Buffer, Naive]:
    """Return a stream with episode ends as a ring over arrays, as a buffer of the same size, and as a reference."""
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

    def stack_rows(name: str, chosen: np.ndarray) -> object:
        return tree_map(lambda *leaves: np.stack([leaf[0] for leaf in leaves]), *(rows[i][name] for i in chosen))

    arrays = {name: stack_rows(name, np.arange(LENGTH)) for name in SPEC}
    final_fields = {"obs": stack_rows("next_obs", ends), "mask": stack_rows("next_mask", ends)}
    return Ring.from_arrays(SPEC, arrays, final_fields, ends), buffer, naive


@pytest.mark.parametrize("view", [NStep(1, 0.9), NStep(4, 0.9), SequenceView(5, 2), EpisodeView()])
def test_samples_equal_those_of_a_buffer_with_the_same_steps(view: object) -> None:
    ring, filled, _ = make_recorded()
    buffer = Buffer.from_ring(ring, sampler=Uniform(), view=view)
    filled.view = view
    index = np.arange(LENGTH - view.lookahead) if not isinstance(view, EpisodeView) else view.candidates(filled.ring)
    if isinstance(view, EpisodeView):  # the unfinished episode at the end doesn't count
        assert np.array_equal(view.candidates(ring), index)
    actual, expected = Batch(**view.gather(ring, index)), Batch(**view.gather(filled.ring, index))
    assert actual.fields == expected.fields
    for name in actual.fields:
        assert_equal(getattr(actual, name), getattr(expected, name), name)
    rng, same_rng = np.random.default_rng(0), np.random.default_rng(0)
    assert torch.equal(buffer.sample(50, rng).index, filled.sample(50, same_rng).index)


def test_rows_are_sampled_uniformly_until_priorities_are_set() -> None:
    ring, _, _ = make_recorded()
    buffer = Buffer.from_ring(ring, sampler=Prioritized(alpha=1.0), view=NStep(1, 0.9))
    rng = np.random.default_rng(0)
    counts = np.bincount(buffer.sample(60_000, rng).index.numpy(), minlength=LENGTH)
    assert counts.min() > 900  # 1000 each: sampling is stratified
    buffer.set_priority(np.arange(LENGTH), np.where(np.arange(LENGTH) == 7, 59.0, 1.0))
    counts = np.bincount(buffer.sample(60_000, rng).index.numpy(), minlength=LENGTH)
    assert counts[7] / 60_000 == pytest.approx(0.5, abs=0.01)


def test_recorded_data_is_read_only_and_saves_only_priorities(tmp_path: object) -> None:
    ring, _, _ = make_recorded()
    buffer = Buffer.from_ring(ring, sampler=Prioritized(), view=NStep(1, 0.9))
    with pytest.raises(UserError, match="takes no new steps"):
        buffer.add(step([Stream(9)])[0])
    buffer.set_priority(np.arange(10), np.arange(10.0))
    state = buffer.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    restored = Buffer.from_ring(make_recorded()[0], sampler=Prioritized(), view=NStep(1, 0.9))
    restored.load(state, tmp_path)
    first, second = (b.sample(30, np.random.default_rng(1)).index for b in (buffer, restored))
    assert torch.equal(first, second)
    assert len(buffer) == LENGTH
    assert buffer.full


def test_data_shorter_than_a_window_is_rejected() -> None:
    with pytest.raises(UserError, match="holds 60 steps"):
        Buffer.from_ring(make_recorded()[0], sampler=Uniform(), view=SequenceView(61))
