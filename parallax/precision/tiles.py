"""Quantisation to FP8 with one scale for each tile of a matrix, defined to the bit (DeepSeek-AI 2024, arXiv:2412.19437, 3.3.2).

    amax   greatest magnitude of the tile                  NaN if it holds one
    scale  fl32(fp8_max / amax), correctly rounded         1 for an amax of 0, inf or NaN; fp32's greatest if it overflows
           with its mantissa cut off, for powers of two    rounded down, so that nothing saturates
    q      cast(clamp(x * scale, -fp8_max, fp8_max))       to nearest, ties to even
    x      q * scale_inv, where scale_inv = fl32(1 / scale)

Tiles are counted from the first row and column; those at the far edges may be smaller. Activations and gradients take 1x128
tiles along the dim that their GEMM sums over, weights 128x128. These are plain operators of PyTorch, for any device; with them
the kernels (parallax.kernels.fp8_quantize) agree to the bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

TILE_SIZE = 128
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MAXIMUM = {name: torch.finfo(dtype).max for name, dtype in DTYPES.items()}  # 448 and 57344
FORMATS = {dtype: name for name, dtype in DTYPES.items()}

Tile = tuple[int, int]


def quantize_tiles(
    x: torch.Tensor, tile: Tile = (1, TILE_SIZE), fp8_format: str = "e4m3", power_of_two_scales: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q, scale_inv): `x` in FP8, and the fp32 factor of each tile that brings it back.

    x: `[..., rows, columns]`, of a floating type; more than fp32 is rounded to fp32 first. tile: (rows, columns) of a tile.
    fp8_format: "e4m3" or "e5m2". q has the shape of x, scale_inv `[..., ceil(rows / tile rows), ceil(columns / tile columns)]`.
    Raises ValueError for an unknown format, a tile that is not two positive ints, or an x that is no matrix or of another type,
    TypeError for an x that is no tensor.
    """
    check_format(fp8_format)
    _check_tensor("x", x)
    _check_matrix(x, tile)
    if not x.dtype.is_floating_point:
        raise ValueError(f"x is {x.dtype}, and only floating types are quantised; pass x.float()")
    values = x.float()
    scale = scale_of(tile_amax(values, tile), fp8_format, power_of_two_scales)
    return cast_to_fp8(scaled_by_tile(values, scale, tile), fp8_format), scale.reciprocal()


def dequantize_tiles(q: torch.Tensor, scale_inv: torch.Tensor, tile: Tile = (1, TILE_SIZE)) -> torch.Tensor:
    """Return q * scale_inv, fp32 in the shape of q; `tile` as it was quantised. Scales of another type are rounded to fp32.

    Raises ValueError for a tile that is not two positive ints, a q that is no matrix, scales that are not one for each tile, or
    complex numbers, TypeError for what is no tensor.
    """
    _check_tensor("q", q)
    _check_tensor("scale_inv", scale_inv)
    _check_matrix(q, tile)
    for name, one in (("q", q), ("scale_inv", scale_inv)):
        if one.is_complex():
            raise ValueError(
                f"{name} is {one.dtype}, and only real numbers were quantised; pass what quantize_tiles returned"
            )
    expected = [*q.shape[:-2], *(-(-size // part) for size, part in zip(q.shape[-2:], tile, strict=True))]
    if list(scale_inv.shape) != expected:
        raise ValueError(
            f"scale_inv has the shape {list(scale_inv.shape)}; a q of the shape {list(q.shape)} in tiles of {tile} has {expected}"
        )
    return scaled_by_tile(q.float(), scale_inv.float(), tile)


def check_format(fp8_format: str) -> None:
    if not isinstance(fp8_format, str) or fp8_format not in DTYPES:
        raise ValueError(f"the FP8 format {fp8_format!r} is unknown; use {' or '.join(map(repr, DTYPES))}")


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{name} is of the type {type(x).__name__}, and only tensors are taken; pass torch.as_tensor({name})"
        )


def _check_matrix(x: torch.Tensor, tile: Tile) -> None:
    if not isinstance(tile, tuple | list) or len(tile) != 2 or any(type(size) is not int or size < 1 for size in tile):
        raise ValueError(f"the tile {tile} must be two whole numbers of at least 1: rows and columns, as in (1, 128)")
    if x.ndim < 2:
        raise ValueError(
            f"tiles are those of a matrix, and the shape {list(x.shape)} is none; give it at least two dims"
        )


def tile_amax(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Return the greatest magnitude of each tile of fp32 `[..., rows, columns]`; NaN where there is one."""
    tile = _within(x, tile)
    blocks = _padded(x, tile).unflatten(-1, (-1, tile[1])).unflatten(-3, (-1, tile[0]))
    if not x.numel():
        return x.new_zeros((*blocks.shape[:-4], blocks.shape[-4], blocks.shape[-2]))
    return blocks.abs().amax((-3, -1))


def scale_of(amax: torch.Tensor, fp8_format: str, power_of_two: bool = False) -> torch.Tensor:
    """Return the scale for each fp32 amax."""
    # A division of tensors is correctly rounded; `448.0 / amax` would be a product with the reciprocal, which is not.
    scale = torch.full_like(amax, MAXIMUM[fp8_format]) / amax
    scale = torch.where(amax.isfinite() & (amax > 0), scale, torch.ones_like(scale))
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    if power_of_two:
        scale = scale.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    return scale


def cast_to_fp8(scaled: torch.Tensor, fp8_format: str) -> torch.Tensor:
    """Round fp32 to FP8; what is too large saturates, NaN stays."""
    # The cast itself saturates or overflows, as the version of torch and the format will have it.
    return scaled.clamp(-MAXIMUM[fp8_format], MAXIMUM[fp8_format]).to(DTYPES[fp8_format])


def scaled_by_tile(x: torch.Tensor, factor: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Return fp32 `[..., rows, columns]` times the factor of each element's tile."""
    rows, columns = x.shape[-2:]
    tile = _within(x, tile)
    if tile[0] > 1:
        factor = factor.repeat_interleave(tile[0], -2)[..., :rows, :]
    if columns % tile[1]:
        return x * factor.repeat_interleave(tile[1], -1)[..., :columns]
    return (x.unflatten(-1, (-1, tile[1])) * factor.unsqueeze(-1)).flatten(-2)


def _within(x: torch.Tensor, tile: Tile) -> Tile:
    """Return the part of a tile that a matrix can fill: padded to whole tiles, it is as large as the matrix and not as the tile."""
    return min(tile[0], max(1, x.shape[-2])), min(tile[1], max(1, x.shape[-1]))


def _padded(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Return x with zeros after its last row and column, to whole tiles."""
    rows, columns = (-size % part for size, part in zip(x.shape[-2:], tile, strict=True))
    return F.pad(x, (0, columns, 0, rows)) if rows or columns else x
