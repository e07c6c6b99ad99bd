"""SwiGLU's kernel against its reference, in Triton's interpreter; test_under_interpreter.py runs this file."""

from __future__ import annotations

import pytest
import torch

from parallax.kernels.swiglu import kernel, reference
from parallax.models.mlp import ParallelMLP
from tests.kernels.cases import assert_near, dtypes, poisoned, random, sizes
from tests.kernels.interpreted.pretend import on_gpu, plain, spy


@sizes
@dtypes
def test_forward_equals_the_reference(rows: int, columns: int, dtype: torch.dtype) -> None:
    gate, up = random(rows, columns, dtype=dtype), random(rows, columns, dtype=dtype, seed=1)
    with poisoned():
        output = kernel.swiglu_forward(gate, up)
    assert_near(output, reference.swiglu_forward(gate, up), roundings=3)


@sizes
@dtypes
def test_backward_equals_the_reference(rows: int, columns: int, dtype: torch.dtype) -> None:
    gradient, gate, up = (random(rows, columns, dtype=dtype, seed=seed) for seed in range(3))
    with poisoned():
        result = kernel.swiglu_backward(gradient, gate, up)
    for each, expected in zip(result, reference.swiglu_backward(gradient, gate, up), strict=True):
        assert_near(each, expected, roundings=3)


def test_silu_is_rounded_before_it_is_multiplied() -> None:
    # fp16: the interpreter rounds it as a GPU does.
    gate, up = random(4, 1000, dtype=torch.float16), random(4, 1000, dtype=torch.float16, seed=1)
    output = kernel.swiglu_forward(gate, up)
    assert (output == torch.nn.functional.silu(gate) * up).float().mean() > 0.999
    once = (torch.nn.functional.silu(gate.float()) * up.float()).half()
    assert (output == once).float().mean() < 0.95


def test_large_values_neither_overflow_nor_make_nan() -> None:
    gate, up = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4]), torch.ones(5)
    assert torch.equal(kernel.swiglu_forward(gate, up), torch.tensor([0.0, 0.0, 0.0, 100.0, 1e4]))
    grad_gate, grad_up = kernel.swiglu_backward(up, gate, up)
    assert torch.equal(grad_gate, torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))
    assert torch.equal(grad_up, torch.tensor([0.0, 0.0, 0.0, 100.0, 1e4]))


def test_arguments_that_do_not_fit_are_refused() -> None:
    gate, up = random(4, 64), random(4, 64, seed=1)
    with pytest.raises(ValueError, match=r"up is not contiguous .*up.contiguous\(\)"):
        kernel.swiglu_forward(gate, random(64, 4).t())
    with pytest.raises(ValueError, match=r"up is torch.float16; this kernel takes torch.float32"):
        kernel.swiglu_forward(gate, up.half())
    with pytest.raises(ValueError, match=r"up has the shape \[3, 64\], but the other arguments make it \[4, 64\]"):
        kernel.swiglu_forward(gate, up[:3])
    with pytest.raises(ValueError, match="gradient is not contiguous"):
        kernel.swiglu_backward(torch.ones(1).expand(4, 64), gate, up)


def test_the_mlp_calls_the_kernel_for_a_tensor_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spy(monkeypatch, kernel, "swiglu_forward", "swiglu_backward")
    mlp, input = ParallelMLP(16, 40), random(2, 3, 16)
    expected = mlp(input)
    expected_gradients = torch.autograd.grad(expected.square().sum(), list(mlp.parameters()))
    assert calls == []
    for parameter in mlp.parameters():
        parameter.data = on_gpu(parameter.data)
    result = mlp(on_gpu(input))
    assert_near(plain(result), expected.detach())
    gradients = torch.autograd.grad(result.square().sum(), list(mlp.parameters()))
    assert calls == ["swiglu_forward", "swiglu_backward"]
    for each, right in zip(gradients, expected_gradients, strict=True):
        assert_near(plain(each), right)
