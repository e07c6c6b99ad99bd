"""What all ranks hold of each tensor of the run, made known to all of them at the price of one copy of the model.

    table     what one rank holds, as JSON: a row for each parameter, and one for each that it keeps optimizer states of
    ranks     with equal tables (replicas) are described once, by the lowest of them; the others only give a checksum
    source    a full tensor of the run: a parameter, or one of its optimizer states, cut into shares held by ranks

ZeRO gives each replica other pieces of the states, and ZeRO 3 of the parameters too. Those are a table of their own, short on
each rank: all ranks together keep each parameter about once.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parallax.checkpoint.agreement import Ranks
from parallax.checkpoint.geometry import Holding, holding_of
from parallax.checkpoint.parts import DTYPE_NAMES, CheckpointParts
from parallax.collectives import broadcast_, gather_json
from parallax.mesh import size_of

WEIGHT = ""  # the kind of source that is the parameter itself

Key = tuple[str, str]  # parameter, kind
Table = list[Any]
Tables = tuple[Table, Table]


@dataclass(frozen=True)
class Share:
    """Elements [start, stop) of the flat local tensor of a source, which each of `ranks`, ascending, holds."""

    ranks: tuple[int, ...]
    holding: Holding
    start: int
    stop: int

    def nearest(self, rank: int) -> int:
        """Return the holder nearest to `rank`, the lower of two."""
        place = bisect_left(self.ranks, rank)
        return min(self.ranks[max(0, place - 1) : place + 1], key=lambda holder: abs(holder - rank))


@dataclass
class Source:
    dtype: str
    shape: tuple[int, ...]
    shares: list[Share] = field(default_factory=list)


Sources = dict[Key, Source]


def describe(parts: CheckpointParts) -> Tables:
    """Return the tables of this rank, its parameters and its pieces of optimizer states, as JSON."""
    parameters: Table = []
    pieces: Table = []
    for name, parameter, facts in parts.parameters:
        holding = holding_of(facts, tuple(parameter.shape))
        numbers = [holding.rows, holding.full_columns, holding.local_columns]
        numbers += [holding.held_columns, holding.first_column]
        dtype = DTYPE_NAMES[parameter.dtype]
        shards = None if parts.optimizer is None else parts.optimizer.weights(name)
        parameters.append([name, dtype, list(facts.full_shape), numbers, shards is None])
        if shards:
            pieces.append([name, {WEIGHT: dtype}, [[start, stop] for start, stop, _ in shards]])
        kinds: dict[str, str] = {}
        ranges = []
        for piece in parts.optimizer.pieces(name) if parts.optimizer else ():
            kinds |= {kind: DTYPE_NAMES[tensor.dtype] for kind, tensor in piece.tensors.items()}
            ranges.append([piece.start, piece.stop])
        if kinds.get("main_param") == dtype:
            del kinds["main_param"]  # then it is the parameter, bit for bit
        if kinds and ranges:
            pieces.append([name, kinds, ranges])
    return parameters, pieces


def gather_sources(parts: CheckpointParts, ranks: Ranks) -> Sources:
    """Return every source of the run; called by all ranks."""
    parameters, pieces = describe(parts)
    return collect(_gather_distinct(parameters, ranks), _gather_distinct(pieces, ranks))


def collect(parameters: Mapping[tuple[int, ...], Table], pieces: Mapping[tuple[int, ...], Table]) -> Sources:
    """Return every source of the run from the tables of each set of ranks that have the same."""
    sources: Sources = {}
    table_of = {rank: {row[0]: row for row in table} for ranks, table in parameters.items() for rank in ranks[:1]}
    first_of = {rank: ranks[0] for ranks in parameters for rank in ranks}
    for ranks, table in parameters.items():
        for name, dtype, shape, numbers, is_whole in table:
            holding = Holding(*numbers)
            whole = Share(ranks, holding, 0, holding.rows * holding.local_columns)
            _add(sources, (name, WEIGHT), dtype, shape, [whole] if is_whole else [])
    for ranks, table in pieces.items():
        by_holding: dict[int, list[int]] = {}
        for rank in ranks:  # pieces may look the same on ranks that hold other parts of the parameters
            by_holding.setdefault(first_of[rank], []).append(rank)
        for first, members in by_holding.items():
            for name, kinds, ranges in table:
                _, _, shape, numbers, _ = table_of[first][name]
                shares = [Share(tuple(members), Holding(*numbers), start, stop) for start, stop in ranges]
                for kind, dtype in kinds.items():
                    _add(sources, (name, kind), dtype, shape, shares)
    return sources


def _add(sources: Sources, key: Key, dtype: str, shape: Sequence[int], shares: Sequence[Share]) -> None:
    source = sources.setdefault(key, Source(dtype, tuple(shape)))
    assert (source.dtype, source.shape) == (dtype, tuple(shape)), f"{key}: the ranks disagree"
    source.shares += shares


def _gather_distinct(value: Table, ranks: Ranks) -> dict[tuple[int, ...], Table]:
    """Return every rank's value by the ranks that have it; equal ones travel once."""
    encoded = json.dumps(value).encode()
    mine = hashlib.sha256(encoded).hexdigest()
    members: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank, (digest, size) in enumerate(gather_json([mine, len(encoded)], ranks.world, ranks.device)):
        members.setdefault(digest, []).append(rank)
        sizes[digest] = size
    if 2 * len(members) > size_of(ranks.world):
        # Few are equal: one call for all, padded to the longest, rather than one for each.
        values = gather_json(value if members[mine][0] == ranks.rank else None, ranks.world, ranks.device)
        return {tuple(group): values[group[0]] for group in members.values()}
    found = {}
    for digest, group in members.items():
        data = torch.empty(sizes[digest], dtype=torch.uint8, device=ranks.device)
        if group[0] == ranks.rank:
            data.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
        broadcast_(data, ranks.world, source=group[0])
        found[tuple(group)] = json.loads(data.cpu().numpy().tobytes())
    return found
