"""Read boxes of full tensors out of safetensors files, a few MiB at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from parallax.checkpoint.files import file_inside
from parallax.checkpoint.geometry import Box
from parallax.checkpoint.manifest import TensorRecord
from parallax.checkpoint.parts import DTYPES
from parallax.checkpoint.safetensors_file import ITEM_BYTES

PAGE_BYTES = 4096  # what a disk and the page cache read at least


class TensorReader:
    """The tensors of `records`, out of files in `folder`; a context manager, which keeps the files open.

    find: returns the path of a file of the folder, by its name, or raises ConfigError.
    """

    def __init__(
        self, folder: Path, records: Mapping[str, TensorRecord], find: Callable[[Path, str], Path] = file_inside
    ) -> None:
        self.folder, self.records, self._find = folder, records, find
        self._opened: dict[str, int] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._opened.values():
            os.close(descriptor)
        self._opened.clear()

    def read(self, name: str, box: Box, full_columns: int) -> torch.Tensor:
        """Return a box `[rows, columns]` of a tensor seen as a matrix of `full_columns`, in its stored type, on the CPU."""
        rows, columns = box.shape
        first = box.row * full_columns + box.column
        item_bytes = ITEM_BYTES[self.records[name].dtype]
        if rows == 1 or columns == full_columns:
            return self._flat(name, first, rows * columns).view(rows, columns)
        if columns * item_bytes >= PAGE_BYTES:
            return torch.stack([self._flat(name, first + row * full_columns, columns) for row in range(rows)])
        start = box.row * full_columns
        return self._flat(name, start, rows * full_columns).view(rows, full_columns)[:, box.column : box.stop_column]

    def read_whole(self, name: str) -> torch.Tensor:
        """Return a full tensor, in its stored type and shape, on the CPU."""
        shape = self.records[name].shape
        return self._flat(name, 0, math.prod(shape)).view(shape)

    def _flat(self, name: str, start: int, count: int) -> torch.Tensor:
        """Return elements [start, start + count) of a tensor in row-major order, collected from its slices."""
        record = self.records[name]
        item_bytes = ITEM_BYTES[record.dtype]
        inner = math.prod(record.shape[1:])
        data = torch.empty(count * item_bytes, dtype=torch.uint8)
        for one in record.slices:
            slice_start = one.start[0] * inner if one.start else 0
            first, stop = max(start, slice_start), min(start + count, slice_start + math.prod(one.extent))
            if first < stop:
                there = one.offset + (first - slice_start) * item_bytes
                here = data.numpy().data[(first - start) * item_bytes : (stop - start) * item_bytes]
                self._read_into(here, one.file, there)
        return data.view(DTYPES[record.dtype])

    def _read_into(self, target: memoryview, file: str, offset: int) -> None:
        if file not in self._opened:
            self._opened[file] = os.open(self._find(self.folder, file), os.O_RDONLY)
        while len(target):
            count = os.preadv(self._opened[file], [target], offset)
            if count == 0:
                raise OSError(f"{self.folder / file} ends before its tensors do")
            target, offset = target[count:], offset + count
