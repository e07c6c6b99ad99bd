"""DualPipe: forwards of one direction run together with backwards of the other (DeepSeek-V3, arXiv:2412.19437, section 3.2.1).

DualPipe feeds half the micro-batches from each end of the ranks. Rank r holds stage r for the pipe that goes down and stage
p - 1 - r for the pipe that goes up, so each stage is held twice, and its gradients have to be summed over both holders.

    stage     0     1     2     3        pipe a, micro-batches 0 .. m/2 - 1      ->
    rank      0     1     2     3
    stage     3     2     1     0        pipe b, micro-batches m/2 .. m - 1      <-

DualPipeV is its half, folded: one pipe goes down ranks 0 .. p - 1 and up again through 2p thin stages, each held once.

    stage     0     1     2     3    |   rank r holds stages r and 2p - 1 - r
    stage     7     6     5     4   <-

Both are one table. Seen from a rank, its near stage (0 below) is the one that is closer to where micro-batches enter, the far
stage (1) the one that is closer to the loss; with h ranks between it and the entry, q ranks from the entry to the middle (or
the fold) and m micro-batches a direction, it does

    1  F0                   2(q - h - 1) times     5  B1 (F1|B0)       q - h - 1 times
    2  F0 F1                h + 1                  6  B1 B0            h + 1; of the second half only I
    3  I1 W1 F1             q - h - 1              7  W I0             q - h - 1
    4  (F0|B1) (F1|B0)      m - 2q + h + 1         8  W                h + 1

where W is the oldest one that is due, and the ranks next to the middle do their first F0 and B1 apart: the others wait for
both. With q = p/2 for DualPipe and p for DualPipeV the worst rank waits (q - 1)(FB + B - 3W) if F = I >= W, FB being a
pair's time. DualPipe holds p + 1 micro-batches in flight, DualPipeV 2p + 1 of half the size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from parallax.pipeline.actions import Action, Entry, Pair, Schedule
from parallax.pipeline.schedules.constraints import Constraints
from parallax.pipeline.schedules.zero_bubble import v_owner

DUALPIPE = Constraints(
    ranks_multiple=2, micro_batches_multiple=2, micro_batches_per_rank=2, for_other_ranks="dualpipev"
)
DUALPIPEV = Constraints(chunks=2, micro_batches_per_rank=2)
NEAR, FAR = 0, 1


def dualpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return DualPipe's table for an even number of ranks and an even number of micro-batches, at least 2 per rank."""
    DUALPIPE.check("dualpipe", num_ranks, num_micro_batches)
    half = num_micro_batches // 2
    order = []
    for rank in range(num_ranks):
        hops = min(rank, num_ranks - 1 - rank)
        down = Action("F", rank, 0)
        up = Action("F", num_ranks - 1 - rank, half, pipe=1)
        near, far = (down, up) if rank < num_ranks // 2 else (up, down)
        order.append(tuple(_eight_steps(near, far, hops, num_ranks // 2, half)))
    owner = (tuple(range(num_ranks)), tuple(reversed(range(num_ranks))))
    return Schedule("dualpipe", num_ranks, num_ranks, num_micro_batches, tuple(order), owner)


def dualpipev(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return DualPipeV's table for any number of ranks, and at least 2 micro-batches per rank."""
    DUALPIPEV.check("dualpipev", num_ranks, num_micro_batches)
    order = tuple(
        tuple(
            _eight_steps(
                Action("F", rank, 0), Action("F", 2 * num_ranks - 1 - rank, 0), rank, num_ranks, num_micro_batches
            )
        )
        for rank in range(num_ranks)
    )
    return Schedule("dualpipev", 2 * num_ranks, num_ranks, num_micro_batches, order, (v_owner(num_ranks),))


def _eight_steps(near: Action, far: Action, hops: int, middle: int, num_micro_batches: int) -> Iterator[Entry]:
    """Yield the entries of a rank that is `hops` from the entry; near, far: the first forwards of its two stages."""
    first = (near, far)
    forwards, backwards = [0, 0], [0, 0]  # done so far, of each stage
    due: deque[Action] = deque()  # weight gradients, oldest first

    def F(which: int) -> Action:
        forwards[which] += 1
        return _after(first[which], "F", forwards[which] - 1)

    def B(which: int, kind: str = "B") -> Action:
        backwards[which] += 1
        action = _after(first[which], kind, backwards[which] - 1)
        if kind == "I":
            due.append(action.at("W"))
        return action

    later = middle - hops - 1  # ranks between this one and the middle
    for _ in range(2 * later):
        yield F(NEAR)
    for _ in range(hops + 1):
        yield F(NEAR)
        yield F(FAR)
    for _ in range(later):
        yield B(FAR, "I")
        yield due.popleft()
        yield F(FAR)
    for number in range(num_micro_batches - 2 * middle + hops + 1):
        if number == 0 and later == 0:
            yield F(NEAR)
            yield B(FAR)
        else:
            yield Pair(F(NEAR), B(FAR))
        yield Pair(F(FAR), B(NEAR))
    for _ in range(later):
        yield B(FAR)
        yield Pair(F(FAR), B(NEAR))
    for number in range(2 * (hops + 1)):
        # Of these backwards the last hops + 1 are split; their weights' halves fill what is left of the step.
        yield B(FAR if number % 2 == 0 else NEAR, "B" if number < hops + 1 else "I")
    for _ in range(later):
        yield due.popleft()
        yield B(NEAR, "I")
    yield from due


def _after(first: Action, kind: str, count: int) -> Action:
    return Action(kind, first.stage, first.micro_batch + count, first.pipe)
