"""Samples of any length as rows of one length, several in a row or each padded on its own.

    samples        aaaaa  bbb  cc           seq_len 6
    rows           a a a a a .     b b b c c .        . is padding
    documents      0 0 0 0 0 1     0 0 0 1 1 2        attention stays inside a document
    positions      0 1 2 3 4 0     0 1 2 0 1 0
    labels         a a a a - -     b b - c - -        the last token of a sample predicts nothing

Which samples share a row is best-fit decreasing: the longest sample first, each into the fullest row that it still fits into, a new
one if there is none. That takes at most 11/9 of the fewest rows possible, and 4 more (Johnson, 1973, "Near-optimal bin packing
algorithms"). The grouping depends on the lengths alone, so it is the same in every layout; the order of the rows is that of
`parallax.data.order`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from parallax.data.cache import digest

IGNORE_INDEX = -100  # the label of a token that is not trained, as in torch


@dataclass(frozen=True)
class Rows:
    """Row r holds the samples `members[starts[r] : starts[r + 1]]`; both int64."""

    members: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> Rows:
    """Group samples into as few rows of `capacity` tokens as best-fit decreasing finds, in O(n log n).

    Each sample must have 1 to `capacity` tokens. Rows are in the order in which they were opened, samples of a row in the order
    in which they came to it.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert not len(lengths) or (lengths.min() >= 1 and lengths.max() <= capacity), "a sample is longer than a row"
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room left -> the rows that have it
    rooms: list[int] = []  # its keys, sorted
    longest_first = np.argsort(-lengths, kind="stable")
    for sample, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
            rows[row].append(sample)
        else:
            room, row = capacity, len(rows)
            rows.append([sample])
        if room > length:
            if room - length not in with_room:
                insort(rooms, room - length)
            with_room.setdefault(room - length, []).append(row)
    members = np.fromiter((sample for row in rows for sample in row), dtype=np.int64, count=len(lengths))
    return Rows(members, np.cumsum([0, *map(len, rows)], dtype=np.int64))


def pad(num_samples: int) -> Rows:
    """Give each sample a row of its own."""
    return Rows(np.arange(num_samples, dtype=np.int64), np.arange(num_samples + 1, dtype=np.int64))


def make_row(
    samples: Sequence[tuple[np.ndarray, np.ndarray]], seq_len: int, padding_id: int, with_weights: bool
) -> dict[str, np.ndarray]:
    """Return the samples, each (ids, weights) `[tokens]`, side by side as one row, see the drawing above.

    weights: what the loss of each token counts, not shifted; a token with 0 is no label. Returns `input_ids`, `labels` and
    `positions`, int64 `[seq_len]`, `documents`, int32 `[seq_len]`, and with `with_weights` `weights`, float32 `[seq_len]`: what
    the loss of each label counts. `labels[t]` follows `input_ids[t]`.
    """
    input_ids = np.full(seq_len, padding_id, dtype=np.int64)
    labels = np.full(seq_len, IGNORE_INDEX, dtype=np.int64)
    documents = np.full(seq_len, len(samples), dtype=np.int32)
    positions = np.zeros(seq_len, dtype=np.int64)
    label_weights = np.zeros(seq_len, dtype=np.float32)
    start = 0
    for document, (ids, weights) in enumerate(samples):
        stop = start + len(ids)
        assert stop <= seq_len, f"{stop} tokens in a row of {seq_len}"
        input_ids[start:stop] = ids
        documents[start:stop] = document
        positions[start:stop] = np.arange(len(ids))
        labels[start : stop - 1] = np.where(weights[1:] > 0, ids[1:].astype(np.int64), IGNORE_INDEX)
        label_weights[start : stop - 1] = weights[1:]
        start = stop
    positions[start:] = np.arange(seq_len - start)
    row: dict[str, np.ndarray] = {"input_ids": input_ids, "labels": labels, "positions": positions}
    row["documents"] = documents
    if with_weights:
        row["weights"] = label_weights
    return row


def squared_document_lengths(documents: np.ndarray) -> int:
    """Return the sum of the squares of the lengths of the documents in rows `[..., seq]`, padding included.

    It stands where seq_len squared stands in the FLOPs of attention over whole rows.
    """
    rows = np.asarray(documents).reshape(-1, np.asarray(documents).shape[-1])
    new = np.ones(rows.shape, dtype=bool)
    new[:, 1:] = rows[:, 1:] != rows[:, :-1]
    starts = np.flatnonzero(new)
    lengths = np.diff(starts, append=rows.size)
    return int((lengths.astype(np.int64) ** 2).sum())


class Samples(Protocol):
    """Samples of which the lengths are known; sample i is (ids, weights), both `[lengths[i]]`.

    num_labels: how many tokens of all are learned. has_weights: whether rows hold weights.
    """

    lengths: np.ndarray
    num_labels: int
    fingerprint: str
    has_weights: bool

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]: ...


class RowDataset:
    """Rows of samples as a data set: item i is what `make_row` returns.

    samples: where the tokens come from. packing: several samples in a row, else one. padding_id: what fills a row.
    """

    def __init__(self, samples: Samples, seq_len: int, padding_id: int, packing: bool = True) -> None:
        self.samples = samples
        self.seq_len = seq_len
        self.padding_id = padding_id
        self.rows = pack(samples.lengths, seq_len) if packing else pad(len(samples.lengths))
        self.num_samples = len(samples.lengths)
        self.num_tokens = int(samples.lengths.sum())
        self.num_labels = samples.num_labels
        self.fingerprint = digest("rows", samples.fingerprint, str(seq_len), str(padding_id), str(packing))

    @property
    def filled(self) -> float:
        """The share of all rows' tokens that is no padding."""
        return self.num_tokens / (len(self) * self.seq_len)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        members = self.rows.members[self.rows.starts[i] : self.rows.starts[i + 1]]
        samples = [self.samples[int(member)] for member in members]
        return make_row(samples, self.seq_len, self.padding_id, self.samples.has_weights)

    def squared_lengths(self, i: int) -> int:
        """Return the sum of the squares of the lengths of the samples in row i, padding not counted."""
        members = self.rows.members[self.rows.starts[i] : self.rows.starts[i + 1]]
        return int((self.samples.lengths[members] ** 2).sum())
