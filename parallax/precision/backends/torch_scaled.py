"""torch's own scaled matrix product (cuBLAS): by tiles on Hopper, with one scale for a tensor from Ada on.

cuBLAS wants scales of 1x128 tiles with the rows along memory, and of 128x128 tiles with k along memory, to a multiple of 4;
both operands with k along memory; rows in multiples of 16. It does not take square tiles on both sides.
https://docs.nvidia.com/cuda/cublas/#element-1d-and-128x128-2d-block-scaling-for-fp8-data-types
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch
import torch.nn.functional as F

from parallax.kernels.table import has_kernel
from parallax.precision.backends.triton import TritonBackend, cut, multiply_plain
from parallax.precision.operands import BLOCK, MULTIPLE, ROW, Operand
from parallax.precision.recipe import Recipe
from parallax.precision.tiles import Tile, quantize_tiles


def why_not(recipe: Recipe, device: torch.device) -> str | None:
    """Return what keeps torch's scaled product from running, None if nothing does."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, and this run is on {device.type}"
    if not hasattr(F, "scaled_mm"):
        return f"needs torch 2.10 or later, for torch.nn.functional.scaled_mm, not {torch.__version__}"
    capability = torch.cuda.get_device_capability(device)
    shown = ".".join(map(str, capability))
    if recipe.scaling == "delayed":
        return None if capability >= (8, 9) else f"needs compute capability 8.9 or later (L4, H100), not {shown}"
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if capability != (9, 0) or cuda < (12, 9):
        return f"needs compute capability 9.0 (H100) and CUDA 12.9 or later for tiles, not {shown} and {torch.version.cuda}"
    return None


class TorchBackend(TritonBackend):
    """torch.nn.functional.scaled_mm; quantised by our kernels where they are on and triton is there, otherwise by PyTorch."""

    name = "torch"

    def __init__(self) -> None:
        self._has_triton = importlib.util.find_spec("triton") is not None

    def quantize(self, x: torch.Tensor, tile: Tile, fp8_format: str, power_of_two: bool) -> Operand:
        if self._has_triton and has_kernel("fp8_quantize", x):
            return super().quantize(x, tile, fp8_format, power_of_two)
        return Operand(*quantize_tiles(x, tile, fp8_format, power_of_two), tile)

    def quantize_both(self, x: torch.Tensor, fp8_format: str, power_of_two: bool) -> tuple[Operand, Operand]:
        if self._has_triton and has_kernel("fp8_quantize", x):
            return super().quantize_both(x, fp8_format, power_of_two)
        return self.quantize(x, ROW, fp8_format, power_of_two), self.quantize(x, ROW[::-1], fp8_format, power_of_two)

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
        if a.scale_inv is None:
            return multiply_plain(a, b, dtype)
        (data_a, scale_a, kind_a), (data_b, scale_b, kind_b) = (laid_out(operand) for operand in (a, b))
        product = F.scaled_mm(
            data_a,
            data_b.t(),
            scale_a=scale_a,
            scale_recipe_a=kind_a,
            scale_b=scale_b,
            scale_recipe_b=kind_b,
            output_dtype=dtype,
            use_fast_accum=False,
        )
        return cut(product, a, b)

    def multiply_add_(self, total: torch.Tensor, a: Operand, b: Operand) -> None:
        total.add_(self.multiply(a, b, torch.float32))


def laid_out(operand: Operand) -> tuple[torch.Tensor, torch.Tensor, F.ScalingType]:
    """Return data, scales and the kind of scales as cuBLAS takes them; those of an operand that is used again are kept."""
    kept = operand.kept if operand.kept is not None else {}
    if "data" not in kept:
        aligned = operand.aligned()
        assert aligned.scale_inv is not None
        if operand.tile == ROW:
            aligned = _with_rows(aligned, -aligned.data.shape[0] % MULTIPLE)
        kept["data"], kept["scale_inv"] = aligned.data, _scales(aligned)
    kinds = {None: F.ScalingType.TensorWise, ROW: F.ScalingType.BlockWise1x128, BLOCK: F.ScalingType.BlockWise128x128}
    return kept["data"], kept["scale_inv"], kinds[operand.tile]


def _with_rows(operand: Operand, count: int) -> Operand:
    """Return an operand of 1x128 tiles with rows of zeros added."""
    if not count:
        return operand
    assert operand.scale_inv is not None
    data = F.pad(operand.data.view(torch.uint8), (0, 0, 0, count)).view(operand.data.dtype)
    return replace(operand, data=data, scale_inv=F.pad(operand.scale_inv, (0, 0, 0, count), value=1.0))


def _scales(operand: Operand) -> torch.Tensor:
    scale_inv = operand.scale_inv
    assert scale_inv is not None
    if operand.tile is None:
        return scale_inv.reshape(1, 1)
    if operand.tile == ROW:
        return scale_inv.t().contiguous().t()
    return F.pad(scale_inv, (0, -scale_inv.shape[1] % 4)).contiguous().t()
