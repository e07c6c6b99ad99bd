"""The FP8 quantiser against its reference, to the bit, in Triton's interpreter; test_under_interpreter.py runs this file."""

from __future__ import annotations

import pytest
import torch

from parallax.kernels.fp8_quantize import kernel, reference
from tests.kernels.cases import dtypes, random

shapes = pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 128), (130, 300), (256, 48), (3, 1000)])
formats = pytest.mark.parametrize("fp8_format", ["e4m3", "e5m2"])
powers = pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32 scales", "powers of two"])


def spread(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of many sizes."""
    return (random(rows, columns) * torch.exp(2 * random(rows, columns, seed=1))).to(dtype)


def assert_same(result: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for one, right in zip(result, expected, strict=True):
        assert one.dtype == right.dtype and one.shape == right.shape
        if one.element_size() > 1:
            assert torch.equal(one, right)
            continue
        nan = right.float().isnan()
        assert torch.equal(one.float().isnan(), nan)
        same = one.contiguous().view(torch.uint8) == right.contiguous().view(torch.uint8)
        assert (same | nan).all()


@shapes
@dtypes
@formats
@powers
def test_bytes_and_scales_are_those_of_the_reference(
    rows: int, columns: int, dtype: torch.dtype, fp8_format: str, power_of_two: bool
) -> None:
    x = spread(rows, columns, dtype)
    for tile in ((1, 128), (128, 1), (128, 128)):
        how = tile, fp8_format, power_of_two
        assert_same(kernel.quantize(x, *how), reference.quantize(x, *how))
    both = kernel.quantize_both(x, fp8_format, power_of_two)
    assert_same(both, reference.quantize_both(x, fp8_format, power_of_two))


@formats
@powers
def test_zeros_infinities_nan_and_the_smallest_numbers(fp8_format: str, power_of_two: bool) -> None:
    x = spread(256, 256)
    x[0], x[1, 3], x[2, 200], x[130, 130] = 0.0, torch.inf, torch.nan, -torch.inf
    x[5] *= 1e-41
    x[7] *= 1e36
    for tile in ((1, 128), (128, 1), (128, 128)):
        how = tile, fp8_format, power_of_two
        assert_same(kernel.quantize(x, *how), reference.quantize(x, *how))


@formats
def test_every_code_and_every_middle_between_two(fp8_format: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(reference.DTYPES[fp8_format]).float()
    values = codes[codes.isfinite()].sort().values
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, middles, values[-1:].expand(-(2 * len(values) - 1) % 128)])[None].repeat(2, 1)
    x = x.view(-1, 128).clone()
    x[:, 0] = values[-1]  # a scale of 1
    q, scale_inv = kernel.quantize(x, (1, 128), fp8_format)
    assert (scale_inv == 1).all()
    assert_same((q, scale_inv), reference.quantize(x, (1, 128), fp8_format))


def test_the_product_of_swiglu_is_quantised_as_if_it_had_been_written() -> None:
    gate, up = random(130, 300, dtype=torch.float16), random(130, 300, dtype=torch.float16, seed=1)
    q, scale_inv = kernel.swiglu_quantize(gate, up)
    expected, expected_scale = reference.swiglu_quantize(gate, up)
    torch.testing.assert_close(
        scale_inv, expected_scale, rtol=2e-3, atol=0
    )  # a last bit of fp16 in the greatest element
    codes = q.view(torch.uint8).int() - expected.view(torch.uint8).int()
    assert codes.abs().max() <= 1 and (codes != 0).float().mean() < 0.01


def test_the_precision_package_defines_the_same_bytes() -> None:
    from parallax.precision import quantize_tiles

    x = spread(130, 300)
    for tile in ((1, 128), (128, 1), (128, 128)):
        for power_of_two in (False, True):
            expected = quantize_tiles(x, tile, "e4m3", power_of_two)
            assert_same(reference.quantize(x, tile, "e4m3", power_of_two), expected)
            assert_same(kernel.quantize(x, tile, "e4m3", power_of_two), expected)


def test_a_tile_may_be_a_list() -> None:
    x = random(130, 200)
    for tile in ([1, 128], [128, 1], [128, 128]):
        assert_same(kernel.quantize(x, tile), kernel.quantize(x, tuple(tile)))
    with pytest.raises(ValueError, match=r"tiles of \(1, 64\) are not known"):
        kernel.quantize(x, [1, 64])


def test_arguments_that_do_not_fit_are_refused() -> None:
    x = random(4, 256)
    with pytest.raises(ValueError, match=r"x is not contiguous .*x.contiguous\(\)"):
        kernel.quantize(x.t())
    with pytest.raises(
        ValueError, match=r"tiles of \(1, 64\) are not known; use \(1, 128\), \(128, 1\) or \(128, 128\)"
    ):
        kernel.quantize(x, (1, 64))
    with pytest.raises(ValueError, match="'e3m4' is unknown"):
        kernel.quantize(x, fp8_format="e3m4")
    with pytest.raises(ValueError, match=r"x has the shape \[256\]; this kernel takes a matrix"):
        kernel.quantize(x[0])
    with pytest.raises(ValueError, match=r"up has the shape \[3, 256\]"):
        kernel.swiglu_quantize(x, x[:3])
