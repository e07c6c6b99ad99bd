"""Where the ranks of one host meet: a barrier in shared memory that sleeps in the kernel and notices who died.

    segment    4 counters | arrivals of each rank | 2 x one call header per rank | ... the caller's data

A rank that arrives adds one to the counter of this meeting, and sleeps until the counter shows the number of ranks. Both
are futex calls (man 2 futex): FUTEX_WAKE_OP adds atomically and wakes all sleepers if it was the last to arrive,
FUTEX_WAIT sleeps unless the counter has changed. So each rank sleeps at most once a meeting, and there may be many more
ranks than cores. Meeting m uses counter m % 4. Rank 0 clears a counter one meeting later: by then all have left it, and
two more meetings lie before its next use.

Each rank brings a header that says which call it is in, and all compare them when they meet: ranks that are in different
calls learn it there, before any takes the other's data for its own.

A sleeper wakes every 0.2 seconds to look at the other processes, which it holds by pidfd (man 2 pidfd_open): a process
that died cannot be mistaken for a later one of the same number. After a failure the ranks are out of step, so every
later meeting of the group fails at once.

Python has no memory barriers. On x86-64 none are needed (loads and stores of a core are seen in order) beside those in
the kernel's calls; other processors are not used, and neither are other systems than Linux: `why_not` says so.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import select
import struct
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

from parallax.errors import LostRank

_SYS_FUTEX = 202  # x86-64
_FUTEX_WAIT, _FUTEX_WAKE, _FUTEX_WAKE_OP = 0, 1, 5
_OP_ADD, _CMP_EQ = 1, 0
_COUNTERS = 4
_LINE = 64  # bytes of a cache line: no two counters share one
SPIN = 100  # looks at the counter before sleeping, about 5 microseconds
_LOOK_SECONDS = 0.2  # between looks at who is alive
_HEADER = struct.Struct("<IIQQ")  # kind, dtype, elements, source
MAX_RANKS = 2047  # what FUTEX_WAKE_OP can compare with

Header = tuple[int, int, int, int]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def why_not() -> str | None:
    """Return why processes cannot meet in shared memory on this system, or None if they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it needs Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
    if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
        return "this Python was built without os.pidfd_open or os.memfd_create"
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("parallax"))
        words = (ctypes.c_uint32 * 2)()
        Futex().add(ctypes.addressof(words), ctypes.addressof(words) + 4, 1)
    except OSError as error:
        return f"the kernel refuses pidfd_open, memfd_create or futex ({error})"
    return None


class Futex:
    """The calls, on addresses."""

    def __init__(self) -> None:
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        pointer, number = ctypes.c_void_p, ctypes.c_long
        self._call.argtypes = (number, pointer, number, number, pointer, pointer, number)
        self._tick = _Timespec(0, int(_LOOK_SECONDS * 1e9))
        self._tick_address = ctypes.addressof(self._tick)

    def add(self, unused: int, counter: int, ranks: int) -> None:
        """Add one to the counter; wake all who wait for it if that makes it `ranks`. `unused`: where nobody waits."""
        operation = _OP_ADD << 28 | _CMP_EQ << 24 | 1 << 12 | (ranks - 1)
        if self._call(_SYS_FUTEX, unused, _FUTEX_WAKE_OP, 1, 0x7FFFFFFF, counter, operation) < 0:
            raise OSError(ctypes.get_errno(), "FUTEX_WAKE_OP failed")

    def wake(self, counter: int) -> None:
        """Wake all who wait for the counter, which the caller has changed."""
        if self._call(_SYS_FUTEX, counter, _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0) < 0:
            raise OSError(ctypes.get_errno(), "FUTEX_WAKE failed")

    def wait(self, counter: int, seen: int) -> bool:
        """Sleep if the counter is still `seen`; return whether it was for the whole tick."""
        if self._call(_SYS_FUTEX, counter, _FUTEX_WAIT, seen, self._tick_address, None, 0) == 0:
            return False
        code = ctypes.get_errno()
        assert code in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT), os.strerror(code)
        return code == errno.ETIMEDOUT


def control_bytes(ranks: int) -> int:
    """Return how many bytes at the start of a segment a meeting needs: whole pages."""
    used = _LINE * (_COUNTERS + 1) + 8 * ranks + 2 * _HEADER.size * ranks
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Meeting:
    """The meetings of one group, seen from one rank.

    name: of the group, in messages. members: the ranks' global ranks, in order. pids: their processes. segment: mapped by
    all, its first `control_bytes` zeros at first. tell: makes a header readable.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[int],
        rank: int,
        pids: Sequence[int],
        segment: mmap.mmap,
        timeout_seconds: float,
        tell: Callable[[Header], str],
    ) -> None:
        self.name, self.members, self.rank, self.ranks = name, members, rank, len(members)
        self.timeout_seconds, self._segment, self._tell = timeout_seconds, segment, tell
        self._futex = Futex()
        base = ctypes.addressof(ctypes.c_char.from_buffer(segment))
        self._addresses = [base + _LINE * counter for counter in range(_COUNTERS)]
        self._unused = base + _LINE * _COUNTERS
        view = memoryview(segment)
        self._counters = view[: _LINE * _COUNTERS].cast("I")
        arrivals = _LINE * (_COUNTERS + 1)
        self._arrivals = view[arrivals : arrivals + 8 * self.ranks].cast("Q")
        self._headers = arrivals + 8 * self.ranks
        self._meetings = self._calls = 0
        self._mine: Header = (0, 0, 0, 0)
        self._failure: str | None = None
        self._poll = select.poll()
        self._processes = {os.pidfd_open(pid): other for other, pid in enumerate(pids) if other != rank}
        for descriptor in self._processes:
            self._poll.register(descriptor, select.POLLIN)
        weakref.finalize(self, _close_all, list(self._processes))

    def begin(self, header: Header) -> None:
        """Meet at the start of a call.

        Raises LostRank if a rank brought another header, ended, or did not come in time.
        """
        self._mine = header
        self._calls += 1
        packed = _HEADER.pack(*header)
        start = self._headers + self._calls % 2 * self.ranks * _HEADER.size
        mine = start + self.rank * _HEADER.size
        self._segment[mine : mine + _HEADER.size] = packed
        self.meet()
        brought = self._segment[start : start + self.ranks * _HEADER.size]
        if brought != packed * self.ranks:
            calls: dict[Header, list[int]] = {}
            for rank in range(self.ranks):
                calls.setdefault(_HEADER.unpack_from(brought, rank * _HEADER.size), []).append(rank)  # type: ignore[arg-type]
            told = "; ".join(f"{self._names(ranks)} in {self._tell(call)}" for call, ranks in calls.items())
            self._fail(f"the ranks are in different calls: {told}")

    def meet(self) -> None:
        """Return when all ranks have come; raises LostRank if one ended or did not come in time."""
        if self._failure is not None:
            raise LostRank(f"an earlier call failed and left the ranks out of step: {self._failure}")
        self._meetings += 1
        counter = self._meetings % _COUNTERS
        self._futex.add(self._unused, self._addresses[counter], self.ranks)
        self._arrivals[self.rank] = self._meetings
        counters, word = self._counters, counter * (_LINE // 4)
        for _ in range(SPIN):
            if counters[word] == self.ranks:
                break
        else:
            self._sleep(self._addresses[counter], word)
        if self.rank == 0:
            counters[(self._meetings - 1) % _COUNTERS * (_LINE // 4)] = 0

    def _sleep(self, address: int, word: int) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        while (seen := self._counters[word]) != self.ranks:
            if not self._futex.wait(address, seen):
                continue
            dead = [rank for rank in self.find_dead() if self._arrivals[rank] < self._meetings]
            late = time.monotonic() >= deadline
            if not (dead or late) or self._counters[word] == self.ranks:
                continue
            if dead:
                self._fail(f"{self._names(dead)} ended while the others waited in {self._tell(self._mine)}")
            missing = [rank for rank in range(self.ranks) if self._arrivals[rank] < self._meetings]
            self._fail(f"{self._names(missing)} did not come to {self._tell(self._mine)} in {self.timeout_seconds:g} s")

    def find_dead(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        return sorted(self._processes[descriptor] for descriptor, _ in self._poll.poll(0))

    def _fail(self, reason: str) -> NoReturn:
        self._failure = f"global rank {self.members[self.rank]}, group {self.name} of {list(self.members)}: {reason}"
        raise LostRank(self._failure)

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"global rank {self.members[rank]}" for rank in ranks)
