"""A file's checksums, one for each block of 4 MiB, so that who reads a part of a file proves just what it reads.

The manifest has the XXH3 of each block (128 bits, xxhash.com), in order; of a file that fits into one block this is the file's own.
It finds every kind of damage and is faster than any disk, which SHA-256 is not; against who forges a file neither helps, since
the manifest could be forged as well. In version 1 of the format a file had a single checksum, SHA-256, however long it was.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise

import xxhash

BLOCK_BYTES = 4 << 20


def num_blocks(num_bytes: int) -> int:
    """Return how many blocks a file has; an empty one has one."""
    return max(1, -(-num_bytes // BLOCK_BYTES))


def cut(start: int, stop: int) -> list[tuple[int, int]]:
    """Return the range [start, stop) cut where blocks end; nothing of an empty one."""
    edges = [start, *range((start // BLOCK_BYTES + 1) * BLOCK_BYTES, stop, BLOCK_BYTES), stop]
    return list(pairwise(edges)) if start < stop else []


def block_of(offset: int, num_bytes: int) -> tuple[int, int, int]:
    """Return the block that a byte of a file is in: its number, and where it starts and ends."""
    number = offset // BLOCK_BYTES
    return number, number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, num_bytes)


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return the checksum of a block."""
    return xxhash.xxh3_128_hexdigest(data)


class BlockHasher:
    """The checksums of a file that comes in parts. whole: one checksum for all of it, as in version 1."""

    def __init__(self, whole: bool = False) -> None:
        self._whole = whole
        self._done: list[str] = []
        self._state = hashlib.sha256() if whole else xxhash.xxh3_128()
        self._size = 0

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes of the file."""
        parts = [(0, len(data))] if self._whole else cut(self._size, self._size + len(data))
        rest = memoryview(data)
        for start, stop in parts:
            if not self._whole and start == (len(self._done) + 1) * BLOCK_BYTES:
                self._close()
            self._state.update(rest[: stop - start])
            rest = rest[stop - start :]
        self._size += len(data)

    def _close(self) -> None:
        self._done.append(self._state.hexdigest())
        self._state = xxhash.xxh3_128()

    def checksums(self) -> tuple[str, ...]:
        """Return the checksums of all that came."""
        return (*self._done, self._state.hexdigest())
