"""The stages of the decoder that one pipeline rank holds.

A rank may hold several stages (interleaved and V-shaped schedules), and a stage may be held by several ranks (DualPipe). Who
else holds a parameter goes into its facts, and from there into the gradient sum, ZeRO's shards, the norm and the checkpoint.
A tied embedding is held by whoever has the first stage or the last; a rank that has both holds it once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from parallax.mesh import Group
from parallax.models.config import DecoderConfig
from parallax.models.decoder import DecoderStage, StageSpec
from parallax.tensor_parallel.facts import initialize, named_parameters_with_facts, update_facts

EMBEDDING = "model.embed_tokens.weight"


def shape_stages(
    config: DecoderConfig,
    layers: Sequence[range],
    holders: Sequence[Sequence[int]],
    pp_rank: int,
    *,
    tp: Group | None = None,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> dict[int, DecoderStage]:
    """Return the stages of a pipeline rank, ascending, on torch's meta device: shapes without values.

    layers: of every stage, by global index. holders: of every stage, the pipeline ranks that hold it.
    """
    count = len(layers)
    with torch.device("meta"):
        stages = {
            index: DecoderStage(
                config,
                StageSpec(layers[index], index, count),
                tp=tp,
                sequence_parallel=sequence_parallel,
                recompute=recompute,
            )
            for index in range(count)
            if pp_rank in holders[index]
        }
    if config.tie_word_embeddings and 0 in stages and count - 1 in stages:
        stages[count - 1].model.embed_tokens = stages[0].model.embed_tokens
    of_embedding = {*holders[0], *holders[count - 1]} if config.tie_word_embeddings else {*holders[0]}
    for index, stage in stages.items():
        for name, _, facts in list(named_parameters_with_facts(stage, tp)):
            ranks = of_embedding if name == EMBEDDING else {*holders[index]}
            others = tuple(sorted(ranks)) if len(ranks) > 1 else ()
            update_facts(stage, name, replicas=dataclasses.replace(facts.replicas, stages=others))
    return stages


def build_stages(
    config: DecoderConfig,
    layers: Sequence[range],
    holders: Sequence[Sequence[int]],
    pp_rank: int,
    *,
    seed: int | None,
    device: torch.device,
    dtype: torch.dtype,
    tp: Group | None = None,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> dict[int, DecoderStage]:
    """Return the stages of a pipeline rank on `device`, with the initial weights of `seed`, in fp32 rounded to `dtype`.

    seed: None for zeros, which cost nothing, where all weights are going to be loaded.
    Layers are shaped without memory first and filled by name, so that no layout ever holds more than its own share.
    """
    stages = shape_stages(
        config, layers, holders, pp_rank, tp=tp, sequence_parallel=sequence_parallel, recompute=recompute
    )
    # What nn.Module.to_empty does, without the import of torch's compiler (seconds) that it brings.
    for module in {module: None for stage in stages.values() for module in stage.modules()}:
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.zeros(parameter.shape, dtype=dtype, device=device)))
    if seed is not None:
        for stage in stages.values():
            initialize(stage, seed)
    return stages
