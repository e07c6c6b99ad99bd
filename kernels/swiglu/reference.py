"""SwiGLU, silu(gate) * up (Shazeer 2020, arXiv:2002.05202), in plain PyTorch: what the kernel beside it must compute.

Arithmetic is fp32 (float64 for float64 inputs). Forward rounds silu(gate) to the inputs' dtype before the product, as
Hugging Face's models do; backward takes that rounded value where it occurs and rounds only its results.
"""

from __future__ import annotations

import torch


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _silu(gate: torch.Tensor) -> torch.Tensor:
    wide = _widen(gate)
    return (wide * torch.sigmoid(wide)).to(gate.dtype)


def swiglu_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, of the shape and dtype of both."""
    return _silu(gate) * up


def swiglu_backward(gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up from that of the output, all of one shape and dtype."""
    wide, wide_gate = _widen(gradient), _widen(gate)
    sigmoid = torch.sigmoid(wide_gate)
    grad_gate = wide * _widen(up) * sigmoid * (1 + wide_gate * (1 - sigmoid))
    grad_up = wide * _widen(_silu(gate))
    return grad_gate.to(gate.dtype), grad_up.to(up.dtype)
