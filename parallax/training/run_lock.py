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


@contextmanager
def only_run_in(out: Path, mesh: Mesh) -> Iterator[None]:
    """Hold the run's folder for this run alone; called by all ranks. A folder in which nothing was done is removed again.

    Raises ConfigError on all of them if another run holds it, or if it cannot be made. The kernel lets go of the lock
    however the process ends.
    """
    made: list[Path] = []  # folders that were not there before, the innermost first

    def hold() -> int | None:
        if mesh.rank != 0:
            return None
        made.extend(path for path in (out, *out.parents) if not path.exists())
        out.mkdir(parents=True, exist_ok=True)
        while True:
            lock = os.open(out / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise ConfigError(
                    f"another run is writing to --out {out}; wait for it, or give another --out"
                ) from None
            if _is_at(lock, out / _NAME):
                return lock
            os.close(lock)  # who held it has just removed it

    lock = together(hold, mesh, f"making --out {out}")
    try:
        yield
    finally:
        if lock is not None:
            _leave_as_found(out, made)
            os.close(lock)


def _is_at(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path))
    except FileNotFoundError:
        return False


def _leave_as_found(out: Path, made: list[Path]) -> None:
    with suppress(OSError):
        if made and os.listdir(out) == [_NAME]:
            os.remove(out / _NAME)
            for folder in made:
                folder.rmdir()
