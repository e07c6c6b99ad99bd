"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).

    rank 0   F0 F1 F2 F3                   B0 B1 B2 B3
    rank 1      F0 F1 F2 F3          B0 B1 B2 B3
    rank 2         F0 F1 F2 F3 B0 B1 B2 B3

Bubble (p - 1)(F + B) on every rank, and all micro-batches in flight at once. With one stage there is nothing to fill,
so each backward directly follows its forward and one micro-batch is in flight.
"""

from __future__ import annotations

from parallax.pipeline.actions import Schedule, one_stage_per_rank
from parallax.pipeline.schedules.constraints import Constraints


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return GPipe's table for any number of stages and micro-batches from 1."""
    Constraints().check("gpipe", num_stages, num_micro_batches)
    numbers = range(num_micro_batches)
    if num_stages == 1:
        row = [(kind, number) for number in numbers for kind in "FB"]
    else:
        row = [(kind, number) for kind in "FB" for number in numbers]
    return one_stage_per_rank("gpipe", num_micro_batches, [row] * num_stages)
