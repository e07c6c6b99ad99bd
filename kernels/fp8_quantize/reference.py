"""Quantisation by tiles in plain PyTorch: what the kernel beside it must compute, to the bit.

`parallax.precision.quantize_tiles` is the same arithmetic for tiles of any size, with its reasons; a test holds them together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def quantize(
    x: torch.Tensor, tile: tuple[int, int] = (1, 128), fp8_format: str = "e4m3", power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q, scale_inv) of `[rows, columns]`; tile: (1, 128), (128, 1) or (128, 128)."""
    (rows, columns), largest = x.shape, torch.finfo(DTYPES[fp8_format]).max
    tile = (
        min(tile[0], max(1, rows)),
        min(tile[1], max(1, columns)),
    )  # zeros beside a small matrix cost memory, and change nothing
    wide = F.pad(x.float(), (0, -columns % tile[1], 0, -rows % tile[0]))
    blocks = wide.unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0]))
    amax = blocks.abs().amax((1, 3))
    scale = (torch.full_like(amax, largest) / amax).clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where((amax > 0) & amax.isfinite(), scale, 1.0)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    q = (blocks * scale[:, None, :, None]).clamp(-largest, largest).to(DTYPES[fp8_format])
    return q.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scale.reciprocal()


def quantize_both(
    x: torch.Tensor, fp8_format: str = "e4m3", power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (q, scale_inv) by 1x128, and by 128x1 the transposed ones: `[columns, rows]`, `[columns, ceil(rows / 128)]`."""
    along_columns = quantize(x, (1, 128), fp8_format, power_of_two)
    q, scale_inv = quantize(x, (128, 1), fp8_format, power_of_two)
    return *along_columns, q.t().contiguous(), scale_inv.t().contiguous()


def swiglu_quantize(
    gate: torch.Tensor, up: torch.Tensor, fp8_format: str = "e4m3", power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q, scale_inv) by 1x128 of silu(gate) * up, rounded to their type on the way as `swiglu` rounds it."""
    silu = F.silu(gate.float()).to(gate.dtype)
    return quantize(silu * up, (1, 128), fp8_format, power_of_two)
