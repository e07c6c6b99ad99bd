"""What --profile leaves behind: one step of all ranks on one time axis, for ui.perfetto.dev and Chrome's chrome://tracing.

A process for each rank. Its first thread shows what the rank does: phases of the step, in them the actions of the pipeline, and in
these what is waited for. Other threads show each group's communications while they are under way; a flight without a wait below
its end is hidden behind computing. The format is Chrome's Trace Event Format; times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallax.collectives import gather_json
from parallax.mesh import Layout, Mesh
from parallax.storage import write_whole
from parallax.training.record import Spans

_GROUPS = ("tp", "pp", "dp", "holders", "world")
_LANES = 100  # thread ids that a group may use


def write_profile(spans: Spans, mesh: Mesh, step: int, folder: Path) -> Path:
    """Write the step of all ranks into `folder`; called by all of them; returns the file, which is rank 0's to write."""
    rows = [Spans(**row) for row in gather_json(asdict(spans), mesh.world, mesh.device)]
    path = folder / f"profile-step-{step}.json"
    if mesh.rank == 0:
        write_whole(path, to_trace_events(rows, mesh.layout))
    return path


def to_trace_events(ranks: Sequence[Spans], layout: Layout) -> str:
    """Return the steps of all ranks, in their order, as Chrome's JSON."""
    first = min(spans.start for spans in ranks)
    out: list[dict[str, Any]] = []
    for rank, spans in enumerate(ranks):
        here = layout.coordinates(rank)
        axes = ", ".join(f"{axis} {here[axis]}" for axis in ("pp", "dp", "tp") if getattr(layout, axis) > 1)
        out += _metadata("process", rank, 0, f"rank {rank}" + (f" ({axes})" if axes else ""))
        threads = {0: "what it does"}
        for name, start, end, kind in _doing(spans):
            out.append(_slice(rank, 0, name, kind, start - first, end - first))
        for number, group in enumerate(_GROUPS, start=1):
            flights = sorted((flight for flight in spans.flights if flight[0] == group), key=lambda flight: flight[3])
            for lane, (_, what, num_bytes, start, end) in _in_lanes(flights):
                thread = number * _LANES + lane
                threads[thread] = f"{group} under way" + (f" {lane + 1}" if lane else "")
                event = _slice(rank, thread, what, group, start - first, end - first)
                out.append(event | {"args": {"bytes": num_bytes}})
        for thread, name in threads.items():
            out += _metadata("thread", rank, thread, name)
    return json.dumps({"traceEvents": out, "displayTimeUnit": "ms"})


def _doing(spans: Spans) -> Iterable[tuple[str, float, float, str]]:
    """Yield (name, start, end, kind) of slices that lie in each other."""
    yield "step", spans.start, spans.end, "step"
    yield from ((name, start, end, "phase") for name, start, end in spans.phases)
    yield from ((action, start, end, share) for action, share, start, end in spans.runs)
    yield from ((f"wait for {what} ({share})", start, end, "wait") for share, what, start, end in spans.waits)
    yield from ((f"wait for {action}", start, end, "wait") for action, start, end, _ in spans.messages)


def _metadata(kind: str, rank: int, thread: int, name: str) -> list[dict[str, Any]]:
    where = {"ph": "M", "pid": rank, "tid": thread}
    order = rank if kind == "process" else thread
    return [
        where | {"name": f"{kind}_name", "args": {"name": name}},
        where | {"name": f"{kind}_sort_index", "args": {"sort_index": order}},
    ]


def _slice(rank: int, thread: int, name: str, kind: str, start: float, end: float) -> dict[str, Any]:
    where = {"ph": "X", "pid": rank, "tid": thread}
    return where | {"name": name, "cat": kind, "ts": round(start * 1e6, 3), "dur": round((end - start) * 1e6, 3)}


def _in_lanes(flights: Sequence[tuple[str, str, int, float, float]]) -> Iterable[tuple[int, tuple]]:
    """Yield (lane, flight), each on the first lane that is free: slices of one thread may not overlap."""
    free_at: list[float] = []
    for flight in flights:
        lane = next((lane for lane, time in enumerate(free_at) if time <= flight[3]), len(free_at))
        free_at[lane : lane + 1] = [flight[4]]
        yield lane, flight
