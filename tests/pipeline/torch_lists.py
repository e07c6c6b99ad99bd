"""The tables of torch.distributed.pipelining, computed without processes: its own methods on a stand-in for its objects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from torch.distributed.pipelining import schedules as theirs


def rows_of(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> dict[int, list]:
    """Return torch's `pipeline_order` of the schedule class `name`: for each rank its actions, None where it waits."""
    stand_in = SimpleNamespace(
        pp_group_size=ranks,
        _num_stages=ranks * chunks,
        num_stages=ranks * chunks,
        n_local_stages=chunks,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // max(1, micro_batches // ranks),
    )
    cls = getattr(theirs, name)
    if hasattr(cls, "_calculate_single_rank_operations"):
        return {rank: cls._calculate_single_rank_operations(stand_in, rank) for rank in range(ranks)}
    return cls._get_pipeline_order(stand_in)


def texts_of(rows: dict[int, list]) -> list[list[str]]:
    """Return the actions as we print them, pairs too; without the places where gradients are reduced."""
    kept = [[str(action) for action in rows[rank] if action is not None] for rank in sorted(rows)]
    return [
        [text.replace(";", "|").replace("OVERLAP_F_B", "") for text in row if "REDUCE_GRAD" not in text] for row in kept
    ]


def write_csv(rows: dict[int, list], path: Path) -> None:
    """Write the compute-only CSV with torch's own code."""
    cls = theirs.ScheduleInterleaved1F1B
    cls._dump_csv(SimpleNamespace(pipeline_order=rows), str(path), format="compute_only")
