"""Requests to stop early: signals, and the time that a run was given.

    with StopRequests(exit_after_minutes) as requests:
        ... each rank brings requests.code() to a reduction that the step does anyway
        stop = decode(sum of the codes)          # the same on all ranks, whichever of them was asked

A signal reaches this process in two ways. Python's own handler runs only between two bytecodes, which may be minutes
away while the process waits in C for another rank; so the kernel's side also writes the signal's number into a pipe
(signal.set_wakeup_fd), and a thread reads it there. While Python runs it is the handler that is first, since the thread has to wait
for its turn. The first signal is noted; a second one, which only the thread tells from the first, exits at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from parallax.errors import EXIT_TIME_UP

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1 is what Slurm's --signal is mostly told to send as a warning
# One number is summed over the ranks, so each reason has digits of its own, for up to 65,535 ranks; exact in float64.
_UNITS = {signal.SIGTERM: 1 << 16, signal.SIGUSR1: 1}
_TIME_UP = 1 << 32


@dataclass(frozen=True)
class StopReason:
    """Why all ranks stop, in words, and the exit status that says it."""

    reason: str
    status: int


def decode(code: float) -> StopReason | None:
    """Return what the sum over the ranks of `StopRequests.code()` asks for, or None."""
    asked = round(code)
    for number in SIGNALS:
        if asked // _UNITS[number] % (1 << 16):
            return StopReason(f"signal {signal.Signals(number).name}", 128 + number)
    return StopReason("--exit-after", EXIT_TIME_UP) if asked else None


class StopRequests:
    """Takes SIGTERM and SIGUSR1 for as long as it is entered; outside of the main thread it can only keep the time.

    exit_after_minutes: of training, counted from here; None: no limit.
    """

    def __init__(self, exit_after_minutes: float | None = None) -> None:
        self._deadline = None if exit_after_minutes is None else time.monotonic() + 60 * exit_after_minutes
        self._received: int | None = None  # as the thread has read it
        self._handled: int | None = None  # as the handler was told
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._handlers_before: dict[int, Any] = {number: signal.signal(number, self._handle) for number in SIGNALS}
            self._thread = threading.Thread(target=self._watch, args=(self._pipe[0],), name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pipe is None:
            return
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._pipe[1])  # ends the thread
        self._thread.join()
        os.close(self._pipe[0])
        self._pipe = None

    def code(self) -> float:
        """Return this rank's number, 0 if it was asked for nothing; the sum over all ranks is what `decode` takes."""
        number = self._received if self._received is not None else self._handled
        if number is not None:
            return float(_UNITS[signal.Signals(number)])
        return float(_TIME_UP) if self._deadline is not None and time.monotonic() >= self._deadline else 0.0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled = number

    def _watch(self, pipe: int) -> None:
        while received := os.read(pipe, 64):
            for number in received:
                if number not in SIGNALS:
                    continue
                name = signal.Signals(number).name
                if self._received is not None:
                    _say(f"rank {_rank()} got {name} after another signal: it exits at once, without saving")
                    os._exit(128 + number)
                self._received = number
                if _rank() == "0":
                    _say(
                        f"{name}: all ranks save after this step, if none has ended, and exit; "
                        f"a second signal exits at once, without saving"
                    )


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _say(text: str) -> None:
    print(f"parallax: {text}", file=sys.stderr, flush=True)
