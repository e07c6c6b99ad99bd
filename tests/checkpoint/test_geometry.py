"""Boxes and blocks against numpy's own indexing of small tensors."""

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.checkpoint.geometry import Box, holding_of
from parallax.tensor_parallel.facts import ParameterFacts

SHARDS = st.tuples(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),  # shape
    st.integers(-1, 2),  # shard dim; -1 or too large: not split
    st.integers(0, 4),  # first row held
    st.integers(0, 5),  # rows held, at most
    st.integers(0, 3),  # rows of padding
    st.integers(0, 200),  # where a piece begins and ends, modulo the size
    st.integers(0, 200),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(SHARDS)
def test_a_flat_range_of_a_shard_is_found_in_the_full_tensor(case: tuple) -> None:
    shape, dim, start, rows, padding, first, last = case
    full = np.arange(1, np.prod(shape) + 1).reshape(shape)
    if 0 <= dim < len(shape):
        start = min(start, shape[dim])
        rows = min(rows, shape[dim] - start)
        padding = padding or (rows == 0)
        held = full.take(range(start, start + rows), axis=dim)
        local = np.pad(held, [(0, padding if axis == dim else 0) for axis in range(len(shape))])
        facts = ParameterFacts(tuple(shape), shard_dim=dim, shard_start=start, shard_rows=rows)
    else:
        local = full
        facts = ParameterFacts(tuple(shape))
    first, last = sorted((first % (local.size + 1), last % (local.size + 1)))
    piece = torch.from_numpy(local.reshape(-1)[first:last].copy())
    holding = holding_of(facts, local.shape)
    matrix = full.reshape(holding.rows, holding.full_columns)
    found = torch.zeros_like(piece)
    for block in holding.blocks(first, last):
        box = block.box
        block.view(found, origin=first).copy_(
            torch.from_numpy(matrix[box.row : box.stop_row, box.column : box.stop_column])
        )
    assert torch.equal(found, piece)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 4), st.integers(0, 5), st.integers(0, 4), st.integers(0, 6), st.integers(1, 9))
def test_chunks_are_small_and_are_the_box_in_row_major_order(
    row: int, rows: int, column: int, columns: int, limit: int
) -> None:
    box = Box(row, row + rows, column, column + columns)
    chunks = list(box.chunks(limit))
    assert all(0 < chunk.size <= limit for chunk in chunks)
    cells = [
        cell
        for chunk in chunks
        for cell in itertools.product(range(chunk.row, chunk.stop_row), range(chunk.column, chunk.stop_column))
    ]
    assert cells == list(itertools.product(range(row, row + rows), range(column, column + columns)))
