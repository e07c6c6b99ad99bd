"""From stored chats to the samples of a run: what is too long, what is held out, how files are mixed.

Chats are held out by a hash of their tokens: the k smallest hashes of each file, so that adding a chat moves hardly any other, and
chats that are equal are on the same side, never one in training and its double in evaluation.

With shares, an epoch is the shortest in which every file has its share of the chats and no chat is left out: files that are small
for their share come several times, each time in another order, the last time in part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from parallax.data.cache import digest
from parallax.data.chat.store import ChatStore
from parallax.data.order import DataOrder
from parallax.errors import ConfigError

MAX_REPEATS = 100  # of all chats in an epoch, on the average


@dataclass(frozen=True)
class Chosen:
    """Which chats of a store are used, with their lengths and numbers of labels after cutting, all int64 `[chats]`.

    num_dropped, num_cut: how many were too long.
    """

    store: ChatStore
    indices: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    num_dropped: int = 0
    num_cut: int = 0

    def take(self, places: np.ndarray) -> Chosen:
        """Return those of the chosen chats."""
        return Chosen(self.store, self.indices[places], self.lengths[places], self.labels[places])


def fit(store: ChatStore, seq_len: int, too_long: Literal["drop", "truncate", "error"]) -> Chosen:
    """Choose the chats that fit into `seq_len` tokens, whole or cut at the end; a cut one of which nothing is trained is dropped.

    Raises:
        ConfigError: one is too long and the policy is "error".
    """
    lengths = np.diff(store.starts)
    long = lengths > seq_len
    if too_long == "error" and long.any():
        first = int(np.flatnonzero(long)[0])
        raise ConfigError(
            f"--data {store.source}, line {store.lines[first]}: this chat has {lengths[first]:,} tokens, more than --seq-len "
            f"{seq_len}, the first of {long.sum():,} that are too long; raise --seq-len, or use --too-long drop or truncate."
        )
    labels = np.array(store.labels)
    for i in np.flatnonzero(long):
        start = int(store.starts[i])
        cut = store.weights[start + 1 : start + seq_len] > 0
        labels[i] = cut.sum() if too_long == "truncate" else 0
    indices = np.flatnonzero(labels)
    num_dropped = len(store) - len(indices)
    lengths = np.minimum(lengths[indices], seq_len)
    return Chosen(store, indices, lengths, labels[indices], num_dropped, int(long.sum()) - num_dropped)


def hold_out(chosen: Chosen, fraction: float) -> tuple[Chosen, Chosen]:
    """Return the chats to train on and those to evaluate on, about `fraction` of them and at least one if there are two."""
    hashes = np.array([_hash(chosen, i) for i in range(len(chosen.indices))], dtype=np.uint64)
    different = np.unique(hashes)
    count = min(max(1, round(fraction * len(different))), len(different) - 1) if fraction else 0
    out = np.isin(hashes, different[:count])
    return chosen.take(~out), chosen.take(out)


def _hash(chosen: Chosen, i: int) -> int:
    start = int(chosen.store.starts[chosen.indices[i]])
    tokens = chosen.store.tokens[start : start + int(chosen.lengths[i])]
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little")


def mix(parts: Sequence[Chosen], shares: Sequence[Fraction | None]) -> list[Chosen]:
    """Return each file's chats of an epoch with those shares; None: each chat once.

    Raises:
        ConfigError: the shares would have the other files repeated too often.
    """
    sizes = [len(part.indices) for part in parts]
    if any(share is None for share in shares):
        return list(parts)
    wanted = {k: share for k, share in enumerate(shares) if share is not None and sizes[k]}
    epoch = max(sizes[k] / share for k, share in wanted.items()) / sum(wanted.values())
    if epoch > MAX_REPEATS * sum(sizes):
        k = max(wanted, key=lambda k: sizes[k] / wanted[k])
        raise ConfigError(
            f"--data gives {parts[k].store.source} a share of {float(wanted[k]):.3g}, but it has {sizes[k]:,} of {sum(sizes):,} "
            f"chats: the others would be repeated more than {MAX_REPEATS} times; give it a larger share, or fewer chats."
        )
    mixed: list[Chosen] = []
    for k, part in enumerate(parts):
        count = max(sizes[k], round(wanted[k] * epoch)) if k in wanted else 0
        in_order = np.arange(sizes[k])
        mixed.append(part.take(DataOrder(0, part.store.fingerprint, sizes[k]).samples(0, count) if count else in_order))
    return mixed


class ChatSamples:
    """Chats of several stores as the samples of `parallax.data.packing`.

    per_sample: the weights of a sample sum up to 1, so that each sample counts the same in the loss.
    """

    def __init__(self, parts: Sequence[Chosen], per_sample: bool) -> None:
        self._stores = [part.store for part in parts]
        self._per_sample = per_sample
        self._store_of = np.repeat(np.arange(len(parts)), [len(part.indices) for part in parts])
        self._indices = np.concatenate([part.indices for part in parts])
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.num_labels = sum(int(part.labels.sum()) for part in parts)
        self.has_weights = per_sample or any(store.has_weights for store in self._stores)
        members = (self._indices.tobytes(), self.lengths.tobytes(), self._store_of.tobytes())
        self.fingerprint = digest("chats", str(per_sample), *members, *(store.fingerprint for store in self._stores))

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        store = self._stores[self._store_of[i]]
        start = int(store.starts[self._indices[i]])
        stop = start + int(self.lengths[i])
        weights = np.asarray(store.weights[start:stop])
        if self._per_sample:
            weights = (weights / weights[1:].sum(dtype=np.float64)).astype(np.float32)
        return np.asarray(store.tokens[start:stop]), weights
