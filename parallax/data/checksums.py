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
from typing import Any, NamedTuple

from parallax.data.cache import build_once, cache_folder, digest
from parallax.errors import ConfigError

LARGE_BYTES = 1 << 28  # hashed in about half a second
TRUSTED_AFTER_SECONDS = 5
PART_BYTES = 1 << 24
MAX_THREADS = 16


class DataFile(NamedTuple):
    """A file as the data's fingerprint knows it: by a name that does not depend on where it lies, and by its content."""

    name: str
    size: int
    checksum: str


def hash_file(path: Path, name: str, look: Callable[[bytes], Any] | None = None) -> tuple[DataFile, list[Any]]:
    """Return the record of a file, from its content, and what `look` says of each of its parts of `PART_BYTES`.

    The checksum is a hash of the hashes of the parts, which several threads make: as fast as a disk reads.

    Raises:
        ConfigError: it cannot be read.
    """

    def hash_part(start: int) -> tuple[bytes, Any]:
        content = os.pread(stream.fileno(), PART_BYTES, start)
        return hashlib.blake2b(content, digest_size=16).digest(), look(content) if look else None

    try:
        with open(path, "rb") as stream, ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
            size = os.fstat(stream.fileno()).st_size
            found = list(threads.map(hash_part, range(0, size, PART_BYTES)))
    except OSError as error:
        raise ConfigError(f"--data {path}: it cannot be read ({error.strerror}).") from error
    return DataFile(name, size, digest(*(part for part, _ in found))), [seen for _, seen in found]


def file_records(paths: Sequence[Path], names: Sequence[str], what: str) -> list[DataFile]:
    """Return the records of files; those of large ones come from the cache as long as `stat` says the same of them."""

    def compute() -> list[DataFile]:
        return [hash_file(path, name)[0] for path, name in zip(paths, names, strict=True)]

    found = cached_by_stat(paths, "checksums", what, compute)
    # The names are not what the cache is asked by: a copy under another name has the same content.
    return [DataFile(name, int(size), str(checksum)) for name, (_, size, checksum) in zip(names, found, strict=True)]


def cached_by_stat(paths: Sequence[Path], kind: str, what: str, compute: Callable[[], list[Any]]) -> list[Any]:
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
    answer: list[Any] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    return answer


def fingerprint_of(records: Sequence[DataFile]) -> str:
    """Return a hash of the names, sizes and contents of files, in their order."""
    parts: list[str] = []
    for name, size, checksum in records:
        parts += [name.encode("utf-8", "surrogateescape").hex(), str(size), checksum]
    return digest(*parts)


_MOST_NAMED = 3  # of files that differ in the same way


def changed_files(before: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> list[str]:
    """Return, each as a clause, in which files two lists of records differ."""

    def by_name(records: Sequence[Sequence[Any]]) -> dict[str, list[tuple[Any, ...]]]:
        result: dict[str, list[tuple[Any, ...]]] = {}
        for name, *content in records:
            result.setdefault(name, []).append(tuple(content))
        return result

    old, new = by_name(before), by_name(now)
    return [
        *_told([name for name in old if name not in new], "is no longer among them", "are no longer among them"),
        *_told([name for name in new if name not in old], "is new", "are new"),
        *_told([name for name in old if name in new and old[name] != new[name]], "has changed", "have changed"),
    ]


def _told(names: Sequence[str], one: str, many: str) -> list[str]:
    if len(names) > _MOST_NAMED:
        return [f"{len(names):,} data files {many}, such as {names[0]}"]
    return [f"the data file {name} {one}" for name in names]
