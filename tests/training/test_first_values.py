"""A model is made bucket by bucket: the same values in every sharding, and never more of it at once than a rank can hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.flat import GradientTypes
from parallax.data_parallel.options import OptimizerOptions
from parallax.mesh import Layout, Mesh
from parallax.models.decoder import DecoderStage
from parallax.models.stages import build_stages, shape_stages
from parallax.objectives.next_token import NextToken
from parallax.pipeline.schedules import make_schedule
from parallax.tensor_parallel.facts import named_parameters_with_facts
from parallax.training.build import build_train_step
from parallax.training.first_values import FirstValues, give_places
from parallax.training.options import TrainingOptions
from parallax.training.stages import stage_ranges
from tests.distributed.training import SMALL

CPU = torch.device("cpu")
TIED = replace(SMALL, tie_word_embeddings=True, num_key_value_heads=1)
DEEP = replace(SMALL, hidden_size=128, intermediate_size=256, head_dim=32, num_hidden_layers=12)


def _divided(layout: Layout, rank: int, dtype: torch.dtype) -> dict[str, list[tuple[int, int, torch.Tensor]]]:
    """Return what a rank has of each parameter under ZeRO 3, as flat ranges."""
    mesh = Mesh(layout, rank, CPU)
    holders = [[stage] for stage in range(layout.pp)]
    layers = stage_ranges(TIED, layout.pp, None, 16)
    (stage,) = shape_stages(TIED, layers, holders, mesh.pp_rank, tp=mesh.tp).values()
    give_places([stage], dtype, CPU)
    entries = list(named_parameters_with_facts(stage, mesh.tp))
    buckets = GradientBuckets(entries, mesh, zero=3, scopes=[stage.scopes], fill=FirstValues(7))
    parts = {name: buckets.weights(name) for name, _, _ in entries}
    return {name: [(0, entry.numel(), entry)] if parts[name] is None else parts[name] for name, entry, _ in entries}


@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(tp=2, dp=2), Layout(pp=2, dp=2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_parts_of_all_ranks_are_the_values_of_a_model_that_is_made_whole(
    layout: Layout, dtype: torch.dtype
) -> None:
    layers, holders = stage_ranges(TIED, layout.pp, None, 16), [[stage] for stage in range(layout.pp)]
    parts = [_divided(layout, rank, dtype) for rank in range(layout.world_size)]
    for rank in range(layout.world_size):
        mesh = Mesh(layout, rank, CPU)
        (stage,) = build_stages(
            TIED, layers, holders, mesh.pp_rank, seed=7, device=CPU, dtype=dtype, tp=mesh.tp
        ).values()
        alike = [other for other in range(layout.world_size) if parts[other].keys() == parts[rank].keys()]
        for name, parameter, facts in named_parameters_with_facts(stage, mesh.tp):
            expected = parameter.detach().view(-1)
            found = torch.full_like(expected, torch.nan)
            for other in alike:
                if layout.coordinates(other)["tp"] == mesh.tp_rank or facts.replicas.tp > 1:
                    for start, stop, values in parts[other][name]:
                        found[start:stop] = values.detach().view(-1)
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_where_weights_are_whole_they_have_the_same_values(zero: int) -> None:
    training = TrainingOptions(seq_len=16, micro_batch=1, global_batch=4, seed=7).resolved()
    mesh, schedule, options = Mesh(Layout(dp=2), 1, CPU), make_schedule("1f1b", 1, 2), OptimizerOptions(zero=zero)
    step = build_train_step(mesh, TIED, [range(4)], schedule, training, options, NextToken(TIED.vocab_size))
    (stage,) = step.runner.stages.values()
    (whole,) = build_stages(TIED, [range(4)], [[0]], 0, seed=7, device=CPU, dtype=torch.float32).values()
    assert all(torch.equal(a, b) for a, b in zip(stage.parameters(), whole.parameters(), strict=True))


@contextmanager
def _allocated() -> Iterator[list[int]]:
    """Yield what becomes [bytes at the end, most bytes at once] of what is allocated in here, as torch's allocator says."""
    result: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield result
    now = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    result += [now, most]


def _stage() -> DecoderStage:
    (stage,) = shape_stages(DEEP, [range(DEEP.num_hidden_layers)], [[0]], 0).values()
    return stage


def test_under_zero_3_building_takes_a_ranks_part_and_one_layer() -> None:
    mesh, stage = Mesh(Layout(dp=16), 3, CPU), _stage()
    whole = sum(parameter.nbytes for parameter in stage.parameters())
    with _allocated() as bytes_held:
        give_places([stage], torch.float32, CPU)
        parameters = list(named_parameters_with_facts(stage))
        buckets = GradientBuckets(parameters, mesh, zero=3, scopes=[stage.scopes], fill=FirstValues(1))
    held, most = bytes_held
    layer = max(bucket.plan.size for bucket in buckets.buckets) * 4
    parts = 2 * whole / 16  # weights and gradients
    assert layer < whole / 10
    assert held == pytest.approx(parts, rel=0.02), "the plan's padding"
    assert most < held + 1.1 * layer, f"{most} bytes at once, where a rank keeps {held} and a layer has {layer}"


def test_building_never_has_the_weights_twice() -> None:
    stage = _stage()
    whole = sum(parameter.nbytes for parameter in stage.parameters())
    with _allocated() as bytes_held:
        give_places([stage], torch.float32, CPU)
        types = GradientTypes(torch.bfloat16)
        GradientBuckets(named_parameters_with_facts(stage), Mesh(Layout(), 0, CPU), types=types, fill=FirstValues(1))
    assert max(bytes_held) < 1.6 * whole, "weights, and gradients of half their size"
