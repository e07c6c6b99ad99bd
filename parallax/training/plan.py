"""What a run would be, before it costs anything: layout, parameters and memory per rank, bubble, traffic (--dry-run).

The parameters are real ones: one rank of each pipeline rank's builds its stages on torch's meta device, which holds
shapes and no values, so that weights, gradients and optimizer states are exact for any number of ranks. Activations follow
the formulas of `parallax.training.memory`, times the micro-batches in flight that the schedule's simulation gives.

Bytes sent by a rank in a step, with rings: an all_reduce of X bytes over t ranks sends 2 X (t - 1) / t, an all_gather or a
reduce_scatter half of that. Per layer and micro-batch, X being the whole hidden state, tensor parallelism sends 8 X / 2 times
(t - 1) / t (Narayanan et al. 2021, arXiv:2104.04473, section 3.2), and 10 / 2 with sequence parallelism, where a backward
gathers its input again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from parallax.data_parallel.options import OptimizerOptions
from parallax.mesh import Layout
from parallax.models.config import DecoderConfig, flops_per_token, linear_layers, num_parameters
from parallax.pipeline.actions import Pair, Schedule
from parallax.pipeline.simulator import simulate
from parallax.precision.copies import RankCopies, copies_of_ranks
from parallax.precision.options import Fp8Options
from parallax.precision.recipe import Table
from parallax.tensor_parallel.vocabulary import padded_vocab_size
from parallax.training.build import plan_fp8, planned_backend
from parallax.training.kept import most_in_pair, stage_parts
from parallax.training.memory import (
    Memory,
    Shapes,
    layer_working_bytes,
    loss_working_bytes,
)
from parallax.training.options import ParallelOptions, TrainingOptions
from parallax.training.sharding import RankSharding, rank_sharding
from parallax.training.stages import stage_flops

TABLE_WIDTH = 200  # characters that the table may take; it takes what it needs


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step along each axis."""

    tp: int
    pp: int
    dp: int


@dataclass(frozen=True)
class RankPlan:
    """One position in the pipeline, as each of its ranks has it.

    stages: that it holds; layers: of each of them. num_parameters: held by a rank, padding included.
    in_flight: micro-batches, counted per stage, whose activations are held at once.
    flops_share: of the model's operations, in units of an even share.
    """

    stages: tuple[int, ...]
    layers: tuple[range, ...]
    ranks: tuple[int, int]  # first and last global rank
    num_parameters: int
    in_flight: int
    flops_share: float
    memory: Memory
    traffic: Traffic


@dataclass(frozen=True)
class Plan:
    """What `make_plan` found, for each position in the pipeline.

    bubble: share of the step in which a rank waits for others, stages taken as equal.
    """

    config: DecoderConfig
    layout: Layout
    schedule: str
    num_micro_batches: int
    tokens_per_step: int
    flops_per_step: float
    bubble: float
    num_stages: int
    ranks: tuple[RankPlan, ...]

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
    def schedule(self) -> Schedule: ...
    @property
    def why_schedule(self) -> str | None: ...
    @property
    def training(self) -> TrainingOptions: ...
    @property
    def optimizer(self) -> OptimizerOptions: ...
    @property
    def fp8(self) -> Fp8Options: ...
    @property
    def fp8_layers(self) -> Table | None: ...
    @property
    def stage_ranges(self) -> list[range]: ...
    @property
    def num_micro_batches(self) -> int: ...


def make_plan(run: PlannedRun) -> Plan:
    """Return the plan of a run, whose options have been checked; takes seconds for any number of ranks."""
    config, layout, parallel, training = run.model_config, run.layout, run.parallel, run.training
    schedule, layers, num_micro_batches = run.schedule, run.stage_ranges, run.num_micro_batches
    simulation = simulate(schedule)
    shapes = Shapes(
        config,
        training.micro_batch,
        training.seq_len,
        layout.tp,
        parallel.sp,
        training.precision,
        training.recompute,
        training.loss_chunk,
    )
    copies: Sequence[RankCopies] = ()
    if run.fp8_layers is not None:
        backend, _ = planned_backend(run.fp8, config, layout.tp)
        copies = copies_of_ranks(backend, run.fp8.recipe, linear_layers(config), layout.tp)
    flops = stage_flops(config, layers, training.seq_len)
    even_share = flops_per_token(config, training.seq_len) / layout.pp
    ranks = []
    for pp_rank in range(layout.pp):
        held = schedule.stages_of(pp_rank)
        sharding = rank_sharding(
            config, layout, layers, schedule, pp_rank, parallel.sp, run.optimizer, training.precision
        )
        chunks = Counter(action.stage for action in schedule.actions_of(pp_rank) if action.kind == "F")
        first = layout.global_rank(pp=pp_rank)
        ranks.append(
            RankPlan(
                stages=held,
                layers=tuple(layers[stage] for stage in held),
                ranks=(first, first + layout.dp * layout.tp - 1),
                num_parameters=sum(place.numel for bucket in sharding.buckets for place in bucket.plan.places),
                in_flight=simulation.peak_in_flight[pp_rank],
                # A stage that is held twice gets a part of the micro-batches on each holder.
                flops_share=sum(flops[stage] * count / num_micro_batches for stage, count in chunks.items())
                / even_share,
                memory=replace(
                    rank_memory(shapes, schedule, layers, pp_rank, sharding),
                    fp8_weights=fp8_weight_bytes(copies, shapes, schedule, layers, pp_rank, sharding),
                ),
                traffic=rank_traffic(shapes, schedule, layers, pp_rank, sharding),
            )
        )
    return Plan(
        config=config,
        layout=layout,
        schedule=schedule.name,
        num_micro_batches=num_micro_batches,
        tokens_per_step=training.tokens_per_step,
        flops_per_step=flops_per_token(config, training.seq_len) * training.tokens_per_step,
        bubble=sum(simulation.bubble) / (simulation.makespan * layout.pp),
        num_stages=schedule.num_stages,
        ranks=tuple(ranks),
    )


def rank_memory(
    shapes: Shapes,
    schedule: Schedule,
    layers: Sequence[range],
    pp_rank: int,
    sharding: RankSharding,
) -> Memory:
    """Return what a rank at a position in the pipeline holds at the fullest moment of a step."""
    weights, gradients, moments = sharding.state_bytes()
    last, padded = schedule.num_stages - 1, padded_vocab_size(shapes.config.vocab_size, shapes.tp)
    parts = {
        stage: stage_parts(shapes, len(layers[stage]), padded if stage == last else None)
        for stage in schedule.stages_of(pp_rank)
    }
    kept = {stage: sum(part.bytes for part in of_stage) for stage, of_stage in parts.items()}
    working = layer_working_bytes(shapes)
    if last in kept:
        # The loss has run backward before any layer does.
        working = max(working, loss_working_bytes(shapes, padded))
    held = peak = 0
    for entry in schedule.order[pp_rank]:
        if isinstance(entry, Pair):
            peak = max(peak, held + most_in_pair(*(parts[action.stage] for action in entry.parts)))
        held += sum(kept[action.stage] for action in entry.parts if action.kind == "F")
        if not isinstance(entry, Pair):
            peak = max(peak, held)
        held -= sum(kept[action.stage] for action in entry.parts if action.kind in ("B", "I"))
    return Memory(weights, gradients, moments, peak, working + sharding.working_bytes())


def fp8_weight_bytes(
    copies: Sequence[RankCopies],
    shapes: Shapes,
    schedule: Schedule,
    layers: Sequence[range],
    pp_rank: int,
    sharding: RankSharding,
) -> int:
    """Return what a rank at a position in the pipeline makes of its weights for FP8, at most; copies: of each tp rank, or none.

    Of weights that are gathered for each use, copies go with them: a forward has those of one layer, a backward of another. The
    two of a pair are there at once where tensor parallelism cuts them into parts that take turns.
    """
    gathered = sharding.gathered
    stages = {stage: layers[stage] for stage in schedule.stages_of(pp_rank)}
    held = [layer for of_stage in stages.values() for layer in of_stage]
    take_turns = shapes.tp > 1 and shapes.recompute != "full"
    entries = {tuple((part.kind, part.stage) for part in entry.parts) for entry in schedule.order[pp_rank]}

    def in_use(rank: RankCopies, kind: str, stage: int) -> int:
        if kind == "F":
            return rank.most_in(stages[stage], gathered, lambda copies: copies.forward)
        if kind == "W":
            return 0  # a product of what was kept of the backward before
        return rank.most_in(
            stages[stage], gathered, lambda copies: copies.both if shapes.recompute == "full" else copies.backward
        )

    def most_in_use(rank: RankCopies) -> int:
        sizes = ([in_use(rank, *part) for part in parts] for parts in entries)
        return max((sum(size) if take_turns else max(size) for size in sizes), default=0)

    return max((rank.kept(held, gathered) + most_in_use(rank) for rank in copies), default=0)


def rank_traffic(
    shapes: Shapes,
    schedule: Schedule,
    layers: Sequence[range],
    pp_rank: int,
    sharding: RankSharding,
) -> Traffic:
    """Return what a rank at a position in the pipeline sends in a step; a few bytes per token, as the loss's, are left out."""
    whole = shapes.num_tokens * shapes.config.hidden_size * shapes.element
    tp_parts = messages = 0
    for action in schedule.actions_of(pp_rank):
        if action.kind == "F":
            tp_parts += _gathers(shapes, len(layers[action.stage]), action.stage, schedule.num_stages)
    for rank in range(schedule.num_ranks):
        for action in schedule.actions_of(rank):
            source = schedule.input_of(action)
            messages += source is not None and rank != pp_rank and schedule.rank_of(source) == pp_rank
    return Traffic(
        tp=round(tp_parts * whole * (shapes.tp - 1) / shapes.tp),
        pp=messages * shapes.hidden_bytes,
        dp=sharding.bytes_sent(),
    )


def _gathers(shapes: Shapes, num_layers: int, stage: int, num_stages: int) -> int:
    """Return what tensor parallelism sends for one micro-batch in a stage, in all_gathers of the whole hidden state."""
    parts = num_layers * (10 if shapes.sp else 8)
    if shapes.recompute == "full":
        parts += num_layers * 4  # forward's once more
    if stage == 0:
        parts += 2  # the embedding's all_reduce, or its reduce_scatter and the all_gather of its gradient
    if stage == num_stages - 1:
        # The head's input, as of any column-parallel layer; where the loss takes chunks of tokens, the gathered one is kept.
        parts += 3 if shapes.sp and shapes.chunk_tokens == shapes.num_tokens else 2
    return parts


def print_plan(run: PlannedRun) -> None:
    """Print the plan of a run for people, from global rank 0 if there is a launcher after all."""
    if os.environ.get("RANK", "0") != "0":
        return
    from rich.console import Console
    from rich.table import Table

    plan = make_plan(run)
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, TABLE_WIDTH)  # a line that is folded is easier to read than cells that are cut
    unit, scale = ("GiB", 2**30) if max(rank.memory.total for rank in plan.ranks) >= 2**31 else ("MiB", 2**20)
    for line in _summary(plan, unit, scale):
        console.print(line)
    if run.why_schedule is not None:
        console.print(f"schedule: {run.why_schedule}")
    for line in plan_fp8(run.fp8, run.model_config, run.layout.tp, run.fp8_layers):
        console.print(line, markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    parts = ["weights", "gradients", "optimizer", "activations", "working", "total"]
    if run.fp8_layers is not None:
        parts.insert(1, "fp8_weights")
    for name in ["stages", "layers", "ranks", "parameters", "in_flight", *parts, "tp", "pp", "dp"]:
        table.add_column(name.replace("_", " "), justify="right")
    for rank in plan.ranks:
        memory, traffic = rank.memory, rank.traffic
        sizes = [getattr(memory, part) for part in parts]
        table.add_row(
            ", ".join(map(str, rank.stages)),
            ", ".join(
                _layers(layers, stage, plan.num_stages) for stage, layers in zip(rank.stages, rank.layers, strict=True)
            ),
            f"{rank.ranks[0]}-{rank.ranks[1]}",
            f"{rank.num_parameters:,}",
            str(rank.in_flight),
            *(f"{size / scale:,.2f}" for size in (*sizes, traffic.tp, traffic.pp, traffic.dp)),
        )
    console.print(f"\nMemory of each rank, and what it sends in a step along tp, pp and dp, in {unit}:")
    console.print(table)


def _summary(plan: Plan, unit: str, scale: int) -> Iterable[str]:
    layout, ranks = plan.layout, plan.ranks
    yield f"{layout.world_size:,} ranks = tp {layout.tp} x pp {layout.pp} x dp {layout.dp}"
    strides = {"tp": 1, "dp": layout.tp, "pp": layout.tp * layout.dp}
    for axis, stride in strides.items():
        size = getattr(layout, axis)
        if size > 1:
            shown = [str(rank * stride) for rank in range(min(3, size))] + (["..."] if size > 3 else [])
            yield f"  {axis}: {size} ranks, {stride} apart: {', '.join(shown)}"
    counts = [rank.num_parameters for rank in ranks]
    totals = [rank.memory.total for rank in ranks]
    slowest = max(rank.flops_share for rank in ranks)
    yield f"parameters: {plan.num_parameters:,}; per rank {min(counts):,} to {max(counts):,}"
    yield f"memory: per rank {min(totals) / scale:,.2f} to {max(totals) / scale:,.2f} {unit}, without the framework's own"
    yield (
        f"step: {plan.tokens_per_step:,} tokens, {plan.flops_per_step:.3e} FLOPs of the model, "
        f"{plan.num_micro_batches} micro-batches"
    )
    yield (
        f"pipeline: {plan.schedule}, bubble {plan.bubble:.1%} of the step; the slowest rank has {slowest:.2f} times its "
        "share of the FLOPs"
    )


def _layers(layers: range, index: int, count: int) -> str:
    middle = f"{layers[0]}-{layers[-1]}" if len(layers) else "none"
    return ("E " if index == 0 else "") + middle + (" L" if index == count - 1 else "")
