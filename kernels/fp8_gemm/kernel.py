"""The block-scaled FP8 product a @ b^T, for fprop, dgrad and wgrad alike (DeepSeek-AI 2024, arXiv:2412.19437, 3.3.2).

    for each 128 of k:   total += (a_q @ b_q^T) * scale_a * scale_b

The tensor cores sum 128 products; what they give is scaled and added in fp32 registers, which also keeps their short
accumulators from mattering (the paper's promotion every 128). a has a scale for each row and 128 columns; b the same (wgrad),
or one for each 128x128 (a weight). Both are row-major, so k lies along memory: the only layout in FP8 that Hopper has.

A portable fallback: where the vendor's own block-scaled product runs, it is the faster one.
Left out: tensor memory descriptors, persistent programs, a split along k.
"""

from __future__ import annotations

import torch

from parallax.kernels.launch import OPTIONS, check, on_device_of, tl, triton

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
TILE = 128  # of k, and of a square tile's rows
GROUP = 8  # blocks of rows that share columns of b in the cache


@triton.jit
def _fp8_gemm(
    a,
    scale_a,
    b,
    scale_b,
    c,
    m,
    n,
    k,
    TENSOR: tl.constexpr,
    SQUARE_A: tl.constexpr,
    SQUARE_B: tl.constexpr,
    ADD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    across, down = tl.cdiv(n, BLOCK_N), tl.cdiv(m, BLOCK_M)
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    row_block = first + program % (GROUP * across) % height
    column_block = program % (GROUP * across) // height
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns beyond the edge read the last one, and are not written.
    row_read = tl.minimum(row, m - 1)
    column_read = tl.minimum(column, n - 1)
    steps = tl.cdiv(k, BLOCK_K)
    lane = tl.arange(0, BLOCK_K)
    a_tiles = a + row_read[:, None] * k + lane[None, :]
    b_tiles = b + column_read[None, :] * k + lane[:, None]
    row_scales = scale_a + (row_read // 128 if SQUARE_A else row_read) * steps
    column_scales = scale_b + (column_read // 128 if SQUARE_B else column_read) * steps
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(steps):
        left = k - step * BLOCK_K
        a_tile = tl.load(a_tiles, mask=(lane < left)[None, :], other=0.0)
        b_tile = tl.load(b_tiles, mask=(lane < left)[:, None], other=0.0)
        if TENSOR:
            total = tl.dot(a_tile, b_tile, total)
        else:
            scaled = tl.dot(a_tile, b_tile) * tl.load(row_scales + step)[:, None]
            total += scaled * tl.load(column_scales + step)[None, :]
        a_tiles += BLOCK_K
        b_tiles += BLOCK_K
    if TENSOR:
        total *= tl.load(scale_a) * tl.load(scale_b)
    place = c + row[:, None] * n + column[None, :]
    inside = (row < m)[:, None] & (column < n)[None, :]
    if ADD:
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total.to(c.dtype.element_ty), mask=inside)


def blocks(m: int, n: int) -> tuple[int, int, int, int]:
    """Return rows and columns of a program's part of the result, its warps and its stages.

    With 128x128 the scaled sum and the product beside it do not fit in the registers of any number of warps.
    """
    return (64, 64, 4, 3) if m <= 64 or n <= 64 else (64, 128, 4, 4)


def multiply(
    a: torch.Tensor,
    scale_a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a @ b^T of `[m, k]` and `[n, k]` in FP8, summed in fp32, or add it to fp32 `total` in place and return that.

    a, b: e4m3 or e5m2, not both e5m2, contiguous. scale_a, scale_b: fp32, the factors that bring them back:
    `[rows, ceil(k / 128)]`, `[ceil(rows / 128), ceil(k / 128)]`, or one scalar each; not both square.
    dtype: of the result, bf16 or fp32. Raises ValueError for other arguments.
    """
    check("a", a, FP8)
    check("b", b, FP8, device=a.device)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a {list(a.shape)} and b {list(b.shape)} must be matrices with equally many columns")
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ValueError("a and b are both e5m2, which no GPU multiplies; use e4m3 for one of them")
    (m, k), n = a.shape, b.shape[0]
    square_a, square_b = (_is_square(*pair, k) for pair in (("scale_a", scale_a, m), ("scale_b", scale_b, n)))
    if square_a and square_b:
        raise ValueError(
            "scale_a and scale_b are both of square tiles, which no vendor's product takes; quantise one by (1, 128)"
        )
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype is {dtype}; the result is torch.bfloat16 or torch.float32")
    if (scale_a.ndim == 0) != (scale_b.ndim == 0):
        raise ValueError("scale_a and scale_b must both be scalars, or neither")
    if total is not None:
        check("total", total, (torch.float32,), shape=(m, n), device=a.device)
    c = torch.empty(m, n, dtype=dtype, device=a.device) if total is None else total
    block_m, block_n, warps, stages = blocks(m, n)
    if m and n:
        with on_device_of(a, _fp8_gemm):
            _fp8_gemm[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
                a,
                scale_a,
                b,
                scale_b,
                c,
                m,
                n,
                k,
                TENSOR=scale_a.ndim == 0,
                SQUARE_A=square_a,
                SQUARE_B=square_b,
                ADD=total is not None,
                GROUP=GROUP,
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                BLOCK_K=TILE,
                num_warps=warps,
                num_stages=stages,
                **OPTIONS,
            )
    return c


def _is_square(name: str, scale: torch.Tensor, rows: int, k: int) -> bool:
    """Whether the scales are of square tiles; raises ValueError if they are of none that is known."""
    check(name, scale, (torch.float32,))
    steps = triton.cdiv(k, TILE)
    known = {(): False, (triton.cdiv(rows, TILE), steps): True, (rows, steps): False}
    if tuple(scale.shape) not in known:
        raise ValueError(
            f"{name} has the shape {list(scale.shape)}; for {rows} rows and {k} columns it is one of {list(known)}"
        )
    return known[tuple(scale.shape)]
