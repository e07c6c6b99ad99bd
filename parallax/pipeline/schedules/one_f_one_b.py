"""1F1B: one forward, one backward, as soon as the pipe is full (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    rank 0   F0 F1 F2             B0 F3 B1    B2    B3      warm-up of p - 1 - r forwards, then F and B in turn
    rank 1      F0 F1       B0 F2 B1 F3 B2    B3            (steady), then the backwards that are left (cool-down)
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3

The bubble is GPipe's, (p - 1)(F + B), but rank r holds only min(m, p - r) micro-batches in flight.
"""

from __future__ import annotations

from parallax.pipeline.actions import Schedule, check_sizes, one_stage_per_rank


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return 1F1B's table for any number of stages and micro-batches from 1, fewer than stages included."""
    check_sizes("1f1b", num_stages, num_micro_batches)
    rows = []
    for rank in range(num_stages):
        warm_up = min(num_micro_batches, num_stages - 1 - rank)
        row = [("F", number) for number in range(warm_up)]
        for number in range(num_micro_batches):
            if warm_up + number < num_micro_batches:
                row.append(("F", warm_up + number))
            row.append(("B", number))
        rows.append(row)
    return one_stage_per_rank("1f1b", num_micro_batches, rows)
