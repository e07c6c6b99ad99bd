"""config.json of a Hugging Face model, read and written.

What a field asks for and the decoder does not compute is refused by name, never ignored: a model that runs and gives other logits
than its author's is the worst outcome. Fields that concern training only (dropout), or nothing (`use_cache`), are skipped. A field
that is absent has the value that transformers gives it. No torch here.
"""

from __future__ import annotations

import json
from typing import Any

from parallax.errors import ConfigError
from parallax.models.config import FAMILIES, DecoderConfig
from parallax.models.config_fields import Fields, shown
from parallax.storage import Location, location

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
BARE_ARCHITECTURES = {"gpt2": "GPT2Model"} | {
    family: name.replace("ForCausalLM", "Model") for family, name in ARCHITECTURES.items() if family != "gpt2"
}
# What a field must be for the decoder to compute what it says; transformers' default comes first.
_ONLY_CAUSAL = {"is_causal": (True,)}
_ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "llama": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    "mistral": {"hidden_act": ("silu",)},
    "qwen2": {"hidden_act": ("silu",)},
    "qwen3": {"hidden_act": ("silu",), "attention_bias": (False,)},
}
# Where the families' defaults differ, in transformers: KV heads (0: as many as heads), head size (0: hidden / heads), positions.
_KV_HEADS = {"llama": 0, "mistral": 8, "qwen2": 32, "qwen3": 32}
_HEAD_DIM = {"qwen3": 128}
_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_SLIDING_WINDOW, _MAX_WINDOW_LAYERS, _ROPE_THETA = 4096, 28, 10000.0

# What is more is a mistake; with MOST, the limits keep every product of sizes within 64 bits.
MOST_LAYERS, MOST_WIDE, MOST_HEAD_DIM = 10_000, 1 << 20, 1 << 16
GPT: dict[str, Any] = {
    "family": "gpt2",
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "bias": True,
}


def read_hugging_face_config(path: str | Location) -> DecoderConfig:
    """Return the model that a config.json, or a folder with one in it, describes.

    Raises ConfigError, a sentence for each problem: no readable JSON, or a model of another kind.
    """
    return from_hugging_face(read_fields(path), str(path))


def read_fields(path: str | Location) -> dict[str, Any]:
    """Return the fields of a config.json, or of the one in a folder; raise ConfigError unless it is a JSON object."""
    path = location(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {file}; a Hugging Face config.json is needed") from None
    except RecursionError:
        raise ConfigError(f"{file} cannot be read as JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # also what is no UTF-8
        # Of a number of thousands of digits Python says which of its own settings to change.
        raise ConfigError(f"{file} cannot be read as JSON: {str(error).partition('; use sys.')[0]}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} holds no JSON object; a Hugging Face config.json is needed")
    return fields


def from_hugging_face(fields: dict[str, Any], source: str = "config.json") -> DecoderConfig:
    """Return the decoder that a Hugging Face configuration describes.

    Raises ConfigError, a sentence for each problem, naming the field: missing, no such number, or not supported.
    """
    given, kind = Fields(fields, source), fields.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"{source}: model_type {given.shown('model_type')} is not supported; use one of {known}")
    _refuse_others(given, kind)
    config = _gpt2(given) if kind == "gpt2" else _llama_like(given, kind)
    if not given.problems:
        _refuse_misfits(given, config)
    if given.problems:
        raise ConfigError(given.problems)
    return config.resolved()


def _refuse_others(given: Fields, kind: str) -> None:
    """Refuse what would be computed otherwise than the configuration says."""
    fields = given.fields
    known = (ARCHITECTURES[kind], BARE_ARCHITECTURES[kind])
    names = fields.get("architectures") or []
    if not isinstance(names, list):
        given.refuse(f"architectures {shown(names)} must be a list of names; {known[0]} is for {kind}")
    for name in names if isinstance(names, list) else ():
        if name not in known:
            given.refuse(f"architecture {shown(name)} is not supported; only {known[0]} is for {kind}")
    if fields.get("quantization_config"):
        given.refuse("quantization_config is not supported; use a model whose weights are not quantized")
    for name, possible in (_ONLY[kind] | _ONLY_CAUSAL).items():
        value = fields.get(name, possible[0])
        if not any(value is one or (isinstance(one, str) and value == one) for one in possible):
            given.refuse(f"{name} {shown(value)} is not supported for {kind}; only {possible[0]!r} is")


def _refuse_misfits(given: Fields, config: DecoderConfig) -> None:
    """Refuse sizes, each of them possible, that do not go together."""
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    if not config.head_dim and hidden % heads:
        names = ("n_head", "n_embd") if config.family == "gpt2" else ("num_attention_heads", "hidden_size")
        given.refuse(f"{names[0]} {heads} must divide {names[1]} {hidden}")
    elif config.positions == "rotary" and config.resolved().head_dim % 2:
        given.refuse(f"head_dim {config.resolved().head_dim} must be even for rotary positions")
    if kv_heads and heads % kv_heads:
        given.refuse(f"num_key_value_heads {kv_heads} must divide num_attention_heads {heads}")


def _gpt2(given: Fields) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=given.whole("vocab_size"),
        hidden_size=(hidden := given.whole("n_embd", most=MOST_WIDE)),
        intermediate_size=given.whole("n_inner", 4 * hidden),
        num_hidden_layers=given.whole("n_layer", most=MOST_LAYERS),
        num_attention_heads=given.whole("n_head", most=MOST_WIDE),
        max_position_embeddings=given.whole("n_positions", 1024),
        norm_eps=float(given.number("layer_norm_epsilon", 1e-5)),
        tie_word_embeddings=given.flag("tie_word_embeddings", True),
        initializer_range=float(given.number("initializer_range", 0.02)),
        **GPT,
    )


def _llama_like(given: Fields, kind: str) -> DecoderConfig:
    fields = given.fields
    layers = given.whole("num_hidden_layers", most=MOST_LAYERS)
    positions = given.whole("max_position_embeddings", _POSITIONS[kind])
    _refuse_windows(given, kind, layers, positions)
    # Absent it is the family's default, null it is as many as heads.
    kv_heads = given.whole("num_key_value_heads", 0 if "num_key_value_heads" in fields else _KV_HEADS[kind])
    head_dim = given.whole("head_dim", 0 if "head_dim" in fields else _HEAD_DIM.get(kind, 0), most=MOST_HEAD_DIM)
    theta, scaling = _rope(given, positions)
    return DecoderConfig(
        family=kind,
        vocab_size=given.whole("vocab_size"),
        hidden_size=given.whole("hidden_size", most=MOST_WIDE),
        intermediate_size=given.whole("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=given.whole("num_attention_heads", most=MOST_WIDE),
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        norm_eps=float(given.number("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        tie_word_embeddings=given.flag("tie_word_embeddings", False),
        initializer_range=float(given.number("initializer_range", 0.02)),
    )


def _refuse_windows(given: Fields, kind: str, layers: int, positions: int) -> None:
    """Refuse attention that sees only the last tokens, unless no text is long enough for it to matter."""
    fields = given.fields
    types = fields.get("layer_types")
    if types is not None and kind in ("qwen2", "qwen3"):
        if not isinstance(types, list) or any(one != "full_attention" for one in types):
            given.refuse("layer_types other than 'full_attention' are not supported; attention here is full and causal")
        return
    window = fields.get("sliding_window", _SLIDING_WINDOW)
    uses = kind == "mistral" or (
        kind in ("qwen2", "qwen3")
        and given.flag("use_sliding_window", False)
        and given.whole("max_window_layers", _MAX_WINDOW_LAYERS) < layers
    )
    if uses and window is not None and given.whole("sliding_window", _SLIDING_WINDOW) < positions:
        given.refuse(f"sliding_window {window} is not supported; attention here is full and causal")


def _rope(given: Fields, positions: int) -> tuple[float, tuple[tuple[str, float | int | str], ...]]:
    """Return theta, and Llama 3's scaling as sorted pairs: from `rope_scaling`, or `rope_parameters` as it is called now."""
    fields = given.fields
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        given.refuse("rope parameters that differ between layers are not supported; one object of numbers is needed")
        return _ROPE_THETA, ()
    theta = given.number("rope_theta", _ROPE_THETA, within={"rope_theta": fields.get("rope_theta", _ROPE_THETA)} | rope)
    for part in (rope, fields):
        if part.get("partial_rotary_factor") not in (None, 1, 1.0):
            given.refuse(f"partial_rotary_factor {shown(part['partial_rotary_factor'])} is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return float(theta), ()
    if kind != "llama3":
        given.refuse(f"rope_type {shown(kind)} is not supported; only 'llama3' and none are")
        return float(theta), ()
    rope = {"original_max_position_embeddings": positions} | rope
    missing = [name for name in ("factor", "high_freq_factor", "low_freq_factor") if name not in rope]
    if missing:
        given.refuse(f"rope scaling 'llama3' lacks {', '.join(missing)}")
        return float(theta), ()
    names = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")
    scaling = {name: given.number(name, 1.0, within=rope) for name in names}
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        given.refuse("low_freq_factor of the rope scaling must be below high_freq_factor")
    return float(theta), tuple(scaling.items())


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
