"""Quantisation to FP8 by tiles of 1x128, 128x1 and 128x128, from one read of the matrix.

A program reads a block of 128x128 and writes what is asked for: the block by rows (for the product that sums over columns),
and transposed by columns (for the one that sums over rows). The scales are those of parallax.precision.tiles: a correctly
rounded quotient, and 1 where the amax is 0, infinite or not a number.

The hardware rounds and saturates (cvt.rn.satfinite). Triton's interpreter rounds wrongly, so there the bytes are made by
integers instead; the flag SOFT, and its two lines, are all that is different.

`swiglu_quantize` makes the product silu(gate) * up in registers, so that it is never written in bf16.
"""

from __future__ import annotations

import torch

from parallax.kernels.launch import FLOATING, OPTIONS, check, on_device_of, tl, triton

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
TILE = 128
WARPS = 8  # 64 values a thread of a block


@triton.jit
def _scales(amax, LARGEST: tl.constexpr, POWER: tl.constexpr):
    scale = tl.math.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax)
    scale = tl.minimum(scale, 3.4028234663852886e38)
    if POWER:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)


@triton.jit
def _cast(scaled, E5M2: tl.constexpr, LARGEST: tl.constexpr, SOFT: tl.constexpr):
    """The bytes of fp32 `scaled`."""
    nan = scaled != scaled
    clamped = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if not SOFT:
        clamped = tl.where(nan, scaled, clamped)
        if E5M2:
            return clamped.to(tl.float8e5).to(tl.uint8, bitcast=True)
        return clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    drop: tl.constexpr = 21 if E5M2 else 20  # bits of fp32's mantissa that do not stay
    bias: tl.constexpr = (127 - 15) << 2 if E5M2 else (127 - 7) << 3
    smallest: tl.constexpr = 2.0**-14 if E5M2 else 2.0**-6
    # Added to a subnormal number, this leaves its code in the lowest bits, rounded to even by the addition.
    magic: tl.constexpr = 2.0**7 if E5M2 else 2.0**14
    bits = tl.abs(clamped).to(tl.int32, bitcast=True)
    code = ((bits + (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)) >> drop) - bias
    low = (tl.abs(clamped) + magic).to(tl.int32, bitcast=True) - tl.full([], magic, tl.float32).to(
        tl.int32, bitcast=True
    )
    code = tl.where(tl.abs(clamped) < smallest, low, code)
    code = tl.where(nan, 0x7F, code) | ((clamped.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return code.to(tl.uint8)


@triton.jit
def _fp8_quantize(
    x,
    up,
    q,
    scale_inv,
    q_transposed,
    scale_inv_transposed,
    rows,
    columns,
    SWIGLU: tl.constexpr,
    ALONG_COLUMNS: tl.constexpr,
    ALONG_ROWS: tl.constexpr,
    SQUARE: tl.constexpr,
    E5M2: tl.constexpr,
    POWER: tl.constexpr,
    SOFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
    row_block = tl.program_id(0).to(tl.int64)
    column_block = tl.program_id(1).to(tl.int64)
    row = row_block * BLOCK + tl.arange(0, BLOCK)
    column = column_block * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if SWIGLU:
        other = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        silu = (values * tl.sigmoid(values)).to(x.dtype.element_ty).to(tl.float32)
        values = (silu * other).to(x.dtype.element_ty).to(tl.float32)
    # Not a number is taken as infinite, for a maximum drops it; both have a scale of 1.
    size = tl.where(values != values, float("inf"), tl.abs(values))
    if SQUARE:
        scale = _scales(tl.max(size), LARGEST, POWER)
        tl.store(q + place, _cast(values * scale, E5M2, LARGEST, SOFT), mask=inside)
        across = tl.cdiv(columns, BLOCK)
        tl.store(scale_inv + row_block * across + column_block, tl.math.div_rn(1.0, scale))
    if ALONG_COLUMNS:
        scale = _scales(tl.max(size, 1), LARGEST, POWER)
        tl.store(q + place, _cast(values * scale[:, None], E5M2, LARGEST, SOFT), mask=inside)
        across = tl.cdiv(columns, BLOCK)
        inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        tl.store(scale_inv + row * across + column_block, inverse, mask=row < rows)
    if ALONG_ROWS:
        scale = _scales(tl.max(size, 0), LARGEST, POWER)
        bytes_ = tl.trans(_cast(values * scale[None, :], E5M2, LARGEST, SOFT))
        there = column[:, None] * rows + row[None, :]
        tl.store(q_transposed + there, bytes_, mask=(column < columns)[:, None] & (row < rows)[None, :])
        across = tl.cdiv(rows, BLOCK)
        inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        tl.store(scale_inv_transposed + column * across + row_block, inverse, mask=column < columns)


def _launch(
    x: torch.Tensor,
    up: torch.Tensor | None,
    fp8_format: str,
    power_of_two: bool,
    *,
    along_columns: bool = False,
    along_rows: bool = False,
    square: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check("x", x, FLOATING)
    if x.ndim != 2:
        raise ValueError(f"x has the shape {list(x.shape)}; this kernel takes a matrix")
    if fp8_format not in DTYPES:
        raise ValueError(f"the FP8 format {fp8_format!r} is unknown; use 'e4m3' or 'e5m2'")
    (rows, columns), dtype = x.shape, DTYPES[fp8_format]
    row_blocks, column_blocks = triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)
    nothing = (0, 0)
    q = torch.empty(x.shape if square or along_columns else nothing, dtype=torch.uint8, device=x.device)
    scale_inv = torch.empty(
        (row_blocks if square else rows, column_blocks) if square or along_columns else nothing,
        dtype=torch.float32,
        device=x.device,
    )
    q_t = torch.empty((columns, rows) if along_rows else nothing, dtype=torch.uint8, device=x.device)
    scale_inv_t = torch.empty((columns, row_blocks) if along_rows else nothing, dtype=torch.float32, device=x.device)
    if x.numel():
        with on_device_of(x, _fp8_quantize):
            _fp8_quantize[(row_blocks, column_blocks)](
                x,
                x if up is None else up,
                q,
                scale_inv,
                q_t,
                scale_inv_t,
                rows,
                columns,
                SWIGLU=up is not None,
                ALONG_COLUMNS=along_columns,
                ALONG_ROWS=along_rows,
                SQUARE=square,
                E5M2=fp8_format == "e5m2",
                POWER=power_of_two,
                SOFT=not isinstance(_fp8_quantize, triton.JITFunction),
                BLOCK=TILE,
                num_warps=WARPS,
                **OPTIONS,
            )
    return q.view(dtype), scale_inv, q_t.view(dtype), scale_inv_t


def quantize(
    x: torch.Tensor, tile: tuple[int, int] | list[int] = (1, 128), fp8_format: str = "e4m3", power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q, scale_inv): `[rows, columns]` in FP8, and the fp32 factor of each tile that brings it back.

    x: fp32, bf16 or fp16, contiguous. tile: (1, 128), (128, 1) or (128, 128); scale_inv has an element for each. With
    (128, 1) both are transposed views. Raises ValueError for other arguments.
    """
    kind = tuple(tile) if isinstance(tile, list) else tile
    if kind == (TILE, 1):
        _, _, q, scale_inv = _launch(x, None, fp8_format, power_of_two, along_rows=True)
        return q.t(), scale_inv.t()
    if kind not in ((1, TILE), (TILE, TILE)):
        raise ValueError(f"tiles of {kind} are not known; use (1, 128), (128, 1) or (128, 128)")
    square = kind == (TILE, TILE)
    return _launch(x, None, fp8_format, power_of_two, along_columns=not square, square=square)[:2]


def quantize_both(
    x: torch.Tensor, fp8_format: str = "e4m3", power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (q, scale_inv) by 1x128, and by 128x1 the transposed ones: `[columns, rows]`, `[columns, ceil(rows / 128)]`."""
    return _launch(x, None, fp8_format, power_of_two, along_columns=True, along_rows=True)


def swiglu_quantize(
    gate: torch.Tensor, up: torch.Tensor, fp8_format: str = "e4m3", power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q, scale_inv) by 1x128 of silu(gate) * up, of two contiguous matrices of one shape and type."""
    check("gate", gate, FLOATING)
    check("up", up, (gate.dtype,), shape=gate.shape, device=gate.device)
    return _launch(gate, up, fp8_format, power_of_two, along_columns=True)[:2]
