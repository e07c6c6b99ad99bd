"""Checksums of data files, which make the data's fingerprint and tell later which file is no longer the same.

Reading all of a large corpus in every rank at every start would take long, so the answer is kept in the cache under what `stat`
says of the files. A file changed within the last seconds is not trusted to show every change there.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from parallax.data.cache import build_once, cache_folder, digest
from parallax.errors import ConfigError

LARGE_BYTES = 1 << 28  # hashed in about half a second
TRUSTED_AFTER_SECONDS = 5
READ_BYTES = 1 << 22
MAX_THREADS = 8


class DataFile(NamedTuple):
    """A file as the data's fingerprint knows it: by a name that does not depend on where it lies, and by its content."""

    name: str
    size: int
    checksum: str


def hash_file(path: Path, name: str) -> DataFile:
    """Return the record of a file, from its content.

    Raises:
        ConfigError: it cannot be read.
    """
    state, size = hashlib.blake2b(digest_size=16), 0
    try:
        with open(path, "rb") as stream:
            while block := stream.read(READ_BYTES):
                state.update(block)  # lets other threads run
                size += len(block)
    except OSError as error:
        raise ConfigError(f"--data {path}: it cannot be read ({error.strerror}).") from error
    return DataFile(name, size, state.hexdigest())


def file_records(paths: Sequence[Path], names: Sequence[str], what: str) -> list[DataFile]:
    """Return the records of files; those of large ones come from the cache as long as `stat` says the same of them."""

    def compute() -> list[DataFile]:
        with ThreadPoolExecutor(MAX_THREADS) as threads:
            return list(threads.map(hash_file, paths, names))

    found = cached_by_stat(paths, "checksums", what, compute)
    # The names are not what the cache is asked by: a copy under another name has the same content.
    return [DataFile(name, int(size), str(checksum)) for name, (_, size, checksum) in zip(names, found, strict=True)]


def cached_by_stat(paths: Sequence[Path], kind: str, what: str, compute: Callable[[], list]) -> list:
    """Return what `compute` finds out from the files' contents, a list that JSON can hold.

    If the files are large, the answer is kept in the cache under `kind` and what `stat` says of them.
    """
    states = []
    for path in paths:
        try:
            states.append(os.stat(path))
        except OSError as error:
            raise ConfigError(f"--data {path}: it cannot be read ({error.strerror}).") from error
    just_changed = max((s.st_ctime_ns for s in states), default=0) / 1e9 > time.time() - TRUSTED_AFTER_SECONDS
    if just_changed or sum(s.st_size for s in states) < LARGE_BYTES:
        return compute()
    stamps = [f"{s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}" for s in states]
    key = digest(*(f"{path.resolve()} {stamp}" for path, stamp in zip(paths, stamps, strict=True)))

    def build(folder: Path) -> None:
        (folder / "answer.json").write_text(json.dumps(compute()), encoding="utf-8")

    folder = build_once(cache_folder() / f"{kind}-{key}", build, what)
    return json.loads((folder / "answer.json").read_text(encoding="utf-8"))


def fingerprint_of(records: Sequence[DataFile]) -> str:
    """Return a hash of the names, sizes and contents of files, in their order."""
    parts: list[str] = []
    for name, size, checksum in records:
        parts += [name.encode("utf-8", "surrogateescape").hex(), str(size), checksum]
    return digest(*parts)


def changed_files(before: Sequence[Sequence], now: Sequence[Sequence]) -> list[str]:
    """Return, each as a clause, in which files two lists of records differ."""

    def by_name(records: Sequence[Sequence]) -> dict[str, list[tuple]]:
        result: dict[str, list[tuple]] = {}
        for name, *content in records:
            result.setdefault(name, []).append(tuple(content))
        return result

    old, new = by_name(before), by_name(now)
    clauses = [f"the data file {name} is no longer among them" for name in old if name not in new]
    clauses += [f"the data file {name} is new" for name in new if name not in old]
    clauses += [f"the data file {name} has changed" for name in old if name in new and old[name] != new[name]]
    return clauses
