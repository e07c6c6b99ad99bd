"""transformers opens what was saved and computes our logits; and what transformers saved is where a run may start."""

from pathlib import Path

import pytest
import torch

from parallax.checkpoint.initial_weights import load_weights
from parallax.checkpoint.parts import CheckpointParts
from parallax.checkpoint.save import save
from parallax.data.tokenizers import ByteTokenizer
from parallax.errors import ConfigError
from parallax.models.config import DecoderConfig
from parallax.models.decoder import DecoderStage
from parallax.models.presets import load_model_config
from parallax.tensor_parallel.facts import initialize, named_parameters_with_facts
from tests.checkpoint.runs import GPT2, LLAMA, TIED, single_process_mesh

transformers = pytest.importorskip("transformers", reason="transformers is the reference; install the test extra")
MESH = single_process_mesh()
MODELS = {"llama": LLAMA, "qwen3, tied": TIED, "gpt2": GPT2}


def stage_with_weights(config: DecoderConfig) -> DecoderStage:
    """Return a single-process model in which norms and biases are not ones and zeros."""
    torch.manual_seed(0)
    stage = DecoderStage(config)
    initialize(stage, seed=1)
    with torch.no_grad():
        for _, parameter, facts in named_parameters_with_facts(stage):
            facts.held(parameter).add_(0.1 * torch.randn(facts.full_shape))
    return stage


@pytest.mark.parametrize("model", MODELS)
def test_transformers_opens_a_checkpoint_and_computes_the_same_logits(model: str, tmp_path: Path) -> None:
    stage, tokenizer = stage_with_weights(MODELS[model]), ByteTokenizer()
    parts = CheckpointParts(MODELS[model], list(named_parameters_with_facts(stage)), tokenizer=tokenizer)
    path = save(tmp_path, 100, parts, MESH) / "model"
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    ids = torch.randint(0, 131, (2, 20))
    with torch.no_grad():
        expected, actual = reference(ids).logits, stage(ids)[..., :131]
    assert torch.allclose(actual, expected, atol=1e-5, rtol=1e-4), (actual - expected).abs().max()
    assert reference.config.eos_token_id == tokenizer.eos_id and reference.config.bos_token_id is None
    text = "a checkpoint holds its tokenizer"
    assert transformers.AutoTokenizer.from_pretrained(path)(text)["input_ids"] == tokenizer.encode(text)
    assert load_model_config(str(path)) == MODELS[model]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_a_run_starts_from_what_transformers_saved_in_another_type(model: str, shard_size: str, tmp_path: Path) -> None:
    saved = CheckpointParts(MODELS[model], list(named_parameters_with_facts(stage_with_weights(MODELS[model]))))
    path = save(tmp_path, 100, saved, MESH) / "model"
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    reference.save_pretrained(tmp_path / "theirs", max_shard_size=shard_size)
    stage = DecoderStage(MODELS[model])
    parts = CheckpointParts(MODELS[model], list(named_parameters_with_facts(stage)))
    for _, parameter, _ in parts.parameters:
        parameter.data.zero_()
    load_weights(tmp_path / "theirs", parts, MESH)
    for (name, found, _), (_, expected, _) in zip(parts.parameters, saved.parameters, strict=True):
        assert torch.equal(found, expected.bfloat16().float()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS)
def test_the_saved_type_is_the_runs_and_a_tied_head_is_stored_once(
    model: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    import safetensors.torch

    stage = stage_with_weights(MODELS[model]).to(dtype)
    parts = CheckpointParts(MODELS[model], list(named_parameters_with_facts(stage)), dtype=dtype)
    path = save(tmp_path, 1, parts, MESH) / "model"
    stored = {name: t for file in path.glob("*.safetensors") for name, t in safetensors.torch.load_file(file).items()}
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    tied = MODELS[model].tie_word_embeddings
    assert ("lm_head.weight" in stored) == (not tied)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert reference.dtype == dtype and reference.config.tie_word_embeddings == tied
    assert (reference.get_output_embeddings().weight is reference.get_input_embeddings().weight) == tied


def test_names_without_their_prefix_are_found(tmp_path: Path) -> None:
    import safetensors.torch

    saved = stage_with_weights(GPT2)
    path = save(tmp_path, 1, CheckpointParts(GPT2, list(named_parameters_with_facts(saved))), MESH) / "model"
    tensors = safetensors.torch.load_file(next(path.glob("*.safetensors")))
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    (tmp_path / "theirs").mkdir()
    safetensors.torch.save_file(bare, tmp_path / "theirs" / "model.safetensors")
    stage = DecoderStage(GPT2)
    load_weights(tmp_path / "theirs", CheckpointParts(GPT2, list(named_parameters_with_facts(stage))), MESH)
    for (name, found), (_, expected) in zip(stage.named_parameters(), saved.named_parameters(), strict=True):
        rows = 131 if "embed_tokens" in name else None
        assert torch.equal(found[:rows], expected[:rows]), name


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no safetensors files of a model"),
        ({"pytorch_model.bin": "x"}, "pickles are not read"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "../a.safetensors"}}'}, "leads out of the checkpoint"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "a.safetensors"}}'}, "a.safetensors is missing"),
        ({"model.safetensors.index.json": "[]"}, "is no valid index of a model"),
        ({"model.safetensors": "x"}, "is not a safetensors file"),
    ],
)
def test_a_folder_without_a_readable_model_is_refused_in_one_sentence(
    files: dict[str, str], said: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    parts = CheckpointParts(LLAMA, list(named_parameters_with_facts(DecoderStage(LLAMA))))
    with pytest.raises(ConfigError) as raised:
        load_weights(tmp_path, parts, MESH)
    assert said in str(raised.value) and "\n" not in str(raised.value)
