"""Numbers for TensorBoard: one events file of a run, written at once.

torch's SummaryWriter writes from a thread, whose errors reach the terminal as tracebacks and end it for good. Here a full disk
costs the numbers of the steps that it lasts, and a file of its own after it; TensorBoard reads all files of a folder as one run.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO


class EventFile:
    """Appends scalars. first_step: what earlier files have from this step on is not shown any more."""

    def __init__(self, folder: Path, first_step: int = 1) -> None:
        # Half a second, which a rank that writes nothing does not spend.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._log = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        self._make_writer = RecordWriter
        self._folder = folder
        self._file: BinaryIO | None = None
        self.begin_again(first_step)

    def add(self, step: int, scalars: Iterable[tuple[str, float]]) -> None:
        """Write (name, value) of a step; raises OSError, and the next call begins another file."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars]
        try:
            self._open()
            self._write(step=step, summary=self._summary(value=values))
        except OSError:
            self.close()
            raise

    def begin_again(self, step: int) -> None:
        """Let a step, and all after it, be shown as they are written from here on; raises OSError."""
        self._open()
        self._write(step=step, session_log=self._log(status=self._log.START))

    def close(self) -> None:
        """End the file; what could not be written was told before."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _open(self) -> None:
        if self._file is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        number = sum(
            path.name.startswith(name) for path in self._folder.iterdir()
        )  # TensorBoard reads them in this order
        # Without a buffer what is written is there, and an error is known.
        self._file = open(self._folder / f"{name}.{number}", "xb", buffering=0)
        self._write(file_version="brain.Event:2")

    def _write(self, **fields: Any) -> None:
        event = self._event(wall_time=time.time(), **fields)
        self._make_writer(_All(self._file)).write(event.SerializeToString())


class _All:
    """Writes all of what it is given: a file without a buffer may take a part."""

    def __init__(self, file: BinaryIO | None) -> None:
        assert file is not None
        self._file = file

    def write(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) or 0 :]
