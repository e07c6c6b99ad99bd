"""Attention, MLP and the transformer layer, split over tp, with an AllReduce at the output of each.

Heads, and the MLP's inner features, are divided over the ranks; the projections into a block are column-parallel and the
one out of it row-parallel. With fewer KV heads than ranks, neighbouring ranks hold the same KV head and the sum of
their gradients is the true one. With sequence parallelism, inputs and outputs are `[batch, seq/tp, hidden]`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from parallax.mesh import Group, size_of
from parallax.models.config import DecoderConfig
from parallax.models.rotary import RotaryEmbedding
from parallax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from parallax.tensor_parallel.norm import LayerNorm, RMSNorm


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
        return torch.ops.aten.silu_backward(gradient * up, gate), F.silu(gate).mul_(gradient)


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if gate.is_cuda and gate.dtype != torch.float64:
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

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(F.gelu(self.up_proj(hidden), approximate="tanh"))
        gate, up = _together(hidden, self.gate_proj, self.up_proj)
        return self.down_proj(_swiglu(gate, up))


def _together(hidden: torch.Tensor, *layers: ColumnParallelLinear) -> tuple[torch.Tensor, ...]:
    """Apply layers to the same input with one communication each way."""
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    return column_parallel(hidden, weights, biases, layers[0].tp, layers[0].sequence_parallel)


class ParallelAttention(nn.Module):
    """Causal grouped-query attention, `[batch, seq, hidden]` to the same shape, heads divided over tp.

    num_key_value_heads: None for as many as query heads; fewer than the tp size are shared by neighbouring ranks.
    rotary: rotates queries and keys; None for none. qk_norm: RMSNorm of each query and key head before that.
    recompute: keep only the projections' outputs for backward and compute the attention core again (Korthikanti et al.
        2022, arXiv:2205.05198, section 5).
    Raises ValueError when heads do not divide over the tp ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        tp: Group | None = None,
        sequence_parallel: bool = False,
        rotary: RotaryEmbedding | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
        recompute: bool = False,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        kv_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        ranks = size_of(tp)
        if num_attention_heads % ranks or num_attention_heads % kv_heads or (kv_heads % ranks and ranks % kv_heads):
            raise ValueError(
                f"{num_attention_heads} query heads and {kv_heads} KV heads do not divide over a tp size of {ranks}"
            )
        shared: dict[str, Any] = {"tp": tp, "sequence_parallel": sequence_parallel, "std": std}
        query_size, kv_size = num_attention_heads * self.head_dim, kv_heads * self.head_dim
        slices = min(kv_heads, ranks)
        self.q_proj = ColumnParallelLinear(hidden_size, query_size, bias=qkv_bias, **shared)
        self.k_proj = ColumnParallelLinear(hidden_size, kv_size, bias=qkv_bias, shards=slices, **shared)
        self.v_proj = ColumnParallelLinear(hidden_size, kv_size, bias=qkv_bias, shards=slices, **shared)
        self.o_proj = RowParallelLinear(query_size, hidden_size, bias=output_bias, **shared)
        # Each rank normalises only its own heads, so the norms' gradients are parts.
        self.q_norm = RMSNorm(self.head_dim, eps=norm_eps, tp=tp, partial=True) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=norm_eps, tp=tp, partial=True) if qk_norm else None
        self.rotary, self.recompute = rotary, recompute

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = _together(hidden, self.q_proj, self.k_proj, self.v_proj)
        if self.recompute and torch.is_grad_enabled():
            mixed = checkpoint(self._core, query, key, value, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._core(query, key, value)
        return self.o_proj(mixed)

    def _core(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`[batch, seq, heads/tp * head_dim]` three times to once."""
        query, key, value = (tensor.unflatten(-1, (-1, self.head_dim)) for tensor in (query, key, value))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return mixed.transpose(1, 2).flatten(2)


class TransformerLayer(nn.Module):
    """Norm, attention, residual; norm, MLP, residual: `[batch, seq(/tp), hidden]` to the same shape.

    config: sizes and choices; tp: the group or None; rotary: shared by the layers of a stage, made here if not given.
    recompute: "none", "selective" (the attention core) or "full" (keep only the layer's input).
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        tp: Group | None = None,
        sequence_parallel: bool = False,
        rotary: RotaryEmbedding | None = None,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        config = config.resolved()
        self.recompute = recompute
        if config.positions == "rotary" and rotary is None:
            rotary = RotaryEmbedding(config)
        self.input_layernorm = make_norm(config, tp, sequence_parallel)
        self.self_attn = ParallelAttention(
            config.hidden_size,
            config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            tp=tp,
            sequence_parallel=sequence_parallel,
            rotary=rotary,
            qkv_bias=config.qkv_bias or config.bias,
            output_bias=config.bias,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            recompute=recompute == "selective",
            std=config.initializer_range,
        )
        self.post_attention_layernorm = make_norm(config, tp, sequence_parallel)
        self.mlp = ParallelMLP(
            config.hidden_size,
            config.intermediate_size,
            tp=tp,
            activation=config.activation,
            bias=config.bias,
            sequence_parallel=sequence_parallel,
            std=config.initializer_range,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.recompute == "full" and torch.is_grad_enabled():
            return checkpoint(self._layer, hidden, use_reentrant=False, preserve_rng_state=False)
        return self._layer(hidden)

    def _layer(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def make_norm(config: DecoderConfig, tp: Group | None, sequence_parallel: bool) -> nn.Module:
    """Return the configuration's norm over hidden_size."""
    kind = RMSNorm if config.norm == "rmsnorm" else LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps, tp=tp, sequence_parallel=sequence_parallel)
