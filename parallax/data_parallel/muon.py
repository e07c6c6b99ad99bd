"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) on matrices of which each rank keeps flat pieces.

    every rank    update its pieces of the momentum, and the direction that comes of them       elementwise, no communication
    to owners     each matrix's direction is put together on one rank                           one exchange
    owners        make it orthogonal, by Newton-Schulz iterations of the whole matrix
    from owners   each rank gets its pieces of the result, and moves its main parameters        one exchange

A matrix is one parameter as a checkpoint has it: whole, without tp's cuts or padding; q, k and v, gate and up are matrices of
their own whatever is computed or stored together. So any sharding makes the update that one process makes. The work is
divided among the ranks that keep a part of a matrix. Ranks that keep the same pieces (ZeRO 0, groups of ZeRO that replicate)
each do it among themselves: the results are bitwise equal, since the same numbers go in.

As its author says, embeddings, the head, norms and biases are left to AdamW. The update is scaled by 0.2 sqrt(max(rows, columns))
(Liu et al. 2025, arXiv:2502.16982, section 2.2), so that both rules take the same learning rate and decay; torch.optim.Muon
calls that "match_rms_adamw". The iterations run in the model's type: torch's always run in bf16, and would round
differences of the last bit, which layouts have, to some of the third digit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from parallax.collectives import exchange, gather_json
from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.flat import Bucket
from parallax.data_parallel.rules import Region, Update
from parallax.mesh import Group, rank_of
from parallax.tensor_parallel.facts import ParameterFacts

# Of the quintic polynomial: its slope at zero is as steep as can be, and it leads into [0.7, 1.2], not to 1 (Jordan et al.).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7


def is_for_muon(facts: ParameterFacts) -> bool:
    """Whether a parameter is a matrix between hidden states."""
    return facts.decays and len(facts.full_shape) == 2 and not facts.is_table


def orthogonalize(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return about U V^T of the singular value decomposition U S V^T of `[rows, columns]`, computed in `dtype`."""
    a, b, c = _COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix.to(dtype) if wide else matrix.to(dtype).t()
    x = x / x.norm().clamp(min=_SMALLEST_NORM)  # no singular value is above 1
    for _ in range(_ITERATIONS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.t()


def update_scale(shape: Sequence[int]) -> float:
    """Return what makes the root mean square of an orthogonal matrix that of an update of AdamW, about 0.2."""
    return 0.2 * max(shape) ** 0.5


@dataclass(frozen=True)
class Piece:
    """The flat range [start, stop) of the local tensor of `shard`, kept by each of `ranks` (positions in the cell, ascending)."""

    shard: int
    start: int
    stop: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A slice of a matrix along tp: rows (or columns) [start, start + rows) of `dim`, held as a tensor of `local_shape`."""

    dim: int
    start: int
    rows: int
    local_shape: tuple[int, int]


@dataclass(frozen=True)
class Matrix:
    """A matrix, the slices and pieces in which it is held in a cell, and the rank of the cell that makes it orthogonal."""

    name: str
    shape: tuple[int, int]
    shards: tuple[Shard, ...]
    pieces: tuple[Piece, ...]
    owner: int

    def source(self, piece: Piece) -> int:
        """Return the rank that the owner has a piece from."""
        return self.owner if self.owner in piece.ranks else piece.ranks[0]


Row = tuple[str, list[int], int, int, int, list[int], list[list[int]]]


def describe(name: str, facts: ParameterFacts, local_shape: Sequence[int], ranges: list[list[int]]) -> Row:
    """Return, as JSON can carry it, what a rank keeps of a matrix: flat ranges of its local tensor."""
    dim = facts.shard_dim or 0
    rows = facts.full_shape[dim] if facts.shard_dim is None else facts.shard_rows
    return name, list(facts.full_shape), dim, facts.shard_start, rows, list(local_shape), ranges


def plan_matrices(rows_of_ranks: Sequence[Iterable[Row]]) -> list[Matrix]:
    """Return the matrices of a cell with their owners, from what each of its ranks keeps; the same on all of them.

    The largest is given away first, each to the rank with the least to do among those that keep a part of it.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    shards: dict[str, set[Shard]] = defaultdict(set)
    holders: dict[str, dict[tuple[Shard, int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, rows in enumerate(rows_of_ranks):
        for name, shape, dim, start, length, local_shape, ranges in rows:
            shard = Shard(dim, start, length, (local_shape[0], local_shape[1]))
            shapes[name] = tuple(shape)
            shards[name].add(shard)
            for first, last in ranges:
                holders[name][shard, first, last].append(rank)
    matrices = []
    work: dict[int, int] = defaultdict(int)
    for name in sorted(holders, key=lambda name: (-_cost(shapes[name]), name)):
        ordered = sorted(shards[name], key=lambda shard: shard.start)
        pieces = tuple(
            Piece(ordered.index(shard), first, last, tuple(ranks))
            for (shard, first, last), ranks in holders[name].items()
        )
        owner = min({rank for piece in pieces for rank in piece.ranks}, key=lambda rank: (work[rank], rank))
        work[owner] += _cost(shapes[name])
        rows_, columns = shapes[name]
        matrices.append(Matrix(name, (rows_, columns), tuple(ordered), pieces, owner))
    return matrices


def _cost(shape: Sequence[int]) -> int:
    return shape[0] * shape[1] * min(shape)


Range = tuple[str, int, int]  # of the flat local tensor of a parameter
Key = tuple[int, int]  # matrix, piece: their places in a cell
Tensors = dict[Key, torch.Tensor]  # flat, of a piece


class Cell:
    """Ranks that between them keep some matrices."""

    def __init__(self, group: Group | None, rows: list[Row], device: torch.device) -> None:
        self.group, self.rank, self.device = group, rank_of(group), device
        self.matrices = plan_matrices(gather_json(rows, group, device))
        self.pieces = {
            (number, place): piece
            for number, matrix in enumerate(self.matrices)
            for place, piece in enumerate(matrix.pieces)
        }

    def orthogonalize(self, flat: Mapping[Range, torch.Tensor], dtype: torch.dtype, main_dtype: torch.dtype) -> None:
        """Replace the matrices, of which `flat` has this rank's pieces, by their scaled orthogonal ones, computed in `dtype`."""
        mine = {
            key: flat[self.matrices[key[0]].name, piece.start, piece.stop]
            for key, piece in self.pieces.items()
            if self.rank in piece.ranks
        }
        here = {number: matrix for number, matrix in enumerate(self.matrices) if matrix.owner == self.rank}
        shards = {
            (number, place): torch.zeros(shard.local_shape, dtype=main_dtype, device=self.device)
            for number, matrix in here.items()
            for place, shard in enumerate(matrix.shards)
        }
        owned = {
            key: shards[key[0], piece.shard].view(-1)[piece.start : piece.stop]
            for key, piece in self.pieces.items()
            if key[0] in here
        }
        to_owners = [
            (self.matrices[key[0]].source(piece), self.matrices[key[0]].owner, key)
            for key, piece in self.pieces.items()
        ]
        self._move(to_owners, mine, owned)
        for number, matrix in here.items():
            parts = [
                shards[number, place].narrow(shard.dim, 0, shard.rows) for place, shard in enumerate(matrix.shards)
            ]
            whole = orthogonalize(torch.cat(parts, matrix.shards[0].dim), dtype) * update_scale(matrix.shape)
            for part, shard in zip(parts, matrix.shards, strict=True):
                part.copy_(whole.narrow(shard.dim, shard.start, shard.rows))
        from_owners = [
            (self.matrices[key[0]].owner, rank, key) for key, piece in self.pieces.items() for rank in piece.ranks
        ]
        self._move(from_owners, owned, mine)

    def _move(self, routes: list[tuple[int, int, Key]], out: Tensors, into: Tensors) -> None:
        """Copy pieces along (sender, receiver, piece); all that one rank sends another goes as one message."""
        outgoing: dict[int, list[torch.Tensor]] = defaultdict(list)
        incoming: dict[int, list[torch.Tensor]] = defaultdict(list)
        for sender, receiver, key in routes:
            if sender == receiver == self.rank:
                into[key].copy_(out[key])
            elif sender == self.rank:
                outgoing[receiver].append(out[key])
            elif receiver == self.rank:
                incoming[sender].append(into[key])
        sent = {rank: torch.cat(pieces) for rank, pieces in outgoing.items()}
        received = {rank: pieces[0].new_empty(sum(map(len, pieces))) for rank, pieces in incoming.items()}
        exchange(sent, received, self.group)
        for rank, pieces in incoming.items():
            for piece, values in zip(pieces, received[rank].split([len(piece) for piece in pieces]), strict=True):
                piece.copy_(values)


class Muon:
    """The rule for matrices; see `parallax.data_parallel.rules.Rule`. Made by every rank at the same time.

    Nesterov's momentum and the decoupled decay are as in torch.optim.Muon.
    """

    states = ("momentum_buffer",)

    def __init__(self, buckets: GradientBuckets, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        self._buckets = [bucket for bucket in buckets.buckets if bucket.plan.key.rule == "muon"]
        self._ranges: dict[Range, tuple[Bucket, slice]] = {}  # of this rank's pieces: where in `kept`
        rows: dict[tuple[tuple[int, ...], str], list[Row]] = {}
        some: dict[tuple[tuple[int, ...], str], Bucket] = {}
        for bucket in self._buckets:
            for place in bucket.plan.places:
                parameter, facts = buckets.trained[place.name]
                start, stop = max(place.offset, bucket.kept.start), min(place.stop, bucket.kept.stop)
                ranges = []
                if start < stop:
                    ranges.append([start - place.offset, stop - place.offset])
                    here = slice(start - bucket.kept.start, stop - bucket.kept.start)
                    self._ranges[place.name, start - place.offset, stop - place.offset] = bucket, here
                cell = (cell_ranks(facts, buckets), bucket.plan.key.dtype)
                rows.setdefault(cell, []).append(describe(place.name, facts, parameter.shape, ranges))
                some[cell] = bucket
        groups = buckets.mesh.groups_of("muon", [ranks for ranks, _ in rows])
        # A cell's matrices have one type, that of any of their buckets.
        self._cells = [(Cell(groups[cell[0]], rows[cell], buckets.device), some[cell]) for cell in sorted(rows)]

    def update(self, regions: Sequence[Region], update: Update) -> None:
        # The gradients have served when the directions are known: these take their place, where the type is right.
        directions = {bucket: bucket.grad(bucket.kept).to(bucket.main_params.dtype) for bucket in self._buckets}
        for region in regions:
            self._find_direction(region, _part(directions, region), update)
        flat = {key: directions[bucket][here] for key, (bucket, here) in self._ranges.items()}
        for cell, bucket in self._cells:
            cell.orthogonalize(flat, bucket.parameters.dtype, bucket.main_params.dtype)
        for region in regions:
            moved = region.main_param * (1 - update.learning_rate * self.weight_decay)
            moved.sub_(_part(directions, region), alpha=update.learning_rate)
            region.main_param.copy_(_unless(update.skip, region.main_param, moved))

    def _find_direction(self, region: Region, gradient: torch.Tensor, update: Update) -> None:
        """Update a region's momentum, and turn its gradient into the direction to go."""
        if update.clip is not None:
            gradient.mul_(update.clip.to(gradient.dtype))
        with region.widened() as wide:
            buffer = wide.states["momentum_buffer"]
            moved = buffer.lerp(gradient, 1 - self.momentum)
            gradient.lerp_(moved, self.momentum)
            buffer.copy_(_unless(update.skip, buffer, moved))


def _part(directions: Mapping[Bucket, torch.Tensor], region: Region) -> torch.Tensor:
    first = region.bucket.kept.start
    return directions[region.bucket][region.start - first : region.stop - first]


def _unless(skip: torch.Tensor | None, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return after if skip is None else torch.where(skip != 0, before, after)


def cell_ranks(facts: ParameterFacts, buckets: GradientBuckets) -> tuple[int, ...]:
    """Return the global ranks, ascending, that between them keep one whole matrix, this one among them."""
    mesh = buckets.mesh
    layout, here = mesh.layout, mesh.layout.coordinates(mesh.rank)
    size = 1 if buckets.zero == 0 else buckets.zero_group or layout.dp
    first = here["dp"] - here["dp"] % size
    stages = facts.replicas.stages if buckets.zero else ()
    return tuple(
        layout.global_rank(pp, dp, tp)
        for pp in sorted(set(stages or (here["pp"],)))
        for dp in range(first, first + size)
        for tp in range(layout.tp)
    )
