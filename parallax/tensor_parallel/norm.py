"""RMSNorm and LayerNorm, whole on every tp rank.

Under sequence parallelism each rank normalises its own part of the sequence, so its weight gradient is a part of the
true one; `sequence_parallel=True` (or `partial=True` for a norm inside the tensor-parallel region, such as the norm of q
and k heads) records that, and data parallelism sums it over the holders.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from parallax.kernels.table import has_kernel
from parallax.mesh import Group
from parallax.tensor_parallel.facts import ParameterFacts, replicated
from parallax.tensor_parallel.weight_gradients import sink_of_bf16


class _RMSNorm(torch.autograd.Function):
    """Zhang and Sennrich 2019, arXiv:1910.07467, with the backward written out: torch's own is slow on a CPU."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = input if input.dtype == torch.float64 else input.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = torch.rsqrt(norm.square_().div_(input.shape[-1]).add_(eps))
        ctx.save_for_backward(input, weight, inverse)
        ctx.sink = sink_of_bf16(weight)
        normalised = wide * inverse
        if input.dtype == wide.dtype:
            return normalised.mul_(weight)
        # As Hugging Face's models do: round first, then multiply in the model's dtype.
        return normalised.to(input.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        input, weight, inverse = ctx.saved_tensors
        wide = input.to(inverse.dtype)
        scaled = grad_output * inverse
        product = scaled * wide
        grad_weight = product.reshape(-1, product.shape[-1]).sum(0)
        # d/dx of x / rms(x): the part of the gradient along x itself drops out.
        along = (product @ weight.to(inverse.dtype)).unsqueeze(-1).mul_(inverse).mul_(inverse)
        grad_input = scaled.mul_(weight).addcmul_(wide, along, value=-1 / input.shape[-1])
        if ctx.sink is not None:
            if ctx.needs_input_grad[1]:
                ctx.sink.add(lambda total: total.add_(grad_weight))
            return grad_input.to(input.dtype), None, None
        return grad_input.to(input.dtype), grad_weight.to(weight.dtype), None


class RMSNorm(nn.Module):
    """Scale `[..., hidden]` to unit root mean square, times a weight; computed in fp32, returned in the input's dtype."""

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-5,
        tp: Group | None = None,
        sequence_parallel: bool = False,
        partial: bool = False,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.parameter_facts: dict[str, ParameterFacts] = {
            "weight": replicated((hidden_size,), tp, partial=partial or sequence_parallel, constant=1.0)
        }

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if has_kernel("rms_norm", input):
            from parallax.kernels.rms_norm.kernel import rms_norm  # here, for it needs triton, which only a GPU needs

            return rms_norm(input.contiguous(), self.weight, self.eps)
        return _RMSNorm.apply(input, self.weight, self.eps)


class _LayerNorm(torch.autograd.Function):
    """Layer normalisation of bf16 whose weight and bias have sinks; torch's own would round their gradients."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        output, mean, inverse = torch.native_layer_norm(input, weight.shape, weight, bias, eps)
        ctx.save_for_backward(input, weight, bias, mean, inverse)
        ctx.sinks = sink_of_bf16(weight), sink_of_bf16(bias)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        input, weight, bias, mean, inverse = ctx.saved_tensors
        gradient = grad_output.contiguous()
        grad_input, _, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, input, weight.shape, mean, inverse, weight, bias, [True, False, False]
        )
        wide = gradient.float()
        grad_weight = (wide * (input.float() - mean) * inverse).flatten(0, -2).sum(0)
        grad_bias = wide.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[1]:
            ctx.sinks[0].add(lambda total: total.add_(grad_weight))
        if ctx.needs_input_grad[2]:
            ctx.sinks[1].add(lambda total: total.add_(grad_bias))
        return grad_input, None, None, None


class LayerNorm(nn.Module):
    """Normalise `[..., hidden]` to mean 0 and variance 1, times a weight, plus a bias."""

    def __init__(
        self, hidden_size: int, *, eps: float = 1e-5, tp: Group | None = None, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.parameter_facts: dict[str, ParameterFacts] = {
            "weight": replicated((hidden_size,), tp, partial=sequence_parallel, constant=1.0),
            "bias": replicated((hidden_size,), tp, partial=sequence_parallel),
        }

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if sink_of_bf16(self.weight) is not None and sink_of_bf16(self.bias) is not None:
            return _LayerNorm.apply(input, self.weight, self.bias, self.eps)
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, self.eps)
