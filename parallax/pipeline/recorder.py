"""Record what a step really did, on this rank, while the executor runs it; `parallax.pipeline.trace` holds the result.

On a CPU the clock is the host's; on a GPU it is the GPU's own, by events in the stream that computes, so that a record does
not make the step wait.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from parallax.collectives import barrier, gather_json
from parallax.mesh import Group, rank_of
from parallax.pipeline.actions import Entry
from parallax.pipeline.lower import Message
from parallax.pipeline.trace import RECEIVE, RUN, SEND, WAIT, Event, RankRecord, Trace

Reading = Any  # seconds, or an event


class Recorder:
    """What one rank does in one step; made by all ranks of a pipeline together, at the common moment 0.

    together: whether they wait for each other; without it each has a moment of its own.
    """

    def __init__(self, pp: Group | None, device: torch.device, together: bool = True) -> None:
        self._pp, self._device = pp, device
        self._posted: dict[Message, Reading] = {}
        self._readings: list[tuple[str, Entry, Reading, Reading, int | None]] = []
        if together and pp is not None:
            barrier(pp)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._origin = self.now()

    def now(self) -> Reading:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ran(self, entry: Entry, start: Reading) -> None:
        """Say that `entry` ran from `start` until now."""
        self._readings.append((RUN, entry, start, self.now(), None))

    def sent(self, message: Message) -> None:
        now = self.now()
        self._readings.append((SEND, message.producer, now, now, message.target))

    def posted(self, message: Message) -> None:
        self._posted[message] = self.now()

    def received(self, message: Message, start: Reading) -> None:
        """Say that the result in `message` was waited for from `start` until now."""
        now = self.now()
        self._readings.append((WAIT, message.producer, start, now, message.source))
        self._readings.append((RECEIVE, message.producer, self._posted.pop(message), now, message.source))

    def trace(self, name: str) -> Trace:
        """Return the step of the whole pipeline; called by all its ranks when it is over."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        record = RankRecord(rank_of(self._pp))
        for kind, what, start, end, peer in self._readings:
            record.add(kind, what, self._seconds(start), self._seconds(end), peer)
        rows = gather_json(record.to_data(), self._pp, self._device)
        return Trace(name, _with_ends_of_sends([RankRecord.from_data(row) for row in rows]))

    def _seconds(self, reading: Reading) -> float:
        if self._device.type != "cuda":
            return reading - self._origin
        return self._origin.elapsed_time(reading) / 1e3


def _with_ends_of_sends(records: list[RankRecord]) -> list[RankRecord]:
    """Let each send last until its result is there: a sender is not told when that is."""
    ends: dict[tuple[int | None, Entry], float] = {
        (record.rank, event.what): event.end for record in records for event in record.events if event.kind == RECEIVE
    }
    for record in records:
        record.events = [
            Event(event.kind, event.what, event.start, max(event.start, ends[event.peer, event.what]), event.peer)
            if event.kind == SEND and (event.peer, event.what) in ends
            else event
            for event in record.events
        ]
    return records
