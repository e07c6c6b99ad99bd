"""What a real step did: for each rank when its actions ran, when it waited, when messages left and came.

    record = RankRecord(rank, origin=time.perf_counter())      # by every rank, right after a barrier
    record.add(RUN, entry, start, end)                         # while the step runs; clock readings
    record.add(SEND, action, start, end, peer)                 # of the action's result
    trace = Trace("1f1b", [RankRecord.from_data(data) for data in gathered])
    chart_of_trace(trace)                                      # as a schedule is drawn (parallax.pipeline.draw)
    to_perfetto(trace)                                         # for ui.perfetto.dev (parallax.pipeline.draw.perfetto)
    simulate(trace.schedule(), trace.costs())                  # what the step would be if messages took no time
    choose_schedule(p, m, trace.share_costs())                 # which schedule suits this machine

A record takes no torch and no clock: whoever runs the step reads the clock and says what was done. Clocks of different
ranks need a common moment, `origin`; on one machine that is the same clock anyway.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from parallax.errors import ConfigError
from parallax.pipeline.actions import Action, Entry, Pair, Schedule, parse_entry
from parallax.pipeline.check import check_schedule
from parallax.pipeline.costs import Costs, PerStage
from parallax.pipeline.tables import owners_of

RUN, WAIT, SEND, RECEIVE = EVENT_KINDS = ("run", "wait", "send", "receive")
_FORMAT = "parallax pipeline trace 1"
_LEAST, _MOST = 1e-9, 1e9  # seconds that a step can take: a tick of the clock, thirty years


@dataclass(frozen=True)
class Event:
    """Something that took its time on a rank, in seconds from the common moment.

    kind: RUN, an entry of the schedule; WAIT, for the result of an action on another rank; SEND, from the moment that a result
        could leave until it has left; RECEIVE, from the posted receive until the result is there.
    what: the entry that ran, or the action whose result it is.
    peer: the other rank of a message; None for RUN.
    """

    kind: str
    what: Entry
    start: float
    end: float
    peer: int | None = None


@dataclass
class RankRecord:
    """What one rank did in one step; origin: its clock at the moment that is 0 for all ranks."""

    rank: int
    origin: float = 0.0
    events: list[Event] = field(default_factory=list)

    def add(self, kind: str, what: Entry, start: float, end: float, peer: int | None = None) -> None:
        """Record an event by the clock's readings."""
        assert kind in EVENT_KINDS and end >= start and (peer is None) == (kind == RUN), (kind, what, start, end, peer)
        self.events.append(Event(kind, what, start - self.origin, end - self.origin, peer))

    def to_data(self) -> dict[str, Any]:
        """Return plain lists and strings, to be sent to another rank; `from_data` reads them."""
        events = [[event.kind, str(event.what), event.start, event.end, event.peer] for event in self.events]
        return {"rank": self.rank, "events": events}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RankRecord:
        """Return the record; raises KeyError, TypeError, ValueError or ConfigError if it is none."""
        events = [
            Event(kind, parse_entry(str(what)), float(start), float(end), peer if peer is None else int(peer))
            for kind, what, start, end, peer in data["events"]
        ]
        if not all(event.kind in EVENT_KINDS and -math.inf < event.start <= event.end < math.inf for event in events):
            raise ValueError(f"rank {data['rank']} has an event of an unknown kind, or one that ends before it starts")
        return cls(int(data["rank"]), events=events)


class Trace:
    """The records of all ranks of one step, in order of rank; the earliest event is at 0.

    name: of the step, as a title.
    """

    def __init__(self, name: str, records: Iterable[RankRecord]) -> None:
        self.name = name
        self.records = sorted(records, key=lambda record: record.rank)
        ranks = [record.rank for record in self.records]
        assert ranks and ranks == list(range(len(ranks))), f"one record of each rank is needed, not of ranks {ranks}"
        assert all(any(event.kind == RUN for event in record.events) for record in self.records), (
            "there is a rank that ran nothing"
        )
        first = min(event.start for record in self.records for event in record.events)
        for record in self.records:
            record.events = [
                Event(event.kind, event.what, event.start - first, event.end - first, event.peer)
                for event in sorted(record.events, key=lambda event: (event.start, event.end))
            ]

    def events(self, kind: str) -> list[tuple[int, Event]]:
        """Return (rank, event) of one kind, by rank, then by start."""
        return [(record.rank, event) for record in self.records for event in record.events if event.kind == kind]

    def schedule(self) -> Schedule:
        """Return the table of what ran, in the order in which it did."""
        order = tuple(tuple(event.what for event in record.events if event.kind == RUN) for record in self.records)
        actions = [action for row in order for entry in row for action in entry.parts]
        return Schedule(
            self.name,
            num_stages=1 + max(action.stage for action in actions),
            num_ranks=len(order),
            num_micro_batches=1 + max(action.micro_batch for action in actions),
            order=order,
            owner=owners_of(self.name, order),
            forward_only=all(action.kind == "F" for action in actions),
        )

    @property
    def makespan(self) -> float:
        """End of the last action, in seconds."""
        return max(event.end for _, event in self.events(RUN))

    def busy(self) -> list[float]:
        """Return for each rank the seconds in which its actions ran, without what pairs waited inside."""
        return [sum(work for _, work in _works(record.events)) for record in self.records]

    def costs(self) -> Costs:
        """Return the median time of each kind of action on each stage, and of pairs, messages taking no time.

        A whole backward counts as I, unless the stage also has split ones. A pair's gain counts for both of its stages; what it
        waits inside for the message that its backward takes is none of its time.
        """
        times: dict[tuple[str, int], list[float]] = {}
        pairs = []
        for record in self.records:
            for entry, work in _works(record.events):
                if isinstance(entry, Pair):
                    pairs.append((entry, work))
                else:
                    times.setdefault((entry.kind, entry.stage), []).append(work)
        stages = range(self.schedule().num_stages)
        forward = tuple(_median(times.get(("F", stage))) for stage in stages)
        weight = tuple(_median(times.get(("W", stage))) for stage in stages)
        whole = tuple(_median(times.get(("B", stage))) for stage in stages)
        half = tuple(_median(times.get(("I", stage))) or whole[stage] for stage in stages)
        alone = Costs(forward, half, weight)
        gains: dict[int, list[float]] = {}
        for pair, time in pairs:
            gain = sum(map(alone.of, pair.parts)) - time
            for action in pair.parts:
                gains.setdefault(action.stage, []).append(gain)
        paired = tuple(
            alone.of(Action("F", stage, 0)) + alone.of(Action("B", stage, 0)) - _median(gains.get(stage))
            for stage in stages
        )
        return Costs(forward, half, weight, pair=paired if pairs else None)

    def message_time(self) -> float:
        """Return the median time of messages, from when one could leave until a rank that waited had it."""
        left: dict[tuple[int | None, Entry], float] = {
            (rank, event.what): event.start for rank, event in self.events(SEND)
        }
        waits = ((event, left.get((event.peer, event.what))) for _, event in self.events(WAIT))
        return _median(
            [event.end - made for event, made in waits if made is not None and event.start < made < event.end]
        )

    def share_costs(self) -> Costs:
        """Return what a rank's whole share of the model takes, on the average of the ranks, as `choose_schedule` takes it.

        A backward that was never split counts as two equal halves, and pairs gain nothing if there were none.
        """
        costs, ranks = self.costs(), len(self.records)
        forward, half, weight = (
            _total(value) for value in (costs.forward, costs.input_gradient, costs.weight_gradient)
        )
        if weight == 0:
            half = weight = half / 2
        pair = None if costs.pair is None else _total(costs.pair) / ranks
        return Costs(forward / ranks, half / ranks, weight / ranks, self.message_time(), pair)


def _works(events: list[Event]) -> Iterator[tuple[Entry, float]]:
    """Yield what one rank ran and the seconds that it took without the waits inside; events: in order of their start."""
    waits = [event for event in events if event.kind == WAIT]
    starts = [wait.start for wait in waits]
    for run in events:
        if run.kind == RUN:
            inside = waits[bisect_left(starts, run.start) : bisect_left(starts, run.end)]
            waited = sum(min(wait.end, run.end) - wait.start for wait in inside)
            yield run.what, max(run.end - run.start - waited, 0.0)


def _total(value: PerStage) -> float:
    return sum(value) if isinstance(value, tuple) else value


def _median(times: list[float] | None) -> float:
    return median(times) if times else 0.0


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write the trace as JSON that `read_trace` reads."""
    data = {"format": _FORMAT, "name": trace.name, "ranks": [record.to_data() for record in trace.records]}
    Path(path).write_text(json.dumps(data), encoding="utf-8")


def read_trace(path: str | Path) -> Trace:
    """Return the trace in a file; raises ConfigError if there is none."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise ValueError(f"its format is {data['format']!r}")
        trace = Trace(str(data["name"]), map(RankRecord.from_data, data["ranks"]))
        if not _LEAST <= trace.makespan <= _MOST:
            raise ValueError(f"its step took {trace.makespan:g} s")
        check_schedule(trace.schedule())
        return trace
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise ConfigError(f"{path} is no trace of a pipeline step, as --trace-pipeline writes it: {error}") from error
