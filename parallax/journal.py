"""What this process has begun last, noted as it goes, so that a run that stands still can say where.

The thread that trains writes it, a few attributes at a time; the thread that watches (parallax.training.watch) reads it and
makes text of it only when someone asks. A mesh has one, and its groups carry it to the collectives.
"""

from __future__ import annotations

import time
from typing import Any, Protocol


class Note(Protocol):
    """One communication in a record of a step."""

    @property
    def recorder(self) -> Any:
        """The record that it is in."""

    def wait(self) -> None:
        """Nothing else is done from now on until it is over."""

    def over(self) -> None: ...


class Record(Protocol):
    """Is told of all communications while a step is recorded (parallax.training.record)."""

    def communicate(self, what: str, group: str, ranks: int, num_bytes: int, began_before: bool = False) -> Note:
        """Note one that begins. num_bytes: of the whole tensor: before a reduction, after a gathering.

        began_before: it began in a step before, and is waited for now.
        """


class Journal:
    """phase: "step 12". action: of the pipeline, what is under way. call: the communication that was begun last.

    waiting: whether that communication is not over, so that other ranks may be what it takes. changed_at: seconds since the
    epoch, when any of it changed. record: of the step that is being recorded, None most of the time.
    """

    __slots__ = ("action", "call", "changed_at", "phase", "record", "waiting")

    def __init__(self) -> None:
        self.phase = "the start"
        self.action: Any = None
        self.call: tuple[str, str, int, Any] | None = None
        self.waiting = False
        self.changed_at = time.time()
        self.record: Record | None = None

    def enter(self, phase: str) -> None:
        """Note that something else begins."""
        self.phase, self.action, self.call, self.waiting, self.changed_at = phase, None, None, False, time.time()

    def act(self, action: Any) -> None:
        """Note that a pipeline action begins; `action` is printed only if it has to be told."""
        self.action, self.changed_at = action, time.time()

    def begin(self, what: str, group: str, elements: int, dtype: Any) -> None:
        """Note that a communication begins."""
        self.call, self.waiting, self.changed_at = (what, group, elements, dtype), True, time.time()

    def end(self) -> None:
        """Note that it is over."""
        self.waiting, self.changed_at = False, time.time()

    def __str__(self) -> str:
        parts = [self.phase]
        if self.action is not None:
            parts.append(str(self.action))
        if self.call is not None:
            what, group, elements, dtype = self.call
            size = f" of {elements:,} {str(dtype).removeprefix('torch.')}" if elements else ""
            parts.append(f"{'in' if self.waiting else 'after'} {what}{size} over {group}")
        return ", ".join(parts)
