import numpy as np
import pytest
import torch
from buffer_streams import F32, SIMPLE, SPEC, SUCCESSORS, Naive, Stream, assert_equal, block, simple, stack, step

from zhixing.buffers import Buffer, EpisodeView, NStep, Prioritized, SequenceView
from zhixing.core.batch import Batch
from zhixing.core.tree import Field, tree_map
from zhixing.errors import UserError


def by_index(batch):
    return {index: i for i, index in enumerate(batch.index.tolist())}


def filled(view, num_envs=2, rows=20, end=0.2, jump=0.1, length=47, **options):
    """Return a buffer after uneven, interrupted streams with episode ends, and its naive reference."""
    buffer = Buffer(SPEC, rows * num_envs, num_envs, view=view, **options)
    naive = Naive(rows, num_envs)
    streams = [Stream(i, end, jump) for i in range(num_envs)]
    for t in range(length):
        env_ids = np.array([0]) if t % 5 == 0 else None
        batch, added = step([streams[0]] if t % 5 == 0 else streams)
        buffer.add(batch, env_ids)
        naive.add(added, env_ids)
    return buffer, naive


def test_three_step_return_by_hand():
    buffer = Buffer(SIMPLE, 10, view=NStep(3, 0.5))
    buffer.add(simple([0, 1, 2, 3, 4], [1, 2, 4, 8], terminated=3))
    batch = buffer.sample(200, np.random.default_rng(0))
    at = by_index(batch)
    # row 0: 1 + 0.5·2 + 0.25·4 = 3, bootstrap from obs 3 with 0.5³
    # row 1: 2 + 0.5·4 + 0.25·8 = 6, ends
    # row 2: 4 + 0.5·8 = 8, two steps to the end; row 3: 8, one
    assert [batch.reward[at[row]].item() for row in range(4)] == [3, 6, 8, 8]
    assert [batch.discount[at[row]].item() for row in range(4)] == [0.125, 0.125, 0.25, 0.5]
    assert [batch.next_obs[at[row]].item() for row in range(4)] == [3, 4, 4, 4]
    assert [batch.terminated[at[row]].item() for row in range(4)] == [False, True, True, True]


@pytest.mark.parametrize("truncated", [True, False])
def test_truncation_and_the_newest_row_shorten_the_return_and_bootstrap(truncated):
    buffer = Buffer(SIMPLE, 10, view=NStep(3, 0.5))
    buffer.add(simple([0, 1, 2], [1, 2], truncated=1 if truncated else -1))
    if truncated:
        buffer.add(simple([9, 8], [100]))
    batch = buffer.sample(100, np.random.default_rng(0))
    at = by_index(batch)
    # row 0: 1 + 0.5·2 = 2 over two steps, then the value of the final observation, 2
    assert batch.reward[at[0]] == 2
    assert batch.discount[at[0]] == 0.25
    assert batch.next_obs[at[0]] == 2
    assert not batch.terminated[at[0]]
    assert batch.truncated[at[0]] == truncated


@pytest.mark.parametrize("n", [1, 2, 5])
def test_n_step_equals_a_loop_over_the_reference(n):
    gamma, N = 0.9, 2
    buffer, naive = filled(NStep(n, gamma))
    batch = buffer.sample(300, np.random.default_rng(1))
    assert len(set(batch.index.tolist())) > 30
    for i, index in enumerate(batch.index.tolist()):
        position, column = divmod(index, N)
        rows = naive.columns[column]
        k, reward = 1, float(rows[position]["reward"])
        while k < n and naive.continues(column, position + k - 1):
            reward += gamma**k * float(rows[position + k]["reward"])
            k += 1
        last = rows[position + k - 1]
        assert batch.reward[i].item() == pytest.approx(reward, abs=1e-5)
        assert batch.discount[i].item() == pytest.approx(gamma**k)
        for name in ("terminated", "truncated", *SUCCESSORS.values()):
            assert_equal(tree_map(lambda leaf, i=i: leaf[i], getattr(batch, name)), last[name], name)
        for name in ("obs", "action", "mask", "hidden"):
            assert_equal(tree_map(lambda leaf, i=i: leaf[i], getattr(batch, name)), rows[position][name], name)


def test_rewards_are_summed_per_agent():
    buffer = Buffer({**SIMPLE, "reward": Field((2,), F32)}, 4, view=NStep(2, 0.5))
    steps = simple([0, 1, 2], [0, 0])
    buffer.add(Batch(**{**steps._fields, "reward": np.array([[[1, 10]], [[2, 20]]], np.float32)}))
    batch = buffer.sample(50, np.random.default_rng(0))
    assert batch.reward[by_index(batch)[0]].tolist() == [2, 20]  # 1 + 0.5·2, 10 + 0.5·20


def test_sequences_are_consecutive_rows_with_is_first():
    N, T = 2, 6
    buffer, naive = filled(SequenceView(4, burn_in=2))
    batch = buffer.sample(600, np.random.default_rng(0))
    assert batch.obs["pos"].shape == (600, T, 2)
    starts = set(batch.index.tolist())
    stored = naive.stored()
    assert starts == {index for index in stored if index + (T - 1) * N in stored}
    for i, index in enumerate(batch.index.tolist()):
        position, column = divmod(index, N)
        window = naive.columns[column][position : position + T]
        for name in [*SPEC, *SUCCESSORS.values()]:
            expected = stack([row[name] for row in window])
            assert_equal(tree_map(lambda leaf, i=i: leaf[i], getattr(batch, name)), expected, name)
        first = [p == 0 or not naive.continues(column, p - 1) for p in range(position, position + T)]
        assert batch.is_first[i].tolist() == first


def test_next_obs_of_sequences_is_assembled_only_when_read():
    buffer, _ = filled(SequenceView(3))
    assert "next_obs=<not read yet>" in repr(buffer.sample(4, np.random.default_rng(0)))


def test_next_obs_of_a_sample_is_unaffected_by_later_rows():
    buffers = [filled(SequenceView(3))[0] for _ in range(2)]
    batches = [buffer.sample(50, np.random.default_rng(0)) for buffer in buffers]
    early = batches[0].next_obs
    buffers[1].add(block([Stream(8), Stream(9)], 100)[0])
    assert_equal(batches[1].next_obs, early)


def test_prioritized_sequences_begin_only_at_complete_windows():
    buffer, naive = filled(SequenceView(6), sampler=Prioritized())
    stored = naive.stored()
    index = buffer.sample(2000, np.random.default_rng(0)).index.tolist()
    assert set(index) == {index for index in stored if index + 5 * 2 in stored}


def test_sequence_longer_than_the_stored_rows_is_rejected():
    buffer = Buffer(SIMPLE, 10, view=SequenceView(4))
    buffer.add(simple([0, 1, 2], [1, 2]))
    with pytest.raises(UserError, match="2 transitions are stored"):
        buffer.sample(1, np.random.default_rng(0))
    with pytest.raises(UserError, match="holds 10 rows"):
        Buffer(SIMPLE, 10, view=SequenceView(11))


@pytest.mark.parametrize("end", [0.2, 2.0])
def test_episodes_are_complete_and_padded(end):
    N = 2
    buffer, naive = filled(EpisodeView(), end=end, jump=0.02)
    stored = naive.stored()
    episodes = {}  # first index: its rows
    for column, rows in enumerate(naive.columns):
        first = 0
        for position, row in enumerate(rows):
            if position > 0 and not naive.continues(column, position - 1):
                first = position
            if (row["terminated"] or row["truncated"]) and first * N + column in stored:
                episodes[first * N + column] = rows[first : position + 1]
    batch = buffer.sample(600, np.random.default_rng(0))
    assert set(batch.index.tolist()) == set(episodes)
    longest = max(len(rows) for rows in episodes.values())
    assert batch.valid.shape == (600, longest)
    for i, index in enumerate(batch.index.tolist()):
        rows = episodes[index]
        assert batch.valid[i].tolist() == [t < len(rows) for t in range(longest)]
        padded = rows + rows[-1:] * (longest - len(rows))
        for name in [*SPEC, *SUCCESSORS.values()]:
            expected = stack([row[name] for row in padded])
            assert_equal(tree_map(lambda leaf, i=i: leaf[i], getattr(batch, name)), expected, name)


def test_long_episode_is_returned_completely():
    buffer = Buffer(SIMPLE, 300, view=EpisodeView())
    buffer.add(simple(list(range(201)), [1.0] * 200, truncated=199))
    batch = buffer.sample(2, np.random.default_rng(0))
    assert batch.valid.sum().item() == 400
    assert batch.obs[0, :, 0].tolist() == list(range(200))


def test_sampling_without_a_complete_episode_is_rejected():
    buffer = Buffer(SIMPLE, 10, view=EpisodeView())
    buffer.add(simple([0, 1, 2], [1, 2]))
    with pytest.raises(UserError, match="nothing to sample"):
        buffer.sample(1, np.random.default_rng(0))
    buffer.add(simple([2, 3], [1], terminated=0))
    assert buffer.sample(1, np.random.default_rng(0)).reward.shape == (1, 3)


def test_frame_stacks_in_sequences_and_n_step():
    # frames 0, 1, 2, ... of one episode in stacks of 2, ring of 6: frame t's stack is (t - 1, t)
    spec = {**SIMPLE, "obs": Field((2, 1), F32)}
    frames = np.arange(-1, 21, dtype=np.float32).clip(0)
    stacks = np.stack([frames[:-1], frames[1:]], 1)[:, None, :, None]  # [21,1,2,1]
    flags = {"reward": np.ones((20, 1)), "terminated": np.zeros((20, 1), bool), "truncated": np.zeros((20, 1), bool)}
    for view in (SequenceView(3), NStep(2, 0.5)):
        for sampler in (Prioritized(), None):
            options = {} if sampler is None else {"sampler": sampler}
            buffer = Buffer(spec, 6, view=view, frame_stack=2, **options)
            buffer.add(Batch(obs=stacks[:-1], next_obs=stacks[1:], **flags))
            batch = buffer.sample(64, np.random.default_rng(0))
            starts = sorted(set(batch.index.tolist()))
            # row 14 has lost a frame
            assert starts == ([15, 16, 17] if isinstance(view, SequenceView) else [15, 16, 17, 18, 19])
            reach = 2 if isinstance(view, NStep) else 1
            after = torch.minimum(batch.index + reach, torch.tensor(20)).float()
            next_obs = batch.next_obs if isinstance(view, NStep) else batch.next_obs[:, 0]
            assert torch.equal(next_obs[:, 1, 0], after)
            assert torch.equal(next_obs[:, 0, 0], after - 1)


@pytest.mark.parametrize(
    "make", [lambda: NStep(0, 0.9), lambda: NStep(1, 1.5), lambda: SequenceView(0), lambda: Prioritized(epsilon=0)]
)
def test_invalid_settings_are_rejected(make):
    with pytest.raises(UserError):
        make()


def test_prioritized_episodes_are_rejected():
    with pytest.raises(UserError, match="Episode"):
        Buffer(SIMPLE, 10, sampler=Prioritized(), view=EpisodeView())


def test_a_block_of_one_environment_is_the_stream():
    batch, rows = block([Stream(0)], 3)
    assert_equal(batch.action[:, 0], np.array([row[0]["action"] for row in rows]))
