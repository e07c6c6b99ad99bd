"""A storage that behaves as S3 does where it matters: objects appear when they are closed, whole, and cannot be renamed.

objects://name/of/a/file is a file below the folder of PARALLAX_TEST_OBJECTS, so several processes can share it.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem


class ObjectFile(io.BytesIO):
    def __init__(self, target: Path) -> None:
        super().__init__()
        self._target = target

    def close(self) -> None:
        if not self.closed:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._target.with_suffix(".uploading").write_bytes(self.getvalue())
            os.rename(self._target.with_suffix(".uploading"), self._target)
        super().close()

    def discard(self) -> None:
        super().close()


class Objects(AbstractFileSystem):
    """What fsspec needs of a file system. Folders are what is in names, as in object stores: an empty one is none."""

    protocol = "objects"
    cachable = False
    log: list[tuple[str, str]] = []  # noqa: RUF012

    @property
    def root(self) -> Path:
        return Path(os.environ["PARALLAX_TEST_OBJECTS"])

    def _at(self, path: str) -> Path:
        return self.root / self._strip_protocol(path).strip("/")

    def _entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.root).as_posix()
        if path.is_dir():
            return {"name": name, "size": 0, "type": "directory"}
        return {"name": name, "size": path.stat().st_size, "type": "file"}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        place = self._at(path)
        if not place.exists():
            raise FileNotFoundError(path)
        return self._entry(place)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list:
        place = self._at(path)
        if not place.exists():
            raise FileNotFoundError(path)
        found = [self._entry(one) for one in (sorted(place.iterdir()) if place.is_dir() else [place])]
        return found if detail else [entry["name"] for entry in found]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass  # as in object stores

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        self.log.append((mode, path))
        if mode == "wb":
            return ObjectFile(self._at(path))
        return self._at(path).open("rb", buffering=0)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.log.append((f"read {start} {end}", path))
        content = self._at(path).read_bytes()
        return content[start:end]

    def _rm(self, path: str) -> None:
        place = self._at(path)
        if place.is_file():
            place.unlink()
            for folder in place.parents:
                if folder == self.root or any(folder.iterdir()):
                    break
                folder.rmdir()

    def rm_file(self, path: str) -> None:
        self._rm(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        for name in self.find(path):
            self._rm(name)

    def mv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("objects cannot be renamed")

    rename = move = mv


fsspec.register_implementation("objects", Objects, clobber=True)
