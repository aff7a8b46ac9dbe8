import numpy as np
import pytest
import torch
from buffer_streams import (
    F32,
    FLAG,
    SIMPLE,
    SPEC,
    SUCCESSORS,
    U8,
    Naive,
    Stream,
    assert_equal,
    block,
    simple,
    step,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from zhixing.buffers import Buffer, NStep
from zhixing.core.batch import Batch
from zhixing.core.tree import Field, tree_map
from zhixing.errors import UserError


def check_all_stored(buffer: Buffer, naive: Naive) -> None:
    """Check that every stored transition has all its fields and its true successors."""
    stored = naive.stored()
    assert len(buffer) == len(stored)
    index = np.array(sorted(stored))
    assert np.array_equal(np.sort(buffer.ring.indices()), index)
    fields = buffer.view.gather(buffer.ring, index)
    for i, key in enumerate(index.tolist()):
        for name in [*SPEC, *SUCCESSORS.values()]:
            assert_equal(tree_map(lambda leaf, i=i: leaf[i], fields[name]), stored[key][name], name)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_envs=st.integers(1, 4),
    capacity=st.integers(1, 20),
    end=st.sampled_from([0.0, 0.3, 2.0]),  # 2.0: every step ends an episode
    jump=st.sampled_from([0.0, 0.3, 1.0]),  # 1.0: unrelated transitions
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    subsets=st.booleans(),
)
def test_stored_transitions_equal_the_added_ones(seed, num_envs, capacity, end, jump, lengths, subsets):
    rng = np.random.default_rng(seed)
    streams = [Stream(i, end, jump) for i in range(num_envs)]
    buffer = Buffer(SPEC, capacity, num_envs, view=NStep(1, 0.9))
    naive = Naive(-(-capacity // num_envs), num_envs)
    for length in lengths:
        env_ids = rng.permutation(num_envs)[: rng.integers(1, num_envs + 1)] if subsets else None
        chosen = streams if env_ids is None else [streams[i] for i in env_ids]
        if length == 0:
            batch, rows = step(chosen)
            buffer.add(batch, env_ids)
            naive.add(rows, env_ids)
        else:
            batch, blocks = block(chosen, length)
            buffer.add(batch, env_ids)
            for rows in blocks:
                naive.add(rows, env_ids)
        check_all_stored(buffer, naive)


def test_slots_of_final_observations_are_reused_when_rows_are_overwritten():
    buffer = Buffer(SPEC, 8, 2)
    streams = [Stream(i, end=2.0) for i in range(2)]
    for _ in range(500):
        buffer.add(step(streams)[0])
    assert buffer.ring.final_obs_pool._size <= 16
    assert len(buffer) == 8
    assert buffer.full


def test_blocks_and_single_steps_give_the_same_ring():
    streams = [Stream(i, 0.2, 0.1) for i in range(3)], [Stream(i, 0.2, 0.1) for i in range(3)]
    by_step, by_block = Buffer(SPEC, 30, 3), Buffer(SPEC, 30, 3)
    for length in (2, 7, 25, 3):
        by_block.add(block(streams[0], length)[0])
        for _ in range(length):
            by_step.add(step(streams[1])[0])
        index = by_step.ring.indices()
        assert np.array_equal(index, by_block.ring.indices())
        assert np.array_equal(by_step.ring.is_first(index), by_block.ring.is_first(index))
        assert np.array_equal(by_step.ring.is_boundary(index), by_block.ring.is_boundary(index))
        rng = np.random.default_rng(0), np.random.default_rng(0)
        assert_equal(by_step.sample(50, rng[0])._fields, by_block.sample(50, rng[1])._fields)


def test_episodes_with_equal_observations_stay_separate():
    # in a bandit that always observes 0, the first observation of an episode equals the final one of the last
    buffer = Buffer(SIMPLE, 4, view=NStep(3, 1.0))
    for reward in (1.0, 2.0, 3.0):
        buffer.add(simple([0, 0], [reward], terminated=0))
    batch = buffer.sample(100, np.random.default_rng(0))
    assert set(batch.reward.tolist()) == {1.0, 2.0, 3.0}
    assert batch.terminated.all()


def test_nan_observations_and_negative_zero_continue_the_stream():
    buffer = Buffer(SIMPLE, 4)
    buffer.add(simple([0, float("nan")], [1]))
    buffer.add(simple([float("nan"), -0.0], [1]))
    buffer.add(simple([0.0, 1], [1]))
    assert not buffer.ring.is_boundary(buffer.ring.indices()).any()


def test_lazy_torch_and_double_precision_fields_are_accepted():
    spec = {**SIMPLE, "logp": Field((), F32)}
    buffer = Buffer(spec, 4)
    for t in range(3):
        buffer.add(
            Batch(
                obs=torch.tensor([[t / 3]], dtype=torch.float64),
                reward=np.array([0.1], np.float64),
                terminated=[False],
                truncated=np.array([0]),
                logp=torch.tensor([1.0], requires_grad=True),
                next_obs=lambda t=t: np.array([[(t + 1) / 3]]),
            )
        )
    assert not buffer.ring.is_boundary(buffer.ring.indices()).any()
    assert buffer.sample(2, np.random.default_rng(0)).obs.dtype == torch.float32


@pytest.mark.parametrize("step_as_block", [False, True])
def test_errors_name_the_field_with_its_actual_and_expected_form(step_as_block):
    def batch(**changes):
        fields = {"obs": np.zeros((2, 1)), "reward": np.zeros(2), "terminated": np.zeros(2, bool)}
        fields |= {"truncated": np.zeros(2, bool), "next_obs": np.zeros((2, 1))} | changes
        fields = {name: value for name, value in fields.items() if value is not None}
        return Batch(**{name: np.asarray(v)[None] if step_as_block else v for name, v in fields.items()})

    buffer = Buffer(SIMPLE, 4, 2)
    buffer.add(batch())
    with pytest.raises(UserError, match="lacks the field 'next_obs'"):
        buffer.add(batch(next_obs=None))
    with pytest.raises(UserError, match=r"unknown field 'rewards'.*'reward'"):
        buffer.add(batch(rewards=np.zeros(2)))
    with pytest.raises(UserError, match=r"'obs' has shape \[.*2, 3\], expected \[.*2, 1\]"):
        buffer.add(batch(obs=np.zeros((2, 3))))
    with pytest.raises(UserError, match="'truncated' has dtype float64, expected bool"):
        buffer.add(batch(truncated=np.zeros(2)))
    with pytest.raises(UserError, match=r"expected len\(env_ids\)=1 as last dimension"):
        buffer.add(batch(), env_ids=np.array([0]))
    with pytest.raises(UserError, match=r"env_ids \[0, 2\]"):
        buffer.add(batch(), env_ids=np.array([0, 2]))
    with pytest.raises(UserError, match="parts"):
        Buffer(SPEC, 4).add(Batch(**{**step([Stream(0)])[0]._fields, "obs": {"pos": np.zeros((1, 2))}}))
    assert len(buffer) == 2


def test_spec_with_next_obs_or_without_reward_is_rejected():
    with pytest.raises(UserError, match="next_obs"):
        Buffer({**SIMPLE, "next_obs": SIMPLE["obs"]}, 4)
    with pytest.raises(UserError, match="'reward'"):
        Buffer({"obs": SIMPLE["obs"], "terminated": FLAG, "truncated": FLAG}, 4)


def test_cleared_buffer_can_be_filled_again():
    buffer = Buffer(SIMPLE, 4)
    buffer.add(simple([0, 1, 2], [1, 1]))
    buffer.clear()
    assert len(buffer) == 0
    with pytest.raises(UserError, match="nothing to sample"):
        buffer.sample(1, np.random.default_rng(0))
    buffer.add(simple([7, 8], [5]))
    batch = buffer.sample(10, np.random.default_rng(0))
    assert (batch.obs == 7).all()
    assert (batch.next_obs == 8).all()


def test_uniform_sampling_weights_rows_equally_in_uneven_columns():
    buffer = Buffer(SPEC, 30, 3)
    streams = [Stream(i) for i in range(3)]
    buffer.add(block(streams, 4)[0])
    buffer.add(block(streams[1:2], 5)[0], env_ids=[1])
    index = buffer.sample(17_000, np.random.default_rng(0)).index.numpy()
    _, counts = np.unique(index, return_counts=True)
    assert len(counts) == 17
    # expected 1000 each, variance 1000 · 16/17; the sum of squares is about 16 (standard deviation 5.7)
    assert ((counts - 1000) ** 2 / 1000).sum() < 16 + 5 * 5.7


def test_memory_mapped_buffer_gives_the_same_samples(tmp_path):
    buffers = Buffer(SPEC, 20, 2), Buffer(SPEC, 20, 2, folder=tmp_path)
    for buffer in buffers:
        buffer.add(block([Stream(0), Stream(1)], 25)[0])
    samples = [buffer.sample(40, np.random.default_rng(0)) for buffer in buffers]
    assert_equal(samples[0]._fields, samples[1]._fields)
    assert (tmp_path / "obs.0.bin").stat().st_size == (10 + 1) * 2 * 2 * 4


def stacked_steps(rng: np.random.Generator, k: int, length: int, end: float) -> list[dict[str, np.ndarray]]:
    """Return the steps of one environment with frame stacking, which repeats the first frame at a reset."""

    def frame() -> np.ndarray:
        return rng.integers(0, 255, (5, 6), np.uint8)

    rows = []
    stack = np.stack([frame()] * k)
    for t in range(length):
        after = np.concatenate([stack[1:], frame()[None]])
        ends = rng.random(2) < end
        rows.append({"obs": stack, "reward": np.float32(t), "terminated": ends[0], "truncated": ends[1]})
        rows[-1]["next_obs"] = after
        stack = np.stack([frame()] * k) if ends.any() else after
    return rows


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(2, 4),
    capacity=st.integers(5, 16),
    end=st.sampled_from([0.0, 0.2, 1.0]),
    at_once=st.booleans(),
)
def test_rebuilt_frame_stacks_equal_the_added_ones(seed, k, capacity, end, at_once):
    spec = {**SIMPLE, "obs": Field((k, 5, 6), U8)}
    rows = stacked_steps(np.random.default_rng(seed), k, 40, end)
    buffer = Buffer(spec, capacity, frame_stack=k)
    fields = {name: np.stack([row[name] for row in rows])[:, None] for name in rows[0]}
    if at_once:
        buffer.add(Batch(**fields))
    else:
        for t in range(len(rows)):
            buffer.add(Batch(**{name: value[t] for name, value in fields.items()}))
    batch = buffer.sample(200, np.random.default_rng(0))
    for i, position in enumerate(batch.index.tolist()):
        for name in fields:
            assert_equal(getattr(batch, name)[i], rows[position][name])
    # only rows whose frames are all stored can be sampled, back to the oldest row or the first of the episode
    oldest = 40 - capacity
    ended = [bool(row["terminated"] | row["truncated"]) for row in rows]
    recent = {p for p in range(oldest, 40) if p - k + 1 >= oldest or any(ended[max(oldest, p - k + 1) - 1 : p])}
    complete = {p for p in recent if all(s >= oldest for s in frames_of(ended, p, k))}
    assert set(batch.index.tolist()) <= complete
    index = buffer.ring.indices()
    assert set(index[buffer.ring.is_complete(index, 0)].tolist()) == complete


def frames_of(ended: list[bool], position: int, k: int) -> list[int]:
    """Return the positions of the frames in a stack."""
    rows = [position]
    while len(rows) < k and rows[-1] > 0 and not ended[rows[-1] - 1]:
        rows.append(rows[-1] - 1)
    return rows


def test_frames_are_stored_once():
    spec = {**SIMPLE, "obs": Field((4, 84, 84), U8)}
    buffer = Buffer(spec, 100, frame_stack=4)
    assert buffer.ring.store.arrays["obs"][0].nbytes == 101 * 84 * 84


def test_stacks_that_cannot_be_rebuilt_are_rejected():
    buffer = Buffer({**SIMPLE, "obs": Field((2, 1), F32)}, 8, frame_stack=2)
    flags = {"reward": np.zeros(1), "terminated": np.zeros(1, bool), "truncated": np.zeros(1, bool)}
    with pytest.raises(UserError, match="shift by one frame with each step"):
        buffer.add(Batch(obs=[[[0.0], [0.0]]], next_obs=[[[1.0], [2.0]]], **flags))
    assert len(buffer) == 0
    buffer.add(Batch(obs=[[[0.0], [0.0]]], next_obs=[[[0.0], [1.0]]], **flags))
    with pytest.raises(UserError, match="first frame repeated"):  # it would be rebuilt from another stream's frames
        buffer.add(Batch(obs=[[[5.0], [6.0]]], next_obs=[[[6.0], [7.0]]], **flags))
    with pytest.raises(UserError, match="frame_stack=3 needs observations with a multiple of 3 elements"):
        Buffer({**SIMPLE, "obs": Field((2, 1), F32)}, 8, frame_stack=3)
    with pytest.raises(UserError, match="with stacks of 4 frames needs 4: raise"):
        Buffer({**SIMPLE, "obs": Field((4,), F32)}, 3, frame_stack=4)


@pytest.mark.parametrize("at_once", [False, True])
def test_recorded_steps_may_begin_in_the_middle_of_an_episode(at_once):
    # frames 7, 8, 9, ... in stacks of 3; the episode began before the first row, whose stack is (5, 6, 7)
    spec = {**SIMPLE, "obs": Field((3,), F32)}
    buffer = Buffer(spec, 10, frame_stack=3)
    stacks = np.stack([np.arange(5, 12) + i for i in range(3)], 1).astype(F32)[:, None]  # [7,1,3]
    fields = {name: np.zeros((6, 1), bool) for name in ("terminated", "truncated")}
    fields |= {"obs": stacks[:-1], "next_obs": stacks[1:], "reward": np.ones((6, 1))}
    for t in [slice(0, 6)] if at_once else range(6):
        buffer.add(Batch(**{name: value[t] for name, value in fields.items()}))
    batch = buffer.sample(50, np.random.default_rng(0))
    assert set(batch.index.tolist()) == {2, 3, 4, 5}  # the frames 5 and 6 are not stored
    assert_equal(batch.obs, stacks[batch.index, 0])
    assert_equal(batch.next_obs, stacks[batch.index + 1, 0])
    assert not buffer.ring.is_first(np.arange(6)).any()


def test_too_large_a_buffer_is_rejected_with_advice() -> None:
    from zhixing.buffers.fields import ArrayStore

    # 10^9 images of 1 MiB each: 2^20 * (10^9 + 1) / 2^30 = 976,563 GiB
    spec = {"obs": Field((1024, 1024), np.dtype(np.uint8))}
    with pytest.raises(UserError, match=r"1,000,000,000 steps of 'obs' take 976563 GiB.*replay\.on_disk=true"):
        ArrayStore(spec, 1_000_000_001)
