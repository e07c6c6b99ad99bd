"""The decoder's logits and its Hugging Face tensors against transformers, for random weights of each family."""

import pytest
import torch

from parallax.models.decoder import DecoderStage
from parallax.models.hugging_face import hugging_face_tensors
from parallax.models.hugging_face_config import from_hugging_face, to_hugging_face

transformers = pytest.importorskip("transformers", reason="transformers is the reference; install the test extra")

SIZES = {
    "vocab_size": 130,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=130, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2
    ),
    "llama": lambda: transformers.LlamaConfig(**SIZES, rope_theta=500.0),
    "llama tied, scaled": lambda: transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=True, rope_parameters={"rope_theta": 500.0, **LLAMA3_SCALING}
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2, wide heads": lambda: transformers.Qwen2Config(**SIZES, head_dim=16),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}


def load(stage: DecoderStage, state: dict[str, torch.Tensor]) -> None:
    """Fill a single-process stage from the tensors of a Hugging Face model."""
    parameters = dict(stage.named_parameters())
    for tensor in hugging_face_tensors(stage.config):
        for name, value in zip(tensor.sources, tensor.take(state[tensor.name]), strict=True):
            rows = value.shape[0]
            parameters.pop(name).data[:rows].copy_(value)
    assert not parameters, f"no checkpoint tensor for {sorted(parameters)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str) -> None:
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation="eager").eval()
    for parameter in reference.parameters():  # biases and norms start as zeros and ones, which would hide mistakes
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    config = from_hugging_face(reference.config.to_dict())
    stage = DecoderStage(config)
    for parameter in stage.parameters():
        parameter.data.zero_()
    load(stage, reference.state_dict())
    ids = torch.randint(0, 130, (2, 40))
    with torch.no_grad():
        expected = reference(ids).logits
        actual = stage(ids)
    assert torch.allclose(actual[..., :130], expected, atol=2e-5, rtol=1e-4), (actual[..., :130] - expected).abs().max()
    assert (actual[..., 130:] == 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_survives_the_way_to_transformers_and_back(family: str) -> None:
    config = from_hugging_face(FAMILIES[family]().to_dict())
    fields = to_hugging_face(config, "float32")
    kind = type(FAMILIES[family]())
    assert from_hugging_face(fields) == config
    assert from_hugging_face(kind(**fields).to_dict()) == config


@pytest.mark.parametrize("family", FAMILIES)
def test_making_a_tensor_is_the_inverse_of_taking_it_apart(family: str) -> None:
    reference = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
    state = reference.state_dict()
    tensors = hugging_face_tensors(from_hugging_face(reference.config.to_dict()))
    for tensor in tensors:
        assert torch.equal(tensor.make(tensor.take(state[tensor.name])), state[tensor.name])
    stored = {name for name in state if not (reference.config.tie_word_embeddings and name == "lm_head.weight")}
    assert {tensor.name for tensor in tensors} == stored
