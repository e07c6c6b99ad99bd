"""A block of records to token ids: what a worker does with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from parallax.data.encoding.blocks import Block
from parallax.data.encoding.lines import BadRecord, text_of_line
from parallax.errors import ConfigError

if TYPE_CHECKING:
    from parallax.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Rules:
    """How records become ids: the key of their text, the type of the ids, and the id that ends a document, if any."""

    key: str
    dtype: str
    eod: int | None


@dataclass
class Encoded:
    """The ids of a block's texts, as bytes; their number for each, int32 `[texts]`; whether each ends its document.

    problems: what is wrong with lines, each with its number. num_empty: documents without text, which are left out.
    """

    content: bytes
    lengths: np.ndarray
    ends: np.ndarray
    problems: list[tuple[int, str]]
    num_empty: int


def encode_block(block: Block, tokenizer: Tokenizer, rules: Rules) -> Encoded:
    """Return the ids of the texts of a block."""
    if block.is_jsonl:
        texts, problems, num_empty = _read_lines(block, rules.key)
        ends = [True] * len(texts)
    else:
        texts, ends, problems, num_empty = *_read_texts(block), [], 0
    dtype = np.dtype(rules.dtype)
    limit = np.iinfo(dtype).max
    eod = [] if rules.eod is None else [np.array([rules.eod], dtype)]
    arrays: list[np.ndarray] = []
    lengths: list[int] = []
    kept: list[bool] = []
    inside = block.continues
    for ids, end in zip(tokenizer.encode_batch(texts) if texts else [], ends, strict=True):
        if end and not inside and not len(ids):
            num_empty += 1
            continue
        inside = not end
        assert not len(ids) or ids.max() <= limit, "an id that its type does not hold"
        arrays.append(ids.astype(dtype, copy=False))
        arrays += eod if end else []
        lengths.append(len(ids) + len(eod) * end)
        kept.append(end)
    content = np.concatenate(arrays).tobytes() if arrays else b""
    return Encoded(content, np.array(lengths, np.int32), np.array(kept, np.bool_), problems, num_empty)


def _read_texts(block: Block) -> tuple[list[str], list[bool]]:
    texts, at = [], 0
    for size in block.sizes:
        texts.append(block.content[at : at + size].decode())
        at += size
    return texts, block.ends


def _read_lines(block: Block, key: str) -> tuple[list[str], list[tuple[int, str]], int]:
    texts: list[str] = []
    problems: list[tuple[int, str]] = []
    num_empty = 0
    # bytes.splitlines, unlike that of str, splits at CR and LF alone
    for number, line in enumerate(block.content.splitlines(), block.first):
        if not line.strip(b" \t"):
            continue
        try:
            text = text_of_line(line, key)
        except BadRecord as error:
            problems.append((number, str(error)))
            continue
        if text:
            texts.append(text)
        else:
            num_empty += 1
    return texts, problems, num_empty


def check_eod(tokenizer: Tokenizer) -> int:
    """Return the id that ends documents.

    Raises:
        ConfigError: the tokenizer has none.
    """
    if tokenizer.eos_id is None:
        raise ConfigError(
            f"--tokenizer {tokenizer.description} names no end-of-text token to separate documents with; put a "
            'tokenizer_config.json with "eos_token" beside its tokenizer.json.'
        )
    return tokenizer.eos_id
