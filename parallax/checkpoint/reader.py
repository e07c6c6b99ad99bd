"""Read boxes of full tensors out of safetensors files, a few MiB at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from parallax.checkpoint import blocks
from parallax.checkpoint.files import THREADS, FileReader, file_inside
from parallax.checkpoint.geometry import Box
from parallax.checkpoint.manifest import FileRecord, TensorRecord
from parallax.checkpoint.parts import DTYPES
from parallax.checkpoint.safetensors_file import ITEM_BYTES
from parallax.storage import Location

READ_BYTES = 32 << 20  # at once
PAGE_BYTES = 4096  # what a disk and the page cache read at least


class TensorReader:
    """The tensors of `records`, out of files in `folder`; a context manager, which keeps the files open.

    files: the checksums of the files' blocks; each block that is read is proved. None: there are no checksums.
    find: returns the path of a file of the folder, by its name, or raises ConfigError.
    """

    def __init__(
        self,
        folder: Location,
        records: Mapping[str, TensorRecord],
        files: Mapping[str, FileRecord] | None = None,
        find: Callable[[Location, str], Location] = file_inside,
    ) -> None:
        self.folder, self.records, self._files, self._find = folder, records, files or {}, find
        self._opened: dict[str, FileReader] = {}
        self._threads = ThreadPoolExecutor(THREADS, "read")

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        for file in self._opened.values():
            file.__exit__()
        self._opened.clear()

    def read(self, name: str, box: Box, full_columns: int) -> torch.Tensor:
        """Return a box `[rows, columns]` of a tensor seen as a matrix of `full_columns`, in its stored type, on the CPU."""
        result = torch.empty(box.shape, dtype=DTYPES[self.records[name].dtype])
        self.read_into(result, name, box, full_columns)
        return result

    def read_whole(self, name: str) -> torch.Tensor:
        """Return a full tensor, in its stored type and shape, on the CPU."""
        shape = self.records[name].shape
        size = math.prod(shape)
        return self.read(name, Box(0, 1, 0, size), size).view(shape)

    def read_into(self, target: torch.Tensor, name: str, box: Box, full_columns: int) -> None:
        """Copy a box of a tensor seen as a matrix of `full_columns` into `target` `[rows, columns]`, of any type and device.

        Raises ConfigError when a block of a file is not what was saved.
        """
        rows, columns = box.shape
        dtype = DTYPES[self.records[name].dtype]
        if rows == 1 or columns == full_columns:
            in_place = target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()
            data = target if in_place else torch.empty(box.shape, dtype=dtype)
            self._read_flat(data, name, box.row * full_columns + box.column)
            if not in_place:
                target.copy_(data)
            return
        # Rows so long that what lies between the parts of them need not be read, or some rows with all that lies between.
        row_bytes, at_least = full_columns * dtype.itemsize, blocks.BLOCK_BYTES if self._files else PAGE_BYTES
        step = 1 if row_bytes > at_least else max(1, READ_BYTES // row_bytes)
        for row in range(0, rows, step):
            stop = min(row + step, rows)
            if step == 1:
                self.read_into(target[row:stop], name, _rows(box, row, stop), full_columns)
                continue
            data = torch.empty(stop - row, full_columns, dtype=dtype)
            self._read_flat(data, name, (box.row + row) * full_columns)
            target[row:stop].copy_(data[:, box.column : box.stop_column])

    def _read_flat(self, target: torch.Tensor, name: str, start: int) -> None:
        """Fill `target`, contiguous, with the elements of a tensor from `start` on in row-major order, from its slices."""
        record = self.records[name]
        item_bytes, count = ITEM_BYTES[record.dtype], target.numel()
        inner = math.prod(record.shape[1:])
        data = target.view(-1).view(torch.uint8).numpy().data
        for one in record.slices:
            slice_start = one.start[0] * inner if one.start else 0
            first, stop = max(start, slice_start), min(start + count, slice_start + math.prod(one.extent))
            if first < stop:
                there = one.offset + (first - slice_start) * item_bytes
                here = data[(first - start) * item_bytes : (stop - start) * item_bytes]
                self._file(one.file).read_into(here, there)

    def _file(self, name: str) -> FileReader:
        if name not in self._opened:
            path = self._find(self.folder, name)
            self._opened[name] = FileReader(path, self._files.get(name), self._threads)
        return self._opened[name]


def _rows(box: Box, start: int, stop: int) -> Box:
    return Box(box.row + start, box.row + stop, box.column, box.stop_column)
