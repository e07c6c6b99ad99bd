"""config.json: defaults as transformers has them, and everything that the decoder does not compute refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from parallax.errors import ConfigError
from parallax.mesh import Layout
from parallax.models.hugging_face_config import ARCHITECTURES, from_hugging_face, read_hugging_face_config
from parallax.models.presets import load_model_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 130,
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 130, "n_embd": 32, "n_layer": 2, "n_head": 4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_an_absent_field_has_the_value_that_transformers_gives_it(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference; install the test extra")
    fields = GPT2 if kind == "gpt2" else LLAMA | {"model_type": kind, "sliding_window": None}
    theirs = transformers.CONFIG_MAPPING[kind].from_dict({k: v for k, v in fields.items() if k != "model_type"})
    ours = from_hugging_face(fields)
    assert (ours.num_hidden_layers, ours.num_attention_heads, ours.hidden_size) == (
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
        theirs.hidden_size,
    )
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.initializer_range == theirs.initializer_range
    if kind == "gpt2":
        assert ours.norm_eps == theirs.layer_norm_epsilon and ours.intermediate_size == 4 * theirs.n_embd
        return
    assert ours.norm_eps == theirs.rms_norm_eps and ours.intermediate_size == theirs.intermediate_size
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"] and ours.rope_scaling == ()


@pytest.mark.parametrize(
    "fields",
    [
        LLAMA | {"rope_theta": 500.0, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}},
        LLAMA | {"rope_parameters": {"rope_theta": 500.0} | LLAMA3},
        LLAMA | {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default"}},
        LLAMA | {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
    ],
)
def test_rotary_positions_are_what_transformers_computes_of_the_same_fields(fields: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference; install the test extra")
    import torch

    from parallax.models.rotary import inverse_frequencies

    given = json.loads(json.dumps({name: value for name, value in fields.items() if name != "model_type"}))
    theirs = transformers.LlamaConfig.from_dict(given)
    expected = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs).inv_freq
    torch.testing.assert_close(inverse_frequencies(from_hugging_face(fields)), expected, rtol=1e-6, atol=0)


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported; use one of gpt2, llama"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architecture 'LlamaForSequenceClassification' is not"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for llama; only 'silu' is"),
        ({"attention_bias": True}, "attention_bias True is not supported for llama"),
        ({"mlp_bias": True}, "mlp_bias True is not supported for llama"),
        (
            {"model_type": "mistral", "num_key_value_heads": 4, "max_position_embeddings": 32768},
            "sliding_window 4096 is",
        ),
        ({"model_type": "mistral", "sliding_window": 16}, "sliding_window 16 is not supported"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, "sliding_window 4096 is not"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types other than"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported; only 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type 'linear' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "lacks factor, high_freq_factor, low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"factor": -1}}, "factor -1 must be a number above 0"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "must be below high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope parameters that differ between layers"),
        ({"rope_parameters": [1]}, "one object of numbers is needed"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_theta": NAN}, "rope_theta nan must be a number above 0"),
        ({"rope_theta": INFINITY}, "rope_theta inf must be a number above 0"),
        ({"rope_theta": "10000"}, "rope_theta '10000' must be a number above 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps -1e-06 must be a number above 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps True must be a number above 0"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers 2.0 must be a whole number from 1 to 10000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 must be a whole number from 1 to 10000"),
        ({"num_hidden_layers": None}, "num_hidden_layers null must be a whole number"),
        ({"model_type": None}, "model_type null is not supported"),
        ({"is_causal": False}, "is_causal False is not supported for llama; only True is"),
        ({"model_type": "qwen2", "is_causal": False}, "is_causal False is not supported for qwen2"),
        ({"architectures": 5}, "architectures 5 must be a list of names; LlamaForCausalLM is for llama"),
        ({"architectures": "LlamaForCausalLM"}, "architectures 'LlamaForCausalLM' must be a list of names"),
        ({"architectures": [5]}, "architecture 5 is not supported"),
        ({"num_hidden_layers": {"a": ["b" * 100]}}, "..."),
        ({"vocab_size": 0}, "vocab_size 0 must be a whole number from 1"),
        ({"hidden_size": -128}, "hidden_size -128 must be a whole number from 1"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 must divide hidden_size 128"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5 must divide num_attention_heads 32"),
        ({"head_dim": 7}, "head_dim 7 must be even for rotary positions"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false' must be true or false"),
    ],
)
def test_what_is_not_supported_or_out_of_range_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_hugging_face(LLAMA | changes, "some/config.json")
    assert len(raised.value.problems) == 1
    assert raised.value.problems[0].startswith("some/config.json: ") and said in raised.value.problems[0]
    assert len(raised.value.problems[0]) < 200 and "\n" not in raised.value.problems[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"activation_function": "relu"}, "activation_function 'relu' is not supported for gpt2; only 'gelu_new' is"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True is not supported"),
        ({"scale_attn_weights": False}, "scale_attn_weights False is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention True is not supported"),
        ({"n_head": 5}, "n_head 5 must divide n_embd 32"),
        ({"is_causal": False}, "is_causal False is not supported for gpt2"),
    ],
)
def test_what_gpt2_may_say_and_is_not_supported_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_hugging_face(GPT2 | changes)


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        from_hugging_face(LLAMA | {"hidden_act": "gelu", "rope_theta": NAN, "rms_norm_eps": 0})
    assert len(raised.value.problems) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 4096},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16},
        {"model_type": "qwen3", "layer_types": ["full_attention", "full_attention"]},
        {"architectures": ["LlamaModel"], "attention_dropout": 0.1, "use_cache": False},
    ],
)
def test_settings_that_change_nothing_are_accepted(changes: dict[str, Any]) -> None:
    assert from_hugging_face(LLAMA | changes).num_attention_heads == 32


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{" * 50, "cannot be read as JSON"),
        (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "cannot be read as JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "cannot be read as JSON"),
        (b"[]", "holds no JSON object"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b'{"model_type": "llama", "vocab_size": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_sentence(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    for read in (read_hugging_face_config, lambda path: load_model_config(str(path))):
        with pytest.raises(ConfigError) as raised:
            read(tmp_path)
        assert len(raised.value.problems) == 1 and said in str(raised.value) and len(str(raised.value)) < 400
        assert "sys." not in str(raised.value), "what a programmer could do is no advice to a user"


def test_a_head_size_that_is_not_a_part_of_the_hidden_size_is_no_obstacle_but_for_gpt2() -> None:
    for kind in ("llama", "mistral", "qwen2", "qwen3"):
        config = from_hugging_face(LLAMA | {"model_type": kind, "head_dim": 16, "sliding_window": None})
        assert config.query_size == 512 and config.check(Layout(), 16, sequence_parallel=False) == []
