"""A recorded step for the viewers of Chrome and Perfetto (ui.perfetto.dev): the JSON of the Trace Event Format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from parallax.pipeline.trace import RECEIVE, RUN, SEND, WAIT, Event, Trace

_THREADS = (((RUN, WAIT), 0, "actions"), ((SEND,), 100, "sends"), ((RECEIVE,), 200, "receives"))  # kinds, id, name


def to_perfetto(trace: Trace) -> str:
    """Return the trace as Chrome's JSON: a process for each rank, a thread of its actions and waits, others of its messages.

    An arrow (a flow event) leads from each action to the one on another rank that uses its result. Messages that are under
    way at the same time stand on lanes of their own, since slices of one thread may not overlap. Times are in microseconds.
    """
    out: list[dict[str, Any]] = []
    for record in trace.records:
        rank = record.rank
        out.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        out.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        names = {}
        for kinds, first, thread in _THREADS:
            for lane, event in _in_lanes([event for event in record.events if event.kind in kinds]):
                names[first + lane] = thread if lane == 0 else f"{thread} {lane + 1}"
                out.append(_slice(rank, first + lane, event))
        for thread_id, name in names.items():
            out.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread_id, "args": {"name": name}})
            order = {"sort_index": thread_id}
            out.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread_id, "args": order})
    return json.dumps({"traceEvents": [*out, *_arrows(trace)], "displayTimeUnit": "ms"})


def _arrows(trace: Trace) -> Iterable[dict[str, Any]]:
    """Yield start and end of an arrow for each message; both lie within the slices of the actions, to belong to them."""
    schedule = trace.schedule()
    ran = {action: (rank, event) for rank, event in trace.events(RUN) for action in event.what.parts}
    messages = ((schedule.input_of(action), action) for action in ran)
    between_ranks = ((source, action) for source, action in messages if source and ran[source][0] != ran[action][0])
    for index, (source, action) in enumerate(between_ranks):
        (left, made), (right, used) = ran[source], ran[action]
        arrow = {"id": index, "name": f"result of {source}", "cat": "message", "tid": 0}
        yield arrow | {"ph": "s", "pid": left, "ts": 1e6 * (made.end - _inside(made))}
        yield arrow | {"ph": "f", "bp": "e", "pid": right, "ts": 1e6 * (used.start + _inside(used))}


def _inside(event: Event) -> float:
    return min(0.5e-6, (event.end - event.start) / 2)


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
