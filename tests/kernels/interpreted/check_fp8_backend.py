"""The FP8 backend of our kernels against the reference, for sizes that cut tiles; test_under_interpreter.py runs this file."""

from __future__ import annotations

import pytest
import torch

from parallax.precision.backends.reference import ReferenceBackend
from parallax.precision.backends.triton import TritonBackend
from parallax.precision.operands import Operand
from parallax.precision.products import Products
from parallax.precision.recipe import Recipe
from tests.kernels.cases import random


@pytest.mark.parametrize(("tokens", "outputs", "inputs", "length"), [(128, 128, 256, 128), (64, 48, 176, 16)])
@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
def test_all_three_products_equal_the_reference(
    tokens: int, outputs: int, inputs: int, length: int, fp8_format: str
) -> None:
    results = []
    for backend in (TritonBackend(), ReferenceBackend()):
        layer = Products(Recipe(fp8_format=fp8_format), backend)
        x, weight, dy = random(tokens, inputs), random(outputs, inputs, seed=1), random(tokens, outputs, seed=2)
        for_input, for_weight = layer.gradient(dy, length)
        total = torch.ones(outputs, inputs)
        layer.wgrad(for_weight, layer.input_for_wgrad(x, length))(total)
        operand = layer.input(x, record=False)
        results.append(
            [layer.fprop(operand, weight, torch.float32, False), layer.dgrad(for_input, weight, torch.float32), total]
        )
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_a_shard_that_begins_inside_a_tile_is_multiplied_as_the_whole_is() -> None:
    x, weight = random(48, 256), random(80, 256, seed=1)
    reference, ours = ReferenceBackend(), TritonBackend()
    a, b = reference.quantize(x, (1, 128), "e4m3", False), reference.quantize(weight, (128, 128), "e4m3", False)
    start = 88  # a rank's columns begin here; the tiles are those of the whole
    cut_a = Operand(a.data[:, start:], a.scale_inv, a.tile, (0, start))
    cut_b = Operand(b.data[:, start:], b.scale_inv, b.tile, (0, start))
    expected = reference.multiply(cut_a, cut_b, torch.float32)
    torch.testing.assert_close(ours.multiply(cut_a, cut_b, torch.float32), expected, rtol=1e-5, atol=1e-4)
    rows = Operand(b.data[start - 64 :], b.scale_inv, b.tile, (start - 64, 0))  # and rows of a weight
    expected = reference.multiply(a, rows, torch.float32)
    torch.testing.assert_close(ours.multiply(a, rows, torch.float32), expected, rtol=1e-5, atol=1e-4)
