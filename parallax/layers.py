"""The parallel layers and blocks, for models of your own: the public shelf, with no code of its own.

    from parallax.layers import ColumnParallelLinear, RowParallelLinear

Every layer takes the tensor-parallel group as a value, `tp=mesh.tp`; without one it is an ordinary layer. A parameter's
`ParameterFacts` say how it is split and what it starts from; layers of your own list theirs in `parameter_facts`, and
optimizer, gradient norm and checkpoint need nothing else. docs/models.md shows a model made of these parts.
"""

from parallax.models.attention import ParallelAttention, Rows, causal_attention
from parallax.models.blocks import TransformerLayer, make_norm
from parallax.models.config import DecoderConfig
from parallax.models.decoder import DecoderStage, PositionEmbedding, StageSpec
from parallax.models.mlp import ParallelMLP
from parallax.models.packed_rows import PackedRows
from parallax.models.rotary import RotaryEmbedding
from parallax.tensor_parallel.facts import (
    ParameterFacts,
    initialize,
    named_parameters_with_facts,
    replicated,
    sharded,
    update_facts,
)
from parallax.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    apply_together,
    column_parallel,
)
from parallax.tensor_parallel.norm import LayerNorm, RMSNorm
from parallax.tensor_parallel.vocabulary import (
    IGNORE_INDEX,
    VocabParallelEmbedding,
    padded_vocab_size,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "IGNORE_INDEX",
    "ColumnParallelLinear",
    "DecoderConfig",
    "DecoderStage",
    "LayerNorm",
    "PackedRows",
    "ParallelAttention",
    "ParallelMLP",
    "ParameterFacts",
    "PositionEmbedding",
    "RMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "Rows",
    "StageSpec",
    "TransformerLayer",
    "VocabParallelEmbedding",
    "apply_together",
    "causal_attention",
    "column_parallel",
    "initialize",
    "make_norm",
    "named_parameters_with_facts",
    "padded_vocab_size",
    "replicated",
    "sharded",
    "update_facts",
    "vocab_parallel_cross_entropy",
]
