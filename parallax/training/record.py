"""A step as one rank went through it: phases, actions of the pipeline, communications; and what share of it each took.

    recorder = StepRecorder(mesh)                 by all ranks, before the step's data is read
    with recorder.phase("data"): ...
    train_step(batches, lr, recorder)
    recorder.end(together=True)                   waits for the others, as who is early does sooner or later
    shares = recorder.shares()                    by all ranks of a pipeline

A communication counts where it is waited for, not where it is under way: what is hidden behind computing costs nothing. On a
CPU the clock is the host's; on a GPU it is that of the stream that computes, read by events, and a wait is what that stream
waits. Recording a step takes about two microseconds for each action and communication.

A wait for a message is split at the moment when it was sent: until then the other rank had not computed it, which is the
pipeline's bubble, and from then on it was under way. Each machine has a clock of its own; `Clock` knows by how much they differ.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from parallax.collectives import barrier, gather_json
from parallax.mesh import Mesh
from parallax.pipeline.actions import Pair
from parallax.pipeline.recorder import Reading, Recorder
from parallax.pipeline.trace import RUN, SEND, WAIT

SHARES = ("data", "forward", "backward", "optimizer", "tp", "pp", "dp", "bubble", "other")
WAITING = ("tp", "pp", "dp", "bubble")  # what a rank with slower neighbours has more of
# A group's name to its share. Gradients and parameters go over the holders of a parameter; over the world goes the step's one sum
# of norm and loss, where whoever is early waits for the others.
_SHARE_OF_GROUP = {"tp": "tp", "pp": "pp", "dp": "dp", "holders": "dp", "world": "dp"}
# Bytes that each of n ranks sends with rings, of a tensor of one byte, times n / (n - 1).
_RING_PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
_ROUNDS = 5
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Clock:
    """By how much this rank's clock is ahead of rank 0's; made by all ranks together.

    Processes of one machine have the same clock. Between machines the difference is the median of some meetings, good to the
    time that a barrier takes.
    """

    def __init__(self, mesh: Mesh) -> None:
        times = []
        for _ in range(_ROUNDS):
            barrier(mesh.world)
            times.append(time.perf_counter())
        machine = _BOOT.read_text() if _BOOT.exists() else str(mesh.rank)
        (first_machine, first), *_ = rows = gather_json([machine, times], mesh.world, mesh.device)
        machine, mine = rows[mesh.rank]
        self.ahead = 0.0 if machine == first_machine else median(a - b for a, b in zip(mine, first, strict=True))


class Call:
    """A communication that is recorded; see `parallax.journal.Note`.

    group: the name of its group. num_bytes: of the whole tensor. began_before: in a step before. begun, waited, ended: readings
    of the clock.
    """

    __slots__ = ("began_before", "begun", "ended", "group", "num_bytes", "ranks", "recorder", "waited", "what")

    def __init__(
        self, recorder: StepRecorder, what: str, group: str, ranks: int, num_bytes: int, began_before: bool
    ) -> None:
        self.recorder, self.what, self.group, self.ranks, self.num_bytes = recorder, what, group, ranks, num_bytes
        self.began_before = began_before
        self.begun = recorder.now()
        self.waited: Reading = None
        self.ended: Reading = None

    def wait(self) -> None:
        if self.waited is None:
            self.waited = self.recorder.now()

    def over(self) -> None:
        self.ended = self.recorder.now()

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank sends, with rings."""
        return _RING_PASSES.get(self.what, 0) * self.num_bytes * (self.ranks - 1) // self.ranks


@dataclass(frozen=True)
class Spans:
    """A step of one rank in seconds of the common clock.

    phases: (name, start, end). runs: (action, share, start, end); share: "forward", "backward" or, of a pair, "both".
    waits: (share, what, start, end). flights: (group, what, bytes, start, end). messages: waits for a message as (action, start,
    end, moment when it was sent).
    """

    start: float
    end: float
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    runs: list[tuple[str, str, float, float]] = field(default_factory=list)
    waits: list[tuple[str, str, float, float]] = field(default_factory=list)
    flights: list[tuple[str, str, int, float, float]] = field(default_factory=list)
    messages: list[tuple[str, float, float, float]] = field(default_factory=list)


class StepRecorder(Recorder):
    """Records one step of this rank. together: all ranks of the mesh begin it at once, so that their records can be laid side
    by side."""

    def __init__(self, mesh: Mesh, clock: Clock | None = None, together: bool = False) -> None:
        if together:
            barrier(mesh.world)
        super().__init__(mesh.pp, mesh.device, together=False)
        self.mesh = mesh
        self._ahead = 0.0 if clock is None else clock.ahead
        self._began = time.perf_counter() if mesh.device.type == "cuda" else 0.0
        self._end: Reading = None
        self._phases: list[tuple[str, Reading, Reading]] = []
        self.calls: list[Call] = []
        mesh.journal.record = self

    def communicate(self, what: str, group: str, ranks: int, num_bytes: int, began_before: bool = False) -> Call:
        """Note a communication that begins; see `parallax.journal.Record`."""
        call = Call(self, what, group, ranks, num_bytes, began_before)
        self.calls.append(call)
        return call

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record what is done in here as a phase of the step."""
        start = self.now()
        yield
        self._phases.append((name, start, self.now()))

    def end(self, together: bool = False) -> None:
        """Say that the step is over, and wait until it is on the device too.

        together: on all ranks of the mesh. Who is early waits for the others at the latest when shares are told, and that is no
        longer in the record.
        """
        if together:
            barrier(self.mesh.world)
        self._end = self.now()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.mesh.journal.record = None

    def spans(self) -> Spans:
        """Return what was recorded; called by all ranks of the pipeline."""
        at = self._common
        sends = {str(what): at(start) for kind, what, start, _, _ in self._readings if kind == SEND}
        sent: dict[str, float] = {}
        for row in gather_json(sends, self.mesh.pp, self._device):
            sent |= row
        runs, messages = [], []
        for kind, what, start, end, _ in self._readings:
            if kind == RUN:
                share = "both" if isinstance(what, Pair) else "forward" if what.kind == "F" else "backward"
                runs.append((str(what), share, at(start), at(end)))
            elif kind == WAIT:
                messages.append((str(what), at(start), at(end), sent.get(str(what), at(start))))
        done = [call for call in self.calls if call.ended is not None]
        return Spans(
            at(self._origin),
            at(self._end),
            [(name, at(start), at(end)) for name, start, end in self._phases],
            runs,
            [
                (self._share(call), call.what, at(call.waited), at(call.ended))
                for call in done
                if call.waited is not None
            ],
            [self._flight(call) for call in self.calls],
            messages,
        )

    def _flight(self, call: Call) -> tuple[str, str, int, float, float]:
        """Return what the step has of a communication: some begin before it, or end after it."""
        begun = self._common(self._origin if call.began_before else call.begun)
        ended = self._common(self._end if call.ended is None else call.ended)
        return call.group, call.what, call.num_bytes, begun, min(ended, self._common(self._end))

    def _share(self, call: Call) -> str:
        if call.group == "world" and self.mesh.layout.pp > 1:
            return "bubble"  # stages end at different times, and meet here
        return _SHARE_OF_GROUP.get(call.group, "other")

    def _common(self, reading: Reading) -> float:
        """Return a reading in seconds of rank 0's clock."""
        if self._device.type == "cuda":
            return self._began + self._origin.elapsed_time(reading) / 1e3 - self._ahead
        return reading - self._ahead

    def traffic(self, message_bytes: int) -> dict[str, tuple[int, int]]:
        """Return along each axis the number of communications and the bytes that this rank sent, with rings.

        message_bytes: of what one stage sends to the next.
        """
        messages = sum(kind == SEND for kind, *_ in self._readings)
        result = {"tp": (0, 0), "pp": (messages, messages * message_bytes), "dp": (0, 0)}
        for call in self.calls:
            if call.what == "barrier":
                continue  # the record's own
            axis = _SHARE_OF_GROUP.get(call.group, "dp")
            number, sent = result[axis]
            result[axis] = number + (not call.began_before), sent + call.sent_bytes
        return result


def shares_of(spans: Spans, seconds: float | None = None) -> dict[str, float]:
    """Return the seconds of each of SHARES; together they are the step, or the `seconds` that it took with what lies around it.

    Whatever is waited for inside an action or a phase, a collective or a message, is not the action's or the phase's: a pair of a
    forward and a backward waits inside for what its backward takes. Of a pair's own time a third counts as forward.
    """
    shares = dict.fromkeys(SHARES, 0.0)
    inside = sorted(
        [(start, end, share) for _, share, start, end in spans.runs]
        + [(start, end, name) for name, start, end in spans.phases if name in ("data", "optimizer")]
    )
    starts = [start for start, _, _ in inside]
    for start, end, share in inside:
        _add(shares, share, end - start)
    for share, _, start, end in _outermost([*spans.waits, *_message_waits(spans.messages)]):
        shares[share] += end - start
        place = bisect_right(starts, start) - 1
        if place >= 0 and end <= inside[place][1]:
            _add(shares, inside[place][2], start - end)
    seconds = spans.end - spans.start if seconds is None else seconds
    shares["other"] += seconds - sum(shares.values())
    return shares


def _message_waits(messages: Sequence[tuple[str, float, float, float]]) -> Iterator[tuple[str, str, float, float]]:
    """Yield the two parts of each wait for a message: until it was sent, and while it was under way."""
    for what, start, end, sent in messages:
        sent = min(max(sent, start), end)
        yield "bubble", what, start, sent
        yield "pp", what, sent, end


def _outermost(waits: Sequence[tuple[str, str, float, float]]) -> Iterator[tuple[str, str, float, float]]:
    """Yield the waits that lie in no other: one may be made of several."""
    over = -1.0
    for wait in sorted(waits, key=lambda wait: (wait[2], -wait[3])):
        if wait[3] > over:
            over = wait[3]
            yield wait


def _add(shares: dict[str, float], share: str, seconds: float) -> None:
    if share == "both":
        shares["forward"] += seconds / 3
        shares["backward"] += seconds * 2 / 3
    else:
        shares[share] += seconds
