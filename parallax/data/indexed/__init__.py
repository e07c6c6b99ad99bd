"""Megatron-LM's token files, PREFIX.bin and PREFIX.idx: reading and writing them."""

from __future__ import annotations

from parallax.data.indexed.dataset import IndexedDataset
from parallax.data.indexed.writer import IndexedWriter

__all__ = ["IndexedDataset", "IndexedWriter"]
