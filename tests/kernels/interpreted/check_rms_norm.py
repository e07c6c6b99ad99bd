"""RMSNorm's kernel against its reference, in Triton's interpreter; test_under_interpreter.py runs this file."""

from __future__ import annotations

import pytest
import torch

from parallax.kernels.rms_norm import kernel, reference
from parallax.tensor_parallel.norm import RMSNorm
from tests.kernels.cases import assert_near, dtypes, poisoned, random, sizes
from tests.kernels.interpreted.pretend import on_gpu, plain, spy

EPS = 1e-5


@sizes
@dtypes
def test_forward_equals_the_reference(rows: int, columns: int, dtype: torch.dtype) -> None:
    input, weight = random(rows, columns, dtype=dtype), random(columns, dtype=dtype, seed=1)
    with poisoned():
        output, inverse = kernel.rms_norm_forward(input, weight, EPS)
    expected, expected_inverse = reference.rms_norm_forward(input, weight, EPS)
    assert_near(output, expected, roundings=3)
    assert_near(inverse, expected_inverse)


@sizes
@dtypes
def test_backward_equals_the_reference(rows: int, columns: int, dtype: torch.dtype) -> None:
    input, weight = random(rows, columns, dtype=dtype), random(columns, dtype=dtype, seed=1)
    gradient = random(rows, columns, dtype=dtype, seed=2)
    _, inverse = reference.rms_norm_forward(input, weight, EPS)
    with poisoned():
        result = kernel.rms_norm_backward(gradient, input, weight, inverse)
    for each, expected in zip(result, reference.rms_norm_backward(gradient, input, weight, inverse), strict=True):
        assert_near(each, expected)


def test_a_row_longer_than_a_tile_is_shared_by_several_programs() -> None:
    columns = 2 * kernel.MAX_BLOCK_BYTES // 4 + 5
    assert kernel.tiling(columns, 4).blocks == 3
    input, weight, gradient = random(3, columns), random(columns, seed=1), random(3, columns, seed=2)
    with poisoned():
        output, inverse = kernel.rms_norm_forward(input, weight, EPS)
        grad_input, grad_weight = kernel.rms_norm_backward(gradient, input, weight, inverse)
    expected, expected_inverse = reference.rms_norm_forward(input, weight, EPS)
    expected_input, expected_weight = reference.rms_norm_backward(gradient, input, weight, expected_inverse)
    for result, right in ((output, expected), (grad_input, expected_input), (grad_weight, expected_weight)):
        assert_near(result, right)


@dtypes
def test_rows_of_no_elements_give_what_the_reference_gives(dtype: torch.dtype) -> None:
    for rows in (0, 3):
        input, weight = torch.empty(rows, 0, dtype=dtype), torch.empty(0)
        result = kernel.rms_norm_forward(input, weight, EPS)
        expected = reference.rms_norm_forward(input, weight, EPS)
        gradients = kernel.rms_norm_backward(input, input, weight, result[1])
        for one, right in zip((*result, *gradients), (*expected, input, weight), strict=True):
            assert one.dtype == right.dtype and one.shape == right.shape
        assert result[1].isnan().all()


def test_every_program_adds_its_run_of_rows_to_the_weight_gradient() -> None:
    plan = kernel.tiling(1000, 4)
    rows = 8 * plan.rows * 3 + 1  # 8 programs in the interpreter, several tiles each, and a last tile with one row
    input, weight, gradient = random(rows, 1000), random(1000, seed=1), random(rows, 1000, seed=2)
    _, inverse = reference.rms_norm_forward(input, weight, EPS)
    _, first = kernel.rms_norm_backward(gradient, input, weight, inverse)
    _, second = kernel.rms_norm_backward(gradient, input, weight, inverse)
    _, expected = reference.rms_norm_backward(gradient, input, weight, inverse)
    assert_near(first, expected)
    assert torch.equal(first, second)


def test_the_normalised_value_is_rounded_before_it_is_multiplied() -> None:
    # fp16: the interpreter rounds it as a GPU does. One rounding at the end gives other bits for a tenth of the elements.
    input, weight = random(4, 1000, dtype=torch.float16), random(1000, dtype=torch.float16, seed=1)
    output, inverse = kernel.rms_norm_forward(input, weight, EPS)
    twice = (input.float() * inverse[:, None]).half() * weight
    once = (input.float() * inverse[:, None] * weight.float()).half()
    assert torch.equal(output, twice)
    assert not torch.equal(output, once)


def test_an_fp32_weight_gives_an_fp32_output() -> None:
    input, weight = random(3, 130, dtype=torch.bfloat16), random(130, seed=1)
    output, inverse = kernel.rms_norm_forward(input, weight, EPS)
    grad_input, grad_weight = kernel.rms_norm_backward(output, input, weight, inverse)
    assert_near(output.bfloat16(), reference.rms_norm_forward(input, weight, EPS)[0].bfloat16(), roundings=2)
    assert (output.dtype, grad_input.dtype, grad_weight.dtype) == (torch.float32, torch.bfloat16, torch.float32)


def test_no_rows_are_no_work() -> None:
    output, inverse = kernel.rms_norm_forward(torch.empty(0, 64), torch.ones(64), EPS)
    assert output.shape == (0, 64)
    _, grad_weight = kernel.rms_norm_backward(output, output, torch.ones(64), inverse)
    assert torch.equal(grad_weight, torch.zeros(64))


def test_arguments_that_do_not_fit_are_refused() -> None:
    input, weight = random(4, 64), random(64)
    with pytest.raises(ValueError, match=r"input is not contiguous .*strides \[1, 4\].*input.contiguous\(\)"):
        kernel.rms_norm_forward(random(64, 4).t(), weight, EPS)
    with pytest.raises(ValueError, match=r"input is torch.float64; this kernel takes torch.float32"):
        kernel.rms_norm_forward(input.double(), weight, EPS)
    with pytest.raises(ValueError, match=r"weight has the shape \[63\], but the other arguments make it \[64\]"):
        kernel.rms_norm_forward(input, weight[:63], EPS)
    _, inverse = kernel.rms_norm_forward(input, weight, EPS)
    with pytest.raises(ValueError, match="gradient is not contiguous"):
        kernel.rms_norm_backward(torch.ones(1).expand(4, 64), input, weight, inverse)
    with pytest.raises(ValueError, match="inverse has the shape"):
        kernel.rms_norm_backward(input, input, weight, inverse[:3])


def test_the_layer_calls_the_kernel_for_a_tensor_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spy(monkeypatch, kernel, "rms_norm_forward", "rms_norm_backward")
    norm, input = RMSNorm(64), random(2, 3, 64)
    with torch.no_grad():
        norm.weight.copy_(random(64, seed=1))
    here = input.clone().requires_grad_()
    there = on_gpu(input).requires_grad_()
    output, pretended = norm(here.transpose(0, 1)), norm(there.transpose(0, 1))
    assert_near(plain(pretended), output.detach())
    expected = torch.autograd.grad(output.square().sum(), [here, norm.weight])
    assert calls == ["rms_norm_forward"]
    result = torch.autograd.grad(pretended.square().sum(), [there, norm.weight])
    assert calls == ["rms_norm_forward", "rms_norm_backward"]
    for each, right in zip(result, expected, strict=True):
        assert_near(plain(each), right)
