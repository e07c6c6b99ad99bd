"""The backwards that are written out by hand are those that autograd makes of the plain formula in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from parallax.models.mlp import _swiglu
from parallax.models.rotary import _Rotate
from parallax.tensor_parallel.norm import _RMSNorm

ANGLES = torch.linspace(0, 30, 24, dtype=torch.float64).view(6, 1, 4)


def rotate(heads: torch.Tensor) -> torch.Tensor:
    cos, sin = ANGLES.cos().to(heads.dtype), ANGLES.sin().to(heads.dtype)
    return _Rotate.apply(heads, torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))


def plain_rotate(heads: torch.Tensor) -> torch.Tensor:
    """Pairs as complex numbers, turned by multiplying."""
    pairs = torch.complex(*heads.chunk(2, -1)) * torch.polar(torch.ones_like(ANGLES), ANGLES)
    return torch.cat([pairs.real, pairs.imag], -1)


def plain_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _RMSNorm.apply(x, weight, 1e-5)


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "rotary": (rotate, plain_rotate, [(2, 6, 3, 8)]),
    "swiglu": (_swiglu, plain_swiglu, [(40, 24), (40, 24)]),
    "rms norm": (norm, plain_norm, [(5, 8, 24), (24,)]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_those_of_the_plain_formula(name: str, scale: float, dtype: torch.dtype) -> None:
    ours, plain, shapes = CASES[name]
    generator = torch.Generator().manual_seed(4)
    inputs = [(scale * torch.randn(shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    output, expected = ours(*inputs), plain(*exact)
    gradient = torch.randn(output.shape, generator=generator).to(dtype)
    results = [output, *torch.autograd.grad(output, inputs, gradient)]
    references = [expected, *torch.autograd.grad(expected, exact, gradient.double())]
    for result, reference in zip(results, references, strict=True):
        assert result.dtype == dtype
        error = (result.double() - reference).abs().max() / reference.abs().max()
        assert error < 16 * torch.finfo(dtype).eps


def test_gates_beyond_the_range_of_exp_have_gradients_of_zero_and_one() -> None:
    gate = torch.tensor([-1e30, -200.0, 200.0, 1e30], requires_grad=True)
    up = torch.ones(4, requires_grad=True)
    _swiglu(gate, up).sum().backward()
    assert gate.grad is not None and gate.grad.tolist() == [0, 0, 1, 1]
    assert up.grad is not None and up.grad.tolist() == [0, 0, 200, pytest.approx(1e30)]
