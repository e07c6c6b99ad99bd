"""The configuration of one decoder, in Hugging Face's words, and what follows from it by arithmetic.

One set of fields covers GPT-2/3 (LayerNorm, GELU, learned positions, biases), Llama and Mistral (RMSNorm, SwiGLU,
rotary, grouped-query attention), Qwen2 (biases on q, k, v) and Qwen3 (norms of q and k heads). No torch here: the command line
and the planner read this without importing it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from parallax.mesh import Layout

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and choices of a decoder-only transformer.

    head_dim 0 stands for hidden_size / num_attention_heads and num_key_value_heads 0 for num_attention_heads; `resolved`
    fills them in. norm: "rmsnorm" or "layernorm". activation: "swiglu" (gate and up projections) or "gelu" (up only, the
    tanh form). positions: "rotary" or "learned".
    """

    family: str = "llama"
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 2048
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    activation: str = "swiglu"
    positions: str = "rotary"
    rope_theta: float = 10000.0
    bias: bool = False  # on every linear layer (GPT-2)
    qkv_bias: bool = False  # on q, k and v only (Qwen2)
    qk_norm: bool = False  # RMSNorm of each q and k head (Qwen3)
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    rope_scaling: tuple[tuple[str, float | int | str], ...] = ()  # Llama 3.1's, as sorted pairs; empty: none

    def resolved(self) -> DecoderConfig:
        """Return this configuration with the derived sizes filled in."""
        from dataclasses import replace

        heads = self.num_attention_heads
        return replace(
            self,
            num_key_value_heads=self.num_key_value_heads or heads,
            head_dim=self.head_dim or (self.hidden_size // heads if heads else 0),
        )

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    def check(self, layout: Layout, sequence_length: int, sequence_parallel: bool, balanced: bool = True) -> list[str]:
        """Return what keeps this model from running in `layout`, a sentence each.

        balanced: every stage gets at least a layer; a pipeline layout of the user's may have stages without any.
        """
        tp = layout.tp
        problems = [
            f"--{flag} {value} must be at least 1"
            for flag, value in (
                ("layers", self.num_hidden_layers),
                ("hidden", self.hidden_size),
                ("heads", self.num_attention_heads),
                ("ffn", self.intermediate_size),
                ("seq-len", sequence_length),
            )
            if value < 1
        ]
        if problems:
            return problems
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if not self.head_dim or (self.head_dim * heads != self.hidden_size and self.family == "gpt2"):
            problems.append(
                f"--heads {heads} must divide --hidden {self.hidden_size}; use {_divisors(self.hidden_size)}"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            problems.append(f"rotary positions need an even head size, not {self.head_dim}; change --heads or --hidden")
        if kv_heads < 1 or heads % kv_heads:
            problems.append(f"--kv-heads {kv_heads} must divide --heads {heads}; use {_divisors(heads)}")
        if tp >= 1 and heads % tp:
            problems.append(f"--tp {tp} must divide num_attention_heads={heads}; use {_divisors(heads)}")
        if tp >= 1 and kv_heads >= 1 and kv_heads % tp and tp % kv_heads:
            fitting = tuple(
                n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
            )
            problems.append(
                f"--tp {tp} must divide or be a multiple of num_key_value_heads={kv_heads}; use {_join(fitting)}"
            )
        if tp >= 1 and self.intermediate_size % tp:
            near = tuple(tp * n for n in (self.intermediate_size // tp, self.intermediate_size // tp + 1) if n)
            problems.append(f"--tp {tp} must divide --ffn {self.intermediate_size}; use --ffn {_join(near)}")
        if balanced and layout.pp > self.num_hidden_layers:
            problems.append(
                f"--pp {layout.pp} needs at least {layout.pp} layers, the model has {self.num_hidden_layers}; "
                f"use --pp {self.num_hidden_layers} or fewer, or more --layers"
            )
        if sequence_parallel and tp > 1 and sequence_length % tp:
            problems.append(
                f"--sp needs --seq-len {sequence_length} to divide by --tp {tp}; use {_nearest(sequence_length, tp)}"
            )
        if self.positions == "learned" and sequence_length > self.max_position_embeddings:
            limit = self.max_position_embeddings
            problems.append(
                f"--seq-len {sequence_length} is longer than the model's {limit} positions; use at most {limit}"
            )
        return problems


def _divisors(number: int) -> str:
    small = [n for n in range(1, min(math.isqrt(number), 1 << 16) + 1) if number % n == 0]
    return _join(tuple(sorted({*small, *(number // n for n in small)})[-8:]))


def _nearest(number: int, multiple: int) -> str:
    return _join(tuple(n for n in (number // multiple * multiple, (number // multiple + 1) * multiple) if n))


def _join(numbers: tuple[int, ...]) -> str:
    return " or ".join([", ".join(map(str, numbers[:-1]))] * (len(numbers) > 1) + [str(numbers[-1])]) if numbers else ""


def layer_parameters(config: DecoderConfig) -> int:
    """Return the number of parameters of one decoder layer."""
    h, q, kv, f = config.hidden_size, config.query_size, config.key_value_size, config.intermediate_size
    norms = 2 * h * (2 if config.norm == "layernorm" else 1) + (2 * config.head_dim if config.qk_norm else 0)
    biases = (q + 2 * kv if config.bias or config.qkv_bias else 0) + ((h + f + h) if config.bias else 0)
    return layer_matrix_parameters(config) + norms + biases


def linear_layers(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Return {name: (outputs, inputs)} of every linear layer, by the names that modules have, the head last."""
    h, q, kv, f = config.hidden_size, config.query_size, config.key_value_size, config.intermediate_size
    gate = {"mlp.gate_proj": (f, h)} if config.activation == "swiglu" else {}
    attention = {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q)}
    layer = {f"self_attn.{name}": sizes for name, sizes in attention.items()}
    layer |= gate | {"mlp.up_proj": (f, h), "mlp.down_proj": (h, f)}
    result = {
        f"model.layers.{index}.{name}": sizes
        for index in range(config.num_hidden_layers)
        for name, sizes in layer.items()
    }
    return result | {"lm_head": (config.vocab_size, h)}


def layer_matrix_parameters(config: DecoderConfig) -> int:
    """Return how many of a layer's parameters are multiplied with every token."""
    h, q, kv, f = config.hidden_size, config.query_size, config.key_value_size, config.intermediate_size
    return h * q + 2 * h * kv + q * h + (3 if config.activation == "swiglu" else 2) * h * f


def num_parameters(config: DecoderConfig) -> int:
    """Return the number of parameters of the whole model, tied embeddings once, without padding."""
    h = config.hidden_size
    embeddings = config.vocab_size * h * (1 if config.tie_word_embeddings else 2)
    positions = config.max_position_embeddings * h if config.positions == "learned" else 0
    final_norm = h * (2 if config.norm == "layernorm" else 1)
    return config.num_hidden_layers * layer_parameters(config) + embeddings + positions + final_norm


def flops_per_token(config: DecoderConfig, sequence_length: float) -> float:
    """Return the floating-point operations of training on one token, forward and backward.

    6 per parameter that takes part in a matrix product (the head does; looking up an embedding, norms and biases do not), and
    attention's two products, of which causal masking leaves half: 6 * layers * heads * head_dim * seq. Recomputation is not
    counted: it is no work of the model's (Narayanan et al. 2021, arXiv:2104.04473; Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B).
    """
    layer = layer_matrix_parameters(config) + config.query_size * sequence_length
    return 6.0 * (config.num_hidden_layers * layer + config.vocab_size * config.hidden_size)
