"""Files that are on the disk when they are said to be, and the checksums that prove it later."""

from __future__ import annotations

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from parallax.checkpoint.manifest import FileRecord
from parallax.errors import ConfigError

READ_BYTES = 4 << 20


class HashingFile:
    """A new file, written from front to back, hashed on the way and synced at its end.

    Large parts are hashed by a thread while they are written, since a disk may be as fast as SHA-256 is.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._hasher: ThreadPoolExecutor | None = None
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`; raise OSError when the disk does not take all of it."""
        if len(data) < READ_BYTES:
            self._hash.update(data)
            self._write(data)
            return
        self._hasher = self._hasher or ThreadPoolExecutor(1, "hash")
        hashing = self._hasher.submit(self._hash.update, data)
        try:
            self._write(data)
        finally:
            hashing.result()  # its caller may reuse the memory

    def _write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while len(rest):
            rest = rest[self._file.write(rest) :]
        self._size += len(data)

    def finish(self) -> FileRecord:
        """Wait until the disk holds the file; return what the manifest says of it."""
        os.fsync(self._file.fileno())
        self.abandon()
        return FileRecord(self._size, self._hash.hexdigest())

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()
        if self._hasher is not None:
            self._hasher.shutdown()
            self._hasher = None


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write and sync a new file."""
    file = HashingFile(path)
    try:
        file.write(content)
        return file.finish()
    finally:
        file.abandon()


def hash_file(path: Path) -> str:
    """Return the checksum of a file as the manifest has it."""
    state = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            state.update(data)
    return state.hexdigest()


def sync(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_inside(folder: Path, name: str) -> Path:
    """Return the file of a checkpoint that a manifest names.

    Raises ConfigError unless it is there, a regular file, and reached without a symbolic link inside the folder.
    """
    path = folder / name
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is missing ({getattr(error, 'strerror', None) or error})") from None
    if not stat.S_ISREG(mode) or Path(os.path.realpath(path)) != Path(os.path.realpath(folder)) / name:
        raise ConfigError(f"{path} is no regular file inside the checkpoint")
    return path
