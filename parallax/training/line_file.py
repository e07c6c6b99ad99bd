"""Files that grow by a line of JSON at a time: on a full disk no line is lost while the run lives, and no run ends for one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallax.errors import ConfigError


class LineFile:
    """Appends lines; one that cannot be written waits in memory and is tried again with the next. say: prints a notice."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self._say = path, say
        self._waiting: list[str] = []
        self._failed = False

    def keep_up_to(self, value: int, field: str = "step") -> None:
        """Forget lines that have more than `value` in a field; a line cut short by a crash goes with them.

        Raises OSError; ConfigError if there is something else in its place, as a pipe, whose end would never come.
        """
        if self.path.exists() and not self.path.is_file():
            raise ConfigError(f"{self.path} is no file that lines could be added to; remove it, or give another --out")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            file.seek(0)
            end = size = 0
            for line in file:
                end += len(line)
                if line.endswith(b"\n") and _is_up_to(line, field, value):
                    size = end
            file.truncate(size)
        self._waiting = [line for line in self._waiting if _is_up_to(line.encode(), field, value)]

    def append(self, values: dict[str, Any]) -> None:
        """Write a line, and those that are waiting."""
        self._waiting.append(json.dumps(values, allow_nan=False) + "\n")
        self.flush()

    def flush(self) -> None:
        """Write the lines that are waiting, if that is possible now."""
        if not self._waiting:
            return
        try:
            _append(self.path, "".join(self._waiting).encode())
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._say(
                    f"notice         {self.path} cannot be written ({error.strerror}); training goes on, its lines wait in memory"
                )
            return
        if self._failed:
            self._failed = False
            self._say(f"notice         {self.path} is complete again")
        self._waiting = []

    def close(self) -> None:
        """Try once more, and say what is lost."""
        self.flush()
        if self._waiting:
            self._say(f"notice         the last {len(self._waiting)} lines of {self.path} are lost")


def _append(path: Path, content: bytes) -> None:
    """Append all of the content or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(file).st_size
        left = memoryview(content)
        try:
            while left:
                left = left[os.write(file, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def _is_up_to(line: bytes, field: str, value: int) -> bool:
    try:
        return bool(json.loads(line)[field] <= value)
    except (ValueError, KeyError, TypeError):
        return False
