"""Records of .jsonl (also .gz, .zst) and .parquet files, one at a time, each with its line and what is wrong with it if anything.

Lines end only where JSON strings cannot: LF, CR LF or CR, never U+2028. A line is read in bounded memory, and one that is broken
does not end the reading, so that --skip-bad can go on behind it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from parallax.data.chat.records import BadChat, Chat, parse_json, to_chat
from parallax.data.corpus import behind_address
from parallax.data.encoding.lines import json_fault
from parallax.data.encoding.sources import check_packing, open_bytes
from parallax.errors import ConfigError
from parallax.storage import is_address

PARQUET_MAGIC = b"PAR1"
MAX_LINE_CHARACTERS = 1 << 26  # a chat of this size has some 16 million tokens


def read_chats(path: str | Path) -> Iterator[tuple[int, Chat | BadChat]]:
    """Yield (line or row counted from 1, its chat or what is wrong with it); empty lines are left out.

    Raises:
        ConfigError: the file cannot be read at all; or it is parquet and pyarrow is not installed.
    """
    try:
        with open(path, "rb") as stream:
            is_parquet = stream.read(4) == PARQUET_MAGIC
        for number, record in _parquet(path) if is_parquet else _lines(path):
            try:
                yield number, record if isinstance(record, BadChat) else to_chat(record)
            except BadChat as error:
                yield number, error
    except OSError as error:
        raise ConfigError(f"--data {path}: it cannot be read ({error.strerror or error}).") from error


def check_chat_file(given: str) -> list[str]:
    """Say what is wrong with a file of --data, without reading it."""
    path = Path(given)
    if is_address(given):
        return [behind_address(f"--data {given}")]
    try:
        if path.is_dir():
            return [f"--data {given}: this is a folder; name the .jsonl or .parquet files in it."]
        if not path.exists():
            return [f"--data {given}: there is no such file."]
        if not path.is_file():
            return [f"--data {given}: this is no file."]
        with open(path, "rb"):
            pass
    except OSError as error:
        return [f"--data {given}: it cannot be read ({error.strerror})."]
    problem = check_packing(path)
    return [f"--data {given}: {problem}."] if problem else []


def _lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    with open_bytes(Path(path)) as (unpacked, _):
        # surrogateescape: a byte that is not UTF-8 makes its own line bad, not the block that the decoder read ahead
        stream = io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors="surrogateescape", newline=None)
        number = 0
        while line := stream.readline(MAX_LINE_CHARACTERS):
            number += 1
            if len(line) == MAX_LINE_CHARACTERS and not line.endswith("\n"):
                _skip_line(stream)
                yield number, BadChat(f"the line has more than {MAX_LINE_CHARACTERS:,} characters")
            elif line.strip(" \t\n"):
                yield number, _parse(line, number)


def _skip_line(stream: TextIO) -> None:
    while (piece := stream.readline(MAX_LINE_CHARACTERS)) and not piece.endswith("\n"):
        pass


def _parse(line: str, number: int) -> Any:
    try:
        line.encode()
        return parse_json(line)
    except UnicodeEncodeError:
        return BadChat("the line is not UTF-8 text")
    except RecursionError:
        return BadChat("the JSON is nested too deeply")
    except ValueError as error:
        hint = ""
        if line.startswith("["):
            hint = "; a file must have each chat on a line of its own, not one list of all"
        elif number == 1 and not line.startswith("{"):
            hint = "; text to go on with is for pretrain.py"
        return BadChat(f"this is not valid JSON ({json_fault(error)}){hint}")


def _parquet(path: str | Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"--data {path}: reading parquet needs pyarrow; pip install pyarrow, or give .jsonl."
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except pyarrow.ArrowException as error:
        raise ConfigError(f"--data {path}: the parquet file is damaged after row {number} ({error}).") from error
