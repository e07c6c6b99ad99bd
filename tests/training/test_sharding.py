"""What data parallelism holds and sends in real runs, counted, against the formulas: equal to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from parallax.data_parallel import muon
from parallax.mesh import Layout, Mesh
from parallax.pipeline.schedules import make_schedule
from parallax.shared_memory import SharedMemory
from parallax.training.sharding import RankSharding, rank_sharding
from parallax.training.stages import stage_ranges
from parallax.training.step import TrainStep
from tests.distributed.harness import run_layout
from tests.distributed.training import SMALL, Case, build, loader_of

TIED = replace(SMALL, tie_word_embeddings=True)
FEW_SCALARS = 16  # elements; a bucket has more


@contextmanager
def _counted(mesh: Mesh) -> Iterator[list[tuple[tuple[int, ...], float, int]]]:
    """Note, of every collective in shared memory, its ranks, the bytes that a ring would send, and its elements."""
    calls: list[tuple[tuple[int, ...], float, int]] = []
    ranks_of = {group.shared_memory: ranks for ranks, group in mesh.groups.items()}
    originals = {name: getattr(SharedMemory, name) for name in ("all_reduce_", "reduce_scatter", "all_gather")}

    def counting(name: str, times: int, place: int) -> Any:
        def call(self: SharedMemory, *tensors: Any) -> None:
            whole = tensors[place]
            calls.append((ranks_of[self], times * whole.nbytes * (self.ranks - 1) / self.ranks, whole.numel()))
            originals[name](self, *tensors)

        return call

    try:
        for name, times, place in (("all_reduce_", 2, 0), ("reduce_scatter", 1, 0), ("all_gather", 1, 1)):
            setattr(SharedMemory, name, counting(name, times, place))
        yield calls
    finally:
        for name, original in originals.items():
            setattr(SharedMemory, name, original)


def _planned(mesh: Mesh, case: Case) -> RankSharding:
    schedule = make_schedule(
        case.schedule, mesh.layout.pp, case.global_batch // (case.micro_batch * mesh.layout.dp), case.chunks
    )
    layers = stage_ranges(case.model, schedule.num_stages, None, case.seq_len)
    options = case.optimizer_options
    return rank_sharding(case.model, mesh.layout, layers, schedule, mesh.pp_rank, case.sp, options, case.precision)


def _held(step: TrainStep) -> tuple[int, int, int]:
    """Return the bytes of all memory behind the weights, the gradients and the optimizer's states."""
    buckets = step.buckets.buckets

    def weigh(tensors: list[torch.Tensor]) -> int:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    # Not by the pieces of parameters: some ranks keep states of padding only.
    regions = [region for regions in step.optimizer._regions.values() for region in regions]
    states = [state for region in regions for state in region.states.values()]
    states += [region.main_param for region in regions if region.bucket.has_own_main_params]
    weights = [tensor for bucket in buckets for tensor in (bucket.parameters, bucket.shard)]
    assert all(bucket.whole_grad is None for bucket in buckets)
    return weigh(weights), weigh([bucket.main_grad for bucket in buckets]), weigh(states)


def _run(mesh: Mesh, cases: list[Case]) -> list[str]:
    """Return in what the second step of each case differs from the formulas."""
    wrong = []
    for case in cases:
        step, loader = build(mesh, case), loader_of(mesh, case)
        step(loader.micro_batches(0), 1e-3)
        held_before = {bucket.groups for bucket in step.buckets.buckets}
        groups = {group.ranks for groups in held_before for group in vars(groups).values() if group is not None}
        with _counted(mesh) as calls:
            step(loader.micro_batches(1), 1e-3)
        sent = sum(count for ranks, count, elements in calls if ranks in groups and elements > FEW_SCALARS)
        planned = _planned(mesh, case)
        if case.optimizer != "muon" and sent != planned.bytes_sent():
            wrong.append(f"{case}: sends {sent}, planned {planned.bytes_sent()}")
        if _held(step) != planned.state_bytes():
            wrong.append(f"{case}: holds {_held(step)}, planned {planned.state_bytes()}")
        scalars = [ranks for ranks, _, elements in calls if elements <= FEW_SCALARS]
        if len(scalars) > 2:  # the targets over dp, and norm and loss over the world
            wrong.append(f"{case}: {len(scalars)} sums of single numbers")
    return wrong


ALL = ("main_grad_dtype", "grad_reduce_dtype", "moment_dtype")
EIGHT_LAYERS = replace(TIED, num_hidden_layers=8)
CASES = {
    Layout(dp=2): [
        *(Case(zero=zero, model=TIED, micro_batch=1) for zero in (0, 1, 2, 3)),
        *(Case(zero=zero, precision="bf16", narrow=ALL) for zero in (0, 1, 2, 3)),
        Case(zero=3, recompute="full", optimizer="sgd"),
        Case(zero=2, optimizer="muon", precision="bf16"),
    ],
    Layout(dp=4): [
        *(Case(zero=zero, zero_group=2, micro_batch=1, precision="bf16") for zero in (1, 2, 3)),
        Case(zero=2, zero_group=2, micro_batch=1, narrow=("grad_reduce_dtype",)),
    ],
    Layout(pp=2, dp=2): [
        Case(schedule=name, zero=zero, model=EIGHT_LAYERS, micro_batch=1)
        for name in ("1f1b", "zb-h1", "dualpipe")
        for zero in (1, 2, 3)
    ],
    Layout(tp=2, dp=2): [Case(zero=zero, sp=True, micro_batch=1) for zero in (0, 1, 2, 3)],
}


@pytest.mark.parametrize("layout", CASES, ids=lambda layout: f"tp{layout.tp}-pp{layout.pp}-dp{layout.dp}")
def test_what_is_held_and_sent_equals_the_formulas(layout: Layout) -> None:
    assert run_layout(layout, _run, CASES[layout], timeout=120) == [[]] * layout.world_size


def _exchanged(mesh: Mesh, cases: list[Case]) -> list[tuple[int, int, int]]:
    """Return the bytes that Muon exchanges in the second step of each case: sent by this rank, owed by it, and planned.

    Owed: of matrices that others own, what is here, unless a rank before has it too; of its own ones, what is elsewhere.
    """
    result = []
    for case in cases:
        step, loader = build(mesh, case), loader_of(mesh, case)
        step(loader.micro_batches(0), 1e-3)
        sent: list[int] = []
        original = muon.exchange

        def counting(outgoing: Any, incoming: Any, group: Any, sent: list[int] = sent, do: Any = original) -> None:
            sent.extend(tensor.nbytes for tensor in outgoing.values())
            do(outgoing, incoming, group)

        muon.exchange = counting
        try:
            step(loader.micro_batches(1), 1e-3)
        finally:
            muon.exchange = original
        rule = step.optimizer._rules["muon"]
        assert isinstance(rule, muon.Muon)
        owed = 0
        for cell, _ in rule._cells:
            for matrix in cell.matrices:
                for piece in matrix.pieces:
                    elements = piece.stop - piece.start
                    if matrix.owner == cell.rank:
                        owed += elements * sum(rank != cell.rank for rank in piece.ranks)
                    elif piece.ranks[0] == cell.rank and matrix.owner not in piece.ranks:
                        owed += elements
        planned = sum(
            2 * (bucket.plan.size // bucket.levels.num_shards) * (bucket.cell - 1) // bucket.cell * 4
            for bucket in _planned(mesh, case).buckets
        )
        result.append((sum(sent), owed * 4, planned))
    return result


WITH_MUON = {
    Layout(dp=2): [Case(optimizer="muon", zero=zero, micro_batch=1) for zero in (0, 1, 2, 3)],
    Layout(tp=2): [Case(optimizer="muon", zero=zero) for zero in (0, 1)],
    Layout(tp=2, dp=2): [Case(optimizer="muon", zero=zero, micro_batch=1, precision="bf16") for zero in (0, 1, 3)],
}


@pytest.mark.parametrize("layout", WITH_MUON, ids=str)
def test_muon_exchanges_what_is_not_at_its_owner_and_at_most_what_is_planned(layout: Layout) -> None:
    for case, *ranks in zip(WITH_MUON[layout], *run_layout(layout, _exchanged, WITH_MUON[layout]), strict=True):
        sent, owed, planned = (sum(column) for column in zip(*ranks, strict=True))
        assert sent == owed, case
        assert sent <= planned, case
        if case.zero == 0 or layout.dp == 1:  # what cuts matrices is tp, evenly
            assert sent == planned, case
