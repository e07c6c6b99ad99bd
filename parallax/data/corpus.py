"""Where documents come from: the user's files and folders, or the source text of Python's standard library.

A .jsonl file holds one document a line, under the key "text"; any other file is one document. Text is kept exactly:
records of .jsonl end only at the line ends that JSON strings cannot contain (LF, CR LF, CR), never at U+2028, U+2029 or
U+0085, which are ordinary characters of a string. A byte order mark is an encoding mark and no text. Empty documents
are left out.

The order of documents is the order of the arguments and, inside a folder, of the names by code point, so it is the same
on every machine. In folders, hidden files and links to folders are left out, and files that are not text are counted
and left out; a file that was named itself must be text.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import os
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from parallax.data.cache import build_once, cache_folder, digest
from parallax.errors import ConfigError

JSONL_SUFFIXES = (".jsonl", ".ndjson")
HEAD_BYTES = 8192  # enough to tell text from binary, as git does
PIECE_CHARACTERS = 1 << 17  # tokenizers take more than linear time: twice as long a character for pieces of 2^20
LARGE_CORPUS_BYTES = 1 << 28  # hashed in about half a second
CHECKED_FILES_PER_FOLDER = 100
SKIPPED_STANDARD_LIBRARY_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__"}
)


@dataclass(frozen=True)
class TextFile:
    """A file of the corpus; `name` is what the fingerprint knows it by: its path inside the folder it was found in."""

    path: Path
    name: str


@dataclass(frozen=True)
class Corpus:
    """Files in the order of their documents. `num_skipped` counts files in folders that are not text."""

    files: tuple[TextFile, ...]
    num_skipped: int
    description: str


def standard_library() -> Corpus:
    """Return the embedded default: the .py files of this Python's standard library, without its tests.

    About 12 MB of text. Site packages are left out, and lib2to3, which newer versions no longer have.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        TextFile(path, path.relative_to(root).as_posix())
        for path in _walk(root, SKIPPED_STANDARD_LIBRARY_FOLDERS)
        if path.suffix == ".py"
    ]
    text = [file for file in files if _is_text(file.path)]
    if not text:
        raise ConfigError(f"the Python standard library in {root} holds no source text to train on; give --data.")
    return Corpus(tuple(text), len(files) - len(text), "the source text of Python's standard library")


def user_corpus(paths: Sequence[str]) -> Corpus:
    """Return the files that --data names.

    Raises:
        ConfigError: a path is missing, unreadable or not text, a folder holds no text, a file is reached twice.
    """
    problems = [problem for path in paths for problem in check_data_path(path)]
    if problems:
        raise ConfigError(problems)
    files: list[TextFile] = []
    num_skipped = 0
    for given in map(Path, paths):
        if given.is_dir():
            found = [TextFile(path, path.relative_to(given).as_posix()) for path in _walk(given)]
            text = [file for file in found if _is_text(file.path)]
            num_skipped += len(found) - len(text)
            files += text
        else:
            files.append(TextFile(given, given.name))
    reached: set[Path] = set()
    for file in files:
        real = file.path.resolve()
        if real in reached:
            raise ConfigError(f"--data reaches {file.path} more than once; name each file or folder once.")
        reached.add(real)
    return Corpus(tuple(files), num_skipped, " ".join(paths))


def check_data_path(given: str) -> list[str]:
    """Say what is wrong with a path of --data, looking only at the first bytes of its files."""
    path = Path(given)
    try:
        if path.is_dir():
            text = (file for file in _walk(path) if _is_text(file))
            files = list(itertools.islice(text, CHECKED_FILES_PER_FOLDER))
            if not files:
                return [f"--data {given}: the folder holds no text file; give a folder of UTF-8 .txt or .jsonl files."]
        elif not path.exists():
            return [f"--data {given}: there is no such file or folder."]
        elif not path.is_file():
            return [f"--data {given}: this is neither a file nor a folder."]
        elif not _is_text(path):
            return [f"--data {given}: the file is not UTF-8 text; convert it, or leave it out."]
        else:
            files = [path]
        problems = [_check_first_record(file) for file in files if file.suffix in JSONL_SUFFIXES]
    except OSError as error:
        return [f"--data {error.filename or given}: it cannot be read ({error.strerror})."]
    return [problem for problem in problems if problem]


def read_documents(file: TextFile) -> Iterator[Iterator[str]]:
    """Yield the documents of a file, each as its pieces in order; joined they are the document's exact text.

    A piece has about `PIECE_CHARACTERS` characters at most and ends at a line's end where there is one, so that a file
    of any size is read in little memory. Each document must be consumed before the next is asked for. (A tokenizer that
    puts a space before each text puts one before each piece: one token in some 30,000 of a very long document.)

    Raises:
        ConfigError: a line is no JSON object with a string "text", or the file is not UTF-8; names file and line.
    """
    with _reading(file.path):
        if file.path.suffix in JSONL_SUFFIXES:
            for text in _read_jsonl(file.path):
                yield _pieces(text)
        else:
            # newline="": line ends are text like any other and are not translated
            with open(file.path, encoding="utf-8-sig", newline="") as stream:
                yield _stream_pieces(stream)


def corpus_digest(corpus: Corpus) -> str:
    """Hash names, sizes and contents of the files.

    Reading all of a large corpus in every rank at every start would take long, so its answer is cached under what
    `stat` says of the files. A file changed within the last seconds is not trusted to show every change there.
    """
    with _reading(corpus.files[0].path):
        states = [file.path.stat() for file in corpus.files]
    just_changed = max(s.st_ctime_ns for s in states) / 1e9 > time.time() - 5
    if just_changed or sum(s.st_size for s in states) < LARGE_CORPUS_BYTES:
        return _hash_contents(corpus)
    stamps = [f"{s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}" for s in states]
    key = digest(*(f"{file.path.resolve()} {stamp}" for file, stamp in zip(corpus.files, stamps, strict=True)))

    def build(folder: Path) -> None:
        (folder / "digest").write_text(_hash_contents(corpus))

    folder = build_once(cache_folder() / f"digest-{key}", build, f"the checksum of {corpus.description}")
    return (folder / "digest").read_text()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Say which file cannot be read."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--data {error.filename or path}: it cannot be read ({error.strerror}).") from error


def _hash_contents(corpus: Corpus) -> str:
    parts: list[str] = []
    for file in corpus.files:
        state = hashlib.blake2b(digest_size=16)
        size = 0
        with _reading(file.path), open(file.path, "rb") as stream:
            while block := stream.read(1 << 20):
                state.update(block)
                size += len(block)
        parts += [file.name.encode("utf-8", "surrogateescape").hex(), str(size), state.hexdigest()]
    return digest(*parts)


def _walk(root: Path, skipped_folders: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the regular files below `root`, sorted by their path's parts, without hidden ones."""
    with os.scandir(root) as entries:
        found = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in skipped_folders:
                yield from _walk(Path(entry.path), skipped_folders)
        elif entry.is_file():
            yield Path(entry.path)


def _is_text(path: Path) -> bool:
    with open(path, "rb") as stream:
        head = stream.read(HEAD_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(
            head, final=len(head) < HEAD_BYTES
        )  # else it may cut a character
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _check_first_record(path: Path) -> str | None:
    try:
        next(_read_jsonl(path), None)
    except ConfigError as error:
        return error.problems[0]
    return None


def _read_jsonl(path: Path) -> Iterator[str]:
    # newline=None turns the three line ends that JSON strings cannot hold into one and splits nowhere else
    with open(path, encoding="utf-8-sig", newline=None) as stream:
        for number, line in enumerate(_decoded(stream, path), 1):
            if line.strip(" \t\n"):
                yield _text_of_record(line, path, number)


def _text_of_record(line: str, path: Path, number: int) -> str:
    where = f"--data {path}, line {number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: this is not valid JSON ({error}); each line must be one JSON object.") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        found = f"an object with the keys {sorted(record)[:8]}" if isinstance(record, dict) else type(record).__name__
        raise ConfigError(f'{where}: found {found}; each line must be an object with a string under the key "text".')
    text: str = record["text"]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: the text holds half of a surrogate pair (\\u{ord(text[error.start]):04x}), which is no "
            "character; repair or remove the record."
        ) from error
    return text


def _decoded(stream: Iterator[str], path: Path) -> Iterator[str]:
    """Yield the lines; say where the file stops being UTF-8."""
    try:
        yield from stream
    except UnicodeDecodeError as error:
        raise ConfigError(_describe_bad_byte(path)) from error


def _describe_bad_byte(path: Path) -> str:
    """Find the first byte that is not UTF-8; the decoder reads ahead in blocks and cannot tell line or offset."""
    offset = 0
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):  # b"\n" is no part of any other UTF-8 character
            try:
                line.decode()
            except UnicodeDecodeError as error:
                at = offset + error.start
                return f"--data {path}, line {number}: byte {at} is not UTF-8 text; convert the file, or leave it out."
            offset += len(line)
    return f"--data {path}: the file changed while it was read."


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        newline = text.rfind("\n", start, start + PIECE_CHARACTERS)
        stop = newline + 1 if newline >= 0 else start + PIECE_CHARACTERS
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def _stream_pieces(stream: TextIO) -> Iterator[str]:
    try:
        while piece := stream.read(PIECE_CHARACTERS):
            yield piece + stream.readline(PIECE_CHARACTERS)
    except UnicodeDecodeError as error:
        raise ConfigError(_describe_bad_byte(Path(stream.name))) from error
