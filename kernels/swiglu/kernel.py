"""SwiGLU, silu(gate) * up (Shazeer 2020, arXiv:2002.05202), forward and backward, each one read and one write of the data.

Only the two inputs are kept for backward, which computes silu(gate) again: PyTorch's own operators keep silu(gate) as
well, and write and read it once more. Works on the elements in memory order, whatever the shape.

The product quantised to FP8 for the matrix product that follows is `parallax.kernels.fp8_quantize`'s `swiglu_quantize`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from parallax.kernels.launch import FLOATING, OPTIONS, check, on_device_of, tl, triton

BLOCK = 2048  # elements a program: 16 a thread of 4 warps
WARPS = 4


@triton.jit
def _swiglu_forward(gate, up, output, count, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    mask = start + lane < count
    value = tl.load(gate + start + lane, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(up + start + lane, mask=mask, other=0.0).to(tl.float32)
    # Rounded first, then multiplied, as Hugging Face's models do.
    silu = (value * tl.sigmoid(value)).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + start + lane, (silu * other).to(output.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(gradient, gate, up, grad_gate, grad_up, count, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    mask = start + lane < count
    upstream = tl.load(gradient + start + lane, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(gate + start + lane, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(up + start + lane, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(value)
    silu = (value * sigmoid).to(gate.dtype.element_ty).to(tl.float32)
    to_gate = upstream * other * sigmoid * (1.0 + value * (1.0 - sigmoid))
    tl.store(grad_gate + start + lane, to_gate.to(grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_up + start + lane, (upstream * silu).to(grad_up.dtype.element_ty), mask=mask)


def swiglu_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up.

    gate, up: of one shape and one dtype (fp32, bf16 or fp16), contiguous. Raises ValueError for other arguments.
    """
    check("gate", gate, FLOATING)
    check("up", up, (gate.dtype,), shape=gate.shape, device=gate.device)
    output = torch.empty_like(gate)
    with on_device_of(gate, _swiglu_forward):
        _swiglu_forward[(triton.cdiv(gate.numel(), BLOCK),)](
            gate, up, output, gate.numel(), BLOCK=BLOCK, num_warps=WARPS, **OPTIONS
        )
    return output


def swiglu_backward(gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up from that of the output.

    gradient, gate, up: of one shape and one dtype, contiguous. Raises ValueError for other arguments.
    """
    check("gate", gate, FLOATING)
    check("up", up, (gate.dtype,), shape=gate.shape, device=gate.device)
    check("gradient", gradient, (gate.dtype,), shape=gate.shape, device=gate.device)
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    with on_device_of(gate, _swiglu_backward):
        _swiglu_backward[(triton.cdiv(gate.numel(), BLOCK),)](
            gradient, gate, up, grad_gate, grad_up, gate.numel(), BLOCK=BLOCK, num_warps=WARPS, **OPTIONS
        )
    return grad_gate, grad_up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return swiglu_backward(gradient.contiguous(), *ctx.saved_tensors)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up; differentiable. See swiglu_forward for what the arguments must be."""
    return _SwiGLU.apply(gate, up)
