"""The collectives of ranks that share a host's memory: on a CPU many times faster than gloo's sockets (benchmarks/collectives.py).

    segment    counters, headers | lines of parallax/mail.py | 2 x ( slot of rank 0 | slot of rank 1 | ... | sum )

A rank copies its tensor into its slot, all meet (parallax/meeting.py), and each takes what it needs from the others'
slots. Two sets of slots alternate: who writes into a set has met the others in the other set since, so all have read
what was in this one. Tensors larger than a slot go through in pieces.

    all_reduce, little or 2 ranks    write | meet | sum all slots
    all_reduce, otherwise            write | meet | sum one part of all slots into `sum` | meet | read `sum`
    reduce_scatter                   write | meet | sum this rank's part of all slots
    all_gather, broadcast            write | meet | read

Sums run in rank order, so the result is bitwise the same on all ranks and in every run; 16-bit floats are summed in fp32
and rounded once. Everything is complete on return, the reduction of gradient buckets during backward too: gloo's background
threads need the same cores, and training steps were measured to be no shorter with them.

The segment is a memfd (man 2 memfd_create): it has no name in any file system, the other ranks open it through rank 0's
/proc, and it vanishes with the last process however that ends. `join` returns None, and the group keeps to gloo, where
the ranks are on several hosts (or containers that hide processes from each other) or the system is not one that
`meeting.why_not` allows: macOS, processors other than x86-64.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parallax.dtypes import DTYPES
from parallax.mail import Mail, mail_bytes
from parallax.meeting import MAX_RANKS, Header, Meeting, control_bytes, why_not

SLOT_BYTES = 1 << 20
# Of all slots together: up to this, summing them all takes less time than meeting again. With fewer cores than ranks even 4
# MiB do; with a core for each rank, reading 1 MiB takes about 0.1 ms.
_LITTLE_BYTES = 1 << 20
_TOKEN_BYTES = 16
_KINDS = ("all_reduce sum", "all_reduce max", "all_reduce min", "reduce_scatter", "all_gather", "broadcast", "barrier")
_REDUCE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_KIND_CODES = {kind: code for code, kind in enumerate(_KINDS)}


class _Rows(NamedTuple):
    """The beginnings of one set of slots, as tensors of one dtype and length."""

    all: torch.Tensor  # [ranks, elements]
    each: Sequence[torch.Tensor]  # of [elements]
    sum: torch.Tensor  # [elements]


class SharedMemory:
    """The collectives of one group. All are called by every rank in the same order; CPU tensors only.

    Raises LostRank, from any of them, if a rank ended, did not come in time, or came with another call.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[int],
        rank: int,
        pids: Sequence[int],
        segment: mmap.mmap,
        timeout_seconds: float,
    ) -> None:
        self.rank, self.ranks = rank, len(members)
        self._meeting = Meeting(name, members, rank, pids, segment, timeout_seconds, _tell)
        lines = control_bytes(self.ranks)
        self.mail: Mail | None = None  # between two ranks; None if there are too many for it
        if mail_bytes(self.ranks):
            self.mail = Mail(name, members, rank, pids, segment, lines, timeout_seconds, self._meeting.find_dead)
        slots = torch.frombuffer(segment, dtype=torch.uint8, offset=_slots_start(self.ranks))
        self._sets = slots.view(2, self.ranks + 1, SLOT_BYTES)
        self._set = 0
        self._header: Header | None = None  # of a call that begins with the next meeting
        self._views: dict[tuple[torch.dtype, int], tuple[_Rows, _Rows]] = {}

    @torch.no_grad()
    def all_reduce_(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Sum (or `op="max"`, "min") a contiguous tensor over the ranks in place."""
        flat = _flat(tensor)
        _check_has_arithmetic(flat)
        self._header = _header(f"all_reduce {op}", flat)
        size = flat.element_size()
        for piece in flat.split(SLOT_BYTES // size):
            rows = self._next_rows(flat.dtype, len(piece))
            rows.each[self.rank].copy_(piece)
            self._meet()
            if self.ranks == 2 or len(piece) * size * self.ranks <= _LITTLE_BYTES:
                _reduce(rows.each, op, piece)
                continue
            start, stop = (len(piece) * rank // self.ranks for rank in (self.rank, self.rank + 1))
            _reduce([row[start:stop] for row in rows.each], op, rows.sum[start:stop])
            self._meeting.meet()
            piece.copy_(rows.sum)

    @torch.no_grad()
    def reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Fill contiguous `part` with this rank's part of the sum of `whole`, whose outermost dim the ranks share evenly.

        `part` may lie in `whole`, at this rank's place. Where it is wider than `whole`, sums of 16-bit floats stay in it unrounded.
        """
        parts, part = whole.detach().view(self.ranks, part.numel()), _flat(part)
        _check_has_arithmetic(part)
        self._header = _header("reduce_scatter", parts)
        step = SLOT_BYTES // (parts.element_size() * self.ranks)
        for start in range(0, max(1, len(part)), step):
            piece = part[start : start + step]
            rows = self._next_rows(parts.dtype, len(piece) * self.ranks)
            rows.each[self.rank].view(self.ranks, len(piece)).copy_(parts[:, start : start + step])
            self._meet()
            first = self.rank * len(piece)
            _reduce([row[first : first + len(piece)] for row in rows.each], "sum", piece)

    @torch.no_grad()
    def all_gather(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Fill contiguous `whole` with the ranks' `part`s in rank order; `part` may lie in `whole`, at its place."""
        part, parts = _flat(part), whole.detach().view(self.ranks, part.numel())
        self._header = _header("all_gather", part)
        step = SLOT_BYTES // part.element_size()
        for start in range(0, max(1, len(part)), step):
            piece = part[start : start + step]
            rows = self._next_rows(part.dtype, len(piece))
            rows.each[self.rank].copy_(piece)
            self._meet()
            parts[:, start : start + step].copy_(rows.all)

    @torch.no_grad()
    def broadcast_(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a contiguous tensor with that of rank `source`."""
        flat = _flat(tensor)
        self._header = _header("broadcast", flat, source)
        for piece in flat.split(SLOT_BYTES // flat.element_size()):
            row = self._next_rows(flat.dtype, len(piece)).each[source]
            if self.rank == source:
                row.copy_(piece)
            self._meet()
            if self.rank != source:
                piece.copy_(row)

    def barrier(self) -> None:
        """Return when every rank has come."""
        self._meeting.begin((_KIND_CODES["barrier"], 0, 0, 0))

    def _meet(self) -> None:
        """Meet for the next piece of a call."""
        header, self._header = self._header, None
        if header is None:
            self._meeting.meet()
        else:
            self._meeting.begin(header)

    def _next_rows(self, dtype: torch.dtype, elements: int) -> _Rows:
        self._set ^= 1
        views = self._views.get((dtype, elements))
        if views is None:
            if len(self._views) >= 64:
                self._views.clear()
            first, second = (self._make_rows(number, dtype, elements) for number in (0, 1))
            views = self._views[dtype, elements] = (first, second)
        return views[self._set]

    def _make_rows(self, number: int, dtype: torch.dtype, elements: int) -> _Rows:
        slots = self._sets[number].view(dtype)[:, :elements]
        *each, total = slots
        return _Rows(slots[:-1], each, total)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


def _check_has_arithmetic(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bool:
        raise TypeError("a tensor of bool cannot be reduced; make it integers")


def _reduce(rows: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
    """Combine `rows` in their order into `out`."""
    if op == "sum" and rows[0].dtype in (torch.bfloat16, torch.float16):
        total = rows[0].float()
        for row in rows[1:]:
            total.add_(row)
        out.copy_(total)
        return
    combine: Any = _REDUCE[op]
    combine(rows[0], rows[1], out=out)
    for row in rows[2:]:
        combine(out, row, out=out)


def _header(kind: str, tensor: torch.Tensor, source: int = 0) -> Header:
    if tensor.dtype not in _CODES:
        raise TypeError(f"{kind} of {tensor.dtype} is not possible; send it as a view of uint8")
    return _KIND_CODES[kind], _CODES[tensor.dtype], tensor.numel(), source


def _tell(header: Header) -> str:
    kind, dtype, elements, source = header
    if _KINDS[kind] == "barrier":
        return "barrier"
    origin = f" from the group's rank {source}" if _KINDS[kind] == "broadcast" else ""
    return f"{_KINDS[kind]}{origin} of {elements} {str(DTYPES[dtype]).removeprefix('torch.')}"


def _home() -> list[str]:
    """Return what is the same for two processes that see each other in one kernel."""
    return [
        socket.gethostname(),
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        os.readlink("/proc/self/ns/pid"),
    ]


def _slots_start(ranks: int) -> int:
    start = control_bytes(ranks) + mail_bytes(ranks)
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE


def _segment_bytes(ranks: int) -> int:
    return _slots_start(ranks) + 2 * (ranks + 1) * SLOT_BYTES


def join(
    name: str, members: Sequence[int], rank: int, gather: Callable[[Any], list[Any]], timeout_seconds: float
) -> tuple[SharedMemory | None, str | None]:
    """Make and map the group's segment; return the collectives on it, or None and why they are not possible.

    Called by every rank of the group at the same time, and all get the same answer. members: the global ranks, in order.
    gather: returns every rank's JSON value in rank order.
    """
    ranks = len(members)
    obstacle = why_not() or (f"{ranks} ranks are more than {MAX_RANKS}" if ranks > MAX_RANKS else None)
    mine: dict[str, Any] = {"obstacle": obstacle, "pid": os.getpid()}
    descriptor = None
    if obstacle is None:
        mine["home"] = _home()
        if rank == 0:
            token = secrets.token_bytes(_TOKEN_BYTES)
            try:
                descriptor = os.memfd_create(f"parallax-{name}")
                os.ftruncate(descriptor, _segment_bytes(ranks))
                os.pwrite(descriptor, token, _slots_start(ranks))  # where a slot will be
            except OSError as error:  # the process may have a limit of files' sizes, or of open ones
                mine["obstacle"] = f"no memory to share can be made ({error.strerror})"
            mine.update(descriptor=descriptor, token=token.hex())
    try:
        everyone = gather(mine)
        obstacle = _find_obstacle(everyone)
        if obstacle is not None:
            return None, obstacle
        segment, obstacle = _map(everyone[0], ranks)
        obstacle = next((problem for problem in gather(obstacle) if problem is not None), None)
        if obstacle is not None or segment is None:
            return None, obstacle
    finally:
        if descriptor is not None:
            os.close(descriptor)
    pids = [row["pid"] for row in everyone]
    return SharedMemory(name, members, rank, pids, segment, timeout_seconds), None


def _find_obstacle(everyone: Sequence[dict[str, Any]]) -> str | None:
    for rank, row in enumerate(everyone):
        if row["obstacle"] is not None:
            return f"rank {rank}: {row['obstacle']}"
        if row["home"] != everyone[0]["home"]:
            return f"ranks 0 and {rank} are on different hosts: {everyone[0]['home']} and {row['home']}"
    return None


def _map(first: dict[str, Any], ranks: int) -> tuple[mmap.mmap | None, str | None]:
    """Map the segment that rank 0 made; return it, or None and what went wrong."""
    try:
        descriptor = os.open(f"/proc/{first['pid']}/fd/{first['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
        try:
            segment = mmap.mmap(descriptor, _segment_bytes(ranks))
        finally:
            os.close(descriptor)
    except OSError as error:
        return None, f"rank 0's memory cannot be opened ({error})"
    start = _slots_start(ranks)
    if segment[start : start + _TOKEN_BYTES] != bytes.fromhex(first["token"]):
        return None, "what was opened is not rank 0's memory"
    return segment, None
