"""Token files in Megatron-LM's format as a token store, checked once against the tokenizer and against themselves.

The first time, both files are read through: for their checksums, for the range of the ids, and to see that the sequences lie one
after another. What that found is kept in the cache for large files (see checksums), so later starts read nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from parallax.data.build import record_path
from parallax.data.cache import build_once, cache_folder, digest
from parallax.data.checksums import DataFile, cached_by_stat, fingerprint_of, hash_file
from parallax.data.indexed import IndexedDataset
from parallax.data.token_store import TokenStore
from parallax.data.tokenizers import DEFAULT_TOKENIZER, Tokenizer, saved_fingerprint
from parallax.errors import ConfigError

MAPPED_FROM = 1 << 20  # documents: 8 MiB in each rank
BLOCK = 1 << 22  # sequences that are checked at a time


def token_files(prefix: str, tokenizer: Tokenizer, flag: str = "--data ") -> TokenStore:
    """Return PREFIX.bin as a token store.

    Raises:
        ConfigError: a file is missing or damaged, or the ids are not the tokenizer's.
    """
    try:
        data = IndexedDataset(prefix)
    except ConfigError as error:
        raise ConfigError([f"{flag}{problem}" for problem in error.problems]) from error
    files, num_tokens, low, high = _look_through(data, flag)
    if high >= tokenizer.vocab_size or low < 0:
        raise ConfigError(
            f"{flag}{data.bin_path} holds the id {high if low >= 0 else low}, but --tokenizer {tokenizer.description} has "
            f"the ids 0 to {tokenizer.vocab_size - 1}; give the tokenizer that the file was made with."
        )
    _check_record(prefix, data, tokenizer, flag)
    if num_tokens == 0:
        raise ConfigError(f"{flag}{data.bin_path} holds no tokens.")
    fingerprint = digest("token files", fingerprint_of(files))
    return TokenStore(data.tokens, _document_starts(data, num_tokens, fingerprint), fingerprint, tuple(files))


def _look_through(data: IndexedDataset, flag: str) -> tuple[list[DataFile], int, int, int]:
    """Return the records of both files, how many tokens they hold, and the lowest and the highest id."""
    itemsize, dtype = data.dtype.itemsize, data.dtype

    def limits(content: bytes) -> tuple[int, int]:
        ids = np.frombuffer(content, dtype, len(content) // itemsize)
        return (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)

    def compute() -> list[Any]:
        num_tokens = _check_index(data, flag)
        tokens, found = hash_file(data.bin_path, data.bin_path.name, limits)
        index, _ = hash_file(data.idx_path, data.idx_path.name)
        lows, highs = [low for low, _ in found], [high for _, high in found]
        return [tokens, index, num_tokens, min(lows, default=0), max(highs, default=0)]

    paths = [data.bin_path, data.idx_path]
    tokens, index, num_tokens, low, high = cached_by_stat(
        paths, "token-files", f"the checksum of {data.bin_path}", compute
    )
    return [DataFile(*tokens), DataFile(*index)], num_tokens, low, high


def _check_record(prefix: str, data: IndexedDataset, tokenizer: Tokenizer, flag: str) -> None:
    """Compare the tokenizer with what `parallax data build` wrote down, if these are still the files that it made."""
    path = record_path(prefix)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        same_files = (record["num_documents"], record["dtype"]) == (data.num_documents, data.dtype.name)
        fingerprint, name = record["tokenizer_fingerprint"], record["tokenizer"]
        forms = {fingerprint, record.get("saved_tokenizer_fingerprint", fingerprint)}
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{flag}{path} is damaged ({error}); remove it, or build the files again.") from error
    if same_files and fingerprint != tokenizer.fingerprint and saved_fingerprint(tokenizer) not in forms:
        raise ConfigError(
            f"{flag}{data.bin_path} was made with {_another(str(name), tokenizer.description)} ({path} says so)."
        )


def _another(made_with: str, given: str) -> str:
    """Return, as the end of a sentence, that the tokenizers of a file and of the run are two, and what to do."""
    if made_with == given:
        return f"{given} as it was then, and that is another tokenizer now; build the files again, or bring back the old one"
    again = "leave out --tokenizer" if made_with == DEFAULT_TOKENIZER else f"run with --tokenizer {made_with}"
    given = given if given == DEFAULT_TOKENIZER else f"--tokenizer {given}"
    made_with = made_with if made_with == DEFAULT_TOKENIZER else f"the tokenizer {made_with}"
    why = f"{made_with}, and this run has {given}, to which its ids may be other text"
    return f"{why}; {again}, or build the files again with this run's"


def _check_index(data: IndexedDataset, flag: str) -> int:
    """Return the number of tokens, having seen that the sequences lie one after another and the documents in order.

    The arrays are compared as a whole, a block at a time: no loop over sequences.
    """
    end = 0
    for first in range(0, len(data), BLOCK):
        lengths = data.lengths[first : first + BLOCK].astype(np.int64)
        ends = np.cumsum(lengths * data.dtype.itemsize) + end
        wrong = np.flatnonzero(
            (data.pointers[first : first + BLOCK] != ends - lengths * data.dtype.itemsize) | (lengths < 0)
        )
        if len(wrong):
            raise ConfigError(
                f"{flag}{data.idx_path}: sequence {first + int(wrong[0])} does not lie where the one before it ends; write the "
                "files again, for example with parallax.data.IndexedWriter."
            )
        end = int(ends[-1])
    size = data.bin_path.stat().st_size
    if size != end:
        raise ConfigError(
            f"{flag}{data.bin_path} has {size:,} bytes, but {data.idx_path.name} describes {end:,}; the two are of "
            "different builds."
        )
    documents = data.document_indices
    if documents[0] != 0 or documents[-1] != len(data) or (np.diff(documents) < 0).any():
        raise ConfigError(
            f"{flag}{data.idx_path} is damaged: its documents are not in order or do not cover all sequences."
        )
    return end // data.dtype.itemsize


def _document_starts(data: IndexedDataset, num_tokens: int, fingerprint: str) -> np.ndarray:
    """Return int64 `[documents + 1]`: the first token of each document, and the number of tokens; mapped where it is large."""

    def make() -> np.ndarray:
        return np.append(data.pointers // data.dtype.itemsize, num_tokens)[data.document_indices]

    if data.num_documents < MAPPED_FROM:
        return make()

    def build(folder: Path) -> None:
        np.save(folder / "documents.npy", make(), allow_pickle=False)

    what = f"where the {data.num_documents:,} documents of {data.bin_path} start"
    folder = build_once(cache_folder() / f"documents-{fingerprint}", build, what)
    return np.load(folder / "documents.npy", mmap_mode="r", allow_pickle=False)
