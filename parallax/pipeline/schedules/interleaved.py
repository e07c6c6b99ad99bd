"""Interleaved 1F1B: each rank holds several thin stages, rank r those with stage % p == r (Narayanan et al. 2021, section 2.2).

    v = 2, p = 2, m = 4; a box is half as wide as 1F1B's
    rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    rank 1   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

A micro-batch comes past each rank v times, so filling the pipe takes 1/v of the time: the bubble is (p - 1)(F + B) of one
thin stage. It costs v times as many messages, and activations of min(mv, (v - 1)p + 2(p - r - 1) + 1) of the thin stages.

Micro-batches go in groups: all of a group pass a rank's first stage, then all pass its second. With m a multiple of p a
group has p; any other m is cut into m // p groups of about equal size (one group if m < p), as torch's schedule does where
that comes out even. No group may be smaller than p, or the ranks wait for each group's first micro-batch to come around;
one that is larger keeps more activations. Of the ways to cut that were tried, none is faster than this for any
p to 8, m to 4p and v to 4: one last group that is larger is as fast where it has a table at all, groups of p with a
smaller last one (which Megatron-LM refuses) are 6% slower.

Paired, the steady phase does each forward together with the backward that would come after it, as Megatron-LM does to hide
the communication of experts: rank r warms up with one forward more, for the first pair to have its backward's input.

    v = 1, p = 2, m = 4
    rank 0   0F0 0F1 0F2 (0F3|0B0) 0B1 0B2 0B3
    rank 1   1F0 (1F1|1B0) (1F2|1B1) (1F3|1B2) 1B3

All pairs but those of the first warm-up are there, as in DualPipe, with each stage held once. In time units of a whole
share of the model, p = 8, m = 32 and FB = 2.5 (F = I = W = 1) it takes 92.75 with two stages a rank and 88.375 with four;
DualPipe takes 89.
"""

from __future__ import annotations

from itertools import pairwise

from parallax.pipeline.actions import Action, Entry, Pair, Schedule
from parallax.pipeline.schedules.constraints import DEFAULT_CHUNKS, Constraints

INTERLEAVED = Constraints(chunks=None, least_chunks=2)
INTERLEAVED_PAIRED = Constraints(chunks=None)


def interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int = DEFAULT_CHUNKS) -> Schedule:
    """Return the table for `num_chunks` stages on each rank, any number of ranks and micro-batches from 1."""
    INTERLEAVED.check("interleaved", num_ranks, num_micro_batches, num_chunks)
    return _in_turn("interleaved", num_ranks, num_micro_batches, num_chunks, paired=False)


def interleaved_paired(num_ranks: int, num_micro_batches: int, num_chunks: int = DEFAULT_CHUNKS) -> Schedule:
    """Return the table with pairs for `num_chunks` stages on each rank, one included, any ranks and micro-batches from 1."""
    INTERLEAVED_PAIRED.check("interleaved-paired", num_ranks, num_micro_batches, num_chunks)
    return _in_turn("interleaved-paired", num_ranks, num_micro_batches, num_chunks, paired=True)


def _in_turn(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int, paired: bool) -> Schedule:
    groups = _groups(num_ranks, num_micro_batches)
    forwards = [(chunk, number) for group in groups for chunk in range(num_chunks) for number in group]
    backwards = [(chunk, number) for group in groups for chunk in reversed(range(num_chunks)) for number in group]
    order = []
    for rank in range(num_ranks):
        # The first micro-batch must be through all but the last of this rank's stages, and then to the last rank and back.
        warm_up = min(len(forwards), (num_chunks - 1) * len(groups[0]) + 2 * (num_ranks - 1 - rank) + paired)
        row: list[Entry] = [Action("F", chunk * num_ranks + rank, number) for chunk, number in forwards[:warm_up]]
        for place, (chunk, number) in enumerate(backwards, start=warm_up):
            backward = Action("B", chunk * num_ranks + rank, number)
            if place >= len(forwards):
                row.append(backward)
                continue
            forward = Action("F", forwards[place][0] * num_ranks + rank, forwards[place][1])
            row += [Pair(forward, backward)] if paired else [forward, backward]
        order.append(tuple(row))
    owner = tuple(range(num_ranks)) * num_chunks
    return Schedule(name, len(owner), num_ranks, num_micro_batches, tuple(order), (owner,))


def _groups(num_ranks: int, num_micro_batches: int) -> list[range]:
    """Return the micro-batches in groups of at least `num_ranks`, if there are as many; the largest groups first."""
    count = max(1, num_micro_batches // num_ranks)
    size, larger = divmod(num_micro_batches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
