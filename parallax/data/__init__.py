"""Text in, batches out: tokenizers, corpora, the token cache, and the deterministic order of samples.

    files -> documents -> token ids on disk -> windows of seq_len + 1 -> blends -> a shuffled order -> micro-batches

Position i of the data order is a pure function of (seed, data, i), so no layout, no number of steps and no restart
changes what a step sees. Everything except the batch loader works without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallax.data.blend import BlendedDataset
    from parallax.data.dataset import TokenDataset
    from parallax.data.indexed import IndexedDataset, IndexedWriter
    from parallax.data.loader import BatchLoader
    from parallax.data.options import DataOptions
    from parallax.data.order import DataOrder, sample_index
    from parallax.data.prepare import PreparedData, prepare_data
    from parallax.data.tokenizers import Tokenizer, load_tokenizer

_HOMES = {
    "BatchLoader": "loader",
    "BlendedDataset": "blend",
    "DataOptions": "options",
    "DataOrder": "order",
    "IndexedDataset": "indexed",
    "IndexedWriter": "indexed",
    "PreparedData": "prepare",
    "TokenDataset": "dataset",
    "Tokenizer": "tokenizers",
    "load_tokenizer": "tokenizers",
    "prepare_data": "prepare",
    "sample_index": "order",
}

__all__ = [
    "BatchLoader",
    "BlendedDataset",
    "DataOptions",
    "DataOrder",
    "IndexedDataset",
    "IndexedWriter",
    "PreparedData",
    "TokenDataset",
    "Tokenizer",
    "load_tokenizer",
    "prepare_data",
    "sample_index",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
