"""Several data sets in one stream of samples, each as often as its weight says, exactly.

    weights 0.7 0.3     A A B A A B A A A B   A A B A A B A A A B   ...

After any number n of samples, each source has given its share of n to less than one sample, up or down. That is a scheduling
problem: the j-th sample of a source with share w must come after position floor((j - 1) / w) and by position ceil(j / w), and
taking, among the samples that may come, the one that must come first keeps all those dates, because unit jobs with dates of this
form fill one processor (Liu and Layland 1973; Baruah, Cohen, Plaxton and Varvel 1996, "Proportionate progress").

The dates repeat with the common denominator of the shares, so one period is a table and any position is looked up in it: no state
to resume. Shares without a common denominator up to a million are taken to the millionth.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Generic, Protocol, TypeVar

import numpy as np

from parallax.data.cache import digest
from parallax.data.order import DataOrder

LONGEST_PERIOD = 10**6

Item = TypeVar("Item", covariant=True)


class Source(Protocol[Item]):
    """A data set that can be a part of a blend."""

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Item: ...


def samples_per_period(weights: Sequence[Fraction]) -> list[int]:
    """Return how many samples of each source a period has: the weights' exact shares, or those to the millionth, one at least."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= LONGEST_PERIOD:
        return [int(share * period) for share in shares]
    counts = [max(1, int(share * LONGEST_PERIOD)) for share in shares]
    # What rounding down left goes to those that lost most, and what the smallest took too much comes from the largest.
    missing = LONGEST_PERIOD - sum(counts)
    if missing >= 0:
        lost = sorted(range(len(shares)), key=lambda k: counts[k] - shares[k] * LONGEST_PERIOD)
        for k in lost[:missing]:
            counts[k] += 1
    else:
        counts[max(range(len(counts)), key=counts.__getitem__)] += missing
    return counts


def schedule_period(counts: Sequence[int]) -> np.ndarray:
    """Return which source each position of a period takes, int64 `[sum(counts)]`; see the module's docstring."""
    period = sum(counts)
    ready = [(-(-period // count), source, 0) for source, count in enumerate(counts)]  # (due, source, j)
    waiting: list[tuple[int, int, int]] = []  # (may come from, source, j)
    heapq.heapify(ready)
    table = np.empty(period, dtype=np.int64)
    for position in range(period):
        while waiting and waiting[0][0] <= position:
            _, source, j = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(j + 1) * period // counts[source]), source, j))
        due, source, j = heapq.heappop(ready)
        assert position < due, "a sample comes too late"
        table[position] = source
        heapq.heappush(waiting, ((j + 1) * period // counts[source], source, j + 1))
    return table


class BlendedDataset(Generic[Item]):
    """Data sets with weights; samples are numbered through, those of the first source first.

    `BlendOrder` says which of them come when. A source that ends starts over, in another order.
    """

    def __init__(self, sources: Sequence[Source[Item]], weights: Sequence[Fraction]) -> None:
        assert len(sources) == len(weights) > 0 and min(weights) > 0, weights
        self.sources = sources
        self.counts = samples_per_period(weights)
        self.offsets = [0, *itertools.accumulate(len(source) for source in sources)]
        self.fingerprint = digest("blend", *(source.fingerprint for source in sources), repr(self.counts))

    def __len__(self) -> int:
        return self.offsets[-1]

    def __getitem__(self, i: int) -> Item:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        source = bisect.bisect_right(self.offsets, i) - 1
        return self.sources[source][i - self.offsets[source]]


class BlendOrder:
    """The order of the samples of a blend: position i is a pure function of (seed, data, weights, i).

    Each source has the order that it would have alone. `num_samples` is how many positions there are before a source starts over.
    """

    def __init__(self, seed: int, blend: BlendedDataset, shuffle: bool = True) -> None:
        self._orders = [DataOrder(seed, source.fingerprint, len(source), shuffle) for source in blend.sources]
        self._offsets = blend.offsets
        self._counts = np.array(blend.counts, dtype=np.int64)
        self._table = schedule_period(blend.counts)
        # How many samples its source has given in the period before each position.
        self._given = np.empty_like(self._table)
        for source, count in enumerate(blend.counts):
            self._given[self._table == source] = np.arange(count)
        self.num_samples = min(self._position_of(source, len(part)) for source, part in enumerate(blend.sources))

    def _position_of(self, source: int, draw: int) -> int:
        """Return where a source gives its sample number `draw`, counted from 0."""
        period, rest = divmod(draw, int(self._counts[source]))
        return period * len(self._table) + int(np.flatnonzero(self._table == source)[rest])

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return the samples at positions first .. first + count - 1 as int64 `[count]`."""
        assert first >= 0, first
        period, slots = divmod(first % len(self._table) + np.arange(count), len(self._table))
        period += first // len(self._table)
        sources = self._table[slots]
        draws = period * self._counts[sources] + self._given[slots]
        result = np.empty(count, dtype=np.int64)
        for source in np.unique(sources).tolist():
            own = sources == source
            # Those of one source follow each other in its order.
            result[own] = self._orders[source].samples(int(draws[own][0]), int(own.sum())) + self._offsets[source]
        return result
