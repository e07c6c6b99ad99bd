"""Files that are on the disk when they are said to be, and the checksums that prove it later."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

from parallax.checkpoint import blocks
from parallax.checkpoint.blocks import BlockHasher, block_of, checksum, cut
from parallax.checkpoint.manifest import FileRecord
from parallax.errors import ConfigError
from parallax.storage import Location, RemoteFile, RemotePath, num_bytes

READ_BYTES = 4 << 20
THREADS = 4  # that read and prove blocks or files: one disk may be faster than one core computes checksums


class FileThreads:
    """The threads of one save: one computes checksums, the other waits for the disk. A context manager."""

    def __init__(self) -> None:
        self.hashing, self.syncing = ThreadPoolExecutor(1, "hash"), ThreadPoolExecutor(1, "sync")

    def __enter__(self) -> FileThreads:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for threads in (self.hashing, self.syncing):
            threads.shutdown(wait=error is None, cancel_futures=True)  # Ctrl-C does not wait for a disk that hangs


class HashingFile:
    """A new file, written from front to back, hashed on the way and synced at its end.

    threads: hash large parts while they are written, and have the disk take the file when all of its num_bytes are there, while
    others are written; None to do one after the other.
    """

    def __init__(self, path: Location, num_bytes: int | None = None, threads: FileThreads | None = None) -> None:
        self._file = path.create() if isinstance(path, RemotePath) else path.open("xb", buffering=0)
        self._threads = threads
        self._syncing: Future[None] | None = None
        self._hash = BlockHasher()
        self._size, self._num_bytes = 0, num_bytes

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`; raise OSError when the disk does not take all of it."""
        if self._threads is None or len(data) < READ_BYTES:
            self._hash.update(data)
            self._write(data)
        else:
            hashing = self._threads.hashing.submit(self._hash.update, data)
            try:
                self._write(data)
            finally:
                hashing.result()  # its caller may reuse the memory
        # Once: of a failure to write back the system tells the first who asks, and nobody after.
        is_complete = self._size == self._num_bytes and self._syncing is None
        if is_complete and self._threads is not None and not isinstance(self._file, RemoteFile):
            self._syncing = self._threads.syncing.submit(os.fsync, self._file.fileno())

    def _write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while len(rest):
            rest = rest[self._file.write(rest) :]
        self._size += len(data)

    def finish(self) -> FileRecord:
        """Wait until the disk, or the storage, holds the file; return what the manifest says of it."""
        if isinstance(self._file, RemoteFile):
            self._file.complete()
        elif self._syncing is not None:
            self._syncing.result()
        else:
            os.fsync(self._file.fileno())
        self.abandon()
        return FileRecord(self._size, self._hash.checksums())

    def abandon(self) -> None:
        """Close the file as it is."""
        if self._syncing is not None and not self._syncing.cancel():
            self._syncing.exception()  # wait: its descriptor may be another file's when this one is closed
        if isinstance(self._file, RemoteFile):
            self._file.abandon()
        else:
            self._file.close()


def write_file(path: Location, content: bytes) -> FileRecord:
    """Write and sync a new file."""
    file = HashingFile(path)
    try:
        file.write(content)
        return file.finish()
    finally:
        file.abandon()


def hash_file(path: Location, whole: bool = False, is_given_up: Callable[[], bool] = lambda: False) -> tuple[str, ...]:
    """Return the checksums of a file as the manifest has them; whole: as version 1 had them.

    is_given_up: whether nobody waits for them any more; then it ends soon, with checksums that mean nothing.
    """
    state = BlockHasher(whole)
    size, buffer = num_bytes(path), memoryview(bytearray(READ_BYTES))
    with FileReader(path) as file:
        for start in range(0, size, READ_BYTES):
            if is_given_up():
                break
            part = buffer[: min(READ_BYTES, size - start)]
            file.read_into(part, start)
            state.update(part)
    return state.checksums()


class FileReader:
    """A file that is read in pieces; each block of it that has a checksum is read whole and proved before anything is made of it.

    record: what the manifest says of it, None if there is none. threads: read and prove several blocks at once.
    """

    def __init__(self, path: Location, record: FileRecord | None = None, threads: Executor | None = None) -> None:
        self.path, self._threads = path, threads
        self._record = record if record is not None and record.is_cut else None
        self._descriptor = os.open(path, os.O_RDONLY) if isinstance(path, Path) else -1
        self._kept: tuple[int, memoryview] | None = None  # the last block of which only a part was asked for
        self._buffer = bytearray()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self.path, Path):
            os.close(self._descriptor)

    def read(self, start: int, stop: int) -> bytearray:
        """Return the bytes [start, stop); raises as `read_into` does."""
        data = bytearray(stop - start)
        self.read_into(memoryview(data), start)
        return data

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on.

        Raises ConfigError when they are not those that were saved, OSError when they cannot be read.
        """
        if self._record is None:
            self._read_as_it_is(target, offset)
            return
        reading = []
        for start, stop in cut(offset, offset + len(target)):
            part = target[start - offset : stop - offset]
            number, first, last = block_of(start, self._record.bytes)
            if (start, stop) != (first, last):
                part[:] = self._block(number, first, last)[start - first : stop - first]
            elif self._threads is None or last - first == len(target):
                self._read_proved(part, number, first)
            else:
                reading.append(self._threads.submit(self._read_proved, part, number, first))
        for one in reading:
            one.result()

    def _block(self, number: int, start: int, stop: int) -> memoryview:
        """Return the block [start, stop), of which a part is needed: kept, since the next part is often asked for next."""
        assert self._record is not None
        if self._kept is None or self._kept[0] != number:
            self._kept = None
            self._buffer = self._buffer or bytearray(min(blocks.BLOCK_BYTES, self._record.bytes))
            block = memoryview(self._buffer)[: stop - start]
            self._read_proved(block, number, start)
            self._kept = number, block
        return self._kept[1]

    def _read_proved(self, block: memoryview, number: int, start: int) -> None:
        self._read_as_it_is(block, start)
        assert self._record is not None
        if checksum(block) != self._record.checksums[number]:
            raise ConfigError(damaged(self.path))

    def _read_as_it_is(self, target: memoryview, offset: int) -> None:
        if isinstance(self.path, RemotePath):
            data = self.path.read_range(offset, offset + len(target))
            if len(data) < len(target):
                raise OSError(f"{self.path} ends before its tensors do")
            target[:] = data
            return
        while len(target):
            count = os.preadv(self._descriptor, [target], offset)
            if count == 0:
                raise OSError(f"{self.path} ends before its tensors do")
            target, offset = target[count:], offset + count


def damaged(path: Location) -> str:
    """Say that a file is not what was saved."""
    return f"{path} is damaged: its checksum is not the one that was saved"


def sync(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_inside(folder: Location, name: str) -> Location:
    """Return the file of a checkpoint that a manifest names.

    Raises ConfigError unless it is there, a regular file, and reached without a symbolic link inside the folder.
    """
    if isinstance(folder, RemotePath):
        return folder / name  # links there are none, and that it is missing is seen when it is read
    path = folder / name
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is missing ({getattr(error, 'strerror', None) or error})") from None
    if not stat.S_ISREG(mode) or Path(os.path.realpath(path)) != Path(os.path.realpath(folder)) / name:
        raise ConfigError(f"{path} is no regular file inside the checkpoint")
    return path
