"""Quantisation by tiles against a plain loop over elements and a search through all codes of the format."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from parallax.precision import dequantize_tiles, quantize_tiles
from parallax.precision.tiles import DTYPES

TILES = [(1, 128), (128, 1), (128, 128)]
tiles = pytest.mark.parametrize("tile", TILES, ids=str)
formats = pytest.mark.parametrize("fp8_format", ["e4m3", "e5m2"])
powers = pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32 scales", "powers of two"])
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def codes_of(fp8_format: str) -> dict[int, float]:
    """Return {byte: value} of the finite codes, from the definition of the format (sign, exponent, mantissa)."""
    exponent_bits, bias = {"e4m3": (4, 7), "e5m2": (5, 15)}[fp8_format]
    mantissa_bits = 7 - exponent_bits
    result = {}
    for byte in range(128):
        exponent, mantissa = byte >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
        if value <= LARGEST[fp8_format]:
            result[byte], result[byte | 128] = value, -value
    return result


def by_hand(x: np.ndarray, tile: tuple[int, int], fp8_format: str, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (bytes, scale_inv) of finite fp32 `x`, tile by tile."""
    codes = codes_of(fp8_format)
    positive = sorted((value, byte) for byte, value in codes.items() if byte < 128)
    values, bytes_ = np.array([v for v, _ in positive]), np.array([b for _, b in positive])
    q = np.zeros(x.shape, np.uint8)
    scale_inv = np.zeros([-(-size // part) for size, part in zip(x.shape, tile, strict=True)], np.float32)
    with np.errstate(over="ignore", divide="ignore"):
        for i, j in np.ndindex(*scale_inv.shape):
            here = np.s_[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
            amax = np.abs(x[here]).max()
            scale = np.float32(LARGEST[fp8_format]) / np.float32(amax) if amax > 0 else np.float32(1)
            scale = min(scale, np.finfo(np.float32).max)
            if power_of_two:
                scale = np.float32(2.0 ** np.floor(np.log2(float(scale))))
            scaled = x[here] * scale
            size = np.minimum(np.abs(scaled), np.float32(LARGEST[fp8_format])).astype(np.float64)
            above = np.searchsorted(values, size)
            below = np.maximum(above - (values[np.minimum(above, len(values) - 1)] != size), 0)
            above = np.minimum(above, len(values) - 1)
            down, up = size - values[below], values[above] - size
            # Ties go to the even code.
            code = np.where((down < up) | ((down == up) & (bytes_[below] % 2 == 0)), bytes_[below], bytes_[above])
            q[here] = code | (np.signbit(scaled) * 128).astype(np.uint8)
            scale_inv[i, j] = np.float32(1) / scale
    return q, scale_inv


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers whose sizes differ by many powers of two from element to element."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * torch.exp(2 * torch.randn(*shape, generator=generator))).to(
        dtype
    )


@tiles
@formats
@powers
@pytest.mark.parametrize("shape", [(256, 256), (130, 300), (1, 1), (127, 129)], ids=str)
def test_bytes_and_scales_are_those_of_the_definition(
    shape: tuple[int, int], tile: tuple[int, int], fp8_format: str, power_of_two: bool
) -> None:
    for x in (random(*shape), random(*shape, dtype=torch.bfloat16), random(*shape) * 1e-6, random(*shape) * 1e30):
        q, scale_inv = quantize_tiles(x, tile, fp8_format, power_of_two)
        expected, expected_scale = by_hand(x.float().numpy(), tile, fp8_format, power_of_two)
        assert q.dtype == DTYPES[fp8_format] and q.shape == x.shape
        assert np.array_equal(scale_inv.numpy(), expected_scale)
        assert np.array_equal(q.view(torch.uint8).numpy(), expected)


@formats
def test_every_code_of_the_format_and_every_middle_between_two_is_rounded_to_even(fp8_format: str) -> None:
    values = np.array(sorted(codes_of(fp8_format).values()))
    numbers = np.sort(np.concatenate([values, (values[1:] + values[:-1]) / 2])).astype(np.float32)
    q, scale_inv = quantize_tiles(torch.from_numpy(numbers)[None], (1, len(numbers)), fp8_format)
    assert scale_inv.item() == 1
    assert np.array_equal(q.view(torch.uint8).numpy(), by_hand(numbers[None], (1, len(numbers)), fp8_format, False)[0])


@tiles
@formats
def test_the_largest_element_of_a_tile_is_exact_with_fp32_scales(tile: tuple[int, int], fp8_format: str) -> None:
    x = random(256, 256)
    q, _ = quantize_tiles(x, tile, fp8_format)
    blocks = q.float().unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0])).abs().amax((1, 3))
    assert (blocks == LARGEST[fp8_format]).all()
    q, scale_inv = quantize_tiles(x, tile, fp8_format, power_of_two_scales=True)
    blocks = q.float().unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0])).abs().amax((1, 3))
    assert (blocks <= LARGEST[fp8_format]).all() and (blocks >= LARGEST[fp8_format] / 2).all()
    assert (scale_inv.log2().frac() == 0).all()


@tiles
@powers
def test_quantising_what_was_quantised_changes_no_value(tile: tuple[int, int], power_of_two: bool) -> None:
    x = random(130, 300)
    once = dequantize_tiles(*quantize_tiles(x, tile, power_of_two_scales=power_of_two), tile)
    twice = dequantize_tiles(*quantize_tiles(once, tile, power_of_two_scales=power_of_two), tile)
    if power_of_two:
        assert torch.equal(once, twice)
    else:
        torch.testing.assert_close(twice, once, rtol=2e-7, atol=0)


@tiles
@formats
@powers
def test_an_amax_of_zero_inf_or_nan_gives_a_scale_of_one(
    tile: tuple[int, int], fp8_format: str, power_of_two: bool
) -> None:
    for bad in (0.0, torch.inf, -torch.inf, torch.nan):
        x = random(256, 256)
        x[: tile[0], : tile[1]] = 0
        x[0, 0] = bad
        others = quantize_tiles(random(256, 256), tile, fp8_format, power_of_two)
        q, scale_inv = quantize_tiles(x, tile, fp8_format, power_of_two)
        assert scale_inv[0, 0] == 1
        first = q.float()[0, 0].item()
        if bad != bad:
            assert first != first
        else:
            assert first == min(max(bad, -LARGEST[fp8_format]), LARGEST[fp8_format])
        scale_inv[0, 0] = others[1][0, 0]
        assert torch.equal(scale_inv, others[1])
        assert torch.equal(q.view(torch.uint8)[tile[0] :], others[0].view(torch.uint8)[tile[0] :])


def test_the_smallest_numbers_have_the_greatest_scale_and_no_infinite_one() -> None:
    x = torch.full((1, 128), 1e-42)
    q, scale_inv = quantize_tiles(x)
    assert scale_inv.item() == np.float32(1) / np.finfo(np.float32).max
    assert q.float().isfinite().all()
    _, scale_inv = quantize_tiles(x, power_of_two_scales=True)
    assert scale_inv.item() == 2.0**-127


def test_the_scale_is_a_rounded_quotient_and_no_product_with_a_rounded_reciprocal() -> None:
    amax = torch.linspace(0.5, 8, 4096)
    _, scale_inv = quantize_tiles(amax[:, None], (1, 1))
    exact = (np.float32(448) / amax.numpy()).astype(np.float32)
    assert np.array_equal(scale_inv[:, 0].numpy(), np.float32(1) / exact)
    assert (448.0 * amax.reciprocal() != torch.from_numpy(exact)).float().mean() > 0.1  # what it must not be


def test_leading_dims_are_matrices_of_their_own() -> None:
    x = random(3, 100, 200)
    q, scale_inv = quantize_tiles(x, (128, 1))
    for index in range(3):
        one, scale = quantize_tiles(x[index], (128, 1))
        assert torch.equal(q[index].view(torch.uint8), one.view(torch.uint8)) and torch.equal(scale_inv[index], scale)
    assert torch.equal(dequantize_tiles(q, scale_inv, (128, 1))[1], dequantize_tiles(q[1], scale_inv[1], (128, 1)))


def test_a_matrix_without_rows_has_no_tiles() -> None:
    q, scale_inv = quantize_tiles(torch.empty(0, 256))
    assert q.shape == (0, 256) and scale_inv.shape == (0, 2)


@pytest.mark.parametrize("shape", [(4, 130), (1, 300), (300, 1), (0, 5), (5, 0), (2, 3, 130)], ids=str)
def test_a_tile_larger_than_the_matrix_is_the_matrix(shape: tuple[int, ...]) -> None:
    x = random(*shape)
    for tile in ((1, 10**9), (10**9, 1), (10**9, 10**9), (128, 128)):
        clamped = tuple(min(size, max(1, part)) for size, part in zip(tile, shape[-2:], strict=True))
        (q, scale_inv), (expected, expected_scale) = quantize_tiles(x, tile), quantize_tiles(x, clamped)
        assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scale_inv, expected_scale)
        assert torch.equal(dequantize_tiles(q, scale_inv, tile), dequantize_tiles(q, scale_inv, clamped))


def test_memory_follows_the_matrix_and_not_the_tile() -> None:
    """In a process of its own: a mebibyte in tiles of 128x128 took 128 of them for the zeros alone, of 1 x 10^9 all there is."""
    program = """
import resource, torch
from parallax.kernels.fp8_quantize import reference
from parallax.precision import dequantize_tiles, quantize_tiles
x = torch.randn(1, 2_000_000)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
quantize_tiles(x[:, :1000]), reference.quantize(x[:, :1000])
before = peak()
for tile in ((128, 128), (10**9, 1), (1, 10**9)):
    dequantize_tiles(*quantize_tiles(x, tile), tile)
reference.quantize(x, (128, 128)), reference.quantize(x, (128, 1))
print(peak() - before)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 200  # MiB, of a matrix of 8


def test_scales_of_another_type_give_fp32_all_the_same() -> None:
    q, scale_inv = quantize_tiles(random(3, 200))
    assert dequantize_tiles(q, scale_inv.double()).dtype == torch.float32
    assert torch.equal(dequantize_tiles(q, scale_inv.double()), dequantize_tiles(q, scale_inv))


def test_what_is_no_tensor_is_refused() -> None:
    q, scale_inv = quantize_tiles(torch.ones(3, 200))
    for other, kind in ((np.ones((2, 2), np.float32), "ndarray"), ([[1.0]], "list"), (3, "int"), (None, "NoneType")):
        with pytest.raises(TypeError, match=rf"x is of the type {kind}, .* pass torch.as_tensor\(x\)"):
            quantize_tiles(other)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"q is of the type {kind}"):
            dequantize_tiles(other, scale_inv)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"scale_inv is of the type {kind}"):
            dequantize_tiles(q, other)  # type: ignore[arg-type]


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(ValueError, match="'e3m4' is unknown; use 'e4m3' or 'e5m2'"):
        quantize_tiles(torch.ones(2, 2), fp8_format="e3m4")
    with pytest.raises(ValueError, match=r"\['e4m3'\] is unknown; use 'e4m3' or 'e5m2'"):
        quantize_tiles(torch.ones(2, 2), fp8_format=["e4m3"])  # type: ignore[arg-type]
    q, scale_inv = quantize_tiles(torch.ones(3, 200))
    for call in (quantize_tiles, lambda x, *tile: dequantize_tiles(x, scale_inv, *tile)):
        with pytest.raises(ValueError, match=r"the shape \[2\] is none"):
            call(torch.ones(2))
        for tile in ((0, 128), (1, -1), 128, (128,), (1, 128, 1), (1.0, 128), ("1", 128), (True, 128)):
            with pytest.raises(ValueError, match="must be two whole numbers of at least 1: rows and columns"):
                call(q.float(), tile)
    for dtype in (torch.int32, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=f"x is {dtype}, and only floating types are quantised"):
            quantize_tiles(torch.ones(2, 2, dtype=dtype))
    with pytest.raises(ValueError, match=r"q is torch\.complex64, and only real numbers"):
        dequantize_tiles(q.float().to(torch.complex64), scale_inv)
    with pytest.raises(ValueError, match=r"scale_inv is torch\.complex128, and only real numbers"):
        dequantize_tiles(q, scale_inv.to(torch.complex128))
    for shape in ((3, 1), (1, 2), (2,), (), (3, 2, 1), (1, 3, 2)):
        with pytest.raises(ValueError, match=r"a q of the shape \[3, 200\] in tiles of \(1, 128\) has \[3, 2\]"):
            dequantize_tiles(q, torch.ones(shape))
