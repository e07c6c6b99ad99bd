"""The manifest: what a checkpoint consists of, so that it can be proved whole before anything is loaded.

It is written last, so a folder without one is an unfinished save. It names every file with its size and checksum, and
every tensor with its type, shape and slices: which bytes of which file are which rows. Its own checksum is in it, and it
is only valid in the exact form in which it is written. Tensors are cut into slices along their first dim. Version 1 of the format,
which is still read, had one checksum for each file, version 2 has one for each block of it (parallax.checkpoint.blocks).
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from parallax.checkpoint.blocks import num_blocks
from parallax.checkpoint.names import MANIFEST
from parallax.checkpoint.safetensors_file import ITEM_BYTES, natural_numbers, parse_json
from parallax.errors import ConfigError
from parallax.storage import Location, num_bytes

FORMAT = "parallax-checkpoint"
VERSION, OLDER_VERSIONS = 2, (1,)
MAX_MANIFEST_BYTES = 1 << 30


@dataclass(frozen=True)
class FileRecord:
    """A file's size, and the checksums of its blocks. is_cut: in version 1 it was not, and there is one checksum for all of it."""

    bytes: int
    checksums: tuple[str, ...]
    is_cut: bool = True


@dataclass(frozen=True)
class Slice:
    """Rows [start[0], start[0] + extent[0]) of a tensor: the bytes of `file` from `offset`."""

    file: str
    offset: int
    start: tuple[int, ...]
    extent: tuple[int, ...]


@dataclass(frozen=True)
class TensorRecord:
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Manifest:
    """files by path inside the folder; tensors of the model by Hugging Face's name, of the optimizer by parameter."""

    step: int
    files: Mapping[str, FileRecord]
    model: Mapping[str, TensorRecord] = field(default_factory=dict)
    optimizer: Mapping[str, TensorRecord] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the file's content; `parse_manifest` gives the same manifest back."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "files": {
                name: {"bytes": record.bytes, "xxh128": list(record.checksums)} for name, record in self.files.items()
            },
            "tensors": {
                part: {name: _tensor_json(record) for name, record in records.items()}
                for part, records in (("model", self.model), ("optimizer", self.optimizer))
            },
        }
        return sealed(body)


def _tensor_json(record: TensorRecord) -> dict[str, Any]:
    slices = [
        {"file": one.file, "offset": one.offset, "start": list(one.start), "extent": list(one.extent)}
        for one in record.slices
    ]
    return {"dtype": record.dtype, "shape": list(record.shape), "slices": slices}


def sealed(body: dict[str, Any]) -> bytes:
    """Return a manifest's content from its fields: with their checksum, in the only form that is read."""
    return _dump(body | {"checksum": _digest(body)})


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(_dump(body)).hexdigest()


def read_manifest(folder: Location) -> Manifest:
    """Return the manifest of a checkpoint folder, checked in itself: form, checksum, paths, and that slices cover.

    Raises ConfigError, one sentence.
    """
    path = folder / MANIFEST
    try:
        is_file = not isinstance(path, Path) or stat.S_ISREG(
            path.lstat().st_mode
        )  # no link, and no pipe that never ends
        if not is_file or num_bytes(path) > MAX_MANIFEST_BYTES:
            raise ConfigError(f"{path} is no manifest of a checkpoint")
        text = path.read_bytes()
    except OSError as error:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no checkpoint: there is no such folder") from None
        raise ConfigError(f"{folder} is no complete checkpoint: {MANIFEST} cannot be read ({error.strerror})") from None
    try:
        return _parse(text)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is damaged: {reason}") from None


def _parse(text: bytes) -> Manifest:
    fields = parse_json(text)
    if fields["format"] != FORMAT:
        raise ValueError(f"it is of no format {FORMAT}")
    if type(fields["version"]) is not int or fields["version"] not in (VERSION, *OLDER_VERSIONS):
        raise ValueError(f"its format has version {fields['version']}, this program reads {VERSION}")
    body = {key: value for key, value in fields.items() if key != "checksum"}
    if fields["checksum"] != _digest(body) or text != _dump(fields):
        raise ValueError("its own checksum does not hold")
    (step,) = natural_numbers([fields["step"]])
    files = {}
    for name, record in fields["files"].items():
        check_path(name)
        files[name] = _file(name, record, fields["version"])
    parts = {
        part: {name: _tensor(name, record, files) for name, record in fields["tensors"][part].items()}
        for part in ("model", "optimizer")
    }
    return Manifest(step, files, parts["model"], parts["optimizer"])


def check_path(name: str) -> None:
    """Raise ValueError unless `name` is a plain relative path that stays inside the folder it is relative to."""
    parts = PurePosixPath(name).parts
    plain = "/".join(parts) == name and not name.startswith("/") and "\\" not in name and "\0" not in name
    if not parts or not plain or ".." in parts:
        raise ValueError(f"the path {name!r} leads out of the checkpoint")
    if not _is_text(name):
        raise ValueError(f"the path {name!r} is no valid text")


def _is_text(name: str) -> bool:
    """Whether a string can be written as UTF-8: JSON can hold halves of a surrogate pair."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _file(name: str, fields: dict[str, Any], version: int) -> FileRecord:
    (size,) = natural_numbers([fields["bytes"]])
    record = FileRecord(size, (fields["sha256"],), False) if version == 1 else FileRecord(size, tuple(fields["xxh128"]))
    expected = num_blocks(size) if record.is_cut else 1
    if not all(isinstance(one, str) for one in record.checksums) or len(record.checksums) != expected:
        raise ValueError(f"{name} has not a checksum for each of its blocks")
    return record


def _tensor(name: str, fields: dict[str, Any], files: Mapping[str, FileRecord]) -> TensorRecord:
    """Return one tensor's record after proving that its slices are every row once and lie inside their files."""
    if not _is_text(name):
        raise ValueError(f"the tensor's name {name!r} is no valid text")
    dtype, shape = fields["dtype"], natural_numbers(fields["shape"])
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name} has the unknown type {dtype!r}")
    slices = [
        Slice(one["file"], natural_numbers([one["offset"]])[0], *map(natural_numbers, (one["start"], one["extent"])))
        for one in fields["slices"]
    ]
    if len({one.file for one in slices}) < len(slices) or not all(one.file.endswith(".safetensors") for one in slices):
        raise ValueError(f"the slices of {name} are not each in a safetensors file of its own")
    slices.sort(key=lambda one: one.start)
    next_row = 0
    for one in slices:
        row = one.start[0] if shape else 0
        if len(one.start) != len(shape) or any(one.start[1:]) or one.extent[1:] != shape[1:] or row != next_row:
            raise ValueError(f"the slices of {name} do not cover it exactly once")
        if one.file not in files or one.offset + math.prod(one.extent) * ITEM_BYTES[dtype] > files[one.file].bytes:
            raise ValueError(f"a slice of {name} lies outside of the files")
        next_row = row + (one.extent[0] if shape else 1)
    if next_row != (shape[0] if shape else 1):
        raise ValueError(f"the slices of {name} do not cover it exactly once")
    return TensorRecord(dtype, shape, tuple(slices))
