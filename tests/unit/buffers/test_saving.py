import numpy as np
import pytest
import torch
from buffer_streams import F32, SIMPLE, SPEC, Stream, assert_same_batch, block, simple, step

from zhixing.buffers import Buffer, EpisodeView, NStep, Prioritized, SequenceView, Uniform
from zhixing.core.batch import Batch
from zhixing.core.tree import Field
from zhixing.errors import UserError

KINDS = {
    "uniform": {"view": NStep(3, 0.9)},
    "prioritized": {"sampler": Prioritized(), "view": NStep(1, 0.9)},
    "prioritized sequences": {"sampler": Prioritized(), "view": SequenceView(3)},
    "episodes": {"view": EpisodeView()},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Run:
    """A buffer in use: streams that fill it, a generator that samples it, and new priorities."""

    def __init__(self, kind: str) -> None:
        self.buffer = Buffer(SPEC, 24, 2, **KINDS[kind])
        self.streams = [Stream(0, 0.3, 0.1), Stream(1, 0.3, 0.1)]
        self.rng = np.random.default_rng(5)

    def steps(self, n: int, buffer: Buffer | None = None) -> list[Batch]:
        buffer = buffer or self.buffer
        samples = []
        for t in range(n):
            if t % 4 == 3:
                buffer.add(step(self.streams[1:])[0], env_ids=np.array([1]))
            else:
                buffer.add(step(self.streams)[0])
            if t >= 8:
                samples.append(buffer.sample(5, self.rng))
                buffer.set_priority(samples[-1].index, torch.from_numpy(self.rng.random(5)))
        return samples


def save_and_load(state, tmp_path):
    """Return a state as a checkpoint stores it: written and read without unpickling objects."""
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


@every_kind
@pytest.mark.parametrize("before", [[0], [10], [9, 9, 30, 2, 40, 1, 1]])
def test_loaded_buffer_continues_bit_for_bit(kind, before, tmp_path):
    expected, run = Run(kind), Run(kind)
    for n in before:
        expected.steps(n)
        run.steps(n)
        state = save_and_load(run.buffer.save(tmp_path / "replay"), tmp_path)
    restored = Buffer(SPEC, 24, 2, **KINDS[kind])
    restored.load(state, tmp_path / "replay")
    assert len(restored) == len(expected.buffer)
    for a, b in zip(expected.steps(60), run.steps(60, restored), strict=True):
        assert_same_batch(a, b)


@every_kind
def test_saving_and_loading_again_after_a_load(kind, tmp_path):
    expected, run = Run(kind), Run(kind)
    buffer = run.buffer
    for n in (12, 5, 30, 7):
        expected.steps(n)
        run.steps(n, buffer)
        state = save_and_load(buffer.save(tmp_path), tmp_path)
        Buffer.prune(tmp_path, [state])
        buffer = Buffer(SPEC, 24, 2, **KINDS[kind])
        buffer.load(state, tmp_path)
    for a, b in zip(expected.steps(20), run.steps(20, buffer), strict=True):
        assert_same_batch(a, b)


@every_kind
def test_resuming_from_an_older_state_repeats_the_steps(kind, tmp_path):
    run, repeated = Run(kind), Run(kind)
    run.steps(15)
    repeated.steps(15)
    older = save_and_load(run.buffer.save(tmp_path), tmp_path)
    expected = run.steps(9)
    run.buffer.save(tmp_path)
    run.steps(9)
    run.buffer.save(tmp_path)
    restored = Buffer(SPEC, 24, 2, **KINDS[kind])
    restored.load(older, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("segment*")) == ["segment-00000000.npz"]
    for a, b in zip(expected, repeated.steps(9, restored), strict=True):
        assert_same_batch(a, b)
    assert restored.save(tmp_path)["segments"][-1]["name"] == "segment-00000001.npz"


@every_kind
def test_state_dict_holds_everything(kind):
    expected, run = Run(kind), Run(kind)
    expected.steps(40)
    run.steps(40)
    restored = Buffer(SPEC, 24, 2, **KINDS[kind])
    restored.load_state_dict(run.buffer.state_dict())
    for a, b in zip(expected.steps(40), run.steps(40, restored), strict=True):
        assert_same_batch(a, b)


def test_state_is_not_changed_by_later_steps(tmp_path):
    run = Run("prioritized")
    run.steps(10)
    state = run.buffer.save(tmp_path)
    before = {name: value.clone() for name, value in state["storage"].items()}
    run.steps(10)
    assert all(torch.equal(before[name], state["storage"][name]) for name in before)


def test_each_transition_is_written_once(tmp_path):
    buffer = Buffer(SPEC, 1000, 2)
    streams = [Stream(0), Stream(1)]
    written = []
    for _ in range(5):
        buffer.add(block(streams, 7)[0])
        name = buffer.save(tmp_path)["segments"][-1]["name"]
        written += np.load(tmp_path / name)["index"].tolist()
    assert sorted(written) == list(range(70))
    buffer.save(tmp_path)  # no new rows: no new file
    assert len(list(tmp_path.iterdir())) == 5


def test_a_save_writes_at_most_the_capacity(tmp_path):
    buffer = Buffer(SPEC, 10, 2)
    buffer.add(block([Stream(0), Stream(1)], 100)[0])
    state = buffer.save(tmp_path)
    assert len(np.load(tmp_path / state["segments"][0]["name"])["index"]) == 10


def test_prune_keeps_the_segments_that_states_need(tmp_path):
    buffer = Buffer(SPEC, 20, 2)
    streams = [Stream(0), Stream(1)]
    states = []
    for _ in range(8):
        buffer.add(block(streams, 4)[0])
        states.append(buffer.save(tmp_path))
    # the ring holds 10 rows per environment, a save writes 4: the last 10 rows lie in the last three segments
    assert [part["name"][-5] for part in states[-1]["segments"]] == ["5", "6", "7"]
    Buffer.prune(tmp_path, states[-2:])
    assert sorted(path.name[-5] for path in tmp_path.iterdir()) == ["4", "5", "6", "7"]
    Buffer(SPEC, 20, 2).load(states[-2], tmp_path)
    with pytest.raises(UserError, match=r"segment-00000000\.npz is missing"):
        Buffer(SPEC, 20, 2).load(states[0], tmp_path)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_damaged_segment_is_reported(tmp_path, damage):
    buffer = Buffer(SPEC, 20, 2)
    buffer.add(block([Stream(0), Stream(1)], 10)[0])
    state = buffer.save(tmp_path)
    path = tmp_path / state["segments"][0]["name"]
    data = bytearray(path.read_bytes())
    if damage == "flip":
        with np.load(path) as rows:
            at = bytes(data).index(rows["obs.0"].tobytes())
        data[at] ^= 1
    path.write_bytes({"cut": data[: len(data) // 2], "flip": data, "empty": b""}[damage])
    with pytest.raises(UserError, match=r"segment-00000000\.npz is damaged"):
        Buffer(SPEC, 20, 2).load(state, tmp_path)


def test_state_of_another_kind_of_buffer_is_rejected(tmp_path):
    buffer = Buffer(SPEC, 20, 2)
    buffer.add(block([Stream(0), Stream(1)], 10)[0])
    with pytest.raises(UserError, match="another kind of buffer"):
        Buffer(SPEC, 20, 3).load(buffer.save(tmp_path), tmp_path)
    with pytest.raises(UserError, match="capacity"):
        Buffer(SPEC, 30, 2).load(buffer.save(tmp_path), tmp_path)
    with pytest.raises(UserError, match="sampler"):
        Buffer(SPEC, 20, 2, sampler=Prioritized()).load(buffer.save(tmp_path), tmp_path)


def test_boundary_detected_after_a_save_is_in_the_next_segment(tmp_path):
    buffer = Buffer(SIMPLE, 10)
    buffer.add(simple([0, 1], [1]))
    buffer.save(tmp_path)
    buffer.add(simple([5, 6], [1]))  # 5 isn't the successor 1
    restored = Buffer(SIMPLE, 10)
    restored.load(buffer.save(tmp_path), tmp_path)
    batch = restored.sample(20, np.random.default_rng(0))
    assert {*zip(batch.obs[:, 0].tolist(), batch.next_obs[:, 0].tolist(), strict=True)} == {(0, 1), (5, 6)}


def test_saving_after_clear_and_into_another_folder(tmp_path):
    buffer = Buffer(SIMPLE, 10)
    buffer.add(simple([0, 1, 2], [1, 1]))
    buffer.save(tmp_path / "a")
    buffer.clear()
    buffer.add(simple([7, 8], [1]))
    for folder in ("a", "b"):
        restored = Buffer(SIMPLE, 10)
        restored.load(buffer.save(tmp_path / folder), tmp_path / folder)
        assert len(restored) == 1
        assert restored.sample(3, np.random.default_rng(0)).obs.tolist() == [[7]] * 3


def test_frame_stacks_and_memory_maps_resume(tmp_path):
    spec = {**SIMPLE, "obs": Field((2, 1), F32)}
    frames = np.arange(-1, 31, dtype=np.float32).clip(0)
    stacks = np.stack([frames[:-1], frames[1:]], 1)[:, None, :, None]  # [31,1,2,1]

    def part(a, b):
        flags = {"reward": np.ones((b - a, 1)), "terminated": np.zeros((b - a, 1), bool)}
        truncated = np.zeros((b - a, 1), bool)
        return Batch(obs=stacks[a:b], next_obs=stacks[a + 1 : b + 1], truncated=truncated, **flags)

    def make(name):
        return Buffer(spec, 8, sampler=Uniform(), frame_stack=2, folder=tmp_path / name)

    original = make("original")
    original.add(part(0, 11))
    restored = make("restored")
    restored.load(original.save(tmp_path / "replay"), tmp_path / "replay")
    for buffer in (original, restored):
        buffer.add(part(11, 13))
    assert_same_batch(*(buffer.sample(40, np.random.default_rng(0)) for buffer in (original, restored)))
