"""Messages between two ranks that share a host's memory: a send copies into a slot and returns, a receive copies out of it.

    segment    a line for each source and target: bell, the source's first store
    store      next store | dtype and shape | tags of the slots | 16 slots

A store is a memfd of the sender's, for messages of one dtype and shape. The sender writes a message into the first free slot,
then its tag, then rings the target's bell: adds one to it and wakes whoever sleeps on it (man 2 futex). The receiver looks for
the tag, and sleeps while it is not there; when it has copied the message out it clears the tag, which makes the slot free. If
none is free the sender makes another store, so it never waits, and no more memory is touched than messages were under way at
once. Only the source writes to a line and puts tags, only the target clears them.

Stores have no name in any file system: the receiver opens them through the sender's /proc, and they vanish with the last of
the two processes. What is said in parallax/meeting.py about memory order and about ranks that die holds here too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence

import torch

from parallax.dtypes import DTYPES
from parallax.errors import LostRank
from parallax.meeting import SPIN, Futex

LINE = 64  # bytes of a cache line
MAX_RANKS = 64  # lines grow with its square
MAX_DIMS = 8
_SLOTS = 16
_NEXT, _DTYPE, _DIMS, _SIZES, _TAGS = 0, 1, 2, 3, 16  # places in a store's head, in words of 8 bytes


def mail_bytes(ranks: int) -> int:
    """Return how many bytes of a segment, zeros at first, the lines of so many ranks take; 0 if there are too many."""
    return LINE * ranks * ranks if ranks <= MAX_RANKS else 0


class Mail:
    """One rank's messages to and from the others of a group.

    members: the ranks' global ranks, in order. pids: their processes. segment: mapped by all; the lines begin at `offset`.
    find_dead: returns which ranks have ended. `step` is for its users: a number that they count up together.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[int],
        rank: int,
        pids: Sequence[int],
        segment: mmap.mmap,
        offset: int,
        timeout_seconds: float,
        find_dead: Callable[[], list[int]],
    ) -> None:
        self.step = 0
        self._name, self._members, self._rank, self._pids = name, members, rank, pids
        self._timeout, self._find_dead, self._futex = timeout_seconds, find_dead, Futex()
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(segment, offset))
        self._lines = memoryview(segment)[offset : offset + mail_bytes(len(members))].cast("I")
        self._outgoing: dict[int, list[_Store]] = {}
        self._incoming: dict[int, list[_Store]] = {}

    @torch.no_grad()
    def send(self, target: int, tag: int, tensor: torch.Tensor) -> None:
        """Put a copy of a CPU tensor where the rank `target` finds it by its tag, a positive number; never waits."""
        stores = self._outgoing.setdefault(target, [])
        line = self._line(self._rank, target)
        for store in stores:
            if store.dtype == tensor.dtype and store.shape == tensor.shape and (slot := store.find(0)) is not None:
                break
        else:
            store, slot = _Store.make(f"{self._name}-{self._rank}-{target}", tensor), 0
            if stores:
                stores[-1].head[_NEXT] = store.descriptor + 1
            else:
                self._lines[line + 1] = store.descriptor + 1
            stores.append(store)
        store.slots[slot].copy_(tensor)
        store.tags[slot] = tag
        self._lines[line] = self._lines[line] + 1 & 0xFFFFFFFF
        self._futex.wake(self._base + 4 * line)

    @torch.no_grad()
    def receive(self, source: int, tag: int) -> torch.Tensor:
        """Wait for the message of rank `source` with this tag and return it.

        Raises LostRank if that rank ended without sending it, or did not send it in time.
        """
        line, lines = self._line(source, self._rank), self._lines
        deadline: float | None = None
        while True:
            bell = lines[line]
            if (found := self._find(source, line, tag)) is not None:
                store, slot = found
                result = store.slots[slot].clone()
                store.tags[slot] = 0
                return result
            for _ in range(SPIN):
                if lines[line] != bell:
                    break
            else:
                if deadline is None:
                    deadline = time.monotonic() + self._timeout
                if self._futex.wait(self._base + 4 * line, bell) and lines[line] == bell:
                    self._look(source, deadline)

    def _look(self, source: int, deadline: float) -> None:
        who = f"global rank {self._members[source]}"
        if source in self._find_dead():
            raise LostRank(f"{who} ended while it was waited for")
        if time.monotonic() >= deadline:
            raise LostRank(f"{who} sent nothing in {self._timeout:g} s")

    def _find(self, source: int, line: int, tag: int) -> tuple[_Store, int] | None:
        stores = self._incoming.setdefault(source, [])
        for store in stores:
            if (slot := store.find(tag)) is not None:
                return store, slot
        while following := stores[-1].head[_NEXT] if stores else self._lines[line + 1]:
            stores.append(_Store.open(self._pids[source], following - 1, self._members[source]))
            if (slot := stores[-1].find(tag)) is not None:
                return stores[-1], slot
        return None

    def _line(self, source: int, target: int) -> int:
        return (source * len(self._members) + target) * (LINE // 4)


class _Store:
    """Slots for messages of one dtype and shape. `slots[i]` is a tensor of that shape; its tag is 0 while it is free."""

    def __init__(self, memory: mmap.mmap, descriptor: int) -> None:
        self.descriptor = descriptor
        words = memoryview(memory).cast("Q")
        self.head, self.tags = words, words[_TAGS : _TAGS + _SLOTS]
        self.dtype = DTYPES[words[_DTYPE]]
        self.shape = torch.Size(words[_SIZES : _SIZES + words[_DIMS]].tolist())
        stride = _stride(self.dtype, self.shape)
        data = torch.frombuffer(memory, dtype=torch.uint8, offset=mmap.PAGESIZE)
        used = self.shape.numel() * self.dtype.itemsize
        self.slots = [
            data[start : start + used].view(self.dtype).view(self.shape) for start in range(0, _SLOTS * stride, stride)
        ]

    def find(self, tag: int) -> int | None:
        """Return the first slot with this tag."""
        try:
            return self.tags.tolist().index(tag)
        except ValueError:
            return None

    @classmethod
    def make(cls, name: str, like: torch.Tensor) -> _Store:
        assert like.dtype in DTYPES and like.dim() <= MAX_DIMS, "the caller checks this"
        descriptor = os.memfd_create(f"parallax-mail-{name}")
        os.ftruncate(descriptor, mmap.PAGESIZE + _SLOTS * _stride(like.dtype, like.shape))
        memory = mmap.mmap(descriptor, 0)
        words = memoryview(memory).cast("Q")
        words[_DTYPE], words[_DIMS] = DTYPES.index(like.dtype), like.dim()
        for place, size in enumerate(like.shape):
            words[_SIZES + place] = size
        return cls(memory, descriptor)

    @classmethod
    def open(cls, pid: int, descriptor: int, member: int) -> _Store:
        try:
            here = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                return cls(mmap.mmap(here, 0), descriptor)
            finally:
                os.close(here)
        except OSError as error:
            raise LostRank(f"the memory of global rank {member} cannot be opened; it ended ({error})") from error


def _stride(dtype: torch.dtype, shape: torch.Size) -> int:
    used = shape.numel() * dtype.itemsize
    return -(-max(used, 1) // LINE) * LINE
