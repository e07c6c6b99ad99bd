"""The order of samples: position i is a pure function of (seed, data, i).

Positions 0 .. n - 1 are the first epoch, n .. 2n - 1 the second, and so on; each epoch is a permutation of all samples
of its own. Nothing else enters: not the number of steps (which in some systems reshuffles the first epoch), not ranks,
not batch sizes. Resuming is asking for the next position.

A permutation is the order that sorts n random 64-bit words of the counter-based generator Philox, keyed by a hash of
seed, data and epoch. The raw words of a bit generator never change between numpy versions; those of
`Generator.permutation` may (NEP 19). Large ones are made once a machine, in the cache, and mapped by all its ranks.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from parallax.data.cache import build_once, cache_folder, digest

MAPPED_FROM = 1 << 22  # samples: 32 MiB in each rank, made in half a second


class DataOrder:
    """The order of `num_samples` samples; it keeps the permutation of the epoch asked for last.

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
        if not self.shuffle:
            return (np.arange(count, dtype=np.int64) + first % self.num_samples) % self.num_samples
        parts = [np.empty(0, dtype=np.int64)]
        stop = first + count
        while first < stop:
            epoch, offset = divmod(first, self.num_samples)
            length = min(self.num_samples - offset, stop - first)
            parts.append(self._permutation(epoch)[offset : offset + length].astype(np.int64))
            first += length
        return np.concatenate(parts)

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._kept is None or self._kept[0] != epoch:
            self._kept = (epoch, self._find_permutation(epoch))
        return self._kept[1]

    def _find_permutation(self, epoch: int) -> np.ndarray:
        if self.num_samples < MAPPED_FROM:
            return self._make_permutation(epoch)

        def build(folder: Path) -> None:
            narrow = np.uint32 if self.num_samples <= 1 << 32 else np.int64
            np.save(folder / "samples.npy", self._make_permutation(epoch).astype(narrow), allow_pickle=False)

        key = digest("order", str(self.seed), self.fingerprint, str(epoch), str(self.num_samples))
        what = f"the order of {self.num_samples:,} samples in epoch {epoch + 1}"
        folder = build_once(cache_folder() / f"order-{key}", build, what)
        return np.load(folder / "samples.npy", mmap_mode="r", allow_pickle=False)

    def _make_permutation(self, epoch: int) -> np.ndarray:
        key = hashlib.blake2b(f"{self.seed} {self.fingerprint} {epoch}".encode(), digest_size=16).digest()
        words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(self.num_samples)
        return np.argsort(words, kind="stable")  # stable: equal words, however rare, have one order everywhere


def sample_index(seed: int, fingerprint: str, position: int, num_samples: int) -> int:
    """Return the sample at one position of the order; `DataOrder` does it for many."""
    return int(DataOrder(seed, fingerprint, num_samples).samples(position, 1)[0])
