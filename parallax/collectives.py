"""The collectives on an explicit group, and the four autograd functions that tensor parallelism is made of.

Every function treats None (a group of one) as nothing to do. torch itself reads a missing group as the whole world, so
only this module, the pipeline's point-to-point and the mesh call torch.distributed; a test holds that.

The conjugate pairs (Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198,
section 4.2.2, for the two with a sequence dim):

    function             forward                backward               paper's name
    copy_to              identity               all_reduce             f
    reduce_from          all_reduce             identity               g
    gather_sequence      all_gather(seq)        reduce_scatter(seq)    g
    scatter_sequence     reduce_scatter(seq)    all_gather(seq)        g bar

A group whose ranks share a host's memory has its collectives done there (parallax.shared_memory), complete on return; what
`_start` functions give to wait for is then `DONE`.

In-place functions end in an underscore. All are called by every member of the group, in the same order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from parallax.errors import LostRank
from parallax.journal import Note
from parallax.mesh import Group, size_of
from parallax.shared_memory import SharedMemory

# torch 2.13 renamed these two; 2.9 to 2.12 know only the old names.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Call:
    """A communication that begins: noted in the group's journal until it is over."""

    __slots__ = ("group", "note", "what")

    def __init__(self, what: str, group: Group, tensor: torch.Tensor | None = None) -> None:
        self.what, self.group = what, group
        self.note: Note | None = None
        if group.journal is not None:
            elements, dtype = (0, None) if tensor is None else (tensor.numel(), tensor.dtype)
            group.journal.begin(what, group.name, elements, dtype)
            if group.journal.record is not None:
                num_bytes = 0 if tensor is None else tensor.nbytes * (group.size if what == "all_gather" else 1)
                self.note = group.journal.record.communicate(what, group.name, group.size, num_bytes)
                if group.shared_memory is not None:
                    self.note.wait()  # complete on return

    def wait(self) -> None:
        """Say that nothing else is done until it is over."""
        group, record = self.group, None if self.group.journal is None else self.group.journal.record
        if record is not None and (self.note is None or self.note.recorder is not record):
            self.note = record.communicate(self.what, group.name, group.size, 0, began_before=True)
        if self.note is not None:
            self.note.wait()

    def over(self) -> None:
        if self.group.journal is not None:
            self.group.journal.end()
        if self.note is not None:
            self.note.over()

    def lost(self, error: RuntimeError) -> LostRank:
        """Return the error to raise when the backend gave one while it waited for the other ranks."""
        rank = self.group.ranks[self.group.rank]
        return LostRank(f"global rank {rank}, {self.what} over {self.group.name}: {backend_reason(error)}")


def backend_reason(error: RuntimeError) -> str:
    """Return what a backend says, without its source files and advice."""
    return re.sub(r"^\[\S*\] ", "", str(error).strip()).partition("\n")[0].partition(". ")[0]


class _Waiting:
    """A backend's communication in flight."""

    __slots__ = ("call", "work")

    def __init__(self, work: Any, call: _Call) -> None:
        self.work, self.call = work, call

    def is_completed(self) -> bool:
        """Whether it is over, as far as the backend has noticed."""
        return self.work.is_completed()

    def wait(self) -> None:
        self.call.wait()
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.call.lost(error) from error
        self.call.over()


class Pending(Protocol):
    """A communication in flight."""

    def wait(self) -> Any:
        """Return when the result may be used by what is computed next."""


class _Done:
    def wait(self) -> None:
        return None


class _CopyBack:
    """A reduction that runs on a contiguous stand-in of a strided tensor."""

    def __init__(self, work: Any, stand_in: torch.Tensor, tensor: torch.Tensor) -> None:
        self.work, self.stand_in, self.tensor = work, stand_in, tensor

    def wait(self) -> None:
        self.work.wait()
        self.tensor.copy_(self.stand_in)


DONE: Pending = _Done()


def _process_group(group: Group) -> dist.ProcessGroup:
    assert group.process_group is not None, f"{group} was planned without processes and cannot communicate"
    return group.process_group


def _shared_memory(group: Group, tensor: torch.Tensor) -> SharedMemory | None:
    return group.shared_memory if tensor.device.type == "cpu" else None


def all_reduce_start(tensor: torch.Tensor, group: Group | None, op: str = "sum") -> Pending:
    """Begin to sum (or `op="max"`, "min") `tensor` over the group in place; it may be read after `.wait()`."""
    if group is None:
        return DONE
    call = _Call("all_reduce", group, tensor)
    if (shared := _shared_memory(group, tensor)) is not None:
        dense = tensor.contiguous()
        shared.all_reduce_(dense, op)
        call.over()
        if dense is not tensor:
            tensor.detach().copy_(dense)
        return DONE
    operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    # A strided tensor handed to a backend has been dropped silently before (Megatron-LM pull request 5338).
    dense = tensor if tensor.is_contiguous() else tensor.contiguous()
    work = _Waiting(dist.all_reduce(dense, op=operation, group=_process_group(group), async_op=True), call)
    return work if dense is tensor else _CopyBack(work, dense, tensor)


def all_reduce_(tensor: torch.Tensor, group: Group | None, op: str = "sum") -> torch.Tensor:
    """Sum (or `op="max"`, "min") `tensor` over the group in place and return it."""
    all_reduce_start(tensor, group, op).wait()
    return tensor


def all_gather_start(tensor: torch.Tensor, group: Group) -> tuple[torch.Tensor, Pending]:
    """Begin to gather `tensor` `[...]` of every rank into a new `[ranks, ...]`."""
    dense = tensor.contiguous()
    result = torch.empty((group.size, *dense.shape), dtype=dense.dtype, device=dense.device)
    call = _Call("all_gather", group, dense)
    if (shared := _shared_memory(group, dense)) is not None:
        shared.all_gather(dense, result)
        call.over()
        return result, DONE
    work = _all_gather_flat(result.view(-1), dense.view(-1), group=_process_group(group), async_op=True)
    return result, _Waiting(work, call)


def all_gather(tensor: torch.Tensor, group: Group | None, dim: int = 0) -> torch.Tensor:
    """Return the ranks' tensors concatenated along `dim`."""
    if group is None:
        return tensor
    result, work = all_gather_start(tensor, group)
    work.wait()
    return join_ranks(result, dim)


def join_ranks(gathered: torch.Tensor, dim: int) -> torch.Tensor:
    """Turn `[ranks, ..., n, ...]` into `[..., ranks * n, ...]` along `dim`; a copy unless `dim` is outermost."""
    return gathered.movedim(0, dim).flatten(dim, dim + 1)


def split_ranks(tensor: torch.Tensor, ranks: int, dim: int) -> torch.Tensor:
    """Turn `[..., ranks * n, ...]` along `dim` into a contiguous `[ranks, ..., n, ...]`; inverse of `join_ranks`."""
    return tensor.unflatten(dim, (ranks, tensor.shape[dim] // ranks)).movedim(dim, 0).contiguous()


def reduce_scatter_start(tensor: torch.Tensor, group: Group, dim: int) -> tuple[torch.Tensor, Pending]:
    """Begin to sum `tensor` over the group; return this rank's part along `dim`, valid after `.wait()`."""
    assert tensor.shape[dim] % group.size == 0, f"dim {dim} of {tuple(tensor.shape)} does not split over {group}"
    parts = split_ranks(tensor, group.size, dim)
    part = torch.empty_like(parts[0])
    call = _Call("reduce_scatter", group, tensor)
    if (shared := _shared_memory(group, tensor)) is not None:
        shared.reduce_scatter(parts, part)
        call.over()
        return part, DONE
    return part, _summing_part(parts.view(-1), part.view(-1), group, call)


def reduce_scatter(tensor: torch.Tensor, group: Group | None, dim: int = 0) -> torch.Tensor:
    """Return this rank's part along `dim` of the sum of the ranks' tensors."""
    if group is None:
        return tensor
    part, work = reduce_scatter_start(tensor, group, dim)
    work.wait()
    return part


def all_gather_into_start(whole: torch.Tensor, group: Group | None) -> Pending:
    """Begin to fill flat `whole` in place: rank r's r-th equal slice is sent to all others."""
    if group is None:
        return DONE
    part = whole.view(group.size, -1)[group.rank]
    call = _Call("all_gather", group, part)
    if (shared := _shared_memory(group, whole)) is not None:
        shared.all_gather(part, whole)
        call.over()
        return DONE
    # The backends do not promise to allow an input that lies inside the output.
    return _Waiting(_all_gather_flat(whole, part.clone(), group=_process_group(group), async_op=True), call)


def reduce_scatter_into_start(whole: torch.Tensor, group: Group | None) -> Pending:
    """Begin to sum flat `whole` over the group in place: rank r's r-th equal slice is valid after `.wait()`, no other."""
    if group is None:
        return DONE
    part = whole.view(group.size, -1)[group.rank]
    call = _Call("reduce_scatter", group, whole)
    if (shared := _shared_memory(group, whole)) is not None:
        shared.reduce_scatter(whole, part)
        call.over()
        return DONE
    return _summing_part(whole, part, group, call)


def _summing_part(whole: torch.Tensor, part: torch.Tensor, group: Group, call: _Call) -> Pending:
    """Begin the reduce_scatter of flat `whole` into `part`, over the network."""
    if not whole.is_cuda:  # gloo's own is an all_reduce of a copy, which sends twice as much as has to be sent
        return _sum_rows(whole, part, group, call)
    return _Waiting(_reduce_scatter_flat(part, whole, group=_process_group(group), async_op=True), call)


class _SumRows:
    """Rows that arrive, to be added in the order of the ranks, 16-bit ones in fp32."""

    def __init__(self, work: Any, rows: torch.Tensor, part: torch.Tensor) -> None:
        self.work, self.rows, self.part = work, rows, part

    def is_completed(self) -> bool:
        """Return whether all rows are here."""
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()
        total = self.rows[0] if self.rows.dtype.itemsize >= 4 else self.rows[0].float()
        for row in self.rows[1:]:
            total.add_(row)
        self.part.copy_(total)


def all_to_all_sum_start(whole: torch.Tensor, part: torch.Tensor, group: Group) -> Pending:
    """Begin to sum flat `whole`, of a 16-bit type, over the group into this rank's `part`, valid after `.wait()`.

    As a reduce_scatter, but added in fp32 and rounded once, to the type of `part`.
    """
    call = _Call("reduce_scatter", group, whole)
    if (shared := _shared_memory(group, whole)) is not None:
        shared.reduce_scatter(whole, part)
        call.over()
        return DONE
    return _sum_rows(whole, part, group, call)


def _sum_rows(whole: torch.Tensor, part: torch.Tensor, group: Group, call: _Call) -> Pending:
    rows = torch.empty_like(whole).view(group.size, -1)
    work = dist.all_to_all_single(rows.view(-1), whole, group=_process_group(group), async_op=True)
    return _SumRows(_Waiting(work, call), rows, part)


def broadcast_(tensor: torch.Tensor, group: Group | None, source: int = 0) -> torch.Tensor:
    """Overwrite `tensor` with that of the group's rank `source` and return it."""
    if group is None:
        return tensor
    call = _Call("broadcast", group, tensor)
    if (shared := _shared_memory(group, tensor)) is not None:
        dense = tensor.contiguous()
        shared.broadcast_(dense, source)
        call.over()
        if dense is not tensor:
            tensor.detach().copy_(dense)
    else:
        work = dist.broadcast(tensor, src=group.ranks[source], group=_process_group(group), async_op=True)
        _Waiting(work, call).wait()
    return tensor


def barrier(group: Group | None) -> None:
    """Return when every member has arrived."""
    if group is None:
        return
    call = _Call("barrier", group)
    if group.shared_memory is not None:
        group.shared_memory.barrier()
        call.over()
    else:
        _Waiting(dist.barrier(group=_process_group(group), async_op=True), call).wait()


def gather_json(value: Any, group: Group | None, device: torch.device | None = None) -> list[Any]:
    """Return every member's `value`, in rank order, as JSON can carry it."""
    if group is None:
        return [value]
    encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device or "cpu")
    lengths = all_gather(torch.tensor([len(encoded)], device=encoded.device), group).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=encoded.device)
    padded[: len(encoded)] = encoded
    rows, work = all_gather_start(padded, group)
    work.wait()
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows.cpu(), lengths, strict=True)]


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce_(gradient.clone(memory_format=torch.contiguous_format), ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce_(tensor.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter(gradient, ctx.group, ctx.dim), None, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(gradient, ctx.group, ctx.dim), None, None


def copy_to(tensor: torch.Tensor, group: Group | None) -> torch.Tensor:
    """Enter a tensor-parallel region: identity forward, sum of the gradients over the group backward."""
    return tensor if group is None else _CopyTo.apply(tensor, group)


def reduce_from(tensor: torch.Tensor, group: Group | None) -> torch.Tensor:
    """Leave a tensor-parallel region: sum over the group forward, identity backward."""
    return tensor if group is None else _ReduceFrom.apply(tensor, group)


def gather_sequence(tensor: torch.Tensor, group: Group | None, dim: int = 1) -> torch.Tensor:
    """Enter a tensor-parallel region from a sequence-sharded one: `[batch, seq/tp, ...]` to `[batch, seq, ...]`."""
    return tensor if group is None else _GatherSequence.apply(tensor, group, dim)


def scatter_sequence(tensor: torch.Tensor, group: Group | None, dim: int = 1) -> torch.Tensor:
    """Leave a tensor-parallel region into a sequence-sharded one: sum, and keep `[batch, seq/tp, ...]`."""
    return tensor if group is None else _ScatterSequence.apply(tensor, group, dim)


def same_on_all(tensor: torch.Tensor, group: Group | None) -> bool:
    """Whether `tensor` is bitwise the same on every member; for checks and tests."""
    if size_of(group) == 1:
        return True
    rows = all_gather(tensor.detach().reshape(1, -1), group)
    return bool((rows == rows[:1]).all())


def exchange(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], group: Group | None) -> None:
    """Send `outgoing[r]` to each rank r of the group and fill `incoming[r]` from it; only pairs that say so take part.

    What one sends the other must expect in the same size; contiguous tensors, nothing to oneself.
    """
    if group is None or not (outgoing or incoming):
        return
    process_group = _process_group(group)
    operations = [
        dist.P2POp(operation, tensor, group.ranks[rank], process_group)
        for operation, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
        for rank, tensor in sorted(tensors.items())
    ]
    call = _Call("exchange", group)
    try:
        pending = dist.batch_isend_irecv(operations)
    except RuntimeError as error:  # a backend may notice a closed connection when it begins to send
        raise call.lost(error) from error
    for work in pending:
        _Waiting(work, call).wait()
