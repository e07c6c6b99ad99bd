"""Interleaved 1F1B: each rank holds several thin stages, rank r those with stage % p == r (Narayanan et al. 2021, section 2.2).

    v = 2, p = 2, m = 4; a box is half as wide as 1F1B's
    rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    rank 1   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

A micro-batch comes past each rank v times, so filling the pipe takes 1/v of the time: the bubble is (p - 1)(F + B) of one
thin stage. It costs v times as many messages, and activations of min(mv, (v - 1)p + 2(p - r - 1) + 1) of the thin stages.

Micro-batches go in groups: all of a group pass a rank's first stage, then all pass its second. With m a multiple of p a
group has p; any other m is cut into m // p groups of about equal size (one group if m < p), as torch's schedule does where
that comes out even. A group that is larger than p waits a little, and keeps more activations.
"""

from __future__ import annotations

from itertools import pairwise

from parallax.errors import ConfigError
from parallax.pipeline.actions import Action, Schedule, check_sizes


def interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int = 2) -> Schedule:
    """Return the table for `num_chunks` stages on each rank, any number of ranks and micro-batches from 1."""
    check_sizes("interleaved", num_ranks, num_micro_batches)
    if num_chunks < 2:
        raise ConfigError(
            f"schedule interleaved needs at least 2 stages on each rank (--chunks), not {num_chunks}; "
            "with one the schedule is 1f1b"
        )
    groups = _groups(num_ranks, num_micro_batches)
    forwards = [(chunk, number) for group in groups for chunk in range(num_chunks) for number in group]
    backwards = [(chunk, number) for group in groups for chunk in reversed(range(num_chunks)) for number in group]
    order = []
    for rank in range(num_ranks):
        # The first micro-batch must be through all but the last of this rank's stages, and then to the last rank and back.
        warm_up = (num_chunks - 1) * len(groups[0]) + 2 * (num_ranks - 1 - rank)
        row = [Action("F", chunk * num_ranks + rank, number) for chunk, number in forwards[:warm_up]]
        for place, (chunk, number) in enumerate(backwards, start=warm_up):
            if place < len(forwards):
                row.append(Action("F", forwards[place][0] * num_ranks + rank, forwards[place][1]))
            row.append(Action("B", chunk * num_ranks + rank, number))
        order.append(tuple(row))
    owner = tuple(range(num_ranks)) * num_chunks
    return Schedule("interleaved", len(owner), num_ranks, num_micro_batches, tuple(order), (owner,))


def _groups(num_ranks: int, num_micro_batches: int) -> list[range]:
    """Return the micro-batches in groups of at least `num_ranks`, if there are as many; the largest groups first."""
    count = max(1, num_micro_batches // num_ranks)
    size, larger = divmod(num_micro_batches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
