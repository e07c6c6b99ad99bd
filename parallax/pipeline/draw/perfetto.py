"""A recorded step for the viewers of Chrome and Perfetto (ui.perfetto.dev): the JSON of the Trace Event Format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from parallax.pipeline.actions import Entry
from parallax.pipeline.trace import RECEIVE, RUN, SEND, WAIT, Event, Trace


def to_perfetto(trace: Trace) -> str:
    """Return the trace as Chrome's JSON: a process for each rank, a thread of its actions and waits, others of its messages.

    An arrow (a flow event) leads from the send of a message to its receive. Messages that are under way at the same time
    stand on lanes of their own, since slices of one thread may not overlap. Times are in microseconds.
    """
    out: list[dict[str, Any]] = []
    flows: dict[tuple[int | None, Entry, int | None], int] = {
        (rank, event.what, event.peer): index for index, (rank, event) in enumerate(trace.events(SEND))
    }
    for record in trace.records:
        rank = record.rank
        out.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        out.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        names = {}
        for events, first, thread in (
            ([event for event in record.events if event.kind in (RUN, WAIT)], 0, "actions"),
            ([event for event in record.events if event.kind == SEND], 100, "sends"),
            ([event for event in record.events if event.kind == RECEIVE], 200, "receives"),
        ):
            for lane, event in _in_lanes(events):
                names[first + lane] = thread if lane == 0 else f"{thread} {lane + 1}"
                out.append(_slice(rank, first + lane, event))
                if event.kind == SEND:
                    out.append(_flow("s", flows[rank, event.what, event.peer], rank, first + lane, event.start))
                elif event.kind == RECEIVE and (sent := flows.get((event.peer, event.what, rank))) is not None:
                    out.append(_flow("f", sent, rank, first + lane, _within(event)) | {"bp": "e"})
        for thread_id, name in names.items():
            out.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread_id, "args": {"name": name}})
            out.append(
                {
                    "ph": "M",
                    "name": "thread_sort_index",
                    "pid": rank,
                    "tid": thread_id,
                    "args": {"sort_index": thread_id},
                }
            )
    return json.dumps({"traceEvents": out, "displayTimeUnit": "ms"})


def _in_lanes(events: Sequence[Event]) -> Iterable[tuple[int, Event]]:
    """Yield (lane, event), each on the first lane that is free."""
    free_at: list[float] = []
    for event in events:
        lane = next((lane for lane, time in enumerate(free_at) if time <= event.start), len(free_at))
        free_at[lane : lane + 1] = [event.end]
        yield lane, event


def _slice(rank: int, thread: int, event: Event) -> dict[str, Any]:
    names = {RUN: "{what}", WAIT: "wait for {what}", SEND: "{what} to rank {peer}", RECEIVE: "{what} from rank {peer}"}
    return {
        "ph": "X",
        "name": names[event.kind].format(what=event.what, peer=event.peer),
        "cat": event.kind,
        "pid": rank,
        "tid": thread,
        "ts": event.start * 1e6,
        "dur": (event.end - event.start) * 1e6,
    }


def _within(event: Event) -> float:
    """Return a time just before the end, for the arrow to end in the slice."""
    return event.end - min(0.5e-6, (event.end - event.start) / 2)


def _flow(phase: str, index: int, rank: int, thread: int, time: float) -> dict[str, Any]:
    return {"ph": phase, "id": index, "name": "message", "cat": "message", "pid": rank, "tid": thread, "ts": time * 1e6}
