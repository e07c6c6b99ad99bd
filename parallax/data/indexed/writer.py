"""Write token files in Megatron-LM's format; layout.py says what lies where.

Both files are written under other names, synced, and renamed; the index last, after an older one is out of the way. So an index
under its own name always belongs to the whole token file beside it, whatever is killed when.
"""

from __future__ import annotations

import fcntl
import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from parallax.data.indexed.layout import CODES, HEADER, MAGIC, VERSION, paths_of
from parallax.errors import ConfigError

LONGEST_SEQUENCE = 2**31 - 1  # what int32 holds
BLOCK = 1 << 20  # sequences whose pointers are written at a time


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx, which appear when the `with` block ends well and not before.

        with IndexedWriter("corpus", np.uint16) as writer:
            writer.add_document([5, 6, 7])

    Args:
        prefix: of the two files; those of that name are replaced at the end.
        dtype: of the ids: uint8, int8, int16, uint16, int32 or int64.

    Raises:
        ConfigError: floats were asked for, the folder cannot be written, another process writes the same files.
    """

    def __init__(self, prefix: str | Path, dtype: np.typing.DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            known = ", ".join(kind.name for kind in CODES)
            raise ConfigError(f"token files hold whole numbers of type {known}, not {self.dtype.name}.")
        limits = np.iinfo(self.dtype)
        self._limits = int(limits.min), int(limits.max)
        self.bin_path, self.idx_path = paths_of(prefix)
        self.num_tokens = 0
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._open_tokens = 0  # of a document whose end has not come yet
        self._bin = _open_alone(self.bin_path)

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    def add_sequence(self, ids: np.typing.ArrayLike) -> None:
        """Add a sequence to the present document; one that is too long for the index becomes several.

        Raises:
            ConfigError: an id does not fit the type.
        """
        given = np.asarray(ids)
        if given.size and given.dtype.kind not in "iu":
            raise ConfigError(f"token ids are whole numbers, not {given.dtype.name}.")
        if given.size and given.dtype != self.dtype:
            low, high = int(given.min()), int(given.max())
            if low < self._limits[0] or high > self._limits[1]:
                wrong = low if low < self._limits[0] else high
                raise ConfigError(f"{self.bin_path}: the id {wrong} does not fit into {self.dtype.name}.")
        self.add_bytes(given.astype(self.dtype, copy=False).tobytes())

    def add_bytes(self, content: bytes) -> None:
        """Add a sequence given as the bytes of ids of the file's type."""
        self._write(content)
        length = len(content) // self.dtype.itemsize
        assert length * self.dtype.itemsize == len(content), "half an id"
        self.num_tokens += length
        self._add_lengths(length)

    def add_texts(self, content: bytes, lengths: np.ndarray, ends: np.ndarray) -> None:
        """Add many texts at once; a document is one or more of them, and becomes one sequence.

        Args:
            content: the bytes of all ids, of the file's type.
            lengths: `[texts]`, how many ids each text has.
            ends: bool `[texts]`, whether a text ends its document; the texts of a document may come in several calls.
        """
        stops = np.cumsum(lengths, dtype=np.int64)
        total = int(stops[-1]) if len(stops) else 0
        assert total * self.dtype.itemsize == len(content), (total, len(content))
        self._write(content)
        self.num_tokens += total
        documents = np.diff(stops[ends], prepend=-self._open_tokens)
        self._open_tokens += total - int(documents.sum())
        if len(documents) and documents.max() > LONGEST_SEQUENCE:
            for length in documents.tolist():
                self._add_lengths(length)
                self.end_document()
        else:
            first = len(self._lengths) + 1
            self._lengths.frombytes(documents.astype(np.int32).tobytes())
            self._documents.frombytes(np.arange(first, first + len(documents), dtype=np.int64).tobytes())

    def _add_lengths(self, length: int) -> None:
        while length > LONGEST_SEQUENCE:
            self._lengths.append(LONGEST_SEQUENCE)
            length -= LONGEST_SEQUENCE
        self._lengths.append(length)

    def _write(self, content: bytes) -> None:
        try:
            self._bin.write(content)
        except OSError as error:
            raise ConfigError(_cannot_write(self.bin_path, error)) from error

    def end_document(self) -> None:
        """End the present document."""
        self._documents.append(len(self._lengths))

    def add_document(self, ids: np.typing.ArrayLike) -> None:
        """Add a document of one sequence."""
        self.add_sequence(ids)
        self.end_document()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.finish()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written so far."""
        Path(self._bin.name).unlink(missing_ok=True)
        _partial(self.idx_path).unlink(missing_ok=True)
        self._bin.close()

    def finish(self) -> None:
        """Write the index and put both files in their places."""
        assert self._documents[-1] == len(self._lengths) and not self._open_tokens, "the last document was not ended"
        try:
            with open(_partial(self.idx_path), "wb") as stream:
                self._write_index(stream)
                stream.flush()
                os.fsync(stream.fileno())
            self._bin.flush()
            os.fsync(self._bin.fileno())
            self.idx_path.unlink(missing_ok=True)
            os.replace(self._bin.name, self.bin_path)
            os.replace(_partial(self.idx_path), self.idx_path)
        except OSError as error:
            raise ConfigError(_cannot_write(self.idx_path, error)) from error
        self._bin.close()  # and with it the lock
        _sync_folder(self.idx_path.parent)

    def _write_index(self, stream: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, np.int32)
        header = (MAGIC, VERSION, CODES[self.dtype], len(lengths), len(self._documents))
        stream.write(np.array([header], HEADER).tobytes())
        stream.write(lengths.astype("<i4", copy=False).tobytes())
        end = 0
        for first in range(0, len(lengths), BLOCK):
            ends = np.cumsum(lengths[first : first + BLOCK].astype(np.int64) * self.dtype.itemsize) + end
            stream.write(np.concatenate([[end], ends[:-1]]).astype("<i8").tobytes())
            end = int(ends[-1])
        stream.write(np.frombuffer(self._documents, np.int64).astype("<i8", copy=False).tobytes())


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _open_alone(path: Path) -> BinaryIO:
    """Open the file that becomes `path`, and hold its lock, which the kernel frees when this process ends in whatever way."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = open(_partial(path), "ab", buffering=1 << 20)
    except OSError as error:
        raise ConfigError(_cannot_write(path, error)) from error
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.close()
        raise ConfigError(f"{path} is being written by another process; wait for it, or give another name.") from error
    os.truncate(stream.fileno(), 0)  # what a killed process left
    return stream


def _cannot_write(path: Path, error: OSError) -> str:
    return f"{path} cannot be written ({error.strerror or error}); give a name in a writable folder with enough room."


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
