"""Rows: which samples share one, and what a row holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.data.loader import BatchLoader
from parallax.data.packing import RowDataset, make_row, pack, pad, squared_document_lengths

LENGTHS = st.lists(st.integers(1, 20), max_size=60)


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Return the filled tokens of each row, sorted: the definition, row by row, in quadratic time."""
    filled: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(filled)) if filled[row] + length <= capacity]
        if fitting:
            filled[max(fitting, key=lambda row: filled[row])] += length
        else:
            filled.append(length)
    return sorted(filled)


def first_fit(lengths: list[int], capacity: int) -> int:
    filled: list[int] = []
    for length in lengths:
        for row in range(len(filled)):
            if filled[row] + length <= capacity:
                filled[row] += length
                break
        else:
            filled.append(length)
    return len(filled)


@given(LENGTHS, st.integers(20, 50))
def test_packing_is_best_fit_decreasing_and_keeps_every_sample_once(lengths: list[int], capacity: int) -> None:
    rows = pack(lengths, capacity)
    assert sorted(rows.members) == list(range(len(lengths)))
    filled = [
        sum(lengths[m] for m in rows.members[a:b]) for a, b in zip(rows.starts[:-1], rows.starts[1:], strict=True)
    ]
    assert sorted(filled) == best_fit_decreasing(lengths, capacity)
    assert all(0 < tokens <= capacity for tokens in filled)


def test_packing_fills_more_than_first_fit() -> None:
    lengths = (np.random.RandomState(0).lognormal(5, 1, 3000).astype(int) + 1).clip(max=1024).tolist()
    assert len(pack(lengths, 1024)) < first_fit(lengths, 1024)
    assert sum(lengths) / (len(pack(lengths, 1024)) * 1024) > 0.99


def test_the_grouping_is_written_down_so_that_nothing_changes_it() -> None:
    rows = pack([3, 5, 2, 7, 1, 4, 4, 6], 8)
    groups = [rows.members[a:b].tolist() for a, b in zip(rows.starts[:-1], rows.starts[1:], strict=True)]
    assert groups == [[3, 4], [7, 2], [1, 0], [5, 6]]


class Lists:
    """Samples given as lists; fingerprint and lengths as `Samples` wants them."""

    def __init__(self, samples: list[tuple[list[int], list[float]]], has_weights: bool = False) -> None:
        self.samples = samples
        self.lengths = np.array([len(ids) for ids, _ in samples], dtype=np.int64)
        self.num_labels = sum(weight > 0 for _, weights in samples for weight in weights[1:])
        self.fingerprint = "lists"
        self.has_weights = has_weights

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        ids, weights = self.samples[i]
        return np.array(ids, dtype=np.uint32), np.array(weights, dtype=np.float32)


def test_the_labels_of_a_sample_are_shifted_once() -> None:
    """Fault 30: prompt p0 p1, answer a0 a1: the labels are - a0 a1, weighted 0 1 1; the last token predicts nothing."""
    p0, p1, a0, a1 = 1, 2, 3, 4
    row = make_row([(np.array([p0, p1, a0, a1]), np.array([0.0, 0.0, 1.0, 1.0], np.float32))], 4, 0, with_weights=True)
    assert row["input_ids"].tolist() == [p0, p1, a0, a1]
    assert row["labels"].tolist() == [-100, a0, a1, -100]
    assert row["weights"].tolist() == [0, 1, 1, 0]
    full = make_row([(np.array([p0, p1, a0, a1]), np.ones(4, np.float32))], 4, 0, with_weights=False)
    assert full["labels"].tolist() == [p1, a0, a1, -100] and "weights" not in full


def test_samples_of_a_row_do_not_touch_each_other() -> None:
    """Fault 31: lengths 3 and 2: positions 0 1 2 0 1, boundaries 0 3 5, and no label over a boundary."""
    samples = [(np.array([5, 6, 7]), np.ones(3, np.float32)), (np.array([8, 9]), np.ones(2, np.float32))]
    row = make_row(samples, 7, 99, with_weights=False)
    assert {name: array.tolist() for name, array in row.items()} == {
        "input_ids": [5, 6, 7, 8, 9, 99, 99],
        "labels": [6, 7, -100, 9, -100, -100, -100],
        "positions": [0, 1, 2, 0, 1, 0, 1],
        "documents": [0, 0, 0, 1, 1, 2, 2],
    }
    dtypes = {name: array.dtype for name, array in row.items()}
    assert dtypes == {"input_ids": "int64", "labels": "int64", "positions": "int64", "documents": "int32"}


def test_padding_that_is_the_end_of_text_hides_no_end_of_text() -> None:
    """Fault 24: [5, 6, EOS, 7, EOS] and three pads of the same id: both EOS are labels, no pad is."""
    eos = 2
    row = make_row([(np.array([5, 6, eos, 7, eos]), np.array([0, 0, 1, 0, 1], np.float32))], 8, eos, with_weights=False)
    assert row["input_ids"].tolist() == [5, 6, eos, 7, eos, eos, eos, eos]
    assert row["labels"].tolist() == [-100, eos, -100, eos, -100, -100, -100, -100]


SAMPLES = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.0, 1.0])), min_size=2, max_size=12),
    min_size=1,
    max_size=20,
).map(lambda samples: [([t for t, _ in s], [w for _, w in s]) for s in samples])


@settings(deadline=None)
@given(SAMPLES, st.integers(12, 30), st.booleans())
def test_rows_hold_every_label_once_with_what_is_before_it(
    samples: list[tuple[list[int], list[float]]], seq_len: int, packing: bool
) -> None:
    dataset = RowDataset(Lists(samples), seq_len, 0, packing)
    found: list[tuple[tuple[int, ...], int]] = []
    for i in range(len(dataset)):
        row = dataset[i]
        assert all(array.shape == (seq_len,) for array in row.values())
        assert (np.diff(row["documents"]) >= 0).all() and row["documents"][0] == 0
        for t in np.flatnonzero(row["labels"] != -100):
            start = t - row["positions"][t]
            assert (row["documents"][start : t + 2] == row["documents"][t]).all(), "a label of another document"
            found.append((tuple(row["input_ids"][start : t + 1].tolist()), int(row["labels"][t])))
    expected = [(tuple(ids[:t]), ids[t]) for ids, weights in samples for t in range(1, len(ids)) if weights[t]]
    assert sorted(found) == sorted(expected)
    assert 0 < dataset.filled <= 1 and dataset.num_tokens == sum(len(ids) for ids, _ in samples)


def test_the_squares_of_lengths_count_documents_and_not_rows() -> None:
    """Fault 18: attention in a packed row is not that of the whole row."""
    documents = np.array([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]], dtype=np.int32)
    assert squared_document_lengths(documents[0]) == 9 + 4 + 1
    assert squared_document_lengths(documents) == 9 + 4 + 1 + 36
    assert squared_document_lengths(torch.from_numpy(documents)) == 50
    dataset = RowDataset(Lists([([1] * 3, [1.0] * 3), ([1] * 2, [1.0] * 2)]), 6, 0)
    assert dataset.squared_lengths(0) == 13, "padding is no work of the model"


def test_every_layout_sees_the_same_rows_in_each_step() -> None:
    samples = [([i + 10] * (i % 7 + 2), [1.0] * (i % 7 + 2)) for i in range(200)]
    dataset = RowDataset(Lists(samples), 16, 0)

    def rows(dp: int, micro_batch: int, step: int) -> list[list[int]]:
        loaders = [BatchLoader(dataset, 3, 12, micro_batch, rank, dp) for rank in range(dp)]
        return sorted(
            row for loader in loaders for batch in loader.micro_batches(step) for row in batch["input_ids"].tolist()
        )

    for step in (0, 5, 6):
        for dp, micro_batch in ((1, 3), (2, 2), (3, 1), (4, 3)):
            assert rows(dp, micro_batch, step) == rows(1, 1, step)
    (batch, *_) = BatchLoader(dataset, 3, 12, 4).micro_batches(0)
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "input_ids": ((4, 16), torch.int64),
        "labels": ((4, 16), torch.int64),
        "positions": ((4, 16), torch.int64),
        "documents": ((4, 16), torch.int32),
    }


def test_the_fingerprint_tells_rows_apart() -> None:
    samples = Lists([([1, 2], [1.0, 1.0]), ([3, 4], [1.0, 1.0])])
    made = [
        RowDataset(samples, s, p, k).fingerprint
        for s, p, k in ((8, 0, True), (9, 0, True), (8, 1, True), (8, 0, False))
    ]
    assert len(set(made)) == 4
    assert RowDataset(samples, 8, 0).fingerprint == made[0]
    assert pad(3).starts.tolist() == [0, 1, 2, 3]
    with pytest.raises(IndexError):
        RowDataset(samples, 8, 0)[1]


def test_a_hundred_thousand_samples_are_packed_in_a_second_or_two() -> None:
    import time

    lengths = np.random.RandomState(0).randint(1, 4096, 100_000)
    started = time.process_time()
    pack(lengths, 4096)
    assert time.process_time() - started < 5
