"""Streams of made-up tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parallax.data.stream import TokenStream
from parallax.data.token_store import TokenStore


def store_of(tokens: np.ndarray, document_starts: Sequence[int] = (0,), fingerprint: str = "made up") -> TokenStore:
    return TokenStore(tokens, np.array([*document_starts, len(tokens)], dtype=np.int64), fingerprint)


def stream_of(num_tokens: int, document_starts: Sequence[int] = (0,)) -> TokenStream:
    """Return the stream 0, 1, 2, ..."""
    return TokenStream([store_of(np.arange(num_tokens, dtype=np.uint32), document_starts)])
