"""Files cut into blocks of whole records, without looking into the records: that is left to the workers.

A record of .jsonl ends at LF, CR LF or CR, which JSON strings cannot contain, and nowhere else: U+2028, U+2029 and U+0085 are
ordinary characters of a string. A byte order mark is an encoding mark and no text. A text file is one document. A long one goes
in pieces of about PIECE_CHARACTERS that end with a line where there is one, so that a file of any size is read in little memory.
(A tokenizer that puts a space before each text puts one before each piece: one token in some 30,000 of a very long document.)
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from parallax.data.encoding.lines import hint_of_chats
from parallax.data.encoding.sources import Format, format_of, open_bytes
from parallax.errors import ConfigError

BLOCK_BYTES = 1 << 20
PIECE_CHARACTERS = 1 << 17  # tokenizers take more than linear time: twice as long a character for pieces of 2^20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass
class Block:
    """Consecutive records; `file` and `first` (a line or row, counted from 1) name them in messages.

    Either whole lines of .jsonl, or texts: the UTF-8 of all of them, their sizes in bytes, whether each ends its document, and
    whether the first goes on with the document of the block before.
    """

    file: str
    first: int
    content: bytes
    is_jsonl: bool
    sizes: list[int] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    continues: bool = False


class BlockReader:
    """Reads files, in their order, as blocks.

    Args:
        files: what to read.
        key: of the text in a record; the column of a table.
        format: what the files hold; None goes by their names.

    `bytes_read` says how much of the files, as they lie on the disk, has been read so far.
    """

    def __init__(self, files: Sequence[Path], key: str = "text", format: Format | None = None) -> None:
        self.files = files
        self.key = key
        self.format = format
        self.bytes_read = 0

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks of all files.

        Raises:
            ConfigError: a file cannot be read, or a text file is not UTF-8.
        """
        texts = _Texts()
        for path in self.files:
            before = self.bytes_read
            kind = self.format or format_of(path)
            if kind == "text":
                yield from self._text(path, texts)
            else:
                yield from texts.take()
                yield from self._lines(path) if kind == "jsonl" else self._table(path)
            self.bytes_read = before + path.stat().st_size
        yield from texts.take()

    def _lines(self, path: Path) -> Iterator[Block]:
        start = self.bytes_read
        with open_bytes(path) as (stream, file):
            for first, content in line_blocks(stream):
                self.bytes_read = start + file.tell()
                yield Block(str(path), first, content, is_jsonl=True)

    def _text(self, path: Path, texts: _Texts) -> Iterator[Block]:
        """Small files are put together in a block, in which only the last of a long file's pieces ends a document."""
        start = self.bytes_read
        with open_bytes(path) as (stream, file):
            previous = None
            for piece in _pieces(stream, path):
                if previous is not None:
                    yield from texts.add(str(path), 1, previous, ends=False)
                previous = piece.encode()
                self.bytes_read = start + file.tell()
            if previous is not None:
                yield from texts.add(str(path), 1, previous, ends=True)

    def _table(self, path: Path) -> Iterator[Block]:
        if problem := cannot_read_table(path, self.key):
            raise ConfigError(problem)
        import pyarrow
        import pyarrow.parquet

        start, texts, row = self.bytes_read, _Texts(), 1
        try:
            with pyarrow.parquet.ParquetFile(path) as table:
                for batch in table.iter_batches(batch_size=1024, columns=[self.key]):
                    for text in batch.column(0).to_pylist():
                        yield from texts.add(str(path), row, (text or "").encode(), ends=True)
                        row += 1
                    self.bytes_read = start + path.stat().st_size * row // (table.metadata.num_rows + 1)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: the parquet file is damaged at row {row} or after it ({error}).") from error
        yield from texts.take()


class _Texts:
    """Collects texts into blocks."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._ends: list[bool] = []
        self._size = 0
        self._name, self._first, self._continues = "", 1, False

    def add(self, name: str, first: int, text: bytes, ends: bool) -> Iterator[Block]:
        if not self._parts:
            self._name, self._first = name, first
        self._parts.append(text)
        self._ends.append(ends)
        self._size += len(text)
        if self._size >= BLOCK_BYTES:
            yield from self.take()

    def take(self) -> Iterator[Block]:
        if self._parts:
            sizes = [len(part) for part in self._parts]
            yield Block(self._name, self._first, b"".join(self._parts), False, sizes, self._ends, self._continues)
            self._continues = not self._ends[-1]
            self._parts, self._ends, self._size = [], [], 0


def line_blocks(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (number of the first line, whole lines) of a stream of .jsonl, in blocks of about BLOCK_BYTES."""
    number, at_start = 1, True
    rest: list[bytes] = []
    while data := stream.read(BLOCK_BYTES):
        # A CR at the end may be half of a CR LF. Less than was asked for is the end of the stream.
        is_last = len(data) < BLOCK_BYTES
        cut = len(data) if is_last else data.rfind(b"\n") + 1 or data.rfind(b"\r", 0, len(data) - 1) + 1
        if cut:
            block = b"".join([*rest, data[:cut]])
            if at_start:
                block, at_start = block.removeprefix(BYTE_ORDER_MARK), False
            yield number, block
            number += _count_lines(block)
            rest = []
        rest.append(data[cut:])
    if last := b"".join(rest):
        yield number, last


def _count_lines(content: bytes) -> int:
    return content.count(b"\n") + content.count(b"\r") - content.count(b"\r\n")


def _pieces(stream: BinaryIO, path: Path) -> Iterator[str]:
    # newline="": line ends are text like any other and are not translated
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    try:
        while piece := text.read(PIECE_CHARACTERS):
            yield piece + text.readline(PIECE_CHARACTERS)
    except UnicodeDecodeError as error:
        raise ConfigError(_describe_bad_byte(path)) from error
    finally:
        text.detach()


def _describe_bad_byte(path: Path) -> str:
    """Find the first byte that is not UTF-8; the decoder reads ahead and cannot tell where it is."""
    offset = 0
    with open_bytes(path) as (stream, _):
        for number, line in enumerate(stream, 1):  # b"\n" is no part of any other UTF-8 character
            try:
                line.decode()
            except UnicodeDecodeError as error:
                at = offset + error.start
                return f"{path}, line {number}: byte {at} is not UTF-8 text; convert the file, or leave it out."
            offset += len(line)
    return f"{path}: the file changed while it was read."


def cannot_read_table(path: Path, key: str) -> str | None:
    """Say what keeps a column of text from being read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return f"{path}: reading .parquet needs pyarrow; pip install pyarrow, or give .jsonl."
    try:
        schema = pyarrow.parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError) as error:
        return f"{path}: it cannot be read as parquet ({str(error).splitlines()[0]})."
    if key not in schema.names:
        names = ", ".join(schema.names[:8]) or "none"
        return f'{path}: the table has no column "{key}"; it has {names}{hint_of_chats(schema.names)}.'
    kind = schema.field(key).type
    text = {pyarrow.string(), pyarrow.large_string()}
    if kind in text or (pyarrow.types.is_dictionary(kind) and kind.value_type in text):
        return None
    return f'{path}: the column "{key}" holds {kind}, not text.'
