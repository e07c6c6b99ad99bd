"""A matrix in FP8 with its scales; and how tensor-parallel shards that cut a tile agree on its scale.

A shard need not begin at the edge of a tile: 688 features over two ranks are cut at 344, inside the tile of 256 .. 383.
Tiles are those of the whole matrix, whoever holds it. So the shard is taken as if it began where its first tile does:

    rank 0   | 0 .. 127 | 128 .. 255 | 256 .. 343 |                              lead 0
    rank 1                           |  (88)  344 .. 383 | 384 .. 511 | ...      lead 88

and the ranks exchange the amax of the tiles that they share, one AllReduce over a few columns. Every byte is then what one
process would have stored. Shards of whole tiles, which any large model has, exchange nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from parallax.collectives import all_reduce_
from parallax.mesh import Group
from parallax.precision.tiles import (
    FORMATS,
    TILE_SIZE,
    Tile,
    cast_to_fp8,
    scale_of,
    scaled_by_tile,
    tile_amax,
)

ROW, COLUMN, BLOCK = (1, TILE_SIZE), (TILE_SIZE, 1), (TILE_SIZE, TILE_SIZE)
MULTIPLE = 16  # elements that a line of an FP8 operand must divide by: tensor cores load 16 bytes at a time


@dataclass(frozen=True)
class Cut:
    """The part [start, start + size) of a dim of `full` that this tp rank holds; the other ranks hold parts of that size."""

    start: int
    size: int
    full: int
    tp: Group

    def lead(self, tile: int) -> int:
        """Return how far into its first tile the shard begins."""
        return self.start % tile

    def shared(self, tile: int) -> list[int]:
        """Return the numbers, in the whole matrix, of the tiles that an edge of a shard cuts."""
        return sorted({edge // tile for edge in range(self.size, self.full, self.size) if edge % tile})


@dataclass(frozen=True, eq=False)
class Operand:
    """One operand of a product, quantised along the dim that is summed over, or as it came.

    data: `[rows, columns]`, FP8; or bf16 or fp32, with scale_inv None, which is what runs while scales are not known yet.
    scale_inv: fp32, of each tile, counted from `lead` rows and columns before the data; a scalar where tile is None.
    kept: where a backend keeps what it makes of an operand that is used again, a weight's; None for one that is not.
    origin: of the transposed of an operand that is used again, that operand: what was made of one may do for both.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor | None = None
    tile: Tile | None = None
    lead: Tile = (0, 0)
    kept: dict[str, torch.Tensor] | None = None
    origin: Operand | None = None

    def t(self) -> Operand:
        """Return the transposed matrix: the same bytes."""
        scale_inv = self.scale_inv if self.scale_inv is None or self.tile is None else self.scale_inv.t()
        tile = None if self.tile is None else (self.tile[1], self.tile[0])
        kept: dict[str, torch.Tensor] | None = None if self.kept is None else {}
        origin = None if self.kept is None else self
        lead = self.lead[::-1]
        return replace(self, data=self.data.t(), scale_inv=scale_inv, tile=tile, lead=lead, kept=kept, origin=origin)

    def copies(self) -> list[torch.Tensor]:
        """Return the tensors that it holds beside what it was made of; some may share their memory."""
        # Data without scales is the tensor itself.
        own = [] if self.scale_inv is None else [self.data, self.scale_inv]
        return own + list((self.kept or {}).values())

    def dequantized(self) -> torch.Tensor:
        """Return q * scale_inv without a rounding, in float64."""
        if self.data.stride(0) == 1 and self.data.shape[0] > 1:
            return self.t().dequantized().t()
        values = self.data.float().double()
        if self.scale_inv is None:
            return values
        scale_inv = self.scale_inv.double()
        if self.tile is None:
            return values.mul_(scale_inv)
        if any(self.lead):
            values = scaled_by_tile(_behind(values, self.lead), scale_inv, self.tile)
            return values[self.lead[0] :, self.lead[1] :]
        return scaled_by_tile(values, scale_inv, self.tile)

    def aligned(self) -> Operand:
        """Return it with zeros before and after, to whole tiles (to multiples of 16 where it has one scale), row-major.

        What kernels take; they add nothing to a sum. Rows before and after are to be cut off the result.
        """
        unit = self.tile or (MULTIPLE, MULTIPLE)
        after = [-(size + lead) % n for size, lead, n in zip(self.data.shape, self.lead, unit, strict=True)]
        if not any(after) and not any(self.lead):
            return replace(self, data=self.data.contiguous())
        as_bytes = self.data.view(torch.uint8) if self.data.element_size() == 1 else self.data
        padded = F.pad(as_bytes, (self.lead[1], after[1], self.lead[0], after[0])).view(self.data.dtype)
        return replace(self, data=padded, lead=(0, 0))


def _behind(x: torch.Tensor, lead: Tile) -> torch.Tensor:
    return F.pad(x, (lead[1], 0, lead[0], 0)) if any(lead) else x


def quantize_shard(
    x: torch.Tensor,
    tile: Tile,
    fp8_format: str,
    power_of_two: bool = False,
    rows: Cut | None = None,
    columns: Cut | None = None,
) -> Operand:
    """Quantise this rank's part of a matrix to the bytes that the whole one has there.

    x: `[rows, columns]`. rows, columns: how that dim is cut over tp; None where it is whole. With cuts that share tiles all
    tp ranks call this together.
    """
    lead = (rows.lead(tile[0]) if rows else 0, columns.lead(tile[1]) if columns else 0)
    values = _behind(x.float(), lead)
    amax = tile_amax(values, tile)
    for dim, cut in ((0, rows), (1, columns)):
        if cut is not None and (shared := cut.shared(tile[dim])):
            _agree(amax, dim, cut, cut.start // tile[dim], shared)
    scale = scale_of(amax, fp8_format, power_of_two)
    q = cast_to_fp8(scaled_by_tile(values, scale, tile), fp8_format)
    return Operand(q[lead[0] :, lead[1] :], scale.reciprocal(), tile, lead)


def _agree(amax: torch.Tensor, dim: int, cut: Cut, first: int, shared: list[int]) -> None:
    """Raise the amaxes of shared tiles to the greatest on any rank, in place. first: number of the first tile held here."""
    amax.nan_to_num_(
        nan=torch.inf, posinf=torch.inf
    )  # a maximum over ranks need not keep NaN, and inf has the same scale
    held = [(place, tile - first) for place, tile in enumerate(shared) if 0 <= tile - first < amax.shape[dim]]
    exchanged = amax.new_zeros([len(shared) if d == dim else size for d, size in enumerate(amax.shape)])
    for place, tile in held:
        exchanged.select(dim, place).copy_(amax.select(dim, tile))
    all_reduce_(exchanged, cut.tp, op="max")
    for place, tile in held:
        amax.select(dim, tile).copy_(exchanged.select(dim, place))


def check_pair(a: Operand, b: Operand) -> None:
    """Raise ValueError unless a GPU can compute a @ b^T; the same on every device, so that a CPU refuses what a GPU would."""
    if a.data.shape[1] != b.data.shape[1]:
        raise ValueError(f"operands {list(a.data.shape)} and {list(b.data.shape)} are not summed over dims of one size")
    if a.scale_inv is None or b.scale_inv is None:
        if a.scale_inv is not b.scale_inv:
            raise ValueError("an operand in FP8 and one that is not cannot be multiplied; quantise both or neither")
        return
    if (a.tile, b.tile) not in ((ROW, BLOCK), (ROW, ROW), (BLOCK, ROW), (None, None)):
        raise ValueError(
            f"operands with tiles of {a.tile} and {b.tile} cannot be multiplied; use 1x128 with 1x128 or 128x128"
        )
    formats = FORMATS[a.data.dtype], FORMATS[b.data.dtype]
    if formats == ("e5m2", "e5m2"):
        raise ValueError("two operands in e5m2 cannot be multiplied: no GPU does; use e4m3 for one of them")
    if a.tile is not None and a.lead[1] != b.lead[1]:
        raise ValueError(f"operands whose tiles begin at {a.lead[1]} and {b.lead[1]} do not match")
