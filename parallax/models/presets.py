"""Named model sizes, and the reader of a Hugging Face config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallax.errors import ConfigError
from parallax.models.config import FAMILIES, DecoderConfig

_GPT: dict[str, Any] = {
    "family": "gpt2",
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "bias": True,
}
_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}

# Sizes from the models' papers and published configurations: Radford et al. 2019; Brown et al. 2020, arXiv:2005.14165,
# table 2.1; Llama Team 2024, arXiv:2407.21783, table 3; Qwen Team 2025, arXiv:2505.09388, table 1.
PRESETS: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(num_key_value_heads=4),
    "gpt2-124m": DecoderConfig(
        vocab_size=50257,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        **_GPT,
    ),
    "llama-1b": DecoderConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        tie_word_embeddings=True,
        **_LLAMA3,
    ),
    "llama3-8b": DecoderConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, **_LLAMA3
    ),
    "llama3-70b": DecoderConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, **_LLAMA3
    ),
    "llama3-405b": DecoderConfig(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128, **_LLAMA3
    ),
    "gpt3-175b": DecoderConfig(
        vocab_size=50257,
        hidden_size=12288,
        intermediate_size=49152,
        num_hidden_layers=96,
        num_attention_heads=96,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **_GPT,
    ),
    "qwen3-0.6b": DecoderConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        qk_norm=True,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
}


def load_model_config(name: str) -> DecoderConfig:
    """Return the preset called `name`, or the model that a Hugging Face config.json (or its folder) describes.

    Raises ConfigError, one sentence, for an unknown name, an unreadable file or a model of another kind.
    """
    if name in PRESETS:
        return PRESETS[name].resolved()
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json" and not path.exists():
        raise ConfigError(f"--model {name} is no preset and no file; use one of {', '.join(PRESETS)}, or a config.json")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"--model {name}: there is no such file; use one of {', '.join(PRESETS)}, or a config.json"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--model {name} cannot be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"--model {name} holds no JSON object; a Hugging Face config.json is needed")
    try:
        return from_hugging_face(fields, str(path))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"--model {name} lacks or misstates a field of a Hugging Face configuration: {error}"
        ) from None


def from_hugging_face(fields: dict[str, Any], source: str = "config.json") -> DecoderConfig:
    """Return the decoder that a Hugging Face configuration describes; refuse, by name, what would be computed otherwise."""
    kind = fields.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"{source}: model_type {kind!r} is not supported; use one of {', '.join(FAMILIES)}")
    if kind == "gpt2":
        return _from_gpt2(fields, source)
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{source}: hidden_act {activation!r} is not supported for {kind}; only 'silu' is")
    if fields.get("mlp_bias"):
        raise ConfigError(f"{source}: mlp_bias is not supported for {kind}")
    if kind in ("llama", "qwen3") and fields.get("attention_bias"):
        raise ConfigError(f"{source}: attention_bias is not supported for {kind}")
    window, limit = fields.get("sliding_window"), int(fields.get("max_position_embeddings", 2048))
    if window is not None and fields.get("use_sliding_window", kind == "mistral") and window < limit:
        raise ConfigError(f"{source}: sliding_window {window} is not supported; attention here is full and causal")
    rope = fields.get("rope_parameters") or {}
    scaling = fields.get("rope_scaling") or {key: value for key, value in rope.items() if key != "rope_theta"}
    return DecoderConfig(
        family=kind,
        vocab_size=int(fields["vocab_size"]),
        hidden_size=int(fields["hidden_size"]),
        intermediate_size=int(fields["intermediate_size"]),
        num_hidden_layers=int(fields["num_hidden_layers"]),
        num_attention_heads=int(fields["num_attention_heads"]),
        num_key_value_heads=int(fields.get("num_key_value_heads") or 0),
        head_dim=int(fields.get("head_dim") or 0),
        max_position_embeddings=limit,
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", fields.get("rope_theta", 10000.0))),
        rope_scaling=_rope_scaling(scaling, source),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        initializer_range=float(fields.get("initializer_range", 0.02)),
    ).resolved()


def _rope_scaling(scaling: dict[str, Any], source: str) -> tuple[tuple[str, float | int | str], ...]:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return ()
    if kind != "llama3":
        raise ConfigError(f"{source}: rope scaling {kind!r} is not supported; only 'llama3' and none are")
    keys = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")
    return tuple((key, scaling[key]) for key in keys)


def _from_gpt2(fields: dict[str, Any], source: str) -> DecoderConfig:
    activation = fields.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        raise ConfigError(f"{source}: activation_function {activation!r} is not supported; only 'gelu_new' is")
    if fields.get("scale_attn_by_inverse_layer_idx") or not fields.get("scale_attn_weights", True):
        raise ConfigError(f"{source}: attention scaled otherwise than by 1/sqrt(head size) is not supported")
    hidden = int(fields["n_embd"])
    return DecoderConfig(
        vocab_size=int(fields["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(fields.get("n_inner") or 4 * hidden),
        num_hidden_layers=int(fields["n_layer"]),
        num_attention_heads=int(fields["n_head"]),
        max_position_embeddings=int(fields.get("n_positions", 1024)),
        norm_eps=float(fields.get("layer_norm_epsilon", 1e-5)),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", True)),
        initializer_range=float(fields.get("initializer_range", 0.02)),
        **_GPT,
    ).resolved()


def to_hugging_face(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the Hugging Face config.json of `config`; `from_hugging_face` gives the same configuration back."""
    common: dict[str, Any] = {
        "model_type": config.family,
        "architectures": [ARCHITECTURES[config.family]],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "torch_dtype": dtype,
    }
    if config.family == "gpt2":
        return common | {
            "n_embd": config.hidden_size,
            "n_inner": config.intermediate_size,
            "n_layer": config.num_hidden_layers,
            "n_head": config.num_attention_heads,
            "n_positions": config.max_position_embeddings,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu_new",
            # Parallax trains without dropout.
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }
    fields = common | {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
    }
    if config.rope_scaling:
        fields["rope_scaling"] = {"rope_type": "llama3", **dict(config.rope_scaling)}
    if config.family == "mistral":
        fields["sliding_window"] = None
    return fields


ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
