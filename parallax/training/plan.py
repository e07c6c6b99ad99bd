"""What a run would be, before it costs anything: layout, parameters and memory per rank, bubble, traffic (--dry-run).

The parameters are real ones: one rank of each pipeline stage builds its part of the model on torch's meta device, which holds
shapes and no values, so that weights, gradients and optimizer states are exact for any number of ranks. Activations follow
the formulas of `parallax.training.memory`, times the micro-batches in flight that the schedule's simulation gives.

Bytes sent by a rank in a step, with rings: an all_reduce of X bytes over t ranks sends 2 X (t - 1) / t, an all_gather or a
reduce_scatter half of that. Per layer and micro-batch, X being the whole hidden state, tensor parallelism sends 8 X / 2 times
(t - 1) / t (Narayanan et al. 2021, arXiv:2104.04473, section 3.2), and 10 / 2 with sequence parallelism, where a backward
gathers its input again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from parallax.data_parallel.options import OptimizerOptions
from parallax.data_parallel.plan import BucketKey, BucketPlan, ParameterSize, bucket_key, plan_buckets
from parallax.mesh import Group, Layout, Replicas
from parallax.models.config import DecoderConfig, flops_per_token, num_parameters
from parallax.models.decoder import DecoderStage, StageSpec
from parallax.pipeline.schedules import SCHEDULES
from parallax.pipeline.simulator import simulate
from parallax.tensor_parallel.facts import named_parameters_with_facts
from parallax.tensor_parallel.vocabulary import padded_vocab_size
from parallax.training.memory import (
    FP32_BYTES,
    Memory,
    Shapes,
    layer_activation_bytes,
    layer_working_bytes,
    logits_bytes,
    loss_working_bytes,
    model_state_bytes,
)
from parallax.training.options import ParallelOptions, TrainingOptions
from parallax.training.stages import stage_flops

TABLE_WIDTH = 200  # characters that the table may take; it takes what it needs


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step along each axis."""

    tp: int
    pp: int
    dp: int


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage, as each of its ranks has it.

    num_parameters: held by a rank, padding included. in_flight: micro-batches whose activations are held at once.
    flops_share: of the model's operations, in units of an even share.
    """

    layers: range
    ranks: tuple[int, int]  # first and last global rank
    num_parameters: int
    in_flight: int
    flops_share: float
    memory: Memory
    traffic: Traffic


@dataclass(frozen=True)
class Plan:
    """What `make_plan` found. bubble: share of the step in which a rank waits for others, stages taken as equal."""

    config: DecoderConfig
    layout: Layout
    schedule: str
    num_micro_batches: int
    tokens_per_step: int
    flops_per_step: float
    bubble: float
    stages: tuple[StagePlan, ...]

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.config)


class PlannedRun(Protocol):
    """What a plan reads of a resolved configuration."""

    @property
    def model_config(self) -> DecoderConfig: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def parallel(self) -> ParallelOptions: ...
    @property
    def training(self) -> TrainingOptions: ...
    @property
    def optimizer(self) -> OptimizerOptions: ...
    @property
    def stage_ranges(self) -> list[range]: ...
    @property
    def num_micro_batches(self) -> int: ...


def make_plan(run: PlannedRun) -> Plan:
    """Return the plan of a run, whose options have been checked; takes seconds for any number of ranks."""
    config, layout, parallel, training, zero = (
        run.model_config,
        run.layout,
        run.parallel,
        run.training,
        run.optimizer.zero,
    )
    ranges, num_micro_batches = run.stage_ranges, run.num_micro_batches
    simulation = simulate(SCHEDULES[parallel.schedule](layout.pp, num_micro_batches))
    shapes = Shapes(
        config, training.micro_batch, training.seq_len, layout.tp, parallel.sp, training.precision, training.recompute
    )
    even_share = flops_per_token(config, training.seq_len) / layout.pp
    stages = []
    for index, flops in enumerate(stage_flops(config, ranges, training.seq_len)):
        spec = StageSpec(ranges[index], index, layout.pp)
        buckets = stage_buckets(config, layout, spec, parallel.sp)
        in_flight = simulation.peak_in_flight[index]
        first = layout.global_rank(pp=index)
        stages.append(
            StagePlan(
                layers=ranges[index],
                ranks=(first, first + layout.dp * layout.tp - 1),
                num_parameters=sum(place.numel for bucket in buckets for place in bucket.places),
                in_flight=in_flight,
                flops_share=flops / even_share,
                memory=stage_memory(shapes, spec, buckets, in_flight, zero),
                traffic=stage_traffic(shapes, spec, buckets, num_micro_batches, zero),
            )
        )
    return Plan(
        config=config,
        layout=layout,
        schedule=parallel.schedule,
        num_micro_batches=num_micro_batches,
        tokens_per_step=training.tokens_per_step,
        flops_per_step=flops_per_token(config, training.seq_len) * training.tokens_per_step,
        bubble=sum(simulation.bubble) / (simulation.makespan * layout.pp),
        stages=tuple(stages),
    )


def stage_buckets(config: DecoderConfig, layout: Layout, spec: StageSpec, sequence_parallel: bool) -> list[BucketPlan]:
    """Return the flat buckets of the first rank of a stage; those of its other ranks have the same sizes."""
    rank = layout.global_rank(pp=spec.index)
    tp = Group("tp", layout.ranks_along(["tp"], rank), 0) if layout.tp > 1 else None
    with torch.device("meta"):
        stage = DecoderStage(config, spec, tp=tp, sequence_parallel=sequence_parallel)
    keys: dict[tuple[Replicas, bool], BucketKey] = {}  # lists of holders are long: one for each kind of parameter
    sizes = []
    for name, parameter, facts in named_parameters_with_facts(stage):
        kind = facts.replicas, facts.partial
        if kind not in keys:
            keys[kind] = bucket_key(facts, layout, rank, str(parameter.dtype))
        sizes.append(ParameterSize(name, parameter.numel(), keys[kind], facts.decays))
    return plan_buckets(sizes)


def stage_memory(shapes: Shapes, spec: StageSpec, buckets: list[BucketPlan], in_flight: int, zero: int) -> Memory:
    """Return what a rank of a stage holds at the fullest moment of a step."""
    states = [model_state_bytes(bucket.size, len(bucket.key.holders), shapes.precision, zero) for bucket in buckets]
    weights, gradients, optimizer = (sum(column) for column in zip(*states, strict=True))
    kept, working = len(spec.layers) * layer_activation_bytes(shapes), layer_working_bytes(shapes)
    if spec.is_last:
        padded = padded_vocab_size(shapes.config.vocab_size, shapes.tp)
        kept += logits_bytes(shapes, padded)
        # The loss has run backward before any layer does.
        working = max(working, loss_working_bytes(shapes, padded))
    return Memory(weights, gradients, optimizer, in_flight * kept, working)


def stage_traffic(
    shapes: Shapes, spec: StageSpec, buckets: list[BucketPlan], num_micro_batches: int, zero: int
) -> Traffic:
    """Return what a rank of a stage sends in a step; numbers of a few bytes per token, as the loss's, are left out."""
    whole = shapes.num_tokens * shapes.config.hidden_size * shapes.element
    tp_parts = len(spec.layers) * (10 if shapes.sp else 8)  # in units of an all_gather of the whole hidden state
    if shapes.recompute == "full":
        tp_parts += len(spec.layers) * 4  # forward's once more
    if spec.is_first:
        tp_parts += 2  # the embedding's all_reduce, or its reduce_scatter and the all_gather of its gradient
    if spec.is_last:
        tp_parts += 3 if shapes.sp else 2  # the head's input, as of any column-parallel layer
    neighbours = (not spec.is_first) + (not spec.is_last)
    dp = 0.0
    for bucket in buckets:
        holders = len(bucket.key.holders)
        second = FP32_BYTES if zero == 0 else shapes.element  # all_gather: of the gradients, or of the new weights
        dp += bucket.size * (FP32_BYTES + second) * (holders - 1) / holders
    return Traffic(
        tp=round(num_micro_batches * tp_parts * whole * (shapes.tp - 1) / shapes.tp),
        pp=num_micro_batches * neighbours * shapes.hidden_bytes,
        dp=round(dp),
    )


def print_plan(run: PlannedRun) -> None:
    """Print the plan of a run for people, from global rank 0 if there is a launcher after all."""
    if os.environ.get("RANK", "0") != "0":
        return
    from rich.console import Console
    from rich.table import Table

    plan = make_plan(run)
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, TABLE_WIDTH)  # a line that is folded is easier to read than cells that are cut
    unit, scale = ("GiB", 2**30) if max(stage.memory.total for stage in plan.stages) >= 2**31 else ("MiB", 2**20)
    for line in _summary(plan, unit, scale):
        console.print(line)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = (
        "stage layers ranks parameters in_flight weights gradients optimizer activations working total tp pp dp".split()
    )
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for index, stage in enumerate(plan.stages):
        memory, traffic = stage.memory, stage.traffic
        sizes = [
            getattr(memory, part) for part in ("weights", "gradients", "optimizer", "activations", "working", "total")
        ]
        table.add_row(
            str(index),
            _layers(stage.layers, index, len(plan.stages)),
            f"{stage.ranks[0]}-{stage.ranks[1]}",
            f"{stage.num_parameters:,}",
            str(stage.in_flight),
            *(f"{size / scale:,.2f}" for size in (*sizes, traffic.tp, traffic.pp, traffic.dp)),
        )
    console.print(f"\nMemory of each rank, and what it sends in a step along tp, pp and dp, in {unit}:")
    console.print(table)


def _summary(plan: Plan, unit: str, scale: int) -> Iterable[str]:
    layout, stages = plan.layout, plan.stages
    yield f"{layout.world_size:,} ranks = tp {layout.tp} x pp {layout.pp} x dp {layout.dp}"
    strides = {"tp": 1, "dp": layout.tp, "pp": layout.tp * layout.dp}
    for axis, stride in strides.items():
        size = getattr(layout, axis)
        if size > 1:
            shown = [str(rank * stride) for rank in range(min(3, size))] + (["..."] if size > 3 else [])
            yield f"  {axis}: {size} ranks, {stride} apart: {', '.join(shown)}"
    counts = [stage.num_parameters for stage in stages]
    totals = [stage.memory.total for stage in stages]
    slowest = max(stage.flops_share for stage in stages)
    yield f"parameters: {plan.num_parameters:,}; per rank {min(counts):,} to {max(counts):,}"
    yield f"memory: per rank {min(totals) / scale:,.2f} to {max(totals) / scale:,.2f} {unit}, without the framework's own"
    yield (
        f"step: {plan.tokens_per_step:,} tokens, {plan.flops_per_step:.3e} FLOPs of the model, "
        f"{plan.num_micro_batches} micro-batches"
    )
    yield (
        f"pipeline: {plan.schedule}, bubble {plan.bubble:.1%} of the step; the slowest stage has {slowest:.2f} times its "
        "share of the FLOPs"
    )


def _layers(layers: range, index: int, count: int) -> str:
    middle = f"{layers[0]}-{layers[-1]}" if len(layers) else "none"
    return ("E " if index == 0 else "") + middle + (" L" if index == count - 1 else "")
