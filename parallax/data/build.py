"""`parallax data build`: text to token files, in parallel and in order.

The two files are the same, byte for byte, for any number of workers, and appear under their names when they are whole. A record
of what they were made from lies beside them, PREFIX.build.json, so that training with another tokenizer is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallax.data.corpus import Corpus, Reading, user_corpus
from parallax.data.encoding.blocks import BlockReader
from parallax.data.encoding.encode import Rules, check_eod
from parallax.data.encoding.pool import encode_blocks, usable_cores
from parallax.data.encoding.sources import Format
from parallax.data.indexed import IndexedWriter
from parallax.data.indexed.layout import index_dtype, paths_of
from parallax.data.tokenizers import Tokenizer, load_tokenizer, saved_fingerprint
from parallax.errors import ConfigError

SHOWN_PROBLEMS = 20
MAX_WORKERS = 256

Progress = Callable[[int, int, int], None]  # bytes read, bytes in all, tokens written


@dataclass(frozen=True)
class BuildOptions:
    """What to build.

    inputs: files and folders. tokenizer: as --tokenizer names it. out: the prefix of the files to write. workers: processes, by
    default as many as there are cores. json_key: of the text in a record. append_eod: end each document with the tokenizer's
    end-of-text id. skip_bad: leave broken lines out and count them. format: of all files, in place of what their names say.
    """

    inputs: Sequence[str]
    tokenizer: str | None
    out: str
    workers: int | None = None
    json_key: str = "text"
    append_eod: bool = False
    skip_bad: bool = False
    format: Format | None = None


@dataclass(frozen=True)
class Built:
    """What came out: `num_empty` documents had no text, `num_bad` lines were broken, the first of which `problems` tells."""

    bin_path: Path
    idx_path: Path
    dtype: str
    num_documents: int
    num_tokens: int
    num_empty: int
    num_bad: int
    problems: list[str]
    num_skipped_files: int


def build(options: BuildOptions, progress: Progress = lambda done, total, tokens: None) -> Built:
    """Tokenize the inputs into OUT.bin and OUT.idx.

    Raises:
        ConfigError: the inputs or the tokenizer cannot be used, a line is broken, there is no text, OUT cannot be written.
    """
    corpus = user_corpus(options.inputs, Reading("", options.json_key, options.format, options.skip_bad))
    workers = _check(options, corpus)
    tokenizer = load_tokenizer(options.tokenizer)
    dtype = index_dtype(tokenizer.vocab_size)
    rules = Rules(options.json_key, dtype.str, check_eod(tokenizer) if options.append_eod else None)
    paths = [file.path for file in corpus.files]
    total = sum(path.stat().st_size for path in paths)
    reader = BlockReader(paths, options.json_key, options.format)
    num_empty = num_bad = 0
    problems: list[str] = []
    with (
        IndexedWriter(options.out, dtype) as writer,
        contextlib.closing(encode_blocks(reader.blocks(), tokenizer, rules, workers)) as results,
    ):
        for block, encoded in results:
            num_bad += len(encoded.problems)
            problems += [f"{block.file}, line {number}: {what}" for number, what in encoded.problems]
            if problems and not options.skip_bad:
                raise ConfigError(_broken(problems))
            del problems[SHOWN_PROBLEMS:]
            num_empty += encoded.num_empty
            writer.add_texts(encoded.content, encoded.lengths, encoded.ends)
            progress(reader.bytes_read, total, writer.num_tokens)
        if not writer.num_tokens:
            raise ConfigError(
                f"{corpus.description} holds no text"
                + f" besides {num_bad} broken {'line' if num_bad == 1 else 'lines'}" * (num_bad > 0)
            )
        record_path(options.out).unlink(missing_ok=True)
    built = Built(
        writer.bin_path,
        writer.idx_path,
        dtype.name,
        writer.num_documents,
        writer.num_tokens,
        num_empty,
        num_bad,
        problems,
        corpus.num_skipped,
    )
    _write_record(options, tokenizer, built)
    return built


def _broken(problems: list[str]) -> list[str]:
    advice = "--skip-bad leaves broken lines out and counts them"
    more = f" (and {len(problems) - SHOWN_PROBLEMS} more in this part of the file)" * (len(problems) > SHOWN_PROBLEMS)
    return [*problems[:SHOWN_PROBLEMS], f"nothing was written{more}; {advice}"]


def _check(options: BuildOptions, corpus: Corpus) -> int:
    """Return the number of workers."""
    targets = {path.resolve() for path in (*paths_of(options.out), record_path(options.out))}
    for file in corpus.files:
        if file.path.resolve() in targets:
            raise ConfigError(f"--out {options.out} would replace {file.path}, which is read; give another name.")
    if paths_of(options.out)[0].name == ".bin":
        raise ConfigError(
            f"--out {options.out} names a folder; give the beginning of the files' names, as in {options.out}corpus."
        )
    if options.workers is not None and not 1 <= options.workers <= MAX_WORKERS:
        raise ConfigError(
            f"--workers {options.workers} must be 1 to {MAX_WORKERS}; {usable_cores()} cores can be used here."
        )
    return options.workers or min(usable_cores(), MAX_WORKERS)


def record_path(prefix: str | Path) -> Path:
    """Return where the record of a build lies."""
    return paths_of(prefix)[0].with_suffix(".build.json")


def _write_record(options: BuildOptions, tokenizer: Tokenizer, built: Built) -> None:
    """Write what the files were made from; nothing in it depends on the workers, the time or the place."""
    record: dict[str, Any] = {
        "tokenizer": tokenizer.description,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "saved_tokenizer_fingerprint": saved_fingerprint(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eos_id if options.append_eod else None,
        "dtype": built.dtype,
        "num_documents": built.num_documents,
        "num_tokens": built.num_tokens,
        "num_empty": built.num_empty,
        "num_bad": built.num_bad,
    }
    path = record_path(options.out)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
