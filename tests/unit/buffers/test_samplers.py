import numpy as np
import pytest
import torch
from buffer_streams import SIMPLE, SPEC, Stream, assert_same_batch, simple, step

from zhixing.buffers import Buffer, NStep, Prioritized, SequenceView
from zhixing.buffers.sum_tree import SumTree
from zhixing.errors import UserError


@pytest.mark.parametrize("size", [1, 16, 17, 300, 5000, 300_000])
def test_sum_tree_finds_the_item_at_a_cumulative_weight(size):
    rng = np.random.default_rng(size)
    weights = rng.integers(0, 4, size).astype(float)  # integers: the sums are exact
    weights[-1] = 1
    tree = SumTree(size)
    tree.set(np.arange(size), weights)
    assert tree.total == weights.sum()
    mass = np.arange(int(weights.sum())) + 0.5
    assert np.array_equal(tree.find(mass), np.searchsorted(np.cumsum(weights), mass, side="right"))


def test_sum_tree_accepts_an_item_twice_in_one_update():
    tree = SumTree(100)
    tree.set(np.array([3, 50, 3]), np.array([5.0, 1.0, 2.0]))
    tree.set(np.array([50]), 4.0)
    assert tree.total == 6  # the last weight of each counts: 2 + 4
    assert tree.find(np.array([1.9, 2.1])).tolist() == [3, 50]


def test_sum_tree_never_returns_an_item_without_weight():
    rng = np.random.default_rng(0)
    tree = SumTree(1000)
    items = rng.choice(1000, 30, replace=False)
    tree.set(items, rng.random(30) * 10.0 ** rng.integers(-12, 12, 30))
    for mass in (np.full(3, tree.total), np.full(3, np.nextafter(tree.total, 0)), rng.random(5000) * tree.total):
        assert set(tree.find(mass).tolist()) <= set(items.tolist())


def test_sums_stay_exact_after_many_updates():
    rng = np.random.default_rng(0)
    tree, weights = SumTree(700), np.zeros(700)
    for _ in range(200):
        items = rng.integers(0, 700, rng.integers(1, 100))
        new = rng.integers(0, 9, len(items)).astype(float)
        tree.set(items, new)
        for item, weight in zip(items, new, strict=True):
            weights[item] = weight
        assert tree.total == weights.sum()


def make_prioritized(priorities, **settings):
    buffer = Buffer(SIMPLE, 8, sampler=Prioritized(**{"alpha": 1.0, "epsilon": 1e-9, **settings}))
    n = len(priorities)
    buffer.add(simple(list(range(n + 1)), [1.0] * n))
    buffer.set_priority(torch.arange(n), torch.tensor(priorities))
    return buffer


def test_rows_are_sampled_in_proportion_to_their_priority():
    buffer = make_prioritized([1.0, 2.0, 3.0, 4.0])
    rng = np.random.default_rng(0)
    index = np.concatenate([buffer.sample(7, rng).index.numpy() for _ in range(2000)])
    counts = np.bincount(index, minlength=4)
    expected = np.array([0.1, 0.2, 0.3, 0.4]) * 14_000
    # stratified sampling varies less than independent sampling, whose sum would be 3 (standard deviation 2.4)
    assert ((counts - expected) ** 2 / expected).sum() < 15


def test_alpha_is_the_exponent_of_priorities():
    buffer = make_prioritized([1.0, 16.0], alpha=0.5)
    index = buffer.sample(10_000, np.random.default_rng(0)).index.numpy()
    assert index.mean() == pytest.approx(0.8, abs=1e-3)  # 4 / (1 + 4); stratified: exact up to one sample


def test_importance_weights_by_hand_while_beta_grows_with_progress():
    buffer = make_prioritized([1.0, 4.0], beta_start=0.5, beta_end=1.0)
    for progress, beta in ((0.0, 0.5), (0.5, 0.75), (1.0, 1.0), (1.1, 1.0)):
        buffer.set_progress(progress)
        batch = buffer.sample(50, np.random.default_rng(0))
        # the largest weight is that of priority 1; the other is (P_0 / P_1)^β = (1/4)^β of it
        expected = torch.where(batch.index == 0, 1.0, 0.25**beta)
        assert torch.allclose(batch.weight, expected)
        assert batch.weight.dtype == torch.float32


def test_weights_are_normalized_by_their_maximum_in_the_batch():
    buffer = make_prioritized([1e-6, 4.0, 4.0])
    batch = buffer.sample(4, np.random.default_rng(0))
    assert set(batch.index.tolist()) == {1, 2}
    assert batch.weight.tolist() == [1, 1, 1, 1]


def test_new_rows_get_the_highest_priority_so_far():
    buffer = make_prioritized([1.0, 9.0])
    buffer.add(simple([2, 3], [1.0]))
    index = buffer.sample(1900, np.random.default_rng(0)).index.numpy()
    assert np.abs(np.bincount(index) - [100, 900, 900]).max() <= 2


def test_late_priorities_for_overwritten_rows_are_ignored():
    buffer = Buffer(SIMPLE, 4, sampler=Prioritized())
    buffer.add(simple([0, 1, 2, 3, 4], [1.0] * 4))
    index = buffer.sample(4, np.random.default_rng(0)).index
    buffer.add(simple([4, 5, 6, 7, 8, 9], [1.0] * 5))  # rows 5..8 remain, all with priority 1
    buffer.set_priority(index, torch.full((4,), 1e6))
    index = buffer.sample(4000, np.random.default_rng(0)).index.numpy()
    assert np.abs(np.bincount(index - 5) - 1000).max() <= 1


def test_overwritten_rows_are_never_sampled():
    buffer = Buffer(SPEC, 10, 2, sampler=Prioritized(alpha=1.0))
    streams = [Stream(0), Stream(1)]
    rng = np.random.default_rng(0)
    for t in range(60):
        if t % 3:
            buffer.add(step(streams)[0])
        else:
            buffer.add(step(streams[:1])[0], env_ids=np.array([0]))
        batch = buffer.sample(16, rng)
        assert buffer.ring.is_stored(batch.index.numpy()).all()
        buffer.set_priority(batch.index, torch.from_numpy(rng.random(16)))
        index = buffer.ring.indices()
        leaves = buffer._priorities.tree.weights
        assert np.count_nonzero(leaves) == len(index)
        assert np.isclose(buffer._priorities.tree.total, leaves[index % buffer.ring.size].sum())


@pytest.mark.parametrize("view", [NStep(1, 0.9), SequenceView(3)])
@pytest.mark.parametrize("subsets", [False, True])
def test_priorities_of_new_rows_do_not_depend_on_when_they_are_computed(view, subsets):
    eager, lazy = (Buffer(SPEC, 24, 3, sampler=Prioritized(), view=view) for _ in range(2))
    streams, rng = [Stream(i, 0.2, 0.1) for i in range(3)], np.random.default_rng(0)
    for t in range(1, 121):
        env_ids = rng.permutation(3)[: rng.integers(1, 4)] if subsets else None
        batch = step(streams if env_ids is None else [streams[i] for i in env_ids])[0]
        for buffer in (eager, lazy):
            buffer.add(batch, env_ids)
        eager._priorities.state_dict()
        if t % 40 == 0:  # the last time after every row was overwritten
            batches = [buffer.sample(64, np.random.default_rng(t)) for buffer in (eager, lazy)]
            assert_same_batch(*batches)
            for buffer in (eager, lazy):
                buffer.set_priority(batches[0].index, np.arange(64.0))
            assert np.array_equal(eager._priorities.tree.weights, lazy._priorities.tree.weights)


def test_non_finite_priorities_are_ignored():
    buffer = make_prioritized([1.0, 2.0])
    before = buffer._priorities.priority.copy()
    buffer.set_priority(np.array([0]), np.array([np.nan]))
    assert np.array_equal(buffer._priorities.priority, before)


def test_wrong_number_of_priorities_is_rejected():
    buffer = make_prioritized([1.0, 2.0])
    with pytest.raises(UserError, match=r"\[2\] priorities for \[1\]"):
        buffer.set_priority(np.array([0]), np.array([1.0, 2.0]))


def test_set_priority_of_a_uniform_buffer_does_nothing():
    buffer = Buffer(SIMPLE, 4)
    buffer.add(simple([0, 1], [1.0]))
    buffer.set_priority(torch.tensor([0]), None)
    buffer.set_priority(torch.tensor([0]), torch.tensor([3.0]))
    assert "weight" not in buffer.sample(2, np.random.default_rng(0))
