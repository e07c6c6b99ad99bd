"""Zero bubble: the backward in two halves, the weights' half where a rank would wait (Qi et al. 2024, arXiv:2401.10241).

Only I, the gradient of the input, is waited for by the stage before; W, that of the weights, fits in anywhere later.

ZB-H1 is 1F1B with each W done late by as many micro-batches as ranks come before: the bubble falls from (p - 1)(F + I + W)
to (p - 1)(F + I - min(F, I, W)), with 1F1B's activations in flight until I.

    p = 3, m = 4
    rank 0   F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

ZB-V gives each rank two thin stages, r going down and 2p - 1 - r coming back up: a V. The rank that begins a micro-batch
also ends it, so backwards start early. With F = I = W and m >= 2p, ranks wait only before their first and after their
last action, (p - 1)F each, for at most 2p thin stages in flight, as much as 1F1B's rank 0 holds. The published table takes these
times for granted; it is correct for any, but waits more.
"""

from __future__ import annotations

from collections.abc import Iterator

from parallax.pipeline.actions import Action, Schedule, one_stage_per_rank
from parallax.pipeline.schedules.constraints import Constraints

ZB_V = Constraints(chunks=2)


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return ZB-H1's table for any number of ranks and micro-batches from 1."""
    Constraints().check("zb-h1", num_ranks, num_micro_batches)
    rows = []
    for rank in range(num_ranks):
        warm_up = min(num_micro_batches, num_ranks - 1 - rank)
        row = [("F", number) for number in range(warm_up)]
        for number in range(num_micro_batches):
            if warm_up + number < num_micro_batches:
                row.append(("F", warm_up + number))
            row.append(("I", number))
            if number >= rank:
                row.append(("W", number - rank))
        row += [("W", number) for number in range(max(0, num_micro_batches - rank), num_micro_batches)]
        rows.append(row)
    return one_stage_per_rank("zb-h1", num_micro_batches, rows)


def zb_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return ZB-V's table for any number of ranks and micro-batches from 1; with fewer than 2p - 1 it is cut out of that one's."""
    ZB_V.check("zb-v", num_ranks, num_micro_batches)
    order = []
    for rank in range(num_ranks):
        counts: dict[tuple[str, int], int] = {}
        row = []
        for kind, chunk in _v_steps(num_ranks, rank, max(2 * num_ranks - 1, num_micro_batches)):
            number = counts.get((kind, chunk), 0)
            counts[kind, chunk] = number + 1
            if number < num_micro_batches:
                row.append(Action(kind, rank if chunk == 0 else 2 * num_ranks - 1 - rank, number))
        order.append(tuple(row))
    return Schedule("zb-v", 2 * num_ranks, num_ranks, num_micro_batches, tuple(order), (v_owner(num_ranks),))


def v_owner(num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each of 2p stages that go down the ranks and up again."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def _v_steps(num_ranks: int, rank: int, num_micro_batches: int) -> Iterator[tuple[str, int]]:
    """Yield a rank's actions as (kind, chunk), 0 being the stage on the way down; each (kind, chunk) counts micro-batches up."""
    hops = num_ranks - rank  # to the fold and past it
    yield from [("F", 0)] * (2 * hops - 1)
    yield from [("F", 1), ("F", 0)] * rank
    yield from [("F", 1), ("I", 1), ("W", 1)] * hops
    for number in range(num_micro_batches - num_ranks):
        if number < num_micro_batches - num_ranks - hops + 1:
            yield "F", 0
        yield from [("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1)]
    yield from [("I", 0), ("I", 1)] * rank
    yield from [("I", 0), ("W", 0)] * hops
    yield from [("W", 1)] * rank + [("W", 0)] * rank
