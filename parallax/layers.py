"""The parallel layers and blocks, for models of your own: the public shelf, with no code of its own.

    from parallax.layers import ColumnParallelLinear, RowParallelLinear

Every layer takes the tensor-parallel group as a value, `tp=mesh.tp`; without one it is an ordinary layer.
"""

from parallax.models.blocks import ParallelAttention, ParallelMLP, TransformerLayer
from parallax.models.config import DecoderConfig
from parallax.models.rotary import RotaryEmbedding
from parallax.tensor_parallel.facts import initialize
from parallax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from parallax.tensor_parallel.norm import LayerNorm, RMSNorm
from parallax.tensor_parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "DecoderConfig",
    "LayerNorm",
    "ParallelAttention",
    "ParallelMLP",
    "RMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "TransformerLayer",
    "VocabParallelEmbedding",
    "initialize",
    "vocab_parallel_cross_entropy",
]
