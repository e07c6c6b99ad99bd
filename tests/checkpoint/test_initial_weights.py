"""Folders that transformers saved, read straight into the ranks of a layout: equal logits, or refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from benchmarks.real_model import compute_logits
from parallax.checkpoint.initial_weights import carried_over, load_weights
from parallax.checkpoint.open_model import open_model
from parallax.checkpoint.parts import CheckpointParts
from parallax.checkpoint.save import save
from parallax.errors import ConfigError
from parallax.mesh import Layout, Mesh
from parallax.models.decoder import DecoderStage
from parallax.models.hugging_face_config import read_hugging_face_config
from parallax.models.stages import build_stages
from parallax.tensor_parallel.facts import named_parameters_with_facts
from tests.checkpoint.runs import single_process_mesh
from tests.distributed.harness import run_layout

transformers = pytest.importorskip("transformers", reason="transformers is the reference; install the test extra")
MESH = single_process_mesh()
IDS = torch.randint(0, 130, (2, 24), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# As SmolLM2 has them: heads that 2 does not divide, a third as many KV heads, a tied head.
SMOL = SIZES | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}


def save_model(config: Any, folder: Path, **options: Any) -> torch.Tensor:
    """Save a random model of transformers' into a folder; return its logits of IDS."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # biases and norms start as zeros and ones, which would hide mistakes
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder, **options)
    with torch.no_grad():
        logits: torch.Tensor = model(IDS).logits
    return logits


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """One folder of each family, sharded or not, tied or not, and the logits of each."""
    root = tmp_path_factory.mktemp("families")
    configs = {
        "llama": (transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3), {}),
        "mistral": (transformers.MistralConfig(**SIZES, sliding_window=None), {"max_shard_size": "100KB"}),
        "qwen2": (transformers.Qwen2Config(**SIZES, tie_word_embeddings=True), {}),
        "qwen3": (transformers.Qwen3Config(**SIZES, head_dim=16), {"max_shard_size": "50KB"}),
        "gpt2": (
            transformers.GPT2Config(vocab_size=130, n_embd=48, n_layer=3, n_head=4, n_positions=64, n_inner=96),
            {"max_shard_size": "100KB"},
        ),
    }
    result = {}
    for name, (config, options) in configs.items():
        result[name] = root / name, save_model(config, root / name, **options)
    assert len(list((root / "mistral").glob("*.safetensors"))) > 2
    return result


def logits_of_all(mesh: Mesh, folders: dict[str, Path]) -> dict[str, torch.Tensor | None]:
    return {name: compute_logits(mesh, folder, IDS) for name, folder in folders.items()}


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, pp=2)], ids=["1", "tp2", "tp2pp2"])
def test_every_family_gives_transformers_logits_in_every_layout(
    families: dict[str, tuple[Path, torch.Tensor]], layout: Layout
) -> None:
    results = run_layout(layout, logits_of_all, {name: folder for name, (folder, _) in families.items()})
    for name, (_, expected) in families.items():
        found = [result[name] for result in results if result[name] is not None]
        assert len(found) == layout.tp, f"only the last stage has logits: {len(found)}"
        for logits in found:
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5, msg=name)


def save_again(mesh: Mesh, folders: dict[str, Path], root: Path) -> None:
    for name, folder in folders.items():
        config = read_hugging_face_config(folder)
        layers = [range(config.num_hidden_layers)]
        kind = {"device": mesh.device, "dtype": torch.float32, "tp": mesh.tp}
        (stage,) = build_stages(config, layers, [[0]], 0, seed=None, **kind).values()
        parts = CheckpointParts(config, list(named_parameters_with_facts(stage, mesh.tp)))
        load_weights(folder, parts, mesh)
        save(root / name, 1, parts, mesh)


def test_a_model_read_into_two_ranks_and_saved_has_the_same_tensors_bit_for_bit(
    families: dict[str, tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    run_layout(Layout(tp=2), save_again, {name: folder for name, (folder, _) in families.items()}, tmp_path)
    for name, (folder, _) in families.items():
        theirs, ours = (
            {
                key: tensor
                for file in path.glob("*.safetensors")
                for key, tensor in safetensors.torch.load_file(file).items()
            }
            for path in (folder, tmp_path / name / "step-00000001" / "model")
        )
        assert theirs.keys() == ours.keys()
        for key in theirs:
            assert torch.equal(ours[key], theirs[key]), f"{name} {key}"


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=3), Layout(pp=2)], ids=["1", "tp3", "pp2"])
def test_nine_heads_and_three_kv_heads_work_in_threes(layout: Layout, tmp_path: Path) -> None:
    expected = save_model(transformers.LlamaConfig(**SMOL), tmp_path)
    *_, found = run_layout(layout, compute_logits, tmp_path, IDS)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_nine_heads_over_two_ranks_are_refused_before_a_model_is_built(tmp_path: Path) -> None:
    save_model(transformers.LlamaConfig(**SMOL), tmp_path)
    problems = read_hugging_face_config(tmp_path).check(Layout(tp=2), 24, sequence_parallel=False)
    assert "--tp 2 must divide num_attention_heads=9; use 1, 3 or 9" in problems


def load(folder: Path) -> DecoderStage:
    stage = DecoderStage(read_hugging_face_config(folder))
    load_weights(folder, CheckpointParts(stage.config, list(named_parameters_with_facts(stage))), MESH)
    return stage


def change_tensors(folder: Path, add: dict[str, torch.Tensor], drop: tuple[str, ...] = (), prefix: str = "") -> None:
    """Change the tensors in a folder's only file; prefix: to cut from names."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    kept = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name not in drop}
    safetensors.torch.save_file(kept | add, path, metadata={"format": "pt"})


def test_an_older_gpt2_without_prefix_and_with_its_mask_stored_is_read(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=130, n_embd=48, n_layer=2, n_head=4, n_positions=64)
    expected = save_model(config, tmp_path)
    mask = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
    buffers = {f"h.{layer}.attn.bias": mask.tril() for layer in range(2)}
    buffers |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    change_tensors(tmp_path, buffers, prefix="transformer.")
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path)(IDS)[..., :130], expected, atol=1e-5, rtol=1e-5)


def test_a_tied_head_may_be_stored_too_if_it_is_the_embedding(tmp_path: Path) -> None:
    expected = save_model(transformers.LlamaConfig(**SMOL), tmp_path)
    embedding = safetensors.torch.load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    change_tensors(tmp_path, {"lm_head.weight": embedding.clone()} | inverse)
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path)(IDS)[..., :130], expected, atol=1e-5, rtol=1e-5)
    change_tensors(tmp_path, {"lm_head.weight": embedding + 1e-3})
    with pytest.raises(ConfigError, match=r"ties the head to .*, but lm_head\.weight is stored with other"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("add", "drop", "said"),
    [
        ({}, ("model.norm.weight",), "it lacks model.norm.weight"),
        (
            {},
            tuple(f"model.layers.{n}.mlp.{p}_proj.weight" for n in (0, 1) for p in ("up", "down")),
            "up_proj.weight, model.layers.1.mlp.down_proj.weight and 1 more",
        ),
        ({"model.layers.0.self_attn.q_proj.bias": 72}, (), "has no place for, model.layers.0.self_attn.q_proj.bias"),
        ({"model.layers.3.input_layernorm.weight": 72}, (), "has no place for, model.layers.3.input_layernorm.weight"),
        (
            {"score.weight": 72},
            ("model.norm.weight",),
            "lacks model.norm.weight and holds what this model has no place",
        ),
        ({"model.norm.weight": 71}, (), "model.norm.weight has shape [71], this run needs [72]"),
    ],
)
def test_tensors_that_are_missing_or_left_over_are_named(
    add: dict[str, int], drop: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    save_model(transformers.LlamaConfig(**SMOL), tmp_path)
    change_tensors(tmp_path, {name: torch.zeros(size) for name, size in add.items()}, drop)
    with pytest.raises(ConfigError) as raised:
        load(tmp_path)
    assert len(raised.value.problems) == 1 and said in str(raised.value)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_model(transformers.LlamaConfig(**SIZES), tmp_path, max_shard_size="100KB")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    twice = dict(list(safetensors.torch.load_file(first).items())[:1]) | safetensors.torch.load_file(second)
    safetensors.torch.save_file(twice, second)
    with pytest.raises(ConfigError, match="twice, in model-00001-of"):
        load(tmp_path)


def test_a_run_of_another_model_does_not_start_from_weights_that_happen_to_fit(tmp_path: Path) -> None:
    save_model(transformers.LlamaConfig(**SMOL), tmp_path)
    parts = CheckpointParts(read_hugging_face_config(tmp_path), [])
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["rope_parameters"]["rope_theta"] = 500.0
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"holds another model: its rope_theta is 500.0, this run's is 10000.0"):
        load_weights(tmp_path, parts, MESH)


def test_a_folder_of_links_is_read_as_the_hubs_cache_has_them(tmp_path: Path) -> None:
    expected = save_model(transformers.LlamaConfig(**SMOL), tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{file.name}")
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "snapshot")(IDS)[..., :130], expected, atol=1e-5, rtol=1e-5)
        found = open_model(tmp_path / "snapshot")(IDS)[..., :130]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (tmp_path / "blobs" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no safetensors files of a model"):
        load(tmp_path / "snapshot")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 2**31 - 1}, "model.embed_tokens.weight has shape [130, 72], this run needs [2147483647, 72]"),
        ({"hidden_size": 2**20}, "has shape [130, 72], this run needs [130, 1048576]"),
        ({"intermediate_size": 2**31 - 1}, "this run needs [2147483647, 72]"),
        ({"head_dim": 2**16}, "model.layers.0.self_attn.q_proj.weight has shape [72, 72], this run needs [589824, 72]"),
        (
            {"num_attention_heads": 2**20, "num_key_value_heads": 1, "head_dim": 2**16},
            "this run needs [68719476736, 72]",
        ),
        ({"num_hidden_layers": 10_000}, "it lacks model.layers.10.input_layernorm.weight"),
    ],
)
def test_a_configuration_that_lies_about_sizes_is_found_before_memory_is_asked_for(
    changes: dict[str, int], said: str, tmp_path: Path
) -> None:
    save_model(transformers.LlamaConfig(**SMOL), tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError) as raised:
        open_model(tmp_path)
    assert len(raised.value.problems) == 1 and said in str(raised.value)


def test_how_to_generate_is_carried_over(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMOL, eos_token_id=[2, 7], bos_token_id=1, pad_token_id=3)
    save_model(config, tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.6}')
    stage = load(tmp_path / "theirs")
    files, fields = carried_over(tmp_path / "theirs")
    parameters = list(named_parameters_with_facts(stage))
    template = {"chat_template.jinja": b"{{ messages[0]['content'] }}"}
    parts = CheckpointParts(
        stage.config, parameters, tokenizer=_Tokenizer(), model_files=files | template, config_fields=fields
    )
    path = save(tmp_path, 1, parts, MESH) / "model"
    found = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert found.config.eos_token_id == [2, 7] and (found.config.bos_token_id, found.config.pad_token_id) == (1, 3)
    assert found.generation_config.eos_token_id == [2, 7] and found.generation_config.temperature == 0.6
    assert (path / "chat_template.jinja").read_bytes() == template["chat_template.jinja"]


class _Tokenizer:
    """Has a template of its own, which the run's replaces, and one end of text where the model has two."""

    bos_id, eos_id = None, 7

    def files(self) -> dict[str, bytes]:
        return {"chat_template.jinja": b"another"}
