"""Attention, split over tp: its heads are divided over the ranks, with an AllReduce at the output.

With fewer KV heads than ranks, neighbouring ranks hold the same KV head and the sum of their gradients is the true one. What
attends to what is causal over the whole row, unless the caller hands over `Rows` that know better: packed documents
(packed_rows.py) or the keys and values of tokens gone by (key_value_cache.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallax.mesh import Group, size_of
from parallax.models.rotary import RotaryEmbedding
from parallax.tensor_parallel.gathered_input import GatheredInput
from parallax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, apply_together
from parallax.tensor_parallel.norm import RMSNorm


class Rows(Protocol):
    """What the rows of a batch hold, where that is not one text each, from its beginning."""

    @property
    def positions(self) -> torch.Tensor | None:
        """Position of each token in its text, int64 `[batch, seq]`; None for 0 .. seq - 1."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        """Return what causal attention makes of `[batch, seq, heads, head_dim]`, in the query's shape.

        layer: whose attention it is, for what is kept from one call to the next.
        """


class ParallelAttention(nn.Module):
    """Causal grouped-query attention, `[batch, seq(/tp), hidden]` to the same shape, heads divided over tp.

    With sequence parallelism the input is this rank's part of the sequence; the rows handed to `forward` are whole always.

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
        self.compiled: Callable[..., torch.Tensor] | None = None  # what follows the norms; see parallax.models.compiled

    def forward(self, hidden: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
        return self.o_proj(self._mixed(hidden, rows))

    def part(
        self, hidden: torch.Tensor, rows: Rows | None = None, gathered: GatheredInput | None = None
    ) -> torch.Tensor:
        """Return this rank's part of the sum over tp, without bias; `hidden` and the result are whole sequences.

        gathered: what `hidden` came from, and comes from again in backward; None to keep it.
        """
        return self.o_proj.part(self._mixed(hidden, rows, communicate=False, gathered=gathered))

    def _mixed(
        self, hidden: torch.Tensor, rows: Rows | None, communicate: bool = True, gathered: GatheredInput | None = None
    ) -> torch.Tensor:
        columns = self.q_proj, self.k_proj, self.v_proj
        query, key, value = apply_together(hidden, *columns, communicate=communicate, gathered=gathered)
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._core, query, key, value, rows, use_reentrant=False, preserve_rng_state=False)
        return self._core(query, key, value, rows)

    def _core(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        """`[batch, seq, heads/tp * head_dim]` three times to once."""
        query, key, value = (tensor.unflatten(-1, (-1, self.head_dim)) for tensor in (query, key, value))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.compiled is not None and self.rotary is not None and rows is None:
            return self.compiled(
                query, key, value, *self.rotary.tables(query.shape[1], query.device, query.dtype)
            ).flatten(2)
        if self.rotary is not None:
            positions = None if rows is None else rows.positions
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        mixed = causal_attention(query, key, value) if rows is None else rows.attend(query, key, value, self)
        return mixed.flatten(2)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return attention of `[batch, seq, heads, head_dim]`, each token to itself and those before it in its row.

    mask: bool `[queries, keys]`, what may be attended to, where it is not that.
    """
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return mixed.transpose(1, 2)
