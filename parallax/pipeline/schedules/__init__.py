"""The schedules by name, each a pure function; adding one is adding a line.

    ALL_SCHEDULES    each with its table's function and what is known of it without making a table
    SCHEDULES        the functions alone: (num_ranks, num_micro_batches) -> Schedule
    make_schedule    a table by name; where a name or a size does not exist, one sentence that says which do

With one rank, those that give it one stage are gradient accumulation: a pipeline of length one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from parallax.errors import ConfigError
from parallax.pipeline.actions import Schedule
from parallax.pipeline.schedules.constraints import DEFAULT_CHUNKS, Constraints
from parallax.pipeline.schedules.dualpipe import DUALPIPE, DUALPIPEV, dualpipe, dualpipev
from parallax.pipeline.schedules.forward_only import forward_only
from parallax.pipeline.schedules.gpipe import gpipe
from parallax.pipeline.schedules.interleaved import INTERLEAVED, INTERLEAVED_PAIRED, interleaved, interleaved_paired
from parallax.pipeline.schedules.one_f_one_b import eager_one_f_one_b, one_f_one_b
from parallax.pipeline.schedules.zero_bubble import ZB_V, zb_h1, zb_v


@dataclass(frozen=True)
class ScheduleRecord:
    """What is known of a schedule besides its table.

    make: (num_ranks, num_micro_batches) -> Schedule; if `takes_chunks`, also (..., stages on each rank).
    about: what it is, in half a sentence.
    constraints: the sizes that it has a table for.
    splits_backward: whether it needs the backward in halves, I and W.
    pairs: whether it does forwards and backwards together.
    holds_twice: whether two ranks hold each stage.
    """

    make: Callable[..., Schedule]
    about: str
    constraints: Constraints = Constraints()
    splits_backward: bool = False
    pairs: bool = False
    holds_twice: bool = False

    @property
    def takes_chunks(self) -> bool:
        """Whether the user says how many stages a rank holds."""
        return self.constraints.chunks is None


ALL_SCHEDULES: dict[str, ScheduleRecord] = {
    "gpipe": ScheduleRecord(gpipe, "all forwards, then all backwards"),
    "1f1b": ScheduleRecord(one_f_one_b, "one forward, one backward in turn"),
    "1f1b-eager": ScheduleRecord(eager_one_f_one_b, "1F1B for slow links, with twice the warm-up"),
    "interleaved": ScheduleRecord(interleaved, "1F1B with several thin stages a rank", INTERLEAVED),
    "interleaved-paired": ScheduleRecord(
        interleaved_paired, "interleaved, forwards paired with backwards", INTERLEAVED_PAIRED, pairs=True
    ),
    "zb-h1": ScheduleRecord(zb_h1, "1F1B with split backwards, weights' halves in the bubble", splits_backward=True),
    "zb-v": ScheduleRecord(zb_v, "split backwards, two thin stages a rank, in a V", ZB_V, splits_backward=True),
    "dualpipe": ScheduleRecord(
        dualpipe,
        "fed from both ends, forwards paired with backwards",
        DUALPIPE,
        splits_backward=True,
        pairs=True,
        holds_twice=True,
    ),
    "dualpipev": ScheduleRecord(
        dualpipev, "DualPipe folded to a V, each stage held once", DUALPIPEV, splits_backward=True, pairs=True
    ),
}

SCHEDULES: dict[str, Callable[..., Schedule]] = {name: record.make for name, record in ALL_SCHEDULES.items()}


MAX_CHUNKS = 250_000  # checking a table of so many takes a minute


def make_schedule(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None) -> Schedule:
    """Return a schedule by name; raises ConfigError for a name or sizes that do not exist, with the nearest that do.

    num_chunks: stages on each rank, where the schedule leaves that open; 2 if not given.
    """
    record = ALL_SCHEDULES.get(name)
    if record is None:
        near = get_close_matches(name, ALL_SCHEDULES, 1)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise ConfigError(f"schedule {name} is unknown; use {', '.join(ALL_SCHEDULES)}{hint}")
    for what, number in (("ranks", num_ranks), ("micro-batches", num_micro_batches), ("chunks", num_chunks)):
        if number is not None and not isinstance(number, int):
            raise ConfigError(f"schedule {name} takes a whole number of {what}, not {number!r}")
    if num_ranks * num_micro_batches * (num_chunks or 1) > MAX_CHUNKS:
        raise ConfigError(
            f"schedule {name} of {num_ranks} ranks and {num_micro_batches} micro-batches is a table of more than {MAX_CHUNKS:,} "
            "forwards; use fewer micro-batches in a step, or fewer ranks"
        )
    record.constraints.check(name, num_ranks, num_micro_batches, num_chunks)
    return record.make(num_ranks, num_micro_batches, *([num_chunks] if num_chunks is not None else []))


__all__ = [
    "ALL_SCHEDULES",
    "DEFAULT_CHUNKS",
    "SCHEDULES",
    "Constraints",
    "ScheduleRecord",
    "dualpipe",
    "dualpipev",
    "eager_one_f_one_b",
    "forward_only",
    "gpipe",
    "interleaved",
    "interleaved_paired",
    "make_schedule",
    "one_f_one_b",
    "zb_h1",
    "zb_v",
]
