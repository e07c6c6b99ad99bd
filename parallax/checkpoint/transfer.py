"""Bring the parts of a unit from the ranks that hold them to the rank that writes them.

All that one rank sends another in a round goes as one message of bytes, so many small tensors cost no more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parallax.checkpoint.parts import DTYPES, CheckpointParts
from parallax.checkpoint.plan import WEIGHT, Move, Unit
from parallax.collectives import exchange
from parallax.mesh import Mesh


class LocalTensors:
    """The tensors of this rank, found by what the plan says of them."""

    def __init__(self, parts: CheckpointParts) -> None:
        self._flat: dict[tuple[str, str, int, int], torch.Tensor] = {}
        for name, parameter, _ in parts.parameters:
            self._flat[name, WEIGHT, 0, parameter.numel()] = parameter.detach().view(-1)
            for piece in parts.optimizer.pieces(name) if parts.optimizer else ():
                for kind, tensor in piece.tensors.items():
                    self._flat[name, kind, piece.start, piece.stop] = tensor.detach().view(-1)

    def part(self, unit: Unit, move: Move) -> torch.Tensor:
        """Return the box `[rows, columns]` of a move that this rank sends."""
        name, kind = unit.boxes[move.index][0]
        flat = self._flat[name, kind, move.share.start, move.share.stop]
        return move.block.view(flat, origin=move.share.start)


@dataclass
class Assembled:
    """A unit on its writer: one buffer `[rows, columns]` for each of its boxes."""

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

    def content(self, shapes: Sequence[tuple[int, ...]]) -> memoryview:
        """Return the bytes to append to the file; shapes: of the unit's sources, for a target made of whole ones."""
        tensor = self.buffers[0]
        if self.unit.target.make is not None:
            whole = [buffer.view(shape) for buffer, shape in zip(self.buffers, shapes, strict=True)]
            tensor = self.unit.target.make(whole)
        return _bytes_of(tensor).cpu().numpy().data


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def transfer(units: Sequence[Unit], local: LocalTensors, mesh: Mesh) -> list[Assembled]:
    """Return the units of a round that this rank writes, put together; called by all ranks of the mesh."""
    outgoing: dict[int, list[torch.Tensor]] = {}
    incoming: dict[int, list[torch.Tensor]] = {}
    assembled = []
    for unit in units:
        writer = unit.file.writer
        if writer == mesh.rank:
            dtype = DTYPES[unit.target.dtype]
            buffers = [torch.empty(box.shape, dtype=dtype, device=mesh.device) for _, box in unit.boxes]
            assembled.append(Assembled(unit, buffers))
        for move in unit.moves:
            sender = move.share.rank
            if sender == mesh.rank == writer:
                assembled[-1].target(move).copy_(local.part(unit, move))
            elif sender == mesh.rank:
                outgoing.setdefault(writer, []).append(local.part(unit, move))
            elif writer == mesh.rank:
                incoming.setdefault(sender, []).append(assembled[-1].target(move))
    _exchange(outgoing, incoming, mesh)
    return assembled


def _exchange(outgoing: dict[int, list[torch.Tensor]], incoming: dict[int, list[torch.Tensor]], mesh: Mesh) -> None:
    """Send and receive lists of `[rows, columns]`, packed; the order in a pack is that of the plan on both sides."""
    packed = {rank: torch.cat([_bytes_of(part) for part in parts]).to(mesh.device) for rank, parts in outgoing.items()}
    sizes = {rank: [part.numel() * part.element_size() for part in parts] for rank, parts in incoming.items()}
    received = {rank: torch.empty(sum(counts), dtype=torch.uint8, device=mesh.device) for rank, counts in sizes.items()}
    exchange(packed, received, mesh.world)
    for rank, parts in incoming.items():
        for part, data in zip(parts, received[rank].split(sizes[rank]), strict=True):
            # As bytes, since a pack does not keep the alignment of its parts' types.
            part.view(torch.uint8).copy_(data.view(part.shape[0], -1))
