"""Read token files in Megatron-LM's format through memory maps; layout.py says what lies where."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import SupportsIndex

import numpy as np

from parallax.data.indexed.layout import DTYPES, FLOATS, HEADER, MAGIC, VERSION, index_bytes, paths_of
from parallax.errors import ConfigError


class IndexedDataset:
    """The sequences of PREFIX.bin, as PREFIX.idx describes them; the type of the ids is what the index says.

    `len` counts sequences, `dataset[i]` is one. Opening reads the index's header alone, however many sequences there are.

    Attributes:
        dtype: of the ids.
        lengths: int32 `[sequences]`, in tokens.
        pointers: int64 `[sequences]`, the byte in PREFIX.bin where each sequence begins.
        document_indices: int64 `[documents + 1]`, the first sequence of each document, and the number of sequences.

    Raises:
        ConfigError: a file is missing, unreadable, no such file, damaged, or holds other than whole numbers.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.bin_path, self.idx_path = paths_of(prefix)
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise ConfigError(f"{path}: there is no such file; PREFIX.bin and PREFIX.idx belong together.")
        try:
            self._open_index()
            num_bytes = self.bin_path.stat().st_size
            # An empty file cannot be mapped.
            self._bytes = np.memmap(self.bin_path, np.uint8, "r") if num_bytes else np.empty(0, np.uint8)
        except OSError as error:
            raise ConfigError(f"{error.filename or prefix}: it cannot be read ({error.strerror}).") from error
        if len(self):
            end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
            if end > num_bytes:
                raise ConfigError(
                    f"{self.bin_path} has {num_bytes:,} bytes, but {self.idx_path.name} describes {end:,}; it is cut short, "
                    "or the two files are of different builds."
                )

    def _open_index(self) -> None:
        path = self.idx_path
        with open(path, "rb") as stream:
            content = stream.read(HEADER.itemsize)
        if content[: len(MAGIC)] != MAGIC or len(content) < HEADER.itemsize:
            raise ConfigError(f"{path} is no index of a token file: it does not begin as one.")
        header = np.frombuffer(content, HEADER)[0]
        code, version = int(header["code"]), int(header["version"])
        if version != VERSION:
            raise ConfigError(f"{path} is of version {version} of the format; version {VERSION} can be read.")
        if code not in DTYPES:
            what = f"{FLOATS[code]} numbers" if code in FLOATS else f"numbers of an unknown type (code {code})"
            raise ConfigError(f"{path} describes {what}; token ids are whole numbers.")
        self.dtype = np.dtype(DTYPES[code])
        sequences, entries = int(header["sequences"]), int(header["documents"])
        expected, actual = index_bytes(sequences, entries - 1), path.stat().st_size
        if entries < 1 or actual != expected:
            more = " (data with a mode for each sequence, as of images, is not text)" * (actual == expected + sequences)
            raise ConfigError(
                f"{path} has {actual:,} bytes, but its header speaks of {expected:,}{more}; it is damaged or cut short."
            )
        index = np.memmap(path, np.uint8, "r")
        lengths_end = HEADER.itemsize + 4 * sequences
        pointers_end = lengths_end + 8 * sequences
        # Plain arrays over the map: they keep it open as long as one of them is in use.
        self.lengths = np.frombuffer(index, "<i4", sequences, HEADER.itemsize)
        self.pointers = np.frombuffer(index, "<i8", sequences, lengths_end)
        self.document_indices = np.frombuffer(index, "<i8", entries, pointers_end)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    def __getitem__(self, i: SupportsIndex) -> np.ndarray:
        """Return sequence i, of the file's own type: a copy, which nothing that happens to the data set or its files changes."""
        return self.get(i)

    def get(self, i: SupportsIndex, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` tokens of sequence i from `offset` on, by default all that follow.

        Raises:
            IndexError: there is no such sequence, or it does not have these tokens.
            ConfigError: the index points outside of the token file.
        """
        number = operator.index(i)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"sequence {operator.index(i)} of {len(self)}")
        # Python integers: no width to overflow
        pointer, size = int(self.pointers[number]), int(self.lengths[number])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"tokens {offset} to {offset + length} of sequence {number}, which has {size}")
        start = pointer + offset * self.dtype.itemsize
        stop = start + length * self.dtype.itemsize
        if pointer < 0 or stop > len(self._bytes):
            raise ConfigError(f"{self.idx_path} is damaged: sequence {number} lies outside of {self.bin_path.name}.")
        return np.array(self._bytes[start:stop]).view(self.dtype)

    @property
    def tokens(self) -> np.ndarray:
        """All ids of PREFIX.bin, mapped; the rest of a byte count that is no multiple of an id's size is left out."""
        count = len(self._bytes) // self.dtype.itemsize
        return np.frombuffer(self._bytes, self.dtype, count)
