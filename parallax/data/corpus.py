"""Where documents come from: the user's files and folders, or the source text of Python's standard library.

A .jsonl file holds one document a line, a .parquet file one a row, under the key "text"; any other file is one document. Each may
be packed: .gz, .zst. How they are read is in parallax/data/encoding.

The order of documents is the order of the arguments and, inside a folder, of the names by code point, so it is the same
on every machine. In folders, hidden files and links to folders are left out, and files that are not text are counted
and left out; a file that was named itself must be text.
"""

from __future__ import annotations

import codecs
import itertools
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallax.data.checksums import DataFile, file_records
from parallax.data.encoding.blocks import cannot_read_table, line_blocks
from parallax.data.encoding.lines import BadRecord, text_of_line
from parallax.data.encoding.sources import MAGIC, Format, check_packing, format_of, open_bytes
from parallax.errors import ConfigError
from parallax.storage import is_address

HEAD_BYTES = 8192  # enough to tell text from binary, as git does
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
class Reading:
    """How the user wants files read, and the flag that names them, with a space, as the messages begin.

    key: of the text in a record. format: of the files; None goes by their names. skip_bad: a line that is broken is no error.
    """

    flag: str = "--data "
    key: str = "text"
    format: Format | None = None
    skip_bad: bool = False


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


def user_corpus(paths: Sequence[str], rules: Reading = Reading()) -> Corpus:
    """Return the files that the user names.

    Raises:
        ConfigError: a path is missing, unreadable or not text, a folder holds no text, a file is reached twice.
    """
    problems = [problem for path in paths for problem in check_data_path(path, rules)]
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
            raise ConfigError(f"{rules.flag}{file.path} is reached more than once; name each file or folder once.")
        reached.add(real)
    return Corpus(tuple(files), num_skipped, " ".join(paths))


def check_data_path(given: str, rules: Reading = Reading()) -> list[str]:
    """Say what is wrong with a path, looking only at the first bytes of its files."""
    path, flag = Path(given), rules.flag
    if is_address(given):
        return [behind_address(f"{flag}{given}")]
    try:
        if path.is_dir():
            text = (file for file in _walk(path) if _is_text(file))
            files = list(itertools.islice(text, CHECKED_FILES_PER_FOLDER))
            if not files:
                return [f"{flag}{given}: the folder holds no text file; give a folder of UTF-8 .txt or .jsonl files."]
        elif not path.exists():
            return [f"{flag}{given}: there is no such file or folder."]
        elif not path.is_file():
            return [f"{flag}{given}: this is neither a file nor a folder."]
        elif problem := check_packing(path):
            return [f"{flag}{given}: {problem}."]
        elif (rules.format or format_of(path)) == "text" and not _is_text(path):
            return [f"{flag}{given}: the file is not UTF-8 text; convert it, or leave it out."]
        else:
            files = [path]
        return [f"{flag}{problem}" for file in files if (problem := _check_first_record(file, rules))]
    except OSError as error:
        return [f"{flag}{error.filename or given}: it cannot be read ({error.strerror})."]
    except ConfigError as error:
        return [f"{flag}{problem}" for problem in error.problems]


def behind_address(given: str) -> str:
    """Say why data are not read from an address."""
    return f"{given}: data are read from a disk, which maps them into memory; copy them there, and give the path."


def corpus_files(corpus: Corpus) -> list[DataFile]:
    """Return names, sizes and checksums of the files."""
    what = f"the checksums of {corpus.description}"
    return file_records([file.path for file in corpus.files], [file.name for file in corpus.files], what)


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
    if path.suffix.lower() == ".parquet":
        with open(path, "rb") as stream:
            return stream.read(4) == MAGIC[".parquet"]
    if path.suffix.lower() in MAGIC and check_packing(path):
        return False
    with open_bytes(path) as (stream, _):
        head = stream.read(HEAD_BYTES)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(head, final=len(head) < HEAD_BYTES)  # else it may cut a character
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _check_first_record(path: Path, rules: Reading) -> str | None:
    kind = rules.format or format_of(path)
    if kind == "parquet":
        return cannot_read_table(path, rules.key)
    if kind == "text" or rules.skip_bad:
        return None
    with open_bytes(path) as (stream, _):
        for first, content in line_blocks(stream):
            for number, line in enumerate(content.splitlines(), first):
                if line.strip(b" \t"):
                    try:
                        text_of_line(line, rules.key)
                    except BadRecord as error:
                        return f"{path}, line {number}: {error}"
                    return None
    return None
