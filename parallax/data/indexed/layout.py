"""The bytes of an index file, which says how to read the token file beside it. All numbers are little-endian.

    PREFIX.bin   ids of all sequences, no header
    PREFIX.idx   magic "MMIDIDX\\0\\0"       9 bytes
                 version                   uint64, 1
                 type of an id             uint8, a code: see DTYPES
                 S, number of sequences    uint64
                 D + 1, for D documents    uint64
                 lengths                   int32 [S], in tokens
                 pointers                  int64 [S], where in PREFIX.bin a sequence begins, in bytes
                 document starts           int64 [D + 1], the first sequence of each document, and S

Text has one sequence a document. The arrays of 8-byte numbers begin at odd addresses (the header has 34 bytes), which numpy reads
all the same. The format is that of Megatron-LM's megatron/core/datasets/indexed_dataset.py, which writes more for images.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = np.dtype([("magic", "V9"), ("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}

# Where Megatron-LM changes from 2 bytes to 4; a few ids below what 2 bytes could hold.
TWO_BYTE_VOCABULARY = 65500


def index_dtype(vocab_size: int) -> np.dtype:
    """Return the type that Megatron-LM gives the ids of a vocabulary: uint16, or int32 from 65,500 ids on.

    For writing only. A reader believes the code in the file.
    """
    return np.dtype("<u2" if vocab_size < TWO_BYTE_VOCABULARY else "<i4")


def paths_of(prefix: str | Path) -> tuple[Path, Path]:
    """Return the token file and the index file of a prefix, which may also be given as either of them."""
    text = str(prefix)
    if text.endswith((".bin", ".idx")):
        text = text[:-4]
    return Path(text + ".bin"), Path(text + ".idx")


def index_bytes(num_sequences: int, num_documents: int) -> int:
    """Return the size of an index file."""
    return HEADER.itemsize + 12 * num_sequences + 8 * (num_documents + 1)
