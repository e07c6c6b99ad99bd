"""The header of a safetensors file, written and read.

    8 bytes      length of the header, little-endian
    header       JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}, padded with spaces
    data         the tensors, one after the other, without holes

The public library writes a file from tensors that are all in memory; a checkpoint is written as its tensors arrive, and
read in slices of a few bytes, so the twenty lines are here. What a header says is believed only after it is checked:
nothing is allocated from a number in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from parallax.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# More types than parameters have: files that others wrote may hold them beside the parameters.
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: `offset` is that of its first byte, counted from the file's."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def make_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Entry]]:
    """Return the first bytes of a file of these tensors, (name, dtype, shape) in order, and where each will be."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers reads no file without it
    begin, begins = 0, {}
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begins[name], begin = begin, end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    entries = {name: Entry(dtype, shape, start + begins[name]) for name, dtype, shape in tensors}
    return len(text).to_bytes(8, "little") + text, entries


def read_header(where: object, size: int, read: Callable[[int, int], bytes | bytearray]) -> dict[str, Entry]:
    """Return the tensors that a safetensors file of `size` bytes holds, after checking that they fill it exactly.

    read: returns the bytes [start, stop). Raises ConfigError, one sentence that names the file, when it is no such file.
    """
    length = int.from_bytes(read(0, 8), "little") if size >= 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise ConfigError(f"{where} is not a safetensors file")
    try:
        return _entries(parse_json(read(8, 8 + length)), 8 + length, size)
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{where} is not a valid safetensors file: {error}") from None


def _entries(fields: Any, start: int, size: int) -> dict[str, Entry]:
    if not isinstance(fields, dict):
        raise ValueError("its header is no JSON object")
    found = {}
    for name, field in fields.items():
        if name == "__metadata__":
            continue
        begin, end = field["data_offsets"]
        if field["dtype"] not in ITEM_BYTES:
            raise ValueError(f"{name} has the unknown type {field['dtype']!r}")
        entry = Entry(field["dtype"], natural_numbers(field["shape"]), start + natural_numbers([begin])[0])
        if end != begin + entry.num_bytes:
            raise ValueError(f"the shape and the extent of {name} disagree")
        found[name] = entry
    position = start
    for name, entry in sorted(found.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset != position:
            raise ValueError(f"there is a hole or an overlap before {name}")
        position += entry.num_bytes
    if position != size:
        raise ValueError(f"its tensors end at byte {position}, the file at {size}")
    return found


def natural_numbers(values: Any) -> tuple[int, ...]:
    """Return a JSON list of integers >= 0 as a tuple; raise ValueError for anything else."""
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{str(values)[:80]} is no list of natural numbers")
    return tuple(values)


def parse_json(text: bytes | bytearray) -> Any:
    """Parse JSON in UTF-8; raise ValueError also for a key that comes twice, which readers resolve differently."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a key comes twice in its JSON")
        return result

    return json.loads(text.decode("utf-8"), object_pairs_hook=unique)
