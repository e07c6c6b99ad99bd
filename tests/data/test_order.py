from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.data import order as order_module
from parallax.data.order import DataOrder, sample_index


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    order = DataOrder(seed=1, fingerprint="f", num_samples=100)
    epochs = [order.samples(100 * e, 100) for e in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(100))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert not np.array_equal(epochs[0], np.arange(100))


@given(st.integers(1, 40), st.integers(0, 200), st.integers(0, 60), st.integers(0, 3))
def test_a_position_is_a_pure_function_however_it_is_asked_for(n: int, first: int, count: int, seed: int) -> None:
    together = DataOrder(seed, "f", n).samples(first, count)
    assert together.dtype == np.int64
    assert together.tolist() == [sample_index(seed, "f", first + i, n) for i in range(count)]


def test_seed_and_data_change_the_order() -> None:
    orders = [DataOrder(s, f, 1000).samples(0, 1000).tolist() for s, f in ((0, "a"), (1, "a"), (0, "b"))]
    assert orders[0] != orders[1] and orders[0] != orders[2]


def test_the_order_is_written_down_so_that_no_version_of_numpy_changes_it() -> None:
    assert DataOrder(1234, "fingerprint", 10).samples(0, 20).tolist() == [
        6,
        4,
        8,
        5,
        0,
        1,
        2,
        7,
        3,
        9,
        6,
        3,
        4,
        2,
        1,
        7,
        5,
        8,
        9,
        0,
    ]


def test_a_large_order_is_made_once_a_machine_and_mapped(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory = DataOrder(3, "f", 1000).samples(500, 1700)
    monkeypatch.setattr(order_module, "MAPPED_FROM", 1000)
    order = DataOrder(3, "f", 1000)
    assert order.samples(500, 1700).tolist() == in_memory.tolist()
    files = sorted(cache.glob("order-*/samples.npy"))
    assert len(files) == 3 and isinstance(order._permutation(2), np.memmap)
    assert order._permutation(2).dtype == np.uint32
    monkeypatch.setattr(order, "_make_permutation", None)
    assert order.samples(500, 1700).tolist() == in_memory.tolist()
    DataOrder(4, "f", 1000).samples(0, 1)
    assert len(list(cache.glob("order-*/samples.npy"))) == 4


def test_ranks_that_start_together_make_a_large_order_once(cache: Path) -> None:
    program = (
        "from parallax.data import order; order.MAPPED_FROM = 1; "
        "print(order.DataOrder(1, 'f', 300_000).samples(299_990, 20).tolist())"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(4)
    ]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert {out for out, _ in outputs} == {f"{DataOrder(1, 'f', 300_000).samples(299_990, 20).tolist()}\n"}
    assert sum(err.count("preparing the order") for _, err in outputs) == 2  # of two epochs


def test_the_order_of_evaluation_is_that_of_the_data() -> None:
    assert DataOrder(0, "f", 4, shuffle=False).samples(2, 8).tolist() == [2, 3, 0, 1, 2, 3, 0, 1]


def test_positions_beyond_32_bits_are_exact() -> None:
    order = DataOrder(0, "f", 7)
    first = 2**40 - 2**40 % 7
    assert sorted(order.samples(first, 7)) == list(range(7))
    assert order.samples(first + 3, 1) == order.samples(first, 7)[3]
