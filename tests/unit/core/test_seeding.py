from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zhixing.core.seeding import derive_seed


def test_seed_of_a_stream_never_changes() -> None:
    # a recorded value; another one would change the results of every repeated run
    assert derive_seed(0, "actor") == derive_seed(0, "actor", 0) == 8954217841423245380


def test_streams_differ_by_name_index_and_seed() -> None:
    seeds = [
        derive_seed(seed, name, index)
        for seed in range(20)
        for name in ("actor", "learner", "rotca")
        for index in range(20)
    ]
    assert len(set(seeds)) == len(seeds)


@given(st.integers(0, 2**80), st.text(), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_torch_accepts_the_seed_of_any_stream(seed: int, name: str, index: int) -> None:
    assert torch.Generator().manual_seed(derive_seed(seed, name, index)).initial_seed() == derive_seed(
        seed, name, index
    )
