"""Bytes that one rank holds, by arithmetic: weights, gradients, optimizer states, and what forward keeps for backward.

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4), applied to the blocks of this library. For n
tokens of a micro-batch, element size e, tp size t, and r = n / t with sequence parallelism, else n, a layer keeps

    e * 4 r hidden                      inputs of the two norms and of the two column-parallel products
    e * 2 n (query + key_value) / t     q, k, v and the output of attention
    e * 3 n ffn / t                     gate, up and their product (2 with gelu)

and a little fp32: a statistic or two per token of each norm, and of each head of the flash attention. The attention scores are
never kept, so selective recomputation saves little here; full recomputation keeps the layer's input, e * r hidden, and needs
one layer's worth again while that layer runs backward. There is no dropout, so none of the paper's masks.

The model states follow Rajbhandari et al. 2020 (arXiv:1910.02054, section 3), with fp32 gradients.
Left out: the framework itself, the allocator's fragmentation, and buffers of communication.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from parallax.models.config import DecoderConfig

FP32_BYTES = 4
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}  # fp8: quantised weights come on top, see Memory


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    activations: of all micro-batches in flight. working: lives only while a layer or the loss runs. fp8_weights: the copies of
    weights that FP8 products are of, for a step; where the weights are gathered for each use (ZeRO 3), of the layers in use.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    fp8_weights: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class Shapes:
    """What the formulas need to know of a rank: its micro-batch, its slice of each matrix, and the kind of run.

    micro_batch, seq_len: of the tokens. tp: its size. sp: sequence parallelism. precision, recompute, loss_chunk: as the options
    say.
    """

    config: DecoderConfig
    micro_batch: int
    seq_len: int
    tp: int = 1
    sp: bool = False
    precision: str = "fp32"
    recompute: str = "none"
    loss_chunk: int = 0

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def num_tokens(self) -> int:
        return self.micro_batch * self.seq_len

    @property
    def residual_tokens(self) -> int:
        """Tokens per rank between the blocks."""
        return self.num_tokens // self.tp if self.sp else self.num_tokens

    @property
    def chunk_tokens(self) -> int:
        """Tokens whose logits are there at once."""
        return min(self.loss_chunk, self.num_tokens) or self.num_tokens

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one hidden state between the blocks, which is also what one stage sends to the next."""
        return self.residual_tokens * self.config.hidden_size * self.element

    @property
    def query_size(self) -> int:
        return self.config.query_size // self.tp

    @property
    def key_value_size(self) -> int:
        """Features of k (or v) per rank; with fewer KV heads than ranks each holds one whole head."""
        return max(1, self.config.num_key_value_heads // self.tp) * self.config.head_dim


def layer_activation_bytes(shapes: Shapes) -> int:
    """Return what one layer keeps of one micro-batch from forward to backward."""
    if shapes.recompute == "full":
        return shapes.hidden_bytes
    return _whole_layer_bytes(shapes)


def _whole_layer_bytes(shapes: Shapes) -> int:
    config, n = shapes.config, shapes.num_tokens
    heads_out = 2 * (shapes.query_size + shapes.key_value_size)
    mlp_parts = 3 if config.activation == "swiglu" else 2
    kept = shapes.element * n * (heads_out + mlp_parts * config.intermediate_size // shapes.tp)
    kept += 4 * shapes.hidden_bytes + 2 * _norm_statistics(shapes)
    if shapes.recompute == "selective":
        return kept
    kept += FP32_BYTES * n * config.num_attention_heads // shapes.tp  # the log-sum-exp of each row of the scores
    if config.qk_norm:
        heads = (shapes.query_size + shapes.key_value_size) // config.head_dim
        kept += n * heads * (config.head_dim * shapes.element + FP32_BYTES)
    return kept


def _norm_statistics(shapes: Shapes) -> int:
    return shapes.residual_tokens * FP32_BYTES * (2 if shapes.config.norm == "layernorm" else 1)


def logits_bytes(shapes: Shapes, padded_vocab_size: int) -> int:
    """Return what the loss keeps of one micro-batch: the final norm's input and output, and this rank's logits.

    Of chunks it keeps the head's whole input in place of the logits: with sequence parallelism a gathered one.
    """
    normed = 2 * shapes.hidden_bytes + _norm_statistics(shapes)
    if shapes.chunk_tokens < shapes.num_tokens:
        gathered = shapes.num_tokens * shapes.config.hidden_size * shapes.element
        return normed + (gathered if shapes.sp and shapes.tp > 1 else 0)
    return normed + shapes.num_tokens * padded_vocab_size // shapes.tp * shapes.element


def loss_working_bytes(shapes: Shapes, padded_vocab_size: int) -> int:
    """Return what the loss's backward makes besides: the probabilities in fp32 and, in another type, the gradient.

    Of chunks it makes the logits again.
    """
    logits = shapes.chunk_tokens * padded_vocab_size // shapes.tp
    separate = shapes.precision != "fp32" or padded_vocab_size != shapes.config.vocab_size
    again = shapes.element if shapes.chunk_tokens < shapes.num_tokens else 0
    return logits * (FP32_BYTES + again + (shapes.element if separate else 0))


def layer_working_bytes(shapes: Shapes) -> int:
    """Return what one layer needs while it runs backward beyond what it kept: with full recomputation, itself once more."""
    return _whole_layer_bytes(shapes) if shapes.recompute == "full" else 0


@dataclass(frozen=True)
class StateTypes:
    """Types of what is kept of a model, as the options say them.

    num_moments: states of the optimizer beside the main parameters: two of AdamW, one of momentum.
    """

    precision: str = "fp32"
    main_grad: str = "fp32"
    moments: str = "fp32"
    num_moments: int = 2


def model_state_bytes(
    num_elements: int, zero: int, inner: int = 1, across: int = 1, types: StateTypes | None = None
) -> tuple[int, int, int]:
    """Return the bytes of (weights, gradients, optimizer states) of a bucket on one of its holders.

    inner, across: sizes of the levels over which it is divided (`parallax.data_parallel.plan.Levels`). All that a rank keeps of
    the optimizer's states, and with ZeRO 3 of the weights and with 2 of the gradients, is divided: over `inner` what is
    gathered or reduced while the pipeline runs, over both the optimizer's, which are the moments and, for weights that are not
    fp32, the fp32 main parameters.
    """
    types = types or StateTypes()
    states = ELEMENT_BYTES[types.moments] * types.num_moments + (0 if types.precision == "fp32" else FP32_BYTES)
    weights = num_elements // (inner if zero == 3 else 1) * ELEMENT_BYTES[types.precision]
    gradients = num_elements // (inner if zero >= 2 else 1) * ELEMENT_BYTES[types.main_grad]
    return weights, gradients, num_elements // (inner * across) * states
