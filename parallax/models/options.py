"""Which model: one with its weights, or a new one: a preset or a Hugging Face configuration, and sizes that replace its own.

What follows from a replaced size, unless it is given too: with another --hidden the MLP keeps its share of it, and heads that
fill the hidden size exactly go on doing so; with another --heads a model without grouped queries stays one. The vocabulary
is the model's own and has to have room for every id of the tokenizer; the presets in `VOCAB_FROM_TOKENIZER` have none of
their own and take the tokenizer's size. --vocab replaces either.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from parallax.errors import ConfigError
from parallax.flags import named
from parallax.models.config import DecoderConfig
from parallax.models.hugging_face_config import read_hugging_face_config
from parallax.models.presets import load_model_config

VOCAB_FROM_TOKENIZER = ("tiny",)
# Which option replaces a field of the model's configuration.
OPTION_OF_FIELD = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
}
FFN_MULTIPLE = 16  # a scaled MLP stays divisible by the usual tp sizes

_FROM_MODEL = "from --model"


@dataclass(frozen=True)
class ModelOptions:
    """The model to train: one that is there already, or a new one with random weights."""

    init: Annotated[
        str | None, named("init", "pretrained-checkpoint", metavar="FOLDER", default="a new model, random weights")
    ] = None
    """Start from the weights of a Hugging Face model's folder, or of the newest checkpoint of a run, by its path or an address,
    such as s3://bucket/run; the model and, unless it is given, the tokenizer are that folder's."""

    model: Annotated[str, named("model", metavar="NAME|PATH")] = "tiny"
    """tiny, gpt2-124m, llama-1b, llama3-8b, llama3-70b, llama3-405b, gpt3-175b, qwen3-0.6b, or a Hugging Face config.json."""

    layers: Annotated[int | None, named("layers", "num-layers", metavar="INT", default=_FROM_MODEL)] = None
    """Number of transformer layers."""

    hidden: Annotated[int | None, named("hidden", "hidden-size", metavar="INT", default=_FROM_MODEL)] = None
    """Hidden size; without --ffn the MLP is scaled with it."""

    heads: Annotated[int | None, named("heads", "num-attention-heads", metavar="INT", default=_FROM_MODEL)] = None
    """Number of attention heads."""

    kv_heads: Annotated[int | None, named("kv-heads", "num-query-groups", metavar="INT", default=_FROM_MODEL)] = None
    """Number of key-value heads, each shared by heads / kv-heads query heads."""

    ffn: Annotated[int | None, named("ffn", "ffn-hidden-size", metavar="INT", default=_FROM_MODEL)] = None
    """Intermediate size of the MLP."""

    vocab: Annotated[
        int | None, named("vocab", "vocab-size", metavar="INT", default=f"{_FROM_MODEL}; tiny: the tokenizer's")
    ] = None
    """Number of token ids; at least the tokenizer's."""


@dataclass(frozen=True)
class FinetuneModelOptions(ModelOptions):
    """The model to train: one that is there already, or a new one with random weights."""

    init: Annotated[
        str | None,
        named(
            "init",
            "pretrained-checkpoint",
            metavar="FOLDER|none",
            default="the newest checkpoint of the default pretraining run, if there is one",
        ),
    ] = None
    """Start from the weights of a Hugging Face model's folder, or of the newest checkpoint of a run; the model and, unless they are
    given, tokenizer and chat template are that folder's. none: a new model, random weights."""


def resolve_model(
    options: ModelOptions, tokenizer_size: int | None, sequence_length: int
) -> tuple[DecoderConfig | None, list[str]]:
    """Return the model that the options describe, None if it cannot be read, and what is wrong with it, a sentence each.

    tokenizer_size: number of ids of the tokenizer; None if that cannot be read, a problem that is reported elsewhere.
    `DecoderConfig.check` adds what keeps the model from running in a layout.
    """
    if options.init is not None:
        return _model_of(options, tokenizer_size, sequence_length)
    try:
        base = load_model_config(options.model)
    except ConfigError as error:
        return None, error.problems
    config = _with_sizes(base, options)
    problems = []
    if base.family == "gpt2" and options.kv_heads not in (None, config.num_attention_heads):
        problems.append(
            f"--kv-heads {options.kv_heads} is not possible with --model {options.model}: the gpt2 family has as many "
            "key-value heads as heads; leave it out"
        )
    vocab_size = options.vocab
    if vocab_size is None:
        from_tokenizer = options.model in VOCAB_FROM_TOKENIZER and tokenizer_size is not None
        vocab_size = tokenizer_size if from_tokenizer else base.vocab_size
    assert vocab_size is not None
    if vocab_size < 1:
        problems.append(f"--vocab {vocab_size} must be at least 1")
    elif tokenizer_size is not None and vocab_size < tokenizer_size:
        what = (
            f"--vocab {vocab_size}" if options.vocab is not None else f"--model {options.model}, of {vocab_size} ids,"
        )
        problems.append(
            f"{what} has no room for the {tokenizer_size} ids of the tokenizer; "
            f"use --vocab {tokenizer_size} or more, or another --tokenizer"
        )
    config = replace(config, vocab_size=vocab_size)
    if config.positions == "rotary":
        # Rotary positions have no table that ends: the saved model is to state the length it was trained on.
        longest = max(config.max_position_embeddings, sequence_length)
        config = replace(config, max_position_embeddings=longest)
    return config, problems


def _model_of(
    options: ModelOptions, tokenizer_size: int | None, sequence_length: int
) -> tuple[DecoderConfig | None, list[str]]:
    """Return the model of the folder that --init names, as it is."""
    given = [
        "--" + field.name.replace("_", "-")
        for field in fields(options)
        if field.name != "init" and getattr(options, field.name) != field.default
    ]
    problems = [f"--init takes the model as it is; leave out {', '.join(given)}"] if given else []
    try:
        config = read_hugging_face_config(str(options.init))
    except ConfigError as error:
        return None, problems + [f"--init {problem}" for problem in error.problems]
    if tokenizer_size is not None and config.vocab_size < tokenizer_size:
        problems.append(
            f"the model of --init {options.init}, of {config.vocab_size} ids, has no room for the {tokenizer_size} ids of the "
            "tokenizer; use the --tokenizer that it was trained with"
        )
    limit = config.max_position_embeddings
    if config.positions == "rotary" and sequence_length > limit:
        problems.append(
            f"--seq-len {sequence_length} is longer than the {limit} positions of the model of --init {options.init}; use at most "
            f"{limit}, or a copy of the folder whose config.json says more"
        )
    return config, problems


def _with_sizes(base: DecoderConfig, options: ModelOptions) -> DecoderConfig:
    """Return `base`, which is resolved, with the sizes that are given, and those that follow from them."""
    sizes: dict[str, Any] = {
        field: getattr(options, name) for field, name in OPTION_OF_FIELD.items() if field != "vocab_size"
    }
    if options.hidden is not None and options.ffn is None:
        scaled = base.intermediate_size * options.hidden / base.hidden_size
        sizes["intermediate_size"] = (
            round(scaled) if scaled.is_integer() else -int(-scaled // FFN_MULTIPLE) * FFN_MULTIPLE
        )
    if options.kv_heads is None and base.num_key_value_heads == base.num_attention_heads:
        sizes["num_key_value_heads"] = options.heads
    config = replace(base, **{name: size for name, size in sizes.items() if size is not None})
    if base.query_size == base.hidden_size:
        hidden, heads = config.hidden_size, config.num_attention_heads
        # 0, when the heads do not fill the hidden size, is what `DecoderConfig.check` reports.
        config = replace(config, head_dim=hidden // heads if heads > 0 and hidden % heads == 0 else 0)
    return config
