"""Which part of a stream is trained on, and which is held out.

By default a share of the tokens is held out, in up to 16 stretches spread evenly over the corpus, so that it looks like all of it,
each starting where a document starts if one starts closely before. With --split, whole documents in their order go to training,
validation and test, as in Megatron-LM:

    --eval-fraction 0.01     tttttttttttvtttttttttttvtttttttttttvttttttttt
    --split 80,10,10         ttttttttttttttttttttttttttttttttttttvvvvvxxxx

Either way every token is in exactly one part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from parallax.data.dataset import PLAIN, Borders, Range, TokenDataset
from parallax.data.stream import TokenStream
from parallax.errors import ConfigError

NUM_STRETCHES = 16
PARTS = ("training", "validation", "test")


@dataclass(frozen=True)
class Split:
    """The parts of a source; None where nothing was asked for."""

    train: TokenDataset
    eval: TokenDataset | None = None
    test: TokenDataset | None = None


def hold_out(stream: TokenStream, seq_len: int, eval_fraction: float, borders: Borders = PLAIN) -> Split:
    """Hold out `eval_fraction` of the tokens, one sample at least; nothing with 0.

    Raises:
        ConfigError: there are too few tokens for one sample in each.
    """
    total = stream.num_tokens
    needed = (seq_len + 1) * (2 if eval_fraction else 1)
    if total < needed:
        raise ConfigError(
            f"the data has {total:,} tokens, but --seq-len {seq_len} needs {needed:,} at least (a sample of "
            f"{seq_len + 1:,} to train on{' and one to evaluate on' if eval_fraction else ''}); give more --data, "
            f"a smaller --seq-len{', or --eval-fraction 0' if eval_fraction else ''}."
        )
    held_out = held_out_ranges(stream.document_before, total, seq_len, eval_fraction)
    train = TokenDataset(stream, _complement(held_out, total), seq_len, borders)
    return Split(train, TokenDataset(stream, held_out, seq_len, borders) if held_out else None)


def split_documents(stream: TokenStream, seq_len: int, shares: Sequence[Fraction], borders: Borders = PLAIN) -> Split:
    """Give the documents, in their order, to training, validation and test by their shares, which sum to 1.

    Raises:
        ConfigError: a part with a share is too small for one sample.
    """
    ends = [round(end * stream.num_documents) for end in itertools.accumulate(shares)]
    marks = [stream.start_of_document(number) for number in (0, *ends)]
    parts: list[TokenDataset | None] = []
    for name, share, part in zip(PARTS, shares, itertools.pairwise(marks), strict=True):
        if share and part[1] - part[0] < seq_len + 1:
            raise ConfigError(
                f"--split gives {part[1] - part[0]:,} tokens of {stream.num_tokens:,} to {name}, but a sample of --seq-len "
                f"{seq_len} takes {seq_len + 1:,}; documents are not divided: give more --data, another --split or a "
                "smaller --seq-len."
            )
        parts.append(TokenDataset(stream, [part], seq_len, borders) if share else None)
    assert parts[0] is not None, "a share of 0 for training"
    return Split(parts[0], parts[1], parts[2])


def held_out_ranges(
    document_before: Callable[[int], int], num_tokens: int, seq_len: int, eval_fraction: float
) -> list[Range]:
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
        document = document_before(start)
        if start - document < length:
            start = document
        ranges.append((start, start + length))
    return ranges


def _complement(ranges: Sequence[Range], num_tokens: int) -> list[Range]:
    starts = [0, *(stop for _, stop in ranges)]
    stops = [*(start for start, _ in ranges), num_tokens]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
