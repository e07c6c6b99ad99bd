"""The order of samples: position i is a pure function of (seed, data, i).

Positions 0 .. n - 1 are the first epoch, n .. 2n - 1 the second, and so on; each epoch is a permutation of all samples
of its own. Nothing else enters: not the number of steps (which in some systems reshuffles the first epoch), not ranks,
not batch sizes. Resuming is asking for the next position.

A permutation is the order that sorts n random 64-bit words of the counter-based generator Philox, keyed by a hash of
seed, data and epoch. The raw words of a bit generator never change between numpy versions; those of
`Generator.permutation` may (NEP 19).
"""

from __future__ import annotations

import hashlib

import numpy as np


class DataOrder:
    """The order of `num_samples` samples; it keeps the permutation of the epoch asked for last (8 bytes a sample).

    Args:
        seed: the run's seed.
        fingerprint: of the data set, so that other data has another order.
        num_samples: samples in an epoch.
        shuffle: False gives every epoch in the order of the data.
    """

    def __init__(self, seed: int, fingerprint: str, num_samples: int, shuffle: bool = True) -> None:
        assert num_samples > 0, num_samples
        self.seed = seed
        self.fingerprint = fingerprint
        self.num_samples = num_samples
        self.shuffle = shuffle
        self._kept: tuple[int, np.ndarray] | None = None

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return the samples at positions first .. first + count - 1 as int64 `[count]`."""
        assert first >= 0, first
        parts = [np.empty(0, dtype=np.int64)]
        stop = first + count
        while first < stop:
            epoch, offset = divmod(first, self.num_samples)
            length = min(self.num_samples - offset, stop - first)
            parts.append(self._permutation(epoch)[offset : offset + length])
            first += length
        return np.concatenate(parts)

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            epoch = 0
        if self._kept is None or self._kept[0] != epoch:
            self._kept = (epoch, self._make_permutation(epoch))
        return self._kept[1]

    def _make_permutation(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_samples, dtype=np.int64)
        key = hashlib.blake2b(f"{self.seed} {self.fingerprint} {epoch}".encode(), digest_size=16).digest()
        words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(self.num_samples)
        return np.argsort(words, kind="stable")  # stable: equal words, however rare, have one order everywhere


def sample_index(seed: int, fingerprint: str, position: int, num_samples: int) -> int:
    """Return the sample at one position of the order; `DataOrder` does it for many."""
    return int(DataOrder(seed, fingerprint, num_samples).samples(position, 1)[0])
