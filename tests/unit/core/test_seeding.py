from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zhixing.core.seeding import derive_seed


def test_a_stream_is_the_same_on_every_machine() -> None:
    # written down once: a change here changes every run that is ever repeated
    assert derive_seed(0, "actor") == derive_seed(0, "actor", 0) == 8954217841423245380


def test_names_indices_and_seeds_give_streams_of_their_own() -> None:
    seeds = [
        derive_seed(seed, name, index)
        for seed in range(20)
        for name in ("actor", "learner", "rotca")
        for index in range(20)
    ]
    assert len(set(seeds)) == len(seeds)


@given(st.integers(0, 2**80), st.text(), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_every_stream_is_a_seed_that_torch_takes(seed: int, name: str, index: int) -> None:
    assert torch.Generator().manual_seed(derive_seed(seed, name, index)).initial_seed() == derive_seed(
        seed, name, index
    )
