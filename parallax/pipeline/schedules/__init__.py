"""The schedules by name, each a pure function; adding one is adding a line.

    SCHEDULES        those that a run can use: (num_ranks, num_micro_batches) -> Schedule, one stage on each rank
    ALL_SCHEDULES    these, and those that can so far only be drawn, checked and simulated, each with what is known of it

With one rank, those in SCHEDULES are gradient accumulation: a pipeline of length one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parallax.errors import ConfigError
from parallax.pipeline.actions import Schedule
from parallax.pipeline.schedules.dualpipe import dualpipe, dualpipev
from parallax.pipeline.schedules.forward_only import forward_only
from parallax.pipeline.schedules.gpipe import gpipe
from parallax.pipeline.schedules.interleaved import interleaved
from parallax.pipeline.schedules.one_f_one_b import one_f_one_b
from parallax.pipeline.schedules.zero_bubble import zb_h1, zb_v

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}

_WHOLE_STAGES = "a run does not give a rank more than one stage yet"
_WHOLE_BACKWARDS = "the executor does not run split backwards yet"


@dataclass(frozen=True)
class ScheduleRecord:
    """What is known of a schedule besides its table.

    make: (num_ranks, num_micro_batches) -> Schedule; if `takes_chunks`, also (..., stages on each rank).
    about: what it is, in half a sentence.
    not_run: why a run cannot use it yet; empty if it can.
    """

    make: Callable[..., Schedule]
    about: str
    not_run: str = ""
    takes_chunks: bool = False


ALL_SCHEDULES: dict[str, ScheduleRecord] = {
    "gpipe": ScheduleRecord(gpipe, "all forwards, then all backwards"),
    "1f1b": ScheduleRecord(one_f_one_b, "one forward, one backward in turn"),
    "interleaved": ScheduleRecord(
        interleaved, "1F1B with several thin stages a rank", _WHOLE_STAGES, takes_chunks=True
    ),
    "zb-h1": ScheduleRecord(zb_h1, "1F1B with split backwards, weights' halves in the bubble", _WHOLE_BACKWARDS),
    "zb-v": ScheduleRecord(zb_v, "split backwards, two thin stages a rank, in a V", _WHOLE_BACKWARDS),
    "dualpipe": ScheduleRecord(dualpipe, "fed from both ends, forwards paired with backwards", _WHOLE_BACKWARDS),
    "dualpipev": ScheduleRecord(dualpipev, "DualPipe folded to a V, each stage held once", _WHOLE_BACKWARDS),
}


def make_schedule(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None) -> Schedule:
    """Return a schedule by name; raises ConfigError for a name or sizes that do not exist.

    num_chunks: stages on each rank, where the schedule leaves that open.
    """
    record = ALL_SCHEDULES.get(name)
    if record is None:
        raise ConfigError(f"schedule {name} is unknown; use {', '.join(ALL_SCHEDULES)}")
    if num_chunks is None:
        return record.make(num_ranks, num_micro_batches)
    if not record.takes_chunks:
        raise ConfigError(
            f"schedule {name} says itself how many stages a rank holds; leave out --chunks, which is for interleaved"
        )
    return record.make(num_ranks, num_micro_batches, num_chunks)


__all__ = [
    "ALL_SCHEDULES",
    "SCHEDULES",
    "ScheduleRecord",
    "dualpipe",
    "dualpipev",
    "forward_only",
    "gpipe",
    "interleaved",
    "make_schedule",
    "one_f_one_b",
    "zb_h1",
    "zb_v",
]
