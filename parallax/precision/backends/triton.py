"""Our own kernels: quantisation with its transpose from one read, and the block-scaled product; Hopper and later.

What a shard or a sample cuts is brought to whole tiles by zeros, which add nothing, and cut off the result again.
"""

from __future__ import annotations

import importlib.util

import torch

from parallax.kernels.table import kernels_are_on
from parallax.precision.operands import COLUMN, ROW, Operand
from parallax.precision.recipe import Recipe
from parallax.precision.tiles import Tile, cast_to_fp8


def why_not(recipe: Recipe, device: torch.device) -> str | None:
    """Return what keeps this backend from running, None if nothing does."""
    if not kernels_are_on():
        return "computes with our own kernels, which --kernels off turns off; leave that out"
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, and this run is on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed: pip install triton"
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        return f"needs a GPU of compute capability 9.0 or later (H100), not {capability[0]}.{capability[1]}"
    return None


class TritonBackend:
    """parallax.kernels.fp8_quantize and fp8_gemm."""

    name = "triton"
    exact_sums = False

    def quantize(self, x: torch.Tensor, tile: Tile, fp8_format: str, power_of_two: bool) -> Operand:
        from parallax.kernels.fp8_quantize.kernel import quantize

        return Operand(*quantize(x.contiguous(), tile, fp8_format, power_of_two), tile)

    def quantize_both(self, x: torch.Tensor, fp8_format: str, power_of_two: bool) -> tuple[Operand, Operand]:
        from parallax.kernels.fp8_quantize.kernel import quantize_both

        q, scale_inv, q_t, scale_inv_t = quantize_both(x.contiguous(), fp8_format, power_of_two)
        return Operand(q, scale_inv, ROW), Operand(q_t.t(), scale_inv_t.t(), COLUMN)

    def cast(self, x: torch.Tensor, scale: torch.Tensor, fp8_format: str) -> Operand:
        return Operand(cast_to_fp8(x.float() * scale, fp8_format), scale.reciprocal())

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
        from parallax.kernels.fp8_gemm.kernel import multiply

        if a.scale_inv is None:
            return multiply_plain(a, b, dtype)
        return cut(multiply(*ready(a), *ready(b), dtype=dtype), a, b)

    def multiply_add_(self, total: torch.Tensor, a: Operand, b: Operand) -> None:
        from parallax.kernels.fp8_gemm.kernel import multiply

        if a.scale_inv is None or total.dtype != torch.float32 or not total.is_contiguous() or is_padded(a, b):
            total.add_(self.multiply(a, b, torch.float32))
        else:
            multiply(*ready(a), *ready(b), total=total)


def ready(operand: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data and scales as kernels take them: whole tiles, row-major; those of an operand that is used again are kept."""
    kept = operand.kept if operand.kept is not None else {}
    if "data" not in kept:
        aligned = operand.aligned()
        assert aligned.scale_inv is not None
        kept["data"], kept["scale_inv"] = aligned.data, aligned.scale_inv.contiguous()
    return kept["data"], kept["scale_inv"]


def is_padded(a: Operand, b: Operand) -> bool:
    """Whether the result for whole tiles has rows or columns beyond those of the operands."""
    return any(ready(operand)[0].shape[0] != operand.data.shape[0] for operand in (a, b))


def cut(product: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """Return the part of a product of whole tiles that is the operands' own."""
    if product.shape == (a.data.shape[0], b.data.shape[0]):
        return product
    rows, columns = (slice(one.lead[0], one.lead[0] + one.data.shape[0]) for one in (a, b))
    return product[rows, columns].contiguous()


def multiply_plain(a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    """Multiply operands that are not quantised: the step in which delayed scaling only measures."""
    return (a.data @ b.data.to(a.data.dtype).t()).to(dtype)
