"""The cases that kernels are compared to their references on, in the interpreter and on a GPU alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

# A row, a few, and a number that no tile divides; one column, fewer than a tile, a power of 2, ragged, many tiles.
SIZES = [(rows, columns) for rows in (1, 3, 37) for columns in (1, 5, 64, 130, 1000)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

sizes = pytest.mark.parametrize(("rows", "columns"), SIZES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Return standard normal numbers that are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill fresh memory with NaN, so that an element that a kernel leaves unwritten is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(1).isnan().all(), "torch does not poison fresh memory"
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_near(result: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
    """Compare a kernel's result to its reference's.

    roundings: how many times the result was rounded to its dtype on the way. A rounding may differ by one unit in the last
    place (two numbers that lie at both sides of the middle); Triton's interpreter also cuts bf16 off instead of rounding.
    The inputs are of unit size, so a result near 0 is a difference of numbers of that size.
    """
    assert result.dtype == expected.dtype and result.shape == expected.shape
    size = max(1.0, expected.double().abs().max().item() if expected.numel() else 0.0)
    if result.dtype == torch.float32:
        relative, absolute = 2e-5, 2e-6 * size
    else:
        relative, absolute = roundings * torch.finfo(result.dtype).eps, 1e-5 * size
    torch.testing.assert_close(result, expected, rtol=relative, atol=absolute)
