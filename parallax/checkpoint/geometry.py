"""Where the elements that a rank holds lie in the full tensor; pure arithmetic.

A tensor is split along at most one dim. Seen as a matrix, with the dims before that one as rows and the rest as columns,
a rank holds a range of columns of every row (a tensor split along its first dim, or not at all, is one long row). A piece
of ZeRO is a flat range of the rank's own matrix, so at most a part of a row, some whole rows, and a part of a row:

    full   [rows, full_columns]           local  [rows, local_columns]
    . . . . a b c d . . . .               a b c d p      p: padding, in no full tensor
    . . . . e f g h . . . .               e f g h p
            ^ first_column                        the piece [2, 8) is c d | e f g
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from parallax.tensor_parallel.facts import ParameterFacts


@dataclass(frozen=True)
class Box:
    """Rows [row, stop_row) and columns [column, stop_column) of a full tensor seen as a matrix."""

    row: int
    stop_row: int
    column: int
    stop_column: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop_row - self.row, self.stop_column - self.column

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """Return what both contain, or None."""
        row, stop_row = max(self.row, other.row), min(self.stop_row, other.stop_row)
        column, stop_column = max(self.column, other.column), min(self.stop_column, other.stop_column)
        return Box(row, stop_row, column, stop_column) if row < stop_row and column < stop_column else None

    def chunks(self, limit: int) -> Iterator[Box]:
        """Yield, in row-major order, boxes of at most `limit` elements that make up this one; each is whole rows, or
        a part of one row."""
        columns = self.stop_column - self.column
        if not self.size:
            return
        if columns > limit:
            for row in range(self.row, self.stop_row):
                for column in range(self.column, self.stop_column, limit):
                    yield Box(row, row + 1, column, min(column + limit, self.stop_column))
            return
        step = limit // columns
        for row in range(self.row, self.stop_row, step):
            yield Box(row, min(row + step, self.stop_row), self.column, self.stop_column)


@dataclass(frozen=True)
class Block:
    """A box of the full tensor, and where a rank has it: from `offset` in its flat tensor, `stride` from row to row."""

    box: Box
    offset: int
    stride: int

    def within(self, box: Box) -> Block | None:
        """Return the part of this block that lies in `box`, or None."""
        part = self.box.intersection(box)
        if part is None:
            return None
        moved = (part.row - self.box.row) * self.stride + part.column - self.box.column
        return Block(part, self.offset + moved, self.stride)

    def view(self, flat: torch.Tensor, origin: int = 0) -> torch.Tensor:
        """Return the box `[rows, columns]` as a view of `flat`, whose first element has the flat index `origin`."""
        offset = self.offset - origin
        assert 0 <= offset and offset + (self.box.shape[0] - 1) * self.stride + self.box.shape[1] <= flat.numel(), self
        return flat.as_strided(self.box.shape, (self.stride, 1), flat.storage_offset() + offset)


@dataclass(frozen=True)
class Holding:
    """What one rank has of a tensor: of each of its `rows`, `held_columns` from `first_column`, then padding."""

    rows: int
    full_columns: int
    local_columns: int
    held_columns: int
    first_column: int

    @property
    def whole(self) -> Box:
        """All of the full tensor."""
        return Box(0, self.rows, 0, self.full_columns)

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """Yield what the flat range [start, stop) of the local tensor is of the full one, padding left out."""
        while start < stop:
            row, column = divmod(start, self.local_columns)
            rows, width = 1, min(self.local_columns - column, stop - start)
            if column == 0 and width == self.local_columns:
                rows = (stop - start) // self.local_columns
            real = min(column + width, self.held_columns) - column
            if real > 0:
                first = self.first_column + column
                yield Block(Box(row, row + rows, first, first + real), start, self.local_columns)
            start += rows * width


def holding_of(facts: ParameterFacts, local_shape: tuple[int, ...]) -> Holding:
    """Return what a rank holds whose local tensor, padding included, has `local_shape`."""
    if facts.shard_dim is None:
        assert local_shape == facts.full_shape, (local_shape, facts)
        size = math.prod(local_shape)
        return Holding(1, size, size, size, 0)
    dim, full = facts.shard_dim, facts.full_shape
    assert local_shape[:dim] == full[:dim] and local_shape[dim + 1 :] == full[dim + 1 :], (local_shape, facts)
    rows, inner = math.prod(full[:dim]), math.prod(full[dim + 1 :])
    return Holding(
        rows, full[dim] * inner, local_shape[dim] * inner, facts.shard_rows * inner, facts.shard_start * inner
    )
