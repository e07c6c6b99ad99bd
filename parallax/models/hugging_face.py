"""The tensors of a Hugging Face checkpoint, and the model's parameters that each is made of.

For Llama, Mistral and Qwen the two are the same, name by name. GPT-2 stores its linear weights transposed (`Conv1D`) and
q, k and v fused into one, so its tensors are made of one or three parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from parallax.models.config import DecoderConfig


def _same(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0]


def _back_same(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor]


def _transposed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts), 0).t().contiguous()


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts), 0)


@dataclass(frozen=True)
class HuggingFaceTensor:
    """One tensor of a Hugging Face checkpoint: `name` there, the names of the full parameters it is made of here.

    make: the parameters, whole and in the order of `sources`, to the tensor; take: the tensor back to the parameters.
    """

    name: str
    sources: tuple[str, ...]
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor] = _same
    take: Callable[[torch.Tensor], list[torch.Tensor]] = _back_same

    @property
    def is_stored_as_is(self) -> bool:
        """Whether the tensor is its one source, unchanged, so that a slice of one is that slice of the other."""
        return self.make is _same

    def shape(self, sources: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of what `make` gives for whole parameters of these shapes."""
        joined = (sum(shape[0] for shape in sources), *sources[0][1:]) if sources[0] else ()
        return joined[::-1] if self.make is _transposed else joined


def hugging_face_tensors(config: DecoderConfig) -> list[HuggingFaceTensor]:
    """Return every tensor of the checkpoint of a model of this configuration, in the model's order."""
    config = config.resolved()
    layers = range(config.num_hidden_layers)
    if config.family == "gpt2":
        return _gpt2_tensors(config)
    names = ["model.embed_tokens.weight"]
    for layer in layers:
        prefix = f"model.layers.{layer}"
        names.append(f"{prefix}.input_layernorm.weight")
        for projection in ("q_proj", "k_proj", "v_proj"):
            names.append(f"{prefix}.self_attn.{projection}.weight")
            if config.qkv_bias:
                names.append(f"{prefix}.self_attn.{projection}.bias")
        if config.qk_norm:
            names += [f"{prefix}.self_attn.q_norm.weight", f"{prefix}.self_attn.k_norm.weight"]
        names.append(f"{prefix}.self_attn.o_proj.weight")
        names.append(f"{prefix}.post_attention_layernorm.weight")
        names += [f"{prefix}.mlp.{projection}.weight" for projection in ("gate_proj", "up_proj", "down_proj")]
    names.append("model.norm.weight")
    if not config.tie_word_embeddings:
        names.append("lm_head.weight")
    return [HuggingFaceTensor(name, (name,)) for name in names]


def _linear(there: str, here: Sequence[str], sizes: Sequence[int]) -> list[HuggingFaceTensor]:
    """A transposed, perhaps fused, linear layer: weight and bias."""

    def take_weight(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [part.contiguous() for part in tensor.t().split(list(sizes), 0)]

    def take_bias(tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(tensor.split(list(sizes), 0))

    return [
        HuggingFaceTensor(f"{there}.weight", tuple(f"{name}.weight" for name in here), _transposed, take_weight),
        HuggingFaceTensor(f"{there}.bias", tuple(f"{name}.bias" for name in here), _joined, take_bias),
    ]


def _norm(there: str, here: str) -> list[HuggingFaceTensor]:
    return [HuggingFaceTensor(f"{there}.{leaf}", (f"{here}.{leaf}",)) for leaf in ("weight", "bias")]


def _gpt2_tensors(config: DecoderConfig) -> list[HuggingFaceTensor]:
    hidden, inner = config.hidden_size, config.intermediate_size
    tensors = [
        HuggingFaceTensor("transformer.wte.weight", ("model.embed_tokens.weight",)),
        HuggingFaceTensor("transformer.wpe.weight", ("model.embed_positions.weight",)),
    ]
    for layer in range(config.num_hidden_layers):
        there, here = f"transformer.h.{layer}", f"model.layers.{layer}"
        attention = [f"{here}.self_attn.{name}_proj" for name in "qkv"]
        tensors += _norm(f"{there}.ln_1", f"{here}.input_layernorm")
        tensors += _linear(f"{there}.attn.c_attn", attention, [hidden, hidden, hidden])
        tensors += _linear(f"{there}.attn.c_proj", [f"{here}.self_attn.o_proj"], [hidden])
        tensors += _norm(f"{there}.ln_2", f"{here}.post_attention_layernorm")
        tensors += _linear(f"{there}.mlp.c_fc", [f"{here}.mlp.up_proj"], [inner])
        tensors += _linear(f"{there}.mlp.c_proj", [f"{here}.mlp.down_proj"], [hidden])
    tensors += _norm("transformer.ln_f", "model.norm")
    if not config.tie_word_embeddings:
        tensors.append(HuggingFaceTensor("lm_head.weight", ("lm_head.weight",)))
    return tensors
