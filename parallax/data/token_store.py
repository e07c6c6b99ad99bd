"""A corpus as token ids on disk, made once and mapped into memory by every rank.

    tokens.bin      ids of all documents in order, each document ended by eos; little-endian, no header
    documents.npy   int64 [num_documents + 1]: where each document starts, and the end of the last
    record.json     what it was made from, and its sizes

Ids take 2 bytes where the vocabulary allows it, else 4. Positions are int64 throughout: a corpus may have more than
2^31 tokens. The folder's name is the fingerprint of what it was made from, so a changed file or tokenizer makes a new
one and an old one is never wrong, only unused.
"""

from __future__ import annotations

import itertools
import json
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parallax.data.cache import build_once, cache_folder, digest, notify
from parallax.data.corpus import PIECE_CHARACTERS, Corpus, corpus_digest, read_documents
from parallax.data.tokenizers import Tokenizer
from parallax.errors import ConfigError

FORMAT_VERSION = 1
BATCH_CHARACTERS = 32 * PIECE_CHARACTERS
NOTICE_SECONDS = 10


@dataclass(frozen=True)
class TokenStore:
    """Token ids `[num_tokens]` and the starts of their documents `[num_documents + 1]`, both mapped read-only."""

    tokens: np.ndarray
    document_starts: np.ndarray
    fingerprint: str

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1


def token_store(corpus: Corpus, tokenizer: Tokenizer) -> TokenStore:
    """Return the corpus as tokens, made now if the cache does not have them.

    Raises:
        ConfigError: a file is not what its name says, the tokenizer has no end-of-text token, the cache is unusable.
    """
    if tokenizer.eos_id is None:
        raise ConfigError(
            f"--tokenizer {tokenizer.description} names no end-of-text token to separate documents with; put a "
            'tokenizer_config.json with "eos_token" beside its tokenizer.json.'
        )
    fingerprint = digest("tokens", str(FORMAT_VERSION), corpus_digest(corpus), tokenizer.fingerprint)

    def build(folder: Path) -> None:
        _write(folder, corpus, tokenizer, fingerprint)

    what = f"the tokens of {corpus.description}"
    return open_token_store(build_once(cache_folder() / f"tokens-{fingerprint}", build, what))


def open_token_store(folder: Path) -> TokenStore:
    """Map a folder that `token_store` wrote.

    Raises:
        ConfigError: the folder is damaged.
    """
    try:
        record = json.loads((folder / "record.json").read_text())
        starts = np.load(folder / "documents.npy", mmap_mode="r", allow_pickle=False)
        num_bytes = (folder / "tokens.bin").stat().st_size
        dtype = np.dtype(record["dtype"])
        whole = num_bytes == record["num_tokens"] * dtype.itemsize and len(starts) == record["num_documents"] + 1
        if not whole:
            raise ValueError("the sizes of its files differ from those recorded")
        tokens = np.memmap(folder / "tokens.bin", dtype=dtype, mode="r")
        return TokenStore(tokens, starts, record["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the cached data in {folder} is damaged ({error}); delete that folder.") from error


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the smaller of little-endian uint16 and uint32 that holds all ids."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _write(folder: Path, corpus: Corpus, tokenizer: Tokenizer, fingerprint: str) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    starts = array("q", [0])
    num_tokens = 0
    next_notice = time.monotonic() + NOTICE_SECONDS
    with open(folder / "tokens.bin", "wb") as stream:
        for texts, ends_document in _batches(corpus):
            for ids, ends in zip(tokenizer.encode_batch(texts), ends_document, strict=True):
                assert ids.size == 0 or ids.max() < tokenizer.vocab_size, "an id outside the vocabulary"
                stream.write(ids.astype(dtype).tobytes())
                num_tokens += len(ids)
                if ends:
                    stream.write(np.array(tokenizer.eos_id, dtype).tobytes())
                    num_tokens += 1
                    starts.append(num_tokens)
            if time.monotonic() > next_notice:
                notify(f"{num_tokens:,} tokens so far ...")
                next_notice += NOTICE_SECONDS
    if num_tokens == 0:
        raise ConfigError(f"{corpus.description} holds no text at all; give --data with text.")
    np.save(folder / "documents.npy", np.frombuffer(starts, dtype=np.int64).astype("<i8"), allow_pickle=False)
    record = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "dtype": dtype.str,
        "num_tokens": num_tokens,
        "num_documents": len(starts) - 1,
        "num_files": len(corpus.files),
        "source": corpus.description,
        "tokenizer": tokenizer.description,
        "tokenizer_fingerprint": tokenizer.fingerprint,
    }
    (folder / "record.json").write_text(json.dumps(record, indent=2) + "\n")
    if corpus.num_skipped:
        notify(f"left out {corpus.num_skipped} files that are not UTF-8 text")


def _batches(corpus: Corpus) -> Iterator[tuple[list[str], list[bool]]]:
    """Yield lists of about `BATCH_CHARACTERS` of text, and whether each text ends its document."""
    texts: list[str] = []
    ends_document: list[bool] = []
    size = 0
    for document in itertools.chain.from_iterable(map(read_documents, corpus.files)):
        empty = True
        for piece in document:
            if size >= BATCH_CHARACTERS:
                yield texts, ends_document
                texts, ends_document, size = [], [], 0
            texts.append(piece)
            ends_document.append(False)
            size += len(piece)
            empty = False
        if not empty:
            ends_document[-1] = True  # still in the list: it is given away only when the next text comes
    if texts:
        yield texts, ends_document
