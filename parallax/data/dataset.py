"""Tokens as training samples: windows over a stream, and the split into a training and a held-out stream.

    stream     t0 t1 t2 t3 t4 t5 t6 t7 ...         seq_len 3
    sample 0   t0 t1 t2 t3                         inputs t0 t1 t2, labels t1 t2 t3
    sample 1            t3 t4 t5 t6                every token but the first is a label exactly once

A stream is the concatenation of ranges of the token file; nothing is copied to make one. Windows run over the borders
of documents, which eos marks; a rest shorter than a window is left out, and nothing wraps around.

The held-out part is taken in up to 16 stretches spread evenly over the corpus, so that it looks like all of it, each
starting where a document starts if one starts closely before. Every token is in exactly one of the two streams.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from parallax.data.cache import digest
from parallax.data.token_store import TokenStore
from parallax.errors import ConfigError

NUM_STRETCHES = 16

Range = tuple[int, int]  # first token, one past the last


class TokenDataset:
    """Windows of seq_len + 1 tokens with stride seq_len over a stream.

    Args:
        tokens: `[num_tokens]` unsigned ids, usually mapped from a file.
        ranges: the parts of `tokens` whose concatenation is the stream.
        seq_len: labels per sample.
        source: fingerprint of `tokens`; with ranges and seq_len it makes `fingerprint`.

    Raises:
        ConfigError: the stream is shorter than one window.
    """

    def __init__(self, tokens: np.ndarray, ranges: Sequence[Range], seq_len: int, source: str) -> None:
        self._tokens = tokens
        self._ranges = [(int(start), int(stop)) for start, stop in ranges]
        self._stream_starts = [0]  # where in the stream each range starts
        for start, stop in self._ranges:
            assert 0 <= start <= stop <= len(tokens), f"range {start}:{stop} of {len(tokens)} tokens"
            self._stream_starts.append(self._stream_starts[-1] + stop - start)
        self.num_tokens = self._stream_starts.pop()
        self.seq_len = seq_len
        if self.num_tokens < seq_len + 1:
            raise ConfigError(
                f"the data has {self.num_tokens:,} tokens, but a sample of --seq-len {seq_len} takes {seq_len + 1:,}; "
                "give more --data or a smaller --seq-len."
            )
        self.fingerprint = digest("dataset", source, repr(self._ranges), str(seq_len))

    def __len__(self) -> int:
        return (self.num_tokens - 1) // self.seq_len

    def __getitem__(self, i: int) -> np.ndarray:
        """Return sample i as int64 `[seq_len + 1]`."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        window = np.empty(self.seq_len + 1, dtype=np.int64)
        position = int(i) * self.seq_len  # a Python integer: no width to overflow
        filled = 0
        part = bisect.bisect_right(self._stream_starts, position) - 1
        while filled < len(window):
            start, stop = self._ranges[part]
            start += position + filled - self._stream_starts[part]
            piece = self._tokens[start : min(stop, start + len(window) - filled)]
            window[filled : filled + len(piece)] = piece
            filled += len(piece)
            part += 1
        return window


def split(store: TokenStore, seq_len: int, eval_fraction: float) -> tuple[TokenDataset, TokenDataset | None]:
    """Return the training part of a corpus and the held-out part, None with an eval_fraction of 0.

    The held-out part has `eval_fraction` of the tokens, and one sample at least.

    Raises:
        ConfigError: there are too few tokens for one sample in each.
    """
    total = len(store.tokens)
    needed = (seq_len + 1) * (2 if eval_fraction else 1)
    if total < needed:
        raise ConfigError(
            f"the data has {total:,} tokens, but --seq-len {seq_len} needs {needed:,} at least (a sample of "
            f"{seq_len + 1:,} to train on{' and one to evaluate on' if eval_fraction else ''}); give more --data, "
            f"a smaller --seq-len{', or --eval-fraction 0' if eval_fraction else ''}."
        )
    held_out = held_out_ranges(store.document_starts, total, seq_len, eval_fraction)
    train = TokenDataset(store.tokens, _complement(held_out, total), seq_len, store.fingerprint)
    if not held_out:
        return train, None
    return train, TokenDataset(store.tokens, held_out, seq_len, store.fingerprint)


def held_out_ranges(document_starts: np.ndarray, num_tokens: int, seq_len: int, eval_fraction: float) -> list[Range]:
    """Return the stretches to hold out, sorted and disjoint.

    They cannot meet with a fraction of at most 1/2: then each is at most half as long as the way from one to the next,
    and moves back, to the start of a document, by less than its own length.
    """
    if not eval_fraction:
        return []
    target = max(int(num_tokens * eval_fraction), seq_len + 1)
    count = max(1, min(NUM_STRETCHES, target // (seq_len + 1)))
    length = target // count
    ranges: list[Range] = []
    for k in range(count):
        middle = (2 * k + 1) * num_tokens // (2 * count)
        start = min(middle, num_tokens - length)
        document = int(document_starts[np.searchsorted(document_starts, start, side="right") - 1])
        if start - document < length:
            start = document
        ranges.append((start, start + length))
    return ranges


def _complement(ranges: Sequence[Range], num_tokens: int) -> list[Range]:
    starts = [0, *(stop for _, stop in ranges)]
    stops = [*(start for start, _ in ranges), num_tokens]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
