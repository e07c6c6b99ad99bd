"""The MLP, split over tp: its inner features are divided over the ranks, with an AllReduce at the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from parallax.kernels.table import has_kernel
from parallax.mesh import Group
from parallax.tensor_parallel.gathered_input import GatheredInput
from parallax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, apply_together


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, keeping only its two inputs for backward (Shazeer 2020, arXiv:2002.05202)."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        if gate.dtype.itemsize < 4:  # rounded once, not after each operation
            return torch.ops.aten.silu_backward(gradient * up, gate), F.silu(gate).mul_(gradient)
        # One exponential for both: with s = sigmoid(x), silu(x) = x s and silu'(x) = s + x s (1 - s), which is
        # between 1 and x s as s says.
        sigmoid = torch.sigmoid(gate)
        grad_up = torch.mul(gate, sigmoid).mul_(gradient)
        return torch.lerp(grad_up, gradient, sigmoid).mul_(up), grad_up


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if has_kernel("swiglu", gate):
        from parallax.kernels.swiglu.kernel import swiglu  # here, for it needs triton, which only a GPU needs

        return swiglu(gate.contiguous(), up.contiguous())
    return _SwiGLU.apply(gate, up)


class ParallelMLP(nn.Module):
    """`[batch, seq, hidden]` to the same shape through intermediate_size features, divided over tp.

    activation: "swiglu" (gate_proj, up_proj, down_proj) or "gelu" (up_proj, down_proj).
    Raises ValueError when intermediate_size does not divide by the tp size.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        tp: Group | None = None,
        activation: str = "swiglu",
        bias: bool = False,
        sequence_parallel: bool = False,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        if activation not in ("swiglu", "gelu"):
            raise ValueError(f"activation {activation!r} is not known; use 'swiglu' or 'gelu'")
        shared: dict[str, Any] = {"tp": tp, "bias": bias, "sequence_parallel": sequence_parallel, "std": std}
        self.gate_proj = (
            ColumnParallelLinear(hidden_size, intermediate_size, **shared) if activation == "swiglu" else None
        )
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, **shared)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, **shared)
        self.compiled: Callable[..., torch.Tensor] | None = None  # the activation; see parallax.models.compiled

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._features(hidden))

    def part(self, hidden: torch.Tensor, gathered: GatheredInput | None = None) -> torch.Tensor:
        """Return this rank's part of the sum over tp, without bias; `hidden` and the result are whole sequences.

        gathered: what `hidden` came from, and comes from again in backward; None to keep it.
        """
        return self.down_proj.part(self._features(hidden, communicate=False, gathered=gathered))

    def _features(
        self, hidden: torch.Tensor, communicate: bool = True, gathered: GatheredInput | None = None
    ) -> torch.Tensor:
        if self.gate_proj is None:
            (up,) = apply_together(hidden, self.up_proj, communicate=communicate, gathered=gathered)
            return F.gelu(up, approximate="tanh") if self.compiled is None else self.compiled(up)
        gate, up = apply_together(hidden, self.gate_proj, self.up_proj, communicate=communicate, gathered=gathered)
        return _swiglu(gate, up) if self.compiled is None else self.compiled(gate, up)
