"""Files of text as streams of bytes: which format a name stands for, and how it is unpacked."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from parallax.errors import ConfigError

Format = Literal["jsonl", "parquet", "text"]
FORMATS: tuple[Format, ...] = ("jsonl", "parquet", "text")

MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".parquet": b"PAR1"}
COMPRESSIONS = (".gz", ".zst")
FORMAT_OF = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
READ_BYTES = 1 << 20


def format_of(path: Path) -> Format:
    """Return what a file's name says that it holds: a document a line, a table, or one document."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return cast(Format, FORMAT_OF.get(suffixes[-1] if suffixes else "", "text"))


def check_packing(path: Path) -> str | None:
    """Say what keeps a file from being unpacked, in words that follow its name; None for files that need no unpacking."""
    suffix = path.suffix.lower()
    if suffix not in MAGIC:
        return None
    with open(path, "rb") as stream:
        head = stream.read(4)
    if not head.startswith(MAGIC[suffix]):
        return f"the file is no {suffix} file, although its name says so"
    return _missing_library(suffix)


def _missing_library(suffix: str) -> str | None:
    needed = {".zst": "zstandard", ".parquet": "pyarrow"}.get(suffix)
    if needed is None:
        return None
    from importlib.util import find_spec

    return None if find_spec(needed) else f"reading {suffix} needs {needed}; pip install {needed}, or unpack the file"


@contextmanager
def open_bytes(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file for reading; yield its unpacked bytes and the file as it lies on the disk, whose position tells the progress.

    Raises:
        ConfigError: on opening or at any time while reading: it cannot be read, it is damaged, a library is missing.
    """
    suffix = path.suffix.lower()
    if missing := _missing_library(suffix):
        raise ConfigError(f"{path}: {missing}.")
    try:
        with open(path, "rb") as file:
            if suffix == ".gz":
                yield cast(BinaryIO, gzip.GzipFile(fileobj=file)), file
            elif suffix == ".zst":
                yield cast(BinaryIO, io.BufferedReader(_ZstdStream(file), READ_BYTES)), file
            else:
                yield file, file
    except (EOFError, gzip.BadGzipFile, zlib.error, _DamagedError) as error:
        raise ConfigError(f"{path}: the compressed file is cut short or damaged ({error}).") from error
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: it cannot be read ({error.strerror or error}).") from error


class _DamagedError(Exception):
    """A compressed file cannot be unpacked."""


class _ZstdStream(io.RawIOBase):
    """The unpacked bytes of a .zst file of one or more frames. (zstandard's own stream ends silently where a file is cut.)"""

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file = file
        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._packed = b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            if not self._packed and not (packed := self._file.read(READ_BYTES)):
                if self._frame is not None:
                    raise _DamagedError("its last frame has no end")
                return 0
            self._unpack(self._packed or packed)
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count

    def _unpack(self, packed: bytes) -> None:
        if self._frame is None:
            self._frame = self._new_frame()
        try:
            self._unpacked = memoryview(self._frame.decompress(packed))
        except self._error as error:
            raise _DamagedError(str(error)) from error
        self._packed = b""
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
