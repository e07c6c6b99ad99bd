"""One run at a time in a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from parallax.checkpoint.agreement import together
from parallax.errors import ConfigError
from parallax.mesh import Mesh

_NAME = ".lock"


class RunLock:
    """Holds a run's folder for this run alone, on rank 0. The kernel lets go of it however the process ends."""

    def __init__(self, out: Path, mesh: Mesh) -> None:
        self._out, self._mesh = out, mesh
        self._file: int | None = None

    def hold(self) -> None:
        """Take the lock, or make sure that its file is still there, by which others know; called by all ranks.

        Raises ConfigError on all of them if another run holds it, or if it cannot be made.
        """
        together(self._hold_or_say, self._mesh, f"making --out {self._out}")

    def _hold_or_say(self) -> None:
        try:
            self._hold()
        except OSError as error:
            raise ConfigError(f"--out {self._out} cannot be held by this run ({error}); give another --out") from None

    def _hold(self) -> None:
        if self._mesh.rank != 0:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        while self._file is None or not _is_at(self._file, self._out / _NAME):
            self.let_go()  # of a file that somebody removed
            file = os.open(self._out / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                raise ConfigError(
                    f"another run is writing to --out {self._out}; wait for it, or give another --out"
                ) from None
            self._file = file

    def let_go(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


@contextmanager
def only_run_in(out: Path, mesh: Mesh) -> Iterator[RunLock]:
    """Hold the run's folder for this run alone; called by all ranks. A folder in which nothing was done is removed again.

    Raises ConfigError on all ranks if another run holds it, or if it cannot be made.
    """
    made = [path for path in (out, *out.parents) if not path.exists()]  # the innermost first
    lock = RunLock(out, mesh)
    lock.hold()
    try:
        yield lock
    finally:
        if mesh.rank == 0:
            _leave_as_found(out, made)
        lock.let_go()


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _leave_as_found(out: Path, made: list[Path]) -> None:
    with suppress(OSError):
        if made and os.listdir(out) == [_NAME]:
            os.remove(out / _NAME)
            for folder in made:
                folder.rmdir()
