"""Messages between two ranks that share a host's memory: a send copies into a slot and returns, a receive copies out of it.

    segment    a line for each source and target: bell, the source's first store
    store      next store, number and size of slots | tags of the slots | dtype and shape in each | slots

A store is a memfd of the sender's, of slots of one size, a power of two. The sender writes a message into the first free slot
that is large enough, then its tag, then rings the target's bell: adds one to it and wakes whoever sleeps on it (man 2 futex). The
receiver looks for the tag, and sleeps while it is not there; when it has copied the message out it clears the tag, which makes
the slot free. If none is free the sender makes another store with twice as many slots, so it never waits, and no more memory is
touched than messages were under way at once. Only the source writes to a line and puts tags, only the target clears them.

Stores have no name in any file system: the receiver opens them through the sender's /proc, and they vanish with the last of
the two processes. What is said in parallax/meeting.py about memory order and about ranks that die holds here too.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch

from parallax.dtypes import DTYPES
from parallax.errors import ConfigError, LostRank
from parallax.meeting import SPIN, Futex

LINE = 64  # bytes of a cache line
MAX_RANKS = 64  # lines grow with its square
MAX_DIMS = 8
_FIRST_SLOTS, _LEAST_BYTES = 16, 1024  # of a store
_NEXT, _COUNT, _SIZE, _TAGS = 0, 1, 2, 8  # places in a store's head, in words of 8 bytes
_SPEC_WORDS = 2 + MAX_DIMS  # dtype, number of dims, dims


def mail_bytes(ranks: int) -> int:
    """Return how many bytes of a segment, zeros at first, the lines of so many ranks take; 0 if there are too many."""
    return LINE * ranks * ranks if ranks <= MAX_RANKS else 0


class Mail:
    """One rank's messages to and from the others of a group.

    members: the ranks' global ranks, in order. pids: their processes. segment: mapped by all; the lines begin at `offset`.
    find_dead: returns which ranks have ended.
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
        self._steps = 0
        self._name, self._members, self._rank, self._pids = name, members, rank, pids
        self._timeout, self._find_dead, self._futex = timeout_seconds, find_dead, Futex()
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(segment, offset))
        self._lines = memoryview(segment)[offset : offset + mail_bytes(len(members))].cast("I")
        self._outgoing: dict[int, list[_Store]] = {}
        self._incoming: dict[int, list[_Store]] = {}

    def begin_step(self) -> int:
        """Return a number for what is sent from now on, from 1 on; all ranks begin their steps in the same order."""
        self._steps += 1
        return self._steps

    def forget(self, step: int) -> None:
        """Free the slots of messages to this rank that a step left behind: those whose tags are `step` times 2**32 and more."""
        for stores in self._incoming.values():
            for store in stores:
                for slot, tag in enumerate(store.tags.tolist()):
                    if tag >> 32 == step:
                        store.tags[slot] = 0

    @torch.no_grad()
    def send(self, target: int, tag: int, tensor: torch.Tensor) -> None:
        """Put a copy of a CPU tensor where the rank `target` finds it by its tag, a positive number; never waits.

        Raises ConfigError if no more shared memory can be made.
        """
        stores = self._outgoing.setdefault(target, [])
        line = self._line(self._rank, target)
        size = _slot_bytes(tensor.numel() * tensor.element_size())
        same = [store for store in stores if store.slot_bytes == size]
        for store in same:
            if (slot := store.find(0)) is not None:
                break
        else:
            count = 2 * same[-1].count if same else _FIRST_SLOTS
            store, slot = _Store.make(f"{self._name}-{self._rank}-{target}", count, size), 0
            if stores:
                stores[-1].words[_NEXT] = store.descriptor + 1
            else:
                self._lines[line + 1] = store.descriptor + 1
            stores.append(store)
        store.put(slot, tensor)
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
                result = store.get(slot)
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
        while following := stores[-1].words[_NEXT] if stores else self._lines[line + 1]:
            stores.append(_Store.open(self._pids[source], following - 1, self._members[source]))
            if (slot := stores[-1].find(tag)) is not None:
                return stores[-1], slot
        return None

    def _line(self, source: int, target: int) -> int:
        return (source * len(self._members) + target) * (LINE // 4)


class _Store:
    """`count` slots of `slot_bytes` each. A slot's tag is 0 while it is free; a new store is all zeros."""

    def __init__(self, memory: mmap.mmap, descriptor: int) -> None:
        self.descriptor = descriptor
        self.words = memoryview(memory).cast("Q")
        self.count, self.slot_bytes = self.words[_COUNT], self.words[_SIZE]
        self.tags = self.words[_TAGS : _TAGS + self.count]
        specs = _TAGS + self.count
        self._specs = [
            self.words[start : start + _SPEC_WORDS]
            for start in range(specs, specs + self.count * _SPEC_WORDS, _SPEC_WORDS)
        ]
        with torch.inference_mode(False):
            self._data = torch.frombuffer(memory, dtype=torch.uint8, offset=_head_bytes(self.count))

    def find(self, tag: int) -> int | None:
        """Return the first slot with this tag."""
        try:
            return self.tags.tolist().index(tag)
        except ValueError:
            return None

    def put(self, slot: int, tensor: torch.Tensor) -> None:
        """Copy a tensor that fits into a slot."""
        spec = _encode(tensor.dtype, tensor.shape)
        self._specs[slot].cast("B")[:] = spec
        self._view(slot, spec).copy_(tensor)

    def get(self, slot: int) -> torch.Tensor:
        """Return a copy of the tensor in a slot."""
        return self._view(slot, self._specs[slot].tobytes()).clone()

    def _view(self, slot: int, spec: bytes) -> torch.Tensor:
        dtype, dims, *sizes = struct.unpack(f"{_SPEC_WORDS}Q", spec)
        shape = torch.Size(sizes[:dims])
        start = slot * self.slot_bytes
        with torch.inference_mode(False):  # it may be written to in that mode and outside of it
            flat = self._data[start : start + shape.numel() * DTYPES[dtype].itemsize]
            return flat.view(DTYPES[dtype]).view(shape)

    @classmethod
    def make(cls, name: str, count: int, slot_bytes: int) -> _Store:
        try:
            descriptor = os.memfd_create(f"parallax-mail-{name}")
            os.ftruncate(descriptor, _head_bytes(count) + count * slot_bytes)
            memory = mmap.mmap(descriptor, 0)
        except OSError as error:
            raise ConfigError(
                f"no more shared memory can be made for messages ({error.strerror}); allow this process more memory or open files "
                "(ulimit -n), or connect with shared_memory=False"
            ) from error
        words = memoryview(memory).cast("Q")
        words[_COUNT], words[_SIZE] = count, slot_bytes
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
            if error.errno in (errno.ENOENT, errno.ESRCH) and not os.path.exists(f"/proc/{pid}"):
                raise LostRank(f"global rank {member} ended, and with it the message") from error
            raise ConfigError(
                f"the shared memory of global rank {member} cannot be opened ({error.strerror}); allow this process more memory "
                "or open files (ulimit -n) and let it see that one in /proc, or connect with shared_memory=False"
            ) from error


@cache
def _encode(dtype: torch.dtype, shape: torch.Size) -> bytes:
    assert dtype in DTYPES and len(shape) <= MAX_DIMS, "the caller checks this"
    sizes = [*shape, *[0] * (MAX_DIMS - len(shape))]
    return struct.pack(f"{_SPEC_WORDS}Q", DTYPES.index(dtype), len(shape), *sizes)


def _slot_bytes(used: int) -> int:
    return max(_LEAST_BYTES, 1 << (used - 1).bit_length()) if used else _LEAST_BYTES


def _head_bytes(count: int) -> int:
    used = 8 * (_TAGS + count * (1 + _SPEC_WORDS))
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
