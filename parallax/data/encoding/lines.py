"""A line of .jsonl to its text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


class BadRecord(Exception):
    """A line holds no text; the message follows its name."""


def text_of_line(line: bytes, key: str) -> str:
    """Return the text of a line of .jsonl.

    Raises:
        BadRecord: it is no JSON object with a string of characters under the key.
    """
    try:
        record: Any = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadRecord(f"byte {error.start} of the line is not UTF-8 text; convert the file.") from error
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"this is not valid JSON ({json_fault(error)}); each line must be one JSON object.") from error
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        found = f"an object with the keys {sorted(record)[:8]}" if isinstance(record, dict) else kind_of(record)
        if isinstance(record, dict) and key in record:
            found = f"{kind_of(record[key])} under that key"
        chats = hint_of_chats(record) if isinstance(record, dict) else ""
        raise BadRecord(f'found {found}; each line must be an object with a string under the key "{key}"{chats}.')
    text: str = record[key]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(
            f"the text holds half of a surrogate pair (\\u{ord(text[error.start]):04x}), which is no character; "
            "repair or remove the record."
        ) from error
    return text


def hint_of_chats(keys: Iterable[str]) -> str:
    """Return a clause for records with the keys of chats; "" for others."""
    return "; chats are for finetune_sft.py" if {"messages", "conversations", "completion"} & set(keys) else ""


def kind_of(value: Any) -> str:
    """Return what a value of JSON is, in its words."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", tuple: "a list", str: "a string", bool: "true or false", bytes: "bytes"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def json_fault(error: Exception) -> str:
    """Return what Python's parser says of a line, with the place in it and no number of lines of its own."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, at character {error.pos + 1}"
    # Of a number of thousands of digits Python says which of its own settings to change.
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).partition("; use sys.")[0]
