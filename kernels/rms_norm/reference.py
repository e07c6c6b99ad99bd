"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) in plain PyTorch: what the kernel beside it must compute.

Arithmetic is fp32 (float64 for float64 inputs). The normalised value is rounded to the input's dtype before it is
multiplied by the weight, as Hugging Face's models do.
"""

from __future__ import annotations

import torch


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def rms_norm_forward(input: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised input and the inverse root mean square of each row.

    input: `[..., hidden]`; weight: `[hidden]`.
    Returns `[..., hidden]` in the dtype to which torch promotes the two, and `[...]` in fp32 (float64 for float64).
    """
    wide = _widen(input)
    inverse = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * inverse.unsqueeze(-1)).to(input.dtype) * weight, inverse


def rms_norm_backward(
    gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of input and weight, each in its tensor's dtype, from that of the output `[..., hidden]`.

    The weight's gradient is the sum over rows of gradient * normalised, with the normalised value not rounded.
    """
    wide, normalised = _widen(gradient), _widen(input) * inverse.unsqueeze(-1)
    weighted = wide * weight
    along = (weighted * normalised).mean(-1, keepdim=True)
    grad_input = (weighted - normalised * along) * inverse.unsqueeze(-1)
    grad_weight = (wide * normalised).reshape(-1, input.shape[-1]).sum(0)
    return grad_input.to(input.dtype), grad_weight.to(weight.dtype)
