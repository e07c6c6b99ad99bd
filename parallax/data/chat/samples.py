"""From stored chats to the samples of a run: what is too long, what is held out.

Chats are held out by a hash of their tokens: the k smallest hashes of all files together, so that adding a chat moves hardly any
other, and chats that are equal are on the same side, never one in training and its double in evaluation, in another file neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from parallax.data.cache import digest
from parallax.data.chat.store import ChatStore
from parallax.errors import ConfigError


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


def hold_out(files: Sequence[Chosen], fraction: float) -> list[tuple[Chosen, Chosen]]:
    """Return for each file the chats to train on and those to evaluate on.

    Of the different chats of all files about `fraction` is held out, at least one; but of each file the one with the greatest hash
    stays in training, with its doubles in other files. So nothing is held out where each file has only one chat.
    """
    hashes = [np.array([_hash(file, i) for i in range(len(file.indices))], dtype=np.uint64) for file in files]
    different = np.unique(np.concatenate(hashes))
    kept = np.array([of_file.max() for of_file in hashes if len(of_file)], dtype=np.uint64)
    count = max(1, round(fraction * len(different))) if fraction else 0
    held_out = np.setdiff1d(different, kept)[:count]
    places = [np.isin(of_file, held_out) for of_file in hashes]
    return [(file.take(~out), file.take(out)) for file, out in zip(files, places, strict=True)]


def _hash(chosen: Chosen, i: int) -> int:
    start = int(chosen.store.starts[chosen.indices[i]])
    tokens = chosen.store.tokens[start : start + int(chosen.lengths[i])]
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little")


class ChatSamples:
    """Chats of several stores as the samples of `parallax.data.packing`.

    per_sample: the weights of a sample sum up to 1, so that each sample counts the same in the loss. has_weights: rows shall hold
    weights.
    """

    def __init__(self, parts: Sequence[Chosen], per_sample: bool, has_weights: bool) -> None:
        self._stores = [part.store for part in parts]
        self._per_sample = per_sample
        self._store_of = np.repeat(np.arange(len(parts)), [len(part.indices) for part in parts])
        self._indices = np.concatenate([part.indices for part in parts])
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.num_labels = sum(int(part.labels.sum()) for part in parts)
        self.has_weights = has_weights
        members = (self._indices.tobytes(), self.lengths.tobytes(), self._store_of.tobytes())
        self.fingerprint = digest(
            "chats", str(per_sample), str(has_weights), *members, *(store.fingerprint for store in self._stores)
        )

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        store = self._stores[self._store_of[i]]
        start = int(store.starts[self._indices[i]])
        stop = start + int(self.lengths[i])
        weights = np.asarray(store.weights[start:stop])
        if self._per_sample:
            weights = (weights / weights[1:].sum(dtype=np.float64)).astype(np.float32)
        return np.asarray(store.tokens[start:stop]), weights
