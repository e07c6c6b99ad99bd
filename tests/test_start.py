"""Ranks of one start agree on keys of their own, whatever earlier starts have left in the store."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from parallax.errors import LostRank
from parallax.start import agree_on_start


def _start(store: dist.Store, ranks: int, delays: dict[int, float] | None = None) -> list[str]:
    """Return the tokens of ranks that start together, each in a thread."""
    tokens: list[str] = [""] * ranks

    def one(rank: int) -> None:
        time.sleep((delays or {}).get(rank, 0.0))
        tokens[rank] = agree_on_start(store, rank, ranks, 20.0)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tokens


@pytest.fixture
def store(tmp_path: Path) -> dist.Store:
    return dist.HashStore()


def test_each_start_has_a_token_of_its_own_whoever_comes_first(store: dist.Store) -> None:
    seen = set()
    for delays in ({}, {0: 0.1}, {1: 0.1}, {2: 0.1}, {0: 0.1, 1: 0.2}):
        tokens = _start(store, 3, delays)
        assert len(set(tokens)) == 1 and tokens[0] not in seen
        seen.add(tokens[0])


def test_another_number_of_ranks_can_start_in_the_same_store(store: dist.Store) -> None:
    tokens = [set(_start(store, ranks)) for ranks in (3, 2, 4)]
    assert all(len(found) == 1 for found in tokens) and len(set.union(*tokens)) == 3


def test_a_start_that_was_cut_does_not_count(store: dist.Store) -> None:
    with pytest.raises(LostRank, match="not all 2 ranks came to the start"):
        agree_on_start(store, 1, 2, 0.2)
    with pytest.raises(LostRank):
        agree_on_start(store, 0, 2, 0.2)  # finds the hello of the one before, who is gone
    assert len(set(_start(store, 2))) == 1
