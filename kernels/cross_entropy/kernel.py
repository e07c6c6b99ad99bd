"""This rank's part of the vocabulary-parallel cross-entropy, forward and backward, each one pass over the logits.

A program walks over one row. Forward keeps the greatest value so far and the sum of exp(value - greatest), scaled down
whenever a greater one comes (Milakov and Gimelshein 2018, arXiv:1805.02867). Nothing of the logits' size is kept in fp32:
the logits themselves are saved, and backward computes the exponentials again from them and the row's log-sum-exp.

Columns from `columns` on are padding: they are never read, and their gradient is 0.

Left out: writing the gradient over the logits, which would halve the memory but destroys what autograd has saved.
"""

from __future__ import annotations

import torch

from parallax.kernels.launch import FLOATING, OPTIONS, check, on_device_of, tl, triton

MAX_BLOCK = 4096  # columns a step: 16 a thread of 8 warps


@triton.jit
def _cross_entropy_forward(logits, targets, log_sum, target_logit, width, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * width
    target = tl.load(targets + row)
    here = (target >= 0) & (target < columns)
    tl.store(target_logit + row, tl.load(line + target, mask=here, other=0.0).to(tl.float32))
    greatest = tl.full([], float("-inf"), tl.float32)
    shift = tl.full([], 0.0, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(line + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        greater = tl.maximum(greatest, tl.max(values, 0))
        # inf - inf is not a number: a row that has only seen -inf, or has seen +inf, is not shifted.
        shift = tl.where(tl.abs(greater) == float("inf"), 0.0, greater)
        # Once +inf is seen the sum stays infinite, and is not shifted either: 0 * exp(inf) is not a number.
        factor = tl.where(greater == float("inf"), 1.0, tl.exp(greatest - shift))
        total = total * factor + tl.exp(values - shift)
        greatest = greater
    tl.store(log_sum + row, shift + tl.log(tl.sum(total, 0)))


@triton.jit
def _cross_entropy_backward(logits, targets, log_sum, scale, gradient, width, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    line = row * width
    target = tl.load(targets + row)
    whole = tl.load(log_sum + row)
    factor = tl.load(scale + row)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        real = column < columns
        values = tl.load(logits + line + column, mask=real, other=0.0).to(tl.float32)
        difference = tl.exp(values - whole) - tl.where(column == target, 1.0, 0.0)
        result = tl.where(real, difference * factor, 0.0)
        tl.store(gradient + line + column, result.to(gradient.dtype.element_ty), mask=column < width)


def block_and_warps(width: int) -> tuple[int, int]:
    """Return how many columns a program takes at a time, and its warps."""
    block = min(max(16, triton.next_power_of_2(width)), MAX_BLOCK)
    return block, max(1, block // 512)


def cross_entropy_forward(
    logits: torch.Tensor, targets: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-sum-exp of each row over its first `columns` columns, and its target's logit, both `[...]`, fp32.

    logits: `[..., width]`, fp32, bf16 or fp16, contiguous; targets: int64 `[...]`, contiguous, counted from this rank's
    first column; one outside [0, columns) is another rank's, and its logit is 0 here. With columns == 0 the log-sum-exp
    is -inf. Raises ValueError for other arguments.
    """
    _check(logits, targets, columns)
    log_sum = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    target_logit = torch.empty_like(log_sum)
    block, warps = block_and_warps(logits.shape[-1])
    with on_device_of(logits, _cross_entropy_forward):
        _cross_entropy_forward[(targets.numel(),)](
            logits, targets, log_sum, target_logit, logits.shape[-1], columns, BLOCK=block, num_warps=warps, **OPTIONS
        )
    return log_sum, target_logit


def cross_entropy_backward(
    logits: torch.Tensor, targets: torch.Tensor, log_sum: torch.Tensor, scale: torch.Tensor, columns: int
) -> torch.Tensor:
    """Return (softmax - one-hot of the target) * scale, `[..., width]` in the logits' dtype, 0 in the padding columns.

    logits, targets, columns: as given to the forward pass; log_sum: over the columns of all ranks, `[...]`; scale: the
    gradient of each row's loss, `[...]`; both fp32, contiguous. Raises ValueError for other arguments.
    """
    _check(logits, targets, columns)
    check("log_sum", log_sum, (torch.float32,), shape=targets.shape, device=logits.device)
    check("scale", scale, (torch.float32,), shape=targets.shape, device=logits.device)
    gradient = torch.empty_like(logits)
    block, warps = block_and_warps(logits.shape[-1])
    with on_device_of(logits, _cross_entropy_backward):
        _cross_entropy_backward[(targets.numel(),)](
            logits,
            targets,
            log_sum,
            scale,
            gradient,
            logits.shape[-1],
            columns,
            BLOCK=block,
            num_warps=warps,
            **OPTIONS,
        )
    return gradient


def _check(logits: torch.Tensor, targets: torch.Tensor, columns: int) -> None:
    check("logits", logits, FLOATING)
    check("targets", targets, (torch.int64,), shape=logits.shape[:-1], device=logits.device)
    if not 0 <= columns <= logits.shape[-1]:
        raise ValueError(f"columns={columns} must be between 0 and the width of the logits, {logits.shape[-1]}")
