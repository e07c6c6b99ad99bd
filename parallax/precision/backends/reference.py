"""The reference: operands brought back to float64 and multiplied there, on any device.

Quantisation is defined to the bit, and so are the products: every q * scale_inv has at most 28 significant bits, so what a sum
in float64 rounds lies far below what is kept of it. No library, order or number of ranks shows in the result, which is why
losses of FP8 training can be compared between layouts at all: one element that is rounded to its other FP8 neighbour, 6 % away,
is enough to send two runs apart. A GPU sums in fp32, or with less (DeepSeek-AI 2024, arXiv:2412.19437, 3.3.2).
"""

from __future__ import annotations

import torch

from parallax.precision.operands import COLUMN, ROW, Operand
from parallax.precision.tiles import Tile, cast_to_fp8, quantize_tiles


class ReferenceBackend:
    """Plain PyTorch; what the other backends are compared to."""

    name = "reference"
    exact_sums = True

    def quantize(self, x: torch.Tensor, tile: Tile, fp8_format: str, power_of_two: bool) -> Operand:
        return Operand(*quantize_tiles(x, tile, fp8_format, power_of_two), tile)

    def quantize_both(self, x: torch.Tensor, fp8_format: str, power_of_two: bool) -> tuple[Operand, Operand]:
        along_columns, along_rows = (self.quantize(x, tile, fp8_format, power_of_two) for tile in (ROW, COLUMN))
        return along_columns, along_rows

    def cast(self, x: torch.Tensor, scale: torch.Tensor, fp8_format: str) -> Operand:
        return Operand(cast_to_fp8(x.float() * scale, fp8_format), scale.reciprocal())

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
        return (_values(a) @ _values(b).t()).to(dtype)

    def multiply_add_(self, total: torch.Tensor, a: Operand, b: Operand) -> None:
        total.add_(_values(a) @ _values(b).t())


def _values(operand: Operand) -> torch.Tensor:
    if operand.origin is not None:
        return _values(operand.origin).t()
    if operand.kept is None:
        return operand.dequantized()
    if "values" not in operand.kept:
        operand.kept["values"] = operand.dequantized()
    return operand.kept["values"]
