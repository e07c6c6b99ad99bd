"""Tokens as training samples: windows over a stream, and where its documents end inside them.

    stream     t0 t1 t2 t3 t4 t5 t6 t7 ...         seq_len 3
    sample 0   t0 t1 t2 t3                         inputs t0 t1 t2, labels t1 t2 t3
    sample 1            t3 t4 t5 t6                every token but the first is a label exactly once

Windows run over the borders of documents; a rest shorter than a window is left out, and nothing wraps around. What a sample says
of those borders, if asked:

    documents   0 0 0 1 1 2        attention stays where the number is the same
    positions   0 1 2 0 1 0        count from the document's start, or the window's in a document that began before it

Borders come from the documents' places, not from an end-of-text id, which text may hold anywhere.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallax.data.cache import digest
from parallax.data.stream import TokenStream
from parallax.errors import ConfigError

Range = tuple[int, int]  # first token, one past the last
Sample = np.ndarray | dict[str, np.ndarray]


@dataclass(frozen=True)
class Borders:
    """What samples say of the borders of documents inside them."""

    documents: bool = False
    positions: bool = False


PLAIN = Borders()


class TokenDataset:
    """Windows of seq_len + 1 tokens with stride seq_len over parts of a stream.

    Args:
        stream: the tokens.
        ranges: the parts of it whose concatenation is cut into windows.
        seq_len: labels per sample.
        borders: what samples say besides their tokens.

    `fingerprint` is made from the stream's, the ranges and seq_len.

    Raises:
        ConfigError: the ranges are shorter than one window.
    """

    def __init__(self, stream: TokenStream, ranges: Sequence[Range], seq_len: int, borders: Borders = PLAIN) -> None:
        self._stream = stream
        self._ranges = _merge(ranges)
        self._offsets = [0]  # where each range starts among the windows' tokens
        for start, stop in self._ranges:
            assert 0 <= start <= stop <= stream.num_tokens, f"range {start}:{stop} of {stream.num_tokens} tokens"
            self._offsets.append(self._offsets[-1] + stop - start)
        self.num_tokens = self._offsets.pop()
        self.seq_len = seq_len
        self.borders = borders
        if self.num_tokens < seq_len + 1:
            raise ConfigError(
                f"the data has {self.num_tokens:,} tokens, but a sample of --seq-len {seq_len} takes {seq_len + 1:,}; "
                "give more --data or a smaller --seq-len."
            )
        self.fingerprint = digest("dataset", stream.fingerprint, repr(self._ranges), str(seq_len))

    def __len__(self) -> int:
        return (self.num_tokens - 1) // self.seq_len

    def __getitem__(self, i: int) -> Sample:
        """Return sample i as int64 `[seq_len + 1]`; with borders, a dict with that as `window`, and those, `[seq_len]`."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        window = np.empty(self.seq_len + 1, dtype=np.int64)
        starts = [np.zeros(1, dtype=np.int64)]  # where documents start in the window
        position, filled = int(i) * self.seq_len, 0
        part = bisect.bisect_right(self._offsets, position) - 1
        while filled < len(window):
            start, stop = self._ranges[part]
            start += position + filled - self._offsets[part]
            length = min(stop - start, len(window) - filled)
            self._stream.read_into(window[filled : filled + length], start)
            if self.borders.documents or self.borders.positions:
                # What comes after a gap is another document, even where it is the rest of one.
                starts += [np.array([filled]), self._stream.document_starts(start, start + length) - start + filled]
            filled += length
            part += 1
        if not (self.borders.documents or self.borders.positions):
            return window
        return {"window": window} | self._say_borders(np.unique(np.concatenate(starts)))

    def _say_borders(self, starts: np.ndarray) -> dict[str, np.ndarray]:
        starts = starts[starts < self.seq_len]
        says: dict[str, np.ndarray] = {}
        steps = np.zeros(self.seq_len, dtype=np.int32)
        steps[starts[1:]] = 1
        documents = np.cumsum(steps, dtype=np.int32)
        if self.borders.documents:
            says["documents"] = documents
        if self.borders.positions:
            says["positions"] = np.arange(self.seq_len, dtype=np.int64) - starts[documents]
        return says


def _merge(ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges with those made one that touch."""
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((int(start), int(stop)))
    return merged
