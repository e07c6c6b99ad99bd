"""The block-scaled FP8 product against its reference, in Triton's interpreter; test_under_interpreter.py runs this file."""

from __future__ import annotations

import pytest
import torch

from parallax.kernels.fp8_gemm import kernel, reference
from parallax.kernels.fp8_quantize import reference as quantizer
from tests.kernels.cases import poisoned, random

SIZES = [(1, 1, 16), (64, 64, 128), (130, 200, 300), (200, 48, 256), (37, 130, 48)]
sizes = pytest.mark.parametrize(("m", "n", "k"), SIZES, ids=str)


def operand(rows: int, k: int, tile: tuple[int, int], fp8_format: str = "e4m3", seed: int = 0):
    return quantizer.quantize(random(rows, k, seed=seed), tile, fp8_format)


@sizes
@pytest.mark.parametrize("kinds", ["row block", "block row", "row row"])
def test_the_product_equals_the_reference(m: int, n: int, k: int, kinds: str) -> None:
    tiles = {"row": (1, 128), "block": (128, 128)}
    first, second = (tiles[kind] for kind in kinds.split())
    a, b = operand(m, k, first), operand(n, k, second, seed=1)
    with poisoned():
        result = kernel.multiply(*a, *b, dtype=torch.float32)
    expected = reference.multiply(*a, *b, dtype=torch.float32)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_a_gradient_in_e5m2_and_an_input_in_e4m3_are_added_to_an_fp32_total() -> None:
    a, b = operand(130, 256, (1, 128), "e5m2"), operand(200, 256, (1, 128), seed=1)
    total = random(130, 200, seed=2)
    expected = reference.multiply(*a, *b, total=total.clone())
    assert kernel.multiply(*a, *b, total=total) is total
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)


def test_one_scale_for_a_tensor() -> None:
    a, b = (random(rows, 300, seed=rows).to(torch.float8_e4m3fn) for rows in (70, 90))
    scale_a, scale_b = torch.tensor(0.5), torch.tensor(3.0)
    result = kernel.multiply(a, scale_a, b, scale_b, dtype=torch.float32)
    torch.testing.assert_close(result, 1.5 * (a.float() @ b.float().t()), rtol=1e-5, atol=1e-4)


def test_the_result_is_rounded_to_bf16() -> None:
    a, b = operand(33, 128, (1, 128)), operand(70, 128, (128, 128), seed=1)
    result = kernel.multiply(*a, *b)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), reference.multiply(*a, *b).float(), rtol=2**-7, atol=1e-3)


def test_arguments_that_do_not_fit_are_refused() -> None:
    a, b = operand(4, 256, (1, 128)), operand(8, 256, (128, 128), seed=1)
    with pytest.raises(ValueError, match=r"a is torch\.float32"):
        kernel.multiply(a[0].float(), a[1], *b)
    with pytest.raises(ValueError, match="must be matrices with equally many columns"):
        kernel.multiply(a[0][:, :128].contiguous(), a[1], *b)
    with pytest.raises(ValueError, match=r"scale_a has the shape \[3, 2\]; for 4 rows and 256 columns"):
        kernel.multiply(a[0], a[1][:3].contiguous(), *b)
    with pytest.raises(ValueError, match="both be scalars, or neither"):
        kernel.multiply(a[0], torch.tensor(1.0), *b)
    with pytest.raises(ValueError, match="both of square tiles"):
        kernel.multiply(*operand(200, 256, (128, 128)), *operand(130, 256, (128, 128)))
    with pytest.raises(ValueError, match=r"dtype is torch\.float16; the result is torch\.bfloat16 or torch\.float32"):
        kernel.multiply(*a, *b, dtype=torch.float16)
    five = operand(4, 256, (1, 128), "e5m2")
    with pytest.raises(ValueError, match="both e5m2, which no GPU multiplies"):
        kernel.multiply(*five, *five)
    with pytest.raises(ValueError, match=r"total is torch\.bfloat16"):
        kernel.multiply(*a, *b, total=torch.zeros(4, 8, dtype=torch.bfloat16))
