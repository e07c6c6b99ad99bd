"""The tables of torch.distributed.pipelining, computed without processes: its own methods on objects without stages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Literal

from torch.distributed.pipelining import schedules as theirs


def made_by_torch(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> object:
    """Return an object of the schedule class `name` that knows its sizes and no more."""
    schedule = object.__new__(getattr(theirs, name))
    vars(schedule).update(
        pp_group_size=ranks,
        _num_stages=ranks * chunks,
        num_stages=ranks * chunks,
        n_local_stages=chunks,
        _n_microbatches=micro_batches,
        number_of_rounds=max(1, micro_batches // ranks),
        microbatches_per_round=micro_batches // max(1, micro_batches // ranks),
        _stages=[SimpleNamespace() for _ in range(chunks)],
        _defer_pp_recv=False,
    )
    return schedule


def rows_of(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> dict[int, list]:
    """Return torch's `pipeline_order` of the schedule class `name`: for each rank its actions, None where it waits."""
    schedule = made_by_torch(name, ranks, micro_batches, chunks)
    if hasattr(schedule, "_calculate_single_rank_operations"):
        return {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    return schedule._get_pipeline_order()


def texts_of(rows: dict[int, list]) -> list[list[str]]:
    """Return the actions as we print them, pairs too; without the places where gradients are reduced."""
    kept = [[str(action) for action in rows[rank] if action is not None] for rank in sorted(rows)]
    return [
        [text.replace(";", "|").replace("OVERLAP_F_B", "") for text in row if "REDUCE_GRAD" not in text] for row in kept
    ]


def write_csv(
    rows: dict[int, list],
    path: Path,
    format: Literal["compute_only", "compute_comms"] = "compute_only",
    micro_batches: int = 0,
    defer_receives: bool = False,
) -> None:
    """Write a CSV with torch's own code, which for compute_comms also adds the communication."""
    ranks = len(rows)
    schedule = made_by_torch("ScheduleInterleaved1F1B", ranks, micro_batches)
    stages = 1 + max(action.stage_index for row in rows.values() for action in row if action is not None)
    schedule.pipeline_order, schedule._num_stages, schedule._defer_pp_recv = rows, stages, defer_receives
    if format == "compute_comms":
        # GPipe's rows already say where gradients are reduced, which this pass adds itself.
        schedule._prepare_schedule_with_comms(
            {rank: [a for a in row if a is None or a.is_compute_op] for rank, row in rows.items()}
        )
    schedule._dump_csv(str(path), format=format)
