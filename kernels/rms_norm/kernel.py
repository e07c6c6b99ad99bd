"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), forward and backward, each one read and one write of the data.

A program works on a tile of ROWS rows and BLOCK columns: many rows where they are short (the norm of a query head), one
where they are long. A row of more than 16 KiB is shared by several programs: registers do not hold it. Each of them
computes the sum over the whole row, reading its siblings' columns from the cache, and writes its own columns.

The gradient of the weight is a sum over all rows. A program of the backward pass walks over a run of rows, keeps its part
of that sum in registers, and writes it once; torch adds the parts. No atomic additions, so equal inputs give equal bits
on equal hardware (the number of programs follows the GPU's size).

Left out: adding the residual in the same pass, and weights stored as their distance from 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from parallax.kernels.launch import FLOATING, OPTIONS, check, multiprocessors, on_device_of, tl, triton

MAX_BLOCK_BYTES = 16384  # of a row: what a program's registers hold in backward without spilling
TILE = 2048  # elements that give each thread of 4 warps 16 values: 32 bytes of bf16, two full loads


@triton.jit
def _rms_norm_forward(
    input,
    weight,
    output,
    inverse,
    rows,
    columns,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * BLOCK
    lane = tl.arange(0, BLOCK)
    column = start + lane
    own = (row < rows)[:, None] & (column < columns)[None, :]
    offset = row[:, None] * columns + column[None, :]
    values = tl.load(input + offset, mask=own, other=0.0).to(tl.float32)
    squares = tl.sum(values * values, 1)
    for step in range(1, BLOCKS):
        sibling = (start + step * BLOCK) % (BLOCKS * BLOCK) + lane
        mask = (row < rows)[:, None] & (sibling < columns)[None, :]
        others = tl.load(input + row[:, None] * columns + sibling[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += tl.sum(others * others, 1)
    inverse_rms = tl.math.rsqrt(squares / columns + eps)
    # Rounded first, then multiplied, as Hugging Face's models do.
    normalised = (values * inverse_rms[:, None]).to(input.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(output + offset, (normalised * scale[None, :]).to(output.dtype.element_ty), mask=own)
    if start == 0:
        tl.store(inverse + row, inverse_rms, mask=row < rows)


@triton.jit
def _rms_norm_backward(
    gradient,
    input,
    weight,
    inverse,
    grad_input,
    partial,
    rows,
    columns,
    tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    lane = tl.arange(0, BLOCK)
    column = start + lane
    scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tiles):
        row = (program * tiles + tile) * ROWS + tl.arange(0, ROWS)
        inverse_rms = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        along = tl.zeros([ROWS], tl.float32)
        for step in range(1, BLOCKS):
            sibling = (start + step * BLOCK) % (BLOCKS * BLOCK) + lane
            mask = (row < rows)[:, None] & (sibling < columns)[None, :]
            place = row[:, None] * columns + sibling[None, :]
            others = tl.load(input + place, mask=mask, other=0.0).to(tl.float32) * inverse_rms
            others *= tl.load(gradient + place, mask=mask, other=0.0).to(tl.float32)
            others *= tl.load(weight + sibling, mask=sibling < columns, other=0.0).to(tl.float32)[None, :]
            along += tl.sum(others, 1)
        own = (row < rows)[:, None] & (column < columns)[None, :]
        offset = row[:, None] * columns + column[None, :]
        upstream = tl.load(gradient + offset, mask=own, other=0.0).to(tl.float32)
        normalised = tl.load(input + offset, mask=own, other=0.0).to(tl.float32) * inverse_rms
        product = upstream * normalised
        total += product
        along += tl.sum(product * scale[None, :], 1)
        # d/dx of x / rms(x): the part of the gradient along x itself drops out.
        result = (upstream * scale[None, :] - normalised * (along / columns)[:, None]) * inverse_rms
        tl.store(grad_input + offset, result.to(grad_input.dtype.element_ty), mask=own)
    tl.store(partial + program * columns + column, tl.sum(total, 0), mask=column < columns)


class Tiling(NamedTuple):
    """How rows of a given length are cut: the tile of a program, how many tiles cover a row, and a program's warps."""

    rows: int
    block: int
    blocks: int
    warps: int


def tiling(columns: int, element_bytes: int) -> Tiling:
    """Return the tiling for rows of `columns` elements."""
    block = min(max(16, triton.next_power_of_2(columns)), MAX_BLOCK_BYTES // element_bytes)
    rows = min(32, max(1, TILE // block))
    return Tiling(rows, block, triton.cdiv(columns, block), min(16, max(4, rows * block // 512)))


def rms_norm_forward(input: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised input and the inverse root mean square of each row.

    input: `[..., hidden]`, fp32, bf16 or fp16, contiguous; weight: `[hidden]`, of any of these dtypes.
    Returns `[..., hidden]` in the dtype to which torch promotes the two, and `[...]` in fp32. Raises ValueError otherwise.
    """
    columns = input.shape[-1]
    check("input", input, FLOATING)
    check("weight", weight, FLOATING, shape=(columns,), device=input.device)
    output = torch.empty_like(input, dtype=torch.promote_types(input.dtype, weight.dtype))
    inverse = torch.empty(input.shape[:-1], dtype=torch.float32, device=input.device)
    if not columns:
        return output, inverse.fill_(torch.nan)  # the mean of nothing
    rows, plan = inverse.numel(), tiling(columns, input.element_size())
    with on_device_of(input, _rms_norm_forward):
        _rms_norm_forward[(triton.cdiv(rows, plan.rows), plan.blocks)](
            input,
            weight,
            output,
            inverse,
            rows,
            columns,
            eps,
            ROWS=plan.rows,
            BLOCK=plan.block,
            BLOCKS=plan.blocks,
            num_warps=plan.warps,
            **OPTIONS,
        )
    return output, inverse


def rms_norm_backward(
    gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of input and weight, each in its tensor's dtype.

    gradient: of the output, `[..., hidden]`, contiguous; input and weight: as given to the forward pass; inverse: what it
    returned, fp32 `[...]`. Raises ValueError for other arguments.
    """
    columns = input.shape[-1]
    check("input", input, FLOATING)
    check("gradient", gradient, FLOATING, shape=input.shape, device=input.device)
    check("weight", weight, FLOATING, shape=(columns,), device=input.device)
    check("inverse", inverse, (torch.float32,), shape=input.shape[:-1], device=input.device)
    if not columns:
        return torch.empty_like(input), torch.empty_like(weight)
    rows, plan = inverse.numel(), tiling(columns, input.element_size())
    row_tiles = max(1, triton.cdiv(rows, plan.rows))
    # 16 resident warps a multiprocessor have enough loads in flight to fill the memory bus.
    programs = min(row_tiles, max(1, multiprocessors(input.device) * (16 // plan.warps) // plan.blocks))
    grad_input = torch.empty_like(input)
    partial = torch.empty(programs, columns, dtype=torch.float32, device=input.device)
    with on_device_of(input, _rms_norm_backward):
        _rms_norm_backward[(programs, plan.blocks)](
            gradient,
            input,
            weight,
            inverse,
            grad_input,
            partial,
            rows,
            columns,
            triton.cdiv(row_tiles, programs),
            ROWS=plan.rows,
            BLOCK=plan.block,
            BLOCKS=plan.blocks,
            num_warps=plan.warps,
            **OPTIONS,
        )
    return grad_input, partial.sum(0).to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        output, inverse = rms_norm_forward(input, weight, eps)
        ctx.save_for_backward(input, weight, inverse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        input, weight, inverse = ctx.saved_tensors
        return *rms_norm_backward(gradient.contiguous(), input, weight, inverse), None


def rms_norm(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale `[..., hidden]` to unit root mean square, times a weight `[hidden]`; differentiable. See rms_norm_forward."""
    return _RMSNorm.apply(input, weight, eps)
