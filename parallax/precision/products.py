"""The three products of one linear layer in FP8, whatever computes them.

    fprop   y  [tokens, out] = x [tokens, in] W^T          x and W quantised along in
    dgrad   dx [tokens, in]  = dy [tokens, out] W          dy and W quantised along out
    wgrad   dW [out, in]    += dy^T x                      dy and x quantised along tokens, sample by sample

Each is a @ b^T of two operands that a backend multiplies. Weights have square tiles, so that fprop and dgrad share their
bytes; dy and x are quantised anew for wgrad, from the tensor itself: a quantised one cannot be transposed, its tiles lie along
the wrong dim. Tiles along tokens begin anew with each sample, so that no other sample of its micro-batch changes its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from parallax.precision.operands import BLOCK, COLUMN, ROW, Cut, Operand, check_pair, quantize_shard
from parallax.precision.recipe import Recipe
from parallax.precision.scales import Slots
from parallax.precision.tiles import TILE_SIZE, Tile


class Backend(Protocol):
    """What quantises and multiplies.

    name: as --fp8-backend has it. exact_sums: whether parts of a sum, over tp too, are handed on in float64, so that no
    layout shows in it; otherwise in the model's type, a quarter of the bytes.
    """

    @property
    def name(self) -> str: ...

    @property
    def exact_sums(self) -> bool: ...

    def quantize(self, x: torch.Tensor, tile: Tile, fp8_format: str, power_of_two: bool) -> Operand:
        """Return `[rows, columns]` in FP8, to the bytes that `parallax.precision.quantize_tiles` gives."""

    def quantize_both(self, x: torch.Tensor, fp8_format: str, power_of_two: bool) -> tuple[Operand, Operand]:
        """Return `[rows, columns]` with 1x128 and with 128x1 tiles, from one read where that is faster."""

    def cast(self, x: torch.Tensor, scale: torch.Tensor, fp8_format: str) -> Operand:
        """Return `[rows, columns]` in FP8 with one scale, an fp32 scalar."""

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
        """Return a @ b^T of `[m, k]` and `[n, k]`, summed in fp32 or better, as `[m, n]` in `dtype`."""

    def multiply_add_(self, total: torch.Tensor, a: Operand, b: Operand) -> None:
        """Add a @ b^T to fp32 `[m, n]` in place."""


@dataclass(eq=False)
class WeightCache:
    """The quantised weight of a layer, as it is and transposed, for all micro-batches of a step; only while it is `open`.

    Between uses it may be forgotten: quantised again, it has the same bytes.
    """

    open: bool = False
    operands: tuple[Operand, Operand] | None = None

    def forget(self) -> None:
        self.operands = None

    @property
    def nbytes(self) -> int:
        """Bytes that it holds now, each block of memory once."""
        blocks = {copy.untyped_storage() for operand in self.operands or () for copy in operand.copies()}
        return sum({block.data_ptr(): block.nbytes() for block in blocks}.values())


@dataclass(frozen=True, eq=False)
class Products:
    """The products of one layer on one rank.

    outputs, inputs: how the weight's rows and columns are cut over tp; None where no cut goes through a tile.
    slots: where delayed scaling keeps the layer's scales; None with tiles. weights: opened by who knows when they change.
    """

    recipe: Recipe
    backend: Backend
    outputs: Cut | None = None
    inputs: Cut | None = None
    slots: Slots | None = None
    weights: WeightCache = field(default_factory=WeightCache)

    def input(self, rows: torch.Tensor, record: bool, readers: Sequence[Products] = ()) -> Operand:
        """Return `[tokens, in]` for fprop. record: whether this is a forward of training, whose amax counts.

        readers: other layers that read the same input, and have its amax too.
        """
        if record and self.slots is not None:
            self.slots.record("input", rows)
            for other in readers:
                assert other.slots is not None
                other.slots.follow("input", self.slots)
        if self.slots is not None:
            return self._delayed("input", rows, record=False)
        return self._tiles(rows, ROW, "e4m3", columns=self.inputs)

    def fprop(self, input: Operand, weight: torch.Tensor, dtype: torch.dtype, record: bool) -> torch.Tensor:
        """Return `[tokens, out]`."""
        return self._multiply(input, self._weight(weight, record)[0], dtype)

    def gradient(self, rows: torch.Tensor, length: int) -> tuple[Operand, Operand]:
        """Return `[tokens, out]` for dgrad, and transposed for wgrad. length: tokens of a sample."""
        if self.slots is not None:
            operand = self._delayed("gradient", rows, record=True)
            return operand, operand.t()
        how = self.recipe.gradient_format, self.recipe.power_of_two_scales
        whole_tiles = length % TILE_SIZE == 0 or rows.shape[0] == length
        if self.outputs is None and whole_tiles:
            along_outputs, along_tokens = self.backend.quantize_both(rows, *how)
            return along_outputs, along_tokens.t()
        along_outputs = self._tiles(rows, ROW, how[0], columns=self.outputs)
        return along_outputs, self._along_tokens(rows, length, how[0])

    def dgrad(self, gradient: Operand, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return `[tokens, in]`."""
        return self._multiply(gradient, self._weight(weight, record=False)[1], dtype)

    def input_for_wgrad(self, rows: torch.Tensor, length: int) -> Operand:
        """Return the layer's input `[tokens, in]` quantised and transposed. length: tokens of a sample."""
        if self.slots is not None:
            return self._delayed("input", rows, record=False).t()
        return self._along_tokens(rows, length, "e4m3")

    def wgrad(self, gradient: Operand, input: Operand) -> Callable[[torch.Tensor], None]:
        """Return what adds dW to an fp32 `[out, in]`; it holds on to the operands, in FP8, and to nothing else.

        gradient: the second of what `gradient` returned. input: what `input_for_wgrad` did.
        """
        check_pair(gradient, input)
        return lambda total: self.backend.multiply_add_(total, gradient, input)

    def _weight(self, weight: torch.Tensor, record: bool) -> tuple[Operand, Operand]:
        """Return `[out, in]`, and transposed."""
        if self.weights.operands is not None:
            return self.weights.operands
        if self.slots is not None:
            operand = self._delayed("weight", weight, record)
        else:
            operand = self._tiles(weight, BLOCK, "e4m3", rows=self.outputs, columns=self.inputs)
        if self.weights.open:
            operand = replace(operand, kept={})
            self.weights.operands = operand, operand.t()
            return self.weights.operands
        return operand, operand.t()

    def _multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
        check_pair(a, b)
        return self.backend.multiply(a, b, dtype)

    def _tiles(
        self, x: torch.Tensor, tile: Tile, fp8_format: str, rows: Cut | None = None, columns: Cut | None = None
    ) -> Operand:
        power_of_two = self.recipe.power_of_two_scales
        if rows is not None or columns is not None:
            return quantize_shard(x, tile, fp8_format, power_of_two, rows, columns)
        return self.backend.quantize(x, tile, fp8_format, power_of_two)

    def _along_tokens(self, rows: torch.Tensor, length: int, fp8_format: str) -> Operand:
        """Return `[features, tokens]`, with zeros after a sample that ends inside a tile if another one follows."""
        if length % TILE_SIZE and rows.shape[0] > length:
            samples = rows.unflatten(0, (-1, length))
            rows = F.pad(samples, (0, 0, 0, -length % TILE_SIZE)).flatten(0, 1)
        return self._tiles(rows, COLUMN, fp8_format).t()

    def _delayed(self, which: str, x: torch.Tensor, record: bool) -> Operand:
        assert self.slots is not None
        if record:
            self.slots.record(which, x)
        if not self.slots.known:
            return Operand(x)
        fp8_format = self.recipe.gradient_format if which == "gradient" else "e4m3"
        return self.backend.cast(x, self.slots.scale(which), fp8_format)
