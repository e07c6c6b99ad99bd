"""The transformer layer: attention and MLP, each after a norm and added to what goes by.

With sequence parallelism, inputs and outputs are `[batch, seq/tp, hidden]`: the norms and the residual work on this rank's part.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallax.mesh import Group
from parallax.models.attention import ParallelAttention, Rows
from parallax.models.config import DecoderConfig
from parallax.models.mlp import ParallelMLP
from parallax.models.rotary import RotaryEmbedding
from parallax.tensor_parallel.gathered_input import gathered_input
from parallax.tensor_parallel.norm import LayerNorm, RMSNorm
from parallax.tensor_parallel.scopes import ParameterScope
from parallax.tensor_parallel.segments import Segment, Tensors, into_columns, out_of_rows


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
        self.recompute, self.tp, self.sequence_parallel = recompute, tp, sequence_parallel
        self.scope = ParameterScope("layer", self.parameters)
        self.exact_sums = False  # as of the parallel layers
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

    def forward(self, hidden: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
        hidden = self.scope.entered(hidden)
        if self.recompute == "full" and torch.is_grad_enabled():
            hidden = checkpoint(self._layer, hidden, rows, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden = self._layer(hidden, rows)
        return self.scope.left(hidden)

    def _layer(self, hidden: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rows)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def segments(self, rows: Rows | None = None) -> list[Segment]:
        """Return the layer cut where it communicates over tp; whole if that, or recomputing it whole, leaves nothing to cut."""
        if self.tp is None or self.recompute == "full":
            return [Segment(lambda hidden: (self(hidden, rows),))]

        def wide(normed: torch.Tensor) -> torch.Tensor:
            # Its gradient is summed over tp between two segments, in its type.
            return normed.double() if self.exact_sums else normed

        def before_attention(hidden: torch.Tensor) -> Tensors:
            hidden = self.scope.entered(hidden)
            return wide(self.input_layernorm(hidden)), hidden

        def attention(normed: torch.Tensor, hidden: torch.Tensor) -> Tensors:
            return self.self_attn.part(normed, rows, for_attention), hidden

        def between(mixed: torch.Tensor, hidden: torch.Tensor) -> Tensors:
            hidden = hidden + self.self_attn.o_proj.add_bias(mixed)
            return wide(self.post_attention_layernorm(hidden)), hidden

        def mlp(normed: torch.Tensor, hidden: torch.Tensor) -> Tensors:
            return self.mlp.part(normed, for_mlp), hidden

        def after_mlp(fed: torch.Tensor, hidden: torch.Tensor) -> Tensors:
            return (self.scope.left(hidden + self.mlp.down_proj.add_bias(fed)),)

        for_attention, for_mlp = (gathered_input(self.tp, self.sequence_parallel) for _ in range(2))
        return [
            into_columns(before_attention, self.tp, for_attention),
            out_of_rows(attention, self.tp, for_attention),
            into_columns(between, self.tp, for_mlp),
            out_of_rows(mlp, self.tp, for_mlp),
            Segment(after_mlp),
        ]


def make_norm(config: DecoderConfig, tp: Group | None, sequence_parallel: bool) -> nn.Module:
    """Return the configuration's norm over hidden_size."""
    kind = RMSNorm if config.norm == "rmsnorm" else LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps, tp=tp, sequence_parallel=sequence_parallel)
