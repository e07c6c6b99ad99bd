"""A corpus as token ids on disk, made once and mapped into memory by every rank.

    tokens.bin      ids of all documents in order, each document ended by eos; little-endian, no header
    documents.npy   int64 [num_documents + 1]: where each document starts, and the end of the last
    record.json     what it was made from, and its sizes

Ids take 2 bytes where the vocabulary allows it, else 4. Positions are int64 throughout: a corpus may have more than
2^31 tokens. The folder's name is the fingerprint of what it was made from, so a changed file or tokenizer makes a new
one and an old one is never wrong, only unused.

Order needs all tokens before the first step: which tokens sample 7 has depends on the length of all text before it. So text is
made into tokens before training, by worker processes where there is enough of it, and not while it runs.
"""

from __future__ import annotations

import contextlib
import json
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parallax.data.cache import build_once, cache_folder, digest, notify
from parallax.data.checksums import DataFile, fingerprint_of
from parallax.data.corpus import Corpus, corpus_files
from parallax.data.encoding.blocks import Block, BlockReader
from parallax.data.encoding.encode import Rules, check_eod
from parallax.data.encoding.pool import encode_blocks, usable_cores
from parallax.data.tokenizers import Tokenizer
from parallax.errors import ConfigError

FORMAT_VERSION = 2
NOTICE_SECONDS = 10
WORKERS_FROM_BYTES = 1 << 26  # below, starting processes takes longer than they save
MAX_WORKERS = 64


@dataclass(frozen=True)
class TokenStore:
    """Token ids `[num_tokens]` and the starts of their documents `[num_documents + 1]`, both mapped read-only.

    files: what they were made from.
    """

    tokens: np.ndarray
    document_starts: np.ndarray
    fingerprint: str
    files: tuple[DataFile, ...] = ()

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1


def token_store(corpus: Corpus, tokenizer: Tokenizer) -> TokenStore:
    """Return the corpus as tokens, made now if the cache does not have them.

    Raises:
        ConfigError: a file is not what its name says, the tokenizer has no end-of-text token, the cache is unusable.
    """
    check_eod(tokenizer)
    files = corpus_files(corpus)
    fingerprint = digest("tokens", str(FORMAT_VERSION), fingerprint_of(files), tokenizer.fingerprint)

    def build(folder: Path) -> None:
        _write(folder, corpus, tokenizer, fingerprint)

    what = f"the tokens of {corpus.description}"
    return open_token_store(build_once(cache_folder() / f"tokens-{fingerprint}", build, what), tuple(files))


def open_token_store(folder: Path, files: tuple[DataFile, ...] = ()) -> TokenStore:
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
        return TokenStore(tokens, starts, record["fingerprint"], files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the cached data in {folder} is damaged ({error}); delete that folder.") from error


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the smaller of little-endian uint16 and uint32 that holds all ids."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _write(folder: Path, corpus: Corpus, tokenizer: Tokenizer, fingerprint: str) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    rules = Rules("text", dtype.str, check_eod(tokenizer))
    paths = [file.path for file in corpus.files]
    size = sum(path.stat().st_size for path in paths)
    workers = min(usable_cores(), MAX_WORKERS) if size >= WORKERS_FROM_BYTES else 0
    starts = array("q", [0])
    num_tokens = 0
    next_notice = time.monotonic() + NOTICE_SECONDS
    reader = BlockReader(paths)
    with (
        open(folder / "tokens.bin", "wb") as stream,
        contextlib.closing(encode_blocks(_named(reader), tokenizer, rules, workers)) as results,
    ):
        for block, encoded in results:
            if encoded.problems:
                raise ConfigError(
                    [f"--data {block.file}, line {number}: {what}" for number, what in encoded.problems[:20]]
                )
            stream.write(encoded.content)
            ends = np.cumsum(encoded.lengths, dtype=np.int64) + num_tokens
            starts.frombytes(ends[encoded.ends].tobytes())
            num_tokens += int(encoded.lengths.sum(dtype=np.int64))
            if time.monotonic() > next_notice:
                notify(f"{num_tokens:,} tokens so far, {reader.bytes_read / max(size, 1):.0%} of the text ...")
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


def _named(reader: BlockReader) -> Iterator[Block]:
    """Yield the blocks; what is wrong with a file is said of --data."""
    try:
        yield from reader.blocks()
    except ConfigError as error:
        raise ConfigError([f"--data {problem}" for problem in error.problems]) from error
