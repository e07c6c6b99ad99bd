"""Named model sizes, and what --model names: one of them, or the model of a Hugging Face config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallax.errors import ConfigError
from parallax.models.config import DecoderConfig
from parallax.models.hugging_face_config import GPT, read_hugging_face_config

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
        **GPT,
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
        **GPT,
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

    Raises ConfigError, a sentence for each problem: an unknown name, an unreadable file or a model of another kind.
    """
    if name in PRESETS:
        return PRESETS[name].resolved()
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        what = ": there is no such file" if file.suffix == ".json" else " is no preset and no file"
        raise ConfigError(f"--model {name}{what}; use one of {', '.join(PRESETS)}, or a config.json")
    try:
        return read_hugging_face_config(file)
    except ConfigError as error:
        raise ConfigError([f"--model {problem}" for problem in error.problems]) from None
