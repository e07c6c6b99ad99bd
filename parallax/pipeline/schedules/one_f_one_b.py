"""1F1B: one forward, one backward, as soon as the pipe is full (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    rank 0   F0 F1 F2             B0 F3 B1    B2    B3      warm-up of p - 1 - r forwards, then F and B in turn
    rank 1      F0 F1       B0 F2 B1 F3 B2    B3            (steady), then the backwards that are left (cool-down)
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3

The bubble is GPipe's, (p - 1)(F + B), but rank r holds only min(m, p - r) micro-batches in flight.

Where a message takes time, rank r waits for it at nearly every micro-batch: in the steady phase its next backward needs
what its neighbour makes of the forward just sent. With a latency L a step takes L (2 (p - 1) m / p + 2 (p - 2)) longer.
The eager variant (Zhuang et al. 2023, arXiv:2211.05322, there eager-1F1B) warms up with one forward more for every rank
that follows, 2 (p - 1 - r), so that the two messages of a hop, there and back, have the time of an F and a B to arrive:
where they are no slower, a step takes 2 (p - 1) L longer whatever m is. It holds min(m, 2 (p - 1 - r) + 1) in flight.
"""

from __future__ import annotations

from parallax.pipeline.actions import Schedule, one_stage_per_rank
from parallax.pipeline.schedules.constraints import Constraints


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return 1F1B's table for any number of stages and micro-batches from 1, fewer than stages included."""
    return _warmed_up("1f1b", num_stages, num_micro_batches, forwards_per_hop=1)


def eager_one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the table of 1F1B for slow links, for any number of stages and micro-batches from 1."""
    return _warmed_up("1f1b-eager", num_stages, num_micro_batches, forwards_per_hop=2)


def _warmed_up(name: str, num_stages: int, num_micro_batches: int, forwards_per_hop: int) -> Schedule:
    Constraints().check(name, num_stages, num_micro_batches)
    rows = []
    for rank in range(num_stages):
        warm_up = min(num_micro_batches, forwards_per_hop * (num_stages - 1 - rank))
        row = [("F", number) for number in range(warm_up)]
        for number in range(num_micro_batches):
            if warm_up + number < num_micro_batches:
                row.append(("F", warm_up + number))
            row.append(("B", number))
        rows.append(row)
    return one_stage_per_rank(name, num_micro_batches, rows)
