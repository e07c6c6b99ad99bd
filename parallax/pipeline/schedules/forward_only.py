"""Forwards alone, for evaluation; run it under `torch.no_grad()`."""

from __future__ import annotations

from parallax.pipeline.actions import Schedule, one_stage_per_rank
from parallax.pipeline.schedules.constraints import Constraints


def forward_only(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the table in which every micro-batch passes every stage once, with no backward."""
    Constraints().check("forward-only", num_stages, num_micro_batches)
    row = [("F", number) for number in range(num_micro_batches)]
    return one_stage_per_rank("forward-only", num_micro_batches, [row] * num_stages, forward_only=True)
