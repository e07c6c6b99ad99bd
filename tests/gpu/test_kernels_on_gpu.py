"""The compiled kernels against their references, and the layers that call them against the same layers on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parallax.kernels.cross_entropy import reference as cross_entropy_reference
from parallax.kernels.rms_norm import reference as rms_norm_reference
from parallax.kernels.swiglu import reference as swiglu_reference
from parallax.layers import ParallelMLP, RMSNorm, vocab_parallel_cross_entropy
from tests.kernels.cases import assert_near, dtypes, poisoned, random

pytest.importorskip("triton", reason="needs triton: pip install triton")

from parallax.kernels.cross_entropy import kernel as cross_entropy
from parallax.kernels.rms_norm import kernel as rms_norm
from parallax.kernels.swiglu import kernel as swiglu

# As in the interpreter, and what a training step has: heads, hidden sizes, a row that several programs share, a vocabulary.
SIZES = [(1, 1), (3, 5), (37, 130), (4099, 128), (1030, 4096), (515, 8192), (70, 16384), (65, 32003)]
sizes = pytest.mark.parametrize(("rows", "columns"), SIZES)


def on_gpu(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return random(*shape, dtype=dtype, seed=seed, device="cuda")


@sizes
@dtypes
def test_rms_norm_equals_its_reference(rows: int, columns: int, dtype: torch.dtype) -> None:
    input, gradient = on_gpu(rows, columns, dtype=dtype), on_gpu(rows, columns, dtype=dtype, seed=2)
    weight = on_gpu(columns, dtype=dtype, seed=1)
    expected, expected_inverse = rms_norm_reference.rms_norm_forward(input, weight, 1e-5)
    expected_gradients = rms_norm_reference.rms_norm_backward(gradient, input, weight, expected_inverse)
    with poisoned():
        output, inverse = rms_norm.rms_norm_forward(input, weight, 1e-5)
        gradients = rms_norm.rms_norm_backward(gradient, input, weight, expected_inverse)
        again = rms_norm.rms_norm_backward(gradient, input, weight, expected_inverse)
    assert_near(output, expected, roundings=2)
    assert_near(inverse, expected_inverse)
    for result, repeated, right in zip(gradients, again, expected_gradients, strict=True):
        assert_near(result, right)
        assert torch.equal(result, repeated)


@sizes
@dtypes
def test_swiglu_equals_its_reference(rows: int, columns: int, dtype: torch.dtype) -> None:
    gradient, gate, up = (on_gpu(rows, columns, dtype=dtype, seed=seed) for seed in range(3))
    with poisoned():
        output = swiglu.swiglu_forward(gate, up)
        gradients = swiglu.swiglu_backward(gradient, gate, up)
    assert_near(output, swiglu_reference.swiglu_forward(gate, up), roundings=2)
    for result, right in zip(gradients, swiglu_reference.swiglu_backward(gradient, gate, up), strict=True):
        assert_near(result, right, roundings=2)


@sizes
@dtypes
def test_cross_entropy_equals_its_reference_and_never_reads_padding(
    rows: int, columns: int, dtype: torch.dtype
) -> None:
    logits = on_gpu(rows, columns + 61, dtype=dtype) * 4
    logits[:, columns:] = torch.nan
    targets = torch.arange(rows, device="cuda") * 7 % (columns + 61) - 30  # some before these columns, some beyond
    scale = on_gpu(rows, dtype=torch.float32, seed=1)
    expected, expected_target = cross_entropy_reference.cross_entropy_forward(logits, targets, columns)
    right = cross_entropy_reference.cross_entropy_backward(logits, targets, expected, scale, columns)
    with poisoned():
        log_sum, target = cross_entropy.cross_entropy_forward(logits, targets, columns)
        gradient = cross_entropy.cross_entropy_backward(logits, targets, expected, scale, columns)
    assert_near(log_sum, expected)
    assert torch.equal(target, expected_target)
    assert_near(gradient, right)


def test_logits_of_more_than_two_to_the_31_elements_are_addressed_right() -> None:
    rows, width = 16800, 128256  # 2^31 elements lie in row 16744; 4.3 GB in bf16, and as much for the gradient
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of free GPU memory")
    logits = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    logits[-1] = on_gpu(width, dtype=torch.bfloat16)
    targets = torch.full((rows,), 5, device="cuda")
    log_sum, target = cross_entropy.cross_entropy_forward(logits, targets, width)
    expected, expected_target = cross_entropy_reference.cross_entropy_forward(logits[-1:], targets[-1:], width)
    assert_near(log_sum[-1:], expected)
    assert torch.equal(target[-1:], expected_target)
    scale = torch.ones(rows, device="cuda")
    gradient = cross_entropy.cross_entropy_backward(logits, targets, log_sum, scale, width)[-1:]
    right = cross_entropy_reference.cross_entropy_backward(logits[-1:], targets[-1:], expected, scale[-1:], width)
    assert_near(gradient, right)


def assert_same_on_gpu(layer: nn.Module, input: torch.Tensor) -> None:
    there = copy.deepcopy(layer).cuda()
    output, there_output = layer(input), there(input.cuda())
    torch.testing.assert_close(there_output.cpu(), output, rtol=1e-4, atol=1e-5)
    expected = torch.autograd.grad(output.square().sum(), list(layer.parameters()))
    result = torch.autograd.grad(there_output.square().sum(), list(there.parameters()))
    for each, right in zip(result, expected, strict=True):
        torch.testing.assert_close(each.cpu(), right, rtol=1e-4, atol=1e-4 * right.abs().max().item())


@pytest.mark.parametrize("layer", [RMSNorm(96), ParallelMLP(96, 200)], ids=["norm", "mlp"])
def test_a_layer_computes_on_a_gpu_what_it_computes_on_a_cpu(layer: nn.Module) -> None:
    for dtype in (torch.float32, torch.float64):  # float64 has no kernel, and works all the same
        assert_same_on_gpu(copy.deepcopy(layer).to(dtype), random(2, 7, 96, dtype=dtype))


def test_the_loss_on_a_gpu_is_the_loss_on_a_cpu() -> None:
    logits, labels = random(3, 5, 256) * 4, torch.arange(15).view(3, 5) * 11 % 200
    labels[0, 0] = -100
    here, there = logits.clone().requires_grad_(), logits.cuda().requires_grad_()
    expected = vocab_parallel_cross_entropy(here, labels, vocab_size=200)
    result = vocab_parallel_cross_entropy(there, labels.cuda(), vocab_size=200)
    torch.testing.assert_close(result.cpu(), expected)
    expected.sum().backward()
    result.sum().backward()
    torch.testing.assert_close(there.grad.cpu(), here.grad)


def test_a_kernel_runs_on_the_gpu_that_holds_its_tensors() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    gate = random(3, 1000, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert_near(swiglu.swiglu_forward(gate, gate), swiglu_reference.swiglu_forward(gate, gate))
