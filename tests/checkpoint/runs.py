"""Small runs whose every value is known: weights and optimizer states are functions of (name, index in the full tensor).

So what any layout saves, and what any layout has after loading, is compared with values that no checkpoint code made.
"""

import dataclasses
import hashlib
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from parallax.checkpoint.files import hash_file
from parallax.checkpoint.manifest import FileRecord, Manifest, read_manifest
from parallax.checkpoint.parts import CheckpointParts, weights_of
from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.optimizer import ShardedAdamW
from parallax.mesh import Layout, Mesh
from parallax.models.config import DecoderConfig
from parallax.models.stages import EMBEDDING, build_stages
from parallax.pipeline.schedules import make_schedule
from parallax.tensor_parallel.facts import ParameterFacts, initial_values, named_parameters_with_facts

# Odd sizes: the vocabulary is padded differently by every tp size, KV heads are fewer than 4 ranks, layers uneven over 2.
LLAMA = DecoderConfig(
    vocab_size=131,
    hidden_size=24,
    intermediate_size=36,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
).resolved()
TIED = dataclasses.replace(LLAMA, family="qwen3", qk_norm=True, tie_word_embeddings=True)
GPT2 = dataclasses.replace(
    LLAMA,
    family="gpt2",
    num_key_value_heads=4,
    norm="layernorm",
    activation="gelu",
    positions="learned",
    bias=True,
    tie_word_embeddings=True,
)


def build_parts(
    mesh: Mesh,
    config: DecoderConfig,
    zero: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    fill: bool = False,
    schedule: str = "1f1b",
) -> CheckpointParts:
    """Return this rank's share of a run, with the weights of `seed`; fill: and optimizer states that are not zero.

    schedule: says which stages each pipeline rank holds; some may be without a layer.
    """
    table = make_schedule(schedule, mesh.layout.pp, 2 * mesh.layout.pp)
    edges = [round(config.num_hidden_layers * stage / table.num_stages) for stage in range(table.num_stages + 1)]
    layers = [range(start, stop) for start, stop in pairwise(edges)]
    stages = build_stages(
        config, layers, table.holders, mesh.pp_rank, seed=seed, device=mesh.device, dtype=dtype, tp=mesh.tp
    )
    named = {entry[0]: entry for stage in stages.values() for entry in named_parameters_with_facts(stage, mesh.tp)}
    parameters = sorted(named.values(), key=lambda entry: entry[0] != EMBEDDING)
    # Buckets smaller than a layer, so that pieces begin and end inside of parameters.
    scopes = [stage.scopes for stage in stages.values()]
    used = {index: list(stage.parameters()) for index, stage in stages.items()}
    buckets = GradientBuckets(parameters, mesh, zero=zero, bucket_elements=3000, stages=used, scopes=scopes)
    optimizer = ShardedAdamW(buckets)
    parts = CheckpointParts(config, parameters, optimizer, dtype=dtype, state={"seed": seed, "tokens": 1 << 40})
    if fill:
        optimizer.step_count = seed + 7
        for name, parameter, facts in parameters:
            with torch.no_grad():  # a constant where they begin would hide mistakes
                for start, stop, values in weights_of(optimizer, name, parameter):
                    values.copy_(expected_value(name, "", facts, parameter, seed)[start:stop])
            for piece in optimizer.pieces(name):
                for kind, state in piece.tensors.items():
                    state.copy_(
                        expected_value(name, kind, facts, parameter, seed, state.dtype)[piece.start : piece.stop]
                    )
    return parts


@cache  # the same values are asked for under ZeRO 0 and 1
def _drawn(name: str, facts: ParameterFacts, seed: int) -> torch.Tensor:
    return torch.from_numpy(initial_values(name, facts, seed))


def expected_value(
    name: str,
    kind: str,
    facts: ParameterFacts,
    parameter: nn.Parameter,
    seed: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return, flat, the local tensor that a filled run has: zero where it is padding."""
    local = torch.zeros_like(parameter, dtype=dtype or parameter.dtype)
    facts.held(local).copy_(_drawn(f"{name}/{kind}", dataclasses.replace(facts, std=1.0), seed))
    return local.detach().reshape(-1)


def differences(parts: CheckpointParts, seed: int) -> list[str]:
    """Return the names of this rank's tensors that are not, bit for bit, those of a filled run."""
    wrong = [] if parts.optimizer is None or parts.optimizer.step_count == seed + 7 else ["step_count"]
    for name, parameter, facts in parts.parameters:
        whole = expected_value(name, "", facts, parameter, seed)
        for start, stop, values in weights_of(parts.optimizer, name, parameter):
            if not torch.equal(values, whole[start:stop]):
                wrong.append(name)
        for piece in parts.optimizer.pieces(name) if parts.optimizer else ():
            for kind, state in piece.tensors.items():
                expected = expected_value(name, kind, facts, parameter, seed, state.dtype)
                if not torch.equal(state, expected[piece.start : piece.stop]):
                    wrong.append(f"{name}.{kind}")
    return wrong


def contents(folder: Path) -> dict[str, str]:
    """Return the checksum of every file in a folder by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def single_process_mesh() -> Mesh:
    """Return the mesh of this process alone."""
    return Mesh(Layout(), 0, torch.device("cpu"))


def rewrite_manifest(folder: Path, name: str) -> None:
    """Make the manifest agree with a changed file, as someone would who means harm."""
    manifest = read_manifest(folder)
    files = dict(manifest.files)
    files[name] = FileRecord((folder / name).stat().st_size, hash_file(folder / name))
    (folder / "manifest.json").write_bytes(Manifest(manifest.step, files, manifest.model, manifest.optimizer).encode())
