"""Bring the parts of a unit from the ranks that hold them to the rank that writes them.

All that one rank sends another in a round goes as one message of bytes, so many small tensors cost no more than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from parallax.checkpoint.agreement import Ranks
from parallax.checkpoint.holdings import WEIGHT
from parallax.checkpoint.parts import DTYPES, CheckpointParts, weights_of
from parallax.checkpoint.plan import Move, Unit
from parallax.collectives import exchange

_FlatKey = tuple[str, str, int, int]  # parameter, kind, range of the rank's own flat tensor


def _flat_key(unit: Unit, move: Move) -> _FlatKey:
    name, kind = unit.boxes[move.index][0]
    return name, kind, move.share.start, move.share.stop


class LocalTensors:
    """The tensors of this rank, found by what the plan says of them."""

    def __init__(self, parts: CheckpointParts) -> None:
        self._flat: dict[_FlatKey, torch.Tensor] = {}
        for name, parameter, _ in parts.parameters:
            for start, stop, values in weights_of(parts.optimizer, name, parameter):
                self._flat[name, WEIGHT, start, stop] = values
            for piece in parts.optimizer.pieces(name) if parts.optimizer else ():
                for kind, tensor in piece.tensors.items():
                    self._flat[name, kind, piece.start, piece.stop] = tensor.detach().view(-1)

    def part(self, unit: Unit, move: Move) -> torch.Tensor:
        """Return the box `[rows, columns]` of a move that this rank sends."""
        return move.block.view(self._flat[_flat_key(unit, move)], origin=move.share.start)


class Snapshot(LocalTensors):
    """A copy, in this host's memory, of what this rank sends or writes of its tensors; its buffers are used again and again."""

    def __init__(self, parts: CheckpointParts, units: Iterable[Unit], rank: int) -> None:
        super().__init__(parts)
        needed = {_flat_key(unit, move) for unit in units for move in unit.moves if move.sender == rank}
        self._flat = {key: _host_buffer(tensor) for key, tensor in self._flat.items() if key in needed}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._flat.values())

    @torch.no_grad()
    def take(self, live: LocalTensors) -> None:
        """Copy the tensors as they are; they may be changed as soon as this returns."""
        for key, buffer in self._flat.items():
            buffer.copy_(live._flat[key], non_blocking=True)
        if any(tensor.is_cuda for tensor in live._flat.values()):
            torch.cuda.current_stream().synchronize()


def _host_buffer(tensor: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return buffer.zero_()  # touched once, so that the first copy does not wait for the kernel to find the memory


@dataclass
class Assembled:
    """A unit on its writer: one buffer `[rows, columns]` for each of its boxes, or the writer's own tensor if that is all of it."""

    unit: Unit
    buffers: list[torch.Tensor]

    def target(self, move: Move) -> torch.Tensor:
        """Return where the box of a move belongs."""
        whole, part = self.unit.boxes[move.index][1], move.block.box
        rows, columns = part.shape
        return self.buffers[move.index][
            part.row - whole.row : part.row - whole.row + rows,
            part.column - whole.column : part.column - whole.column + columns,
        ]

    def content(self) -> memoryview:
        """Return the bytes to append to the file."""
        tensor = self.buffers[0]
        if self.unit.target.make is not None:
            whole = [buffer.view(shape) for buffer, shape in zip(self.buffers, self.unit.shapes, strict=True)]
            tensor = self.unit.target.make(whole)
        return _bytes_of(tensor).cpu().numpy().data


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def transfer(units: Sequence[Unit], local: LocalTensors, mesh: Ranks) -> list[Assembled]:
    """Return the units of a round that this rank writes, put together; called by all ranks."""
    outgoing: dict[int, list[torch.Tensor]] = {}
    incoming: dict[int, list[torch.Tensor]] = {}
    assembled = []
    for unit in units:
        writer = unit.file.writer
        if writer == mesh.rank:
            if (whole := _whole(unit, local, writer)) is not None:
                assembled.append(Assembled(unit, [whole]))
                continue
            dtype = DTYPES[unit.target.dtype]
            buffers = [torch.empty(box.shape, dtype=dtype, device=mesh.device) for _, box in unit.boxes]
            assembled.append(Assembled(unit, buffers))
        for move in unit.moves:
            sender = move.sender
            if sender == mesh.rank == writer:
                assembled[-1].target(move).copy_(local.part(unit, move))
            elif sender == mesh.rank:
                outgoing.setdefault(writer, []).append(local.part(unit, move))
            elif writer == mesh.rank:
                incoming.setdefault(sender, []).append(assembled[-1].target(move))
    _exchange(outgoing, incoming, mesh)
    return assembled


def _whole(unit: Unit, local: LocalTensors, writer: int) -> torch.Tensor | None:
    """Return the writer's own tensor where the unit is just that: it need not be copied to be written."""
    if len(unit.boxes) > 1 or len(unit.moves) > 1 or unit.moves[0].sender != writer:
        return None
    part = local.part(unit, unit.moves[0])
    return part if part.shape == unit.boxes[0][1].shape and part.dtype == DTYPES[unit.target.dtype] else None


def _exchange(outgoing: dict[int, list[torch.Tensor]], incoming: dict[int, list[torch.Tensor]], mesh: Ranks) -> None:
    """Send and receive lists of `[rows, columns]`, packed; the order in a pack is that of the plan on both sides."""
    packed = {rank: torch.cat([_bytes_of(part) for part in parts]).to(mesh.device) for rank, parts in outgoing.items()}
    sizes = {rank: [part.numel() * part.element_size() for part in parts] for rank, parts in incoming.items()}
    received = {rank: torch.empty(sum(counts), dtype=torch.uint8, device=mesh.device) for rank, counts in sizes.items()}
    exchange(packed, received, mesh.world)
    for rank, parts in incoming.items():
        for part, data in zip(parts, received[rank].split(sizes[rank]), strict=True):
            # As bytes, since a pack does not keep the alignment of its parts' types.
            part.view(torch.uint8).copy_(data.view(part.shape[0], -1))
