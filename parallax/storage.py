"""Folders by their path, or by an address such as s3://bucket/run: where checkpoints and models are read and written.

A path is a pathlib.Path, with its links, its renaming and its speed. An address is a RemotePath, which has the few methods of a
Path that are needed, through fsspec: S3, Google Cloud Storage and more, each of which needs a package of its own. What is behind
an address appears whole when it is closed, has no other name before, and is read in ranges.
"""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from parallax.errors import ConfigError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LOCAL = re.compile(r"(file|local)://(?=/)")
# What may lie beside a model's weights: a tokenizer has some MiB.
_SMALL, _SMALL_BYTES = {".json", ".model", ".jinja", ".txt"}, 64 << 20


@dataclass(frozen=True)
class RemotePath:
    """A file or folder behind an address. All that goes wrong with it is an OSError, or ConfigError, with the address in it."""

    address: str
    path: str = field(repr=False)  # as fsspec's file system has it
    system: Any = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.address

    def __truediv__(self, name: str) -> RemotePath:
        return replace(self, address=f"{self.address.rstrip('/')}/{name}", path=f"{self.path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def parent(self) -> RemotePath:
        return replace(self, address=self.address.rpartition("/")[0], path=self.path.rpartition("/")[0])

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    def is_dir(self) -> bool:
        with self._said():
            return bool(self.system.isdir(self.path))

    def is_file(self) -> bool:
        with self._said():
            return bool(self.system.isfile(self.path))

    def exists(self) -> bool:
        with self._said():
            return bool(self.system.exists(self.path))

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield what is directly in this folder."""
        with self._said():
            found = [str(path).rstrip("/") for path in self.system.ls(self.path, detail=False)]
        own = self._own_path()  # which some storages list too
        return (self / PurePosixPath(path).name for path in sorted(found) if path != own)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files below this folder, by their paths in it; nothing if there is no such folder."""
        with self._said():
            found = self.system.find(self.path, detail=True)
        first = len(self._own_path()) + 1
        return {str(path)[first:]: int(entry["size"]) for path, entry in sorted(found.items())}

    def _own_path(self) -> str:
        return str(self.system._strip_protocol(self.path)).rstrip("/")

    def num_bytes(self) -> int:
        with self._said():
            return int(self.system.size(self.path))

    def read_range(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop)."""
        with self._said():
            return bytes(self.system.cat_file(self.path, start=start, end=stop)) if start < stop else b""

    def read_bytes(self) -> bytes:
        with self._said():
            return bytes(self.system.cat_file(self.path))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def create(self) -> RemoteFile:
        """Begin a file, which replaces one that is there when it is complete."""
        with self._said():
            self.system.makedirs(self.path.rpartition("/")[0], exist_ok=True)
            return RemoteFile(self, self.system.open(self.path, "wb"))

    def write_bytes(self, content: bytes) -> None:
        file = self.create()
        file.write(content)
        file.complete()

    def remove(self) -> None:
        """Remove a file, or a folder with all that is in it; nothing if there is none."""
        with self._said():
            if self.system.exists(self.path):
                self.system.rm(self.path, recursive=True)

    @contextmanager
    def _said(self) -> Iterator[None]:
        """Make an OSError, with a reason in words, of whatever the packages behind fsspec raise."""
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "there is no such file or folder", self.address) from error
        except OSError as error:
            raise type(error)(error.errno or errno.EIO, error.strerror or str(error), self.address) from error
        except Exception as error:  # such as missing credentials, of a class of each package's own
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.address) from error


class RemoteFile:
    """A file that is being written; it is there when it is `complete`."""

    def __init__(self, path: RemotePath, file: Any) -> None:
        self._path, self._file = path, file

    def write(self, data: bytes | memoryview) -> int:
        with self._path._said():
            self._file.write(data)
        return len(data)

    def complete(self) -> None:
        """Return when the storage has all of it."""
        with self._path._said():
            self._file.close()

    def abandon(self) -> None:
        """Leave an incomplete file; after `complete` nothing is done. What goes wrong is not told: something did before."""
        with suppress(OSError), self._path._said():
            if not self._file.closed:
                getattr(self._file, "discard", self._file.close)()
                if not self._file.closed:
                    self._file.closed = True  # or fsspec would write it when it is forgotten


Location: TypeAlias = Path | RemotePath


def is_address(given: str | Location) -> bool:
    """Whether this is an address, and not a path; file:///home/me is the path /home/me."""
    text = str(given)
    return isinstance(given, RemotePath) or (_ADDRESS.match(text) is not None and _LOCAL.match(text) is None)


def location(given: str | Location) -> Location:
    """Return the folder or file that a path or an address names.

    Raises ConfigError when there is no such kind of storage, or a package is missing that knows it.
    """
    if isinstance(given, RemotePath):
        return given
    text = str(given)
    if isinstance(given, Path) or not is_address(text):
        return Path(_LOCAL.sub("", text)).expanduser()
    if text.partition("://")[0] in ("file", "local"):
        raise ConfigError(f"{text} names another machine; a folder of this one is file:///folder, or its path")
    try:
        from fsspec.core import url_to_fs

        # Other ranks write too, so what was listed before may not be what is there.
        system, path = url_to_fs(text, use_listings_cache=False)
    except ImportError as error:
        raise ConfigError(
            f"{text} needs a package that is not installed ({error}); pip install -e '.[remote]' brings those for s3:// and gs://"
        ) from None
    except Exception as error:
        raise ConfigError(f"{text} cannot be opened: {error}") from None
    kind, separator, rest = text.partition("://")
    return RemotePath(kind + separator + rest.rstrip("/"), path.rstrip("/"), system)


def write_whole(path: Path, text: str) -> None:
    """Write a file, or leave none; raises OSError that names it."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if path.is_file():
            path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def num_bytes(path: Location) -> int:
    """Return the size of a file; raises OSError."""
    return path.num_bytes() if isinstance(path, RemotePath) else path.stat().st_size


def names_below(folder: Location) -> list[str]:
    """Return the paths in a folder of all that is below it, in order; of addresses, of files alone."""
    if isinstance(folder, RemotePath):
        return list(folder.sizes())
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def local_copy(given: str) -> Path:
    """Return the folder or file itself, or of what is behind an address a copy, which lasts as long as this process.

    A file's neighbours are copied too; weights are not. Raises OSError when they cannot be read, ConfigError as `location` does.
    """
    place = location(given)
    if isinstance(place, Path):
        return place
    return Path(_fetched(place.parent).name) / place.name if place.is_file() else Path(_fetched(place).name)


@cache
def _fetched(folder: RemotePath) -> tempfile.TemporaryDirectory[str]:
    copy = tempfile.TemporaryDirectory(prefix="parallax-")
    for name, size in folder.sizes().items():
        if "/" not in name and size <= _SMALL_BYTES and PurePosixPath(name).suffix in _SMALL:
            (Path(copy.name) / name).write_bytes((folder / name).read_bytes())
    return copy
