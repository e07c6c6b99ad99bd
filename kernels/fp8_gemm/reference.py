"""The block-scaled FP8 product in plain PyTorch: what the kernel beside it must compute."""

from __future__ import annotations

import torch

TILE = 128


def multiply(
    a: torch.Tensor,
    scale_a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a @ b^T of `[m, k]` and `[n, k]` in FP8, or add it to fp32 `total` in place and return that.

    scale_a, scale_b: the factors that bring them back: `[rows, k / 128]`, `[rows / 128, k / 128]` or a scalar.
    """
    product = _wide(a, scale_a) @ _wide(b, scale_b).t()
    return product.to(dtype) if total is None else total.add_(product)


def _wide(q: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    values = q.float().double()
    if scale_inv.ndim == 0:
        return values * scale_inv.double()
    rows = 1 if scale_inv.shape[0] == q.shape[0] else TILE
    factors = scale_inv.double().repeat_interleave(rows, 0).repeat_interleave(TILE, 1)
    return values * factors[: q.shape[0], : q.shape[1]]
