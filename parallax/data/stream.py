"""One or more token stores, end to end: positions in a stream of tokens, and where its documents start.

Nothing is copied, and no list of documents is made in memory: both lie in mapped files.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

from parallax.data.cache import digest
from parallax.data.checksums import DataFile
from parallax.data.token_store import TokenStore


class TokenStream:
    """The tokens of stores, one store after the other.

    Positions are Python integers: no width to overflow.
    """

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        assert stores
        self._stores = stores
        self._starts = [0, *itertools.accumulate(len(store.tokens) for store in stores)]
        self._documents = [0, *itertools.accumulate(store.num_documents for store in stores)]
        self.num_tokens = self._starts.pop()
        self.num_documents = self._documents.pop()
        self.fingerprint = (
            stores[0].fingerprint if len(stores) == 1 else digest("stream", *(store.fingerprint for store in stores))
        )
        self.files: tuple[DataFile, ...] = tuple(file for store in stores for file in store.files)

    def read_into(self, out: np.ndarray, first: int) -> None:
        """Fill `out` with the tokens from position `first` on."""
        filled, part = 0, self._part(first)
        while filled < len(out):
            start = first + filled - self._starts[part]
            piece = self._stores[part].tokens[start : start + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            part += 1

    def document_starts(self, first: int, stop: int) -> np.ndarray:
        """Return the positions from `first` to before `stop` where a document starts, int64, ascending."""
        found = []
        for part in range(self._part(first), len(self._stores)):
            base = self._starts[part]
            if base >= stop:
                break
            starts = self._stores[part].document_starts[:-1]
            low, high = np.searchsorted(starts, [first - base, stop - base])
            found.append(starts[low:high] + base)
        return np.unique(np.concatenate(found))  # an empty document starts where the next does

    def document_before(self, position: int) -> int:
        """Return where the document starts that the token at `position` belongs to."""
        part = self._part(position)
        starts = self._stores[part].document_starts
        position -= self._starts[part]
        return int(starts[np.searchsorted(starts, position, side="right") - 1]) + self._starts[part]

    def start_of_document(self, number: int) -> int:
        """Return where a document starts, counted from 0; the number of documents gives the end of the stream."""
        if number == self.num_documents:
            return self.num_tokens
        part = bisect.bisect_right(self._documents, number) - 1
        return int(self._stores[part].document_starts[number - self._documents[part]]) + self._starts[part]

    def _part(self, position: int) -> int:
        return bisect.bisect_right(self._starts, position) - 1
