"""Who writes what, and who sends what to whom: made alike on every rank from what all say that they hold.

    source   a full tensor of the run: a parameter, or one of its optimizer states, cut into shares held by the ranks
    target   a tensor of the checkpoint, made of one source (or, GPT-2's fused projections, of three)
    file     some targets, in the model's order; how targets are divided into files depends on the model only
    unit     a few MiB of a target, put together on the rank that writes its file, then appended to it
    move     a box of a unit that one rank has and the writer needs

No rank ever holds more than a round's units; a share that several ranks hold is sent by the one nearest to the writer,
which is the writer itself where it can be. The plan costs every rank time in proportion to all shares of all ranks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parallax.checkpoint.geometry import Block, Box, Holding, holding_of
from parallax.checkpoint.parts import DTYPE_NAMES, CheckpointParts
from parallax.checkpoint.safetensors_file import ITEM_BYTES, Entry, make_header
from parallax.errors import ConfigError
from parallax.models.hugging_face import hugging_face_tensors

WEIGHT = ""  # the kind of source that is the parameter itself
UNIT_BYTES = 32 << 20  # put together at once; large enough for the disk and the network, small beside a model
ROUND_BYTES = 128 << 20  # that one rank sends and puts together between two waits
FILES = 32  # that a large model is divided into, unless this makes them smaller or larger than
MIN_FILE_BYTES, MAX_FILE_BYTES = 16 << 20, 4 << 30

Key = tuple[str, str]  # parameter, kind


@dataclass(frozen=True)
class Share:
    """Elements [start, stop) of the flat local tensor of a source on `rank`."""

    rank: int
    holding: Holding
    start: int
    stop: int


@dataclass
class Source:
    dtype: str
    shape: tuple[int, ...]
    shares: list[Share] = field(default_factory=list)


Sources = dict[Key, Source]


def describe(parts: CheckpointParts) -> list[Any]:
    """Return what this rank holds, as JSON: one row per parameter."""
    rows = []
    for name, parameter, facts in parts.parameters:
        holding = holding_of(facts, tuple(parameter.shape))
        kinds: dict[str, str] = {}
        pieces = []
        for piece in parts.optimizer.pieces(name) if parts.optimizer else ():
            kinds |= {kind: DTYPE_NAMES[tensor.dtype] for kind, tensor in piece.tensors.items()}
            pieces.append([piece.start, piece.stop])
        if kinds.get("main_param") == DTYPE_NAMES[parameter.dtype]:
            del kinds["main_param"]  # then it is the parameter, bit for bit
        numbers = [holding.rows, holding.full_columns, holding.local_columns]
        numbers += [holding.held_columns, holding.first_column]
        rows.append([name, DTYPE_NAMES[parameter.dtype], list(facts.full_shape), numbers, kinds, pieces])
    return rows


def collect(rows_of_ranks: Sequence[list[Any]]) -> Sources:
    """Return every source of the run from what the ranks hold, in rank order."""
    sources: Sources = {}
    for rank, rows in enumerate(rows_of_ranks):
        for name, dtype, shape, numbers, kinds, pieces in rows:
            holding = Holding(*numbers)
            ranges = {WEIGHT: [[0, holding.rows * holding.local_columns]], **dict.fromkeys(kinds, pieces)}
            for kind, dtype_name in ((WEIGHT, dtype), *kinds.items()):
                source = sources.setdefault((name, kind), Source(dtype_name, tuple(shape)))
                assert (source.dtype, source.shape) == (dtype_name, tuple(shape)), f"{name}: the ranks disagree"
                source.shares += [Share(rank, holding, start, stop) for start, stop in ranges[kind]]
    return sources


@dataclass(frozen=True)
class Target:
    """A tensor of the checkpoint. make: from its sources, whole, if it is more than the bytes of one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[Key, ...]
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass
class FilePlan:
    name: str
    writer: int
    targets: list[Target]
    header: bytes
    entries: dict[str, Entry]


@dataclass(frozen=True)
class Move:
    """A box that `share`'s rank has and the writer puts into buffer number `index` of the unit."""

    index: int
    share: Share
    block: Block


@dataclass
class Unit:
    """Boxes of sources that are put together on `file.writer`; a part of one target, or all of it."""

    file: FilePlan
    target: Target
    boxes: list[tuple[Key, Box]]
    moves: list[Move]

    @property
    def num_bytes(self) -> int:
        return sum(box.size for _, box in self.boxes) * ITEM_BYTES[self.target.dtype]

    def bytes_by_rank(self) -> Counter[int]:
        """Return what each rank has to send for this unit, and the writer to put together."""
        counts = Counter({self.file.writer: self.num_bytes})
        for move in self.moves:
            if move.share.rank != self.file.writer:
                counts[move.share.rank] += move.block.box.size * ITEM_BYTES[self.target.dtype]
        return counts


def model_targets(parts: CheckpointParts, sources: Sources) -> list[Target]:
    """Return the tensors of the Hugging Face model, in its order.

    Raises ConfigError when the model has other parameters than its configuration says.
    """
    targets, left = [], {name for name, kind in sources if kind == WEIGHT}
    for tensor in hugging_face_tensors(parts.config):
        keys = tuple((name, WEIGHT) for name in tensor.sources)
        missing = [name for name, _ in keys if name not in left]
        if missing:
            raise ConfigError(
                f"the model has no parameter {missing[0]}, which a {parts.config.family} model consists of"
            )
        left.difference_update(tensor.sources)
        shape = tensor.shape([sources[key].shape for key in keys])
        make = None if tensor.is_stored_as_is else tensor.make
        targets.append(Target(tensor.name, sources[keys[0]].dtype, shape, keys, make))
    if left:
        raise ConfigError(f"the parameter {min(left)} has no place in a Hugging Face model of {parts.config.family}")
    return targets


def optimizer_targets(model: Sequence[Target], sources: Sources) -> list[Target]:
    """Return the optimizer's tensors, named `parameter.kind`, in the model's order."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, kind in sources:
        if kind != WEIGHT:
            kinds[name].append(kind)
    keys = [(name, kind) for target in model for name, _ in target.sources for kind in sorted(kinds[name])]
    return [Target(".".join(key), sources[key].dtype, sources[key].shape, (key,)) for key in keys]


def divide_into_files(stem: str, targets: Sequence[Target]) -> list[list[Target]]:
    """Return the targets cut into files of about equal size, in order; a function of the model alone."""
    limit = min(max(sum(target.num_bytes for target in targets) // FILES, MIN_FILE_BYTES), MAX_FILE_BYTES)
    files: list[list[Target]] = []
    size = 0
    for target in targets:
        if not files or size + target.num_bytes > limit:
            files.append([])
            size = 0
        files[-1].append(target)
        size += target.num_bytes
    return files


def plan_files(groups: dict[str, Sequence[Target]], sources: Sources) -> list[FilePlan]:
    """Return all files, `stem` to its targets given, each with a writer that holds some of it, bytes balanced."""
    named = []
    for stem, targets in groups.items():
        files = divide_into_files(stem, targets)
        for number, content in enumerate(files, 1):
            # Wide types first, so that every tensor is aligned to its own type.
            content = sorted(content, key=lambda target: -ITEM_BYTES[target.dtype])
            named.append((f"{stem}-{number:05d}-of-{len(files):05d}.safetensors", content))
    loads: Counter[int] = Counter()
    plans = {}
    for name, content in sorted(named, key=lambda item: -sum(target.num_bytes for target in item[1])):
        holders = {share.rank for target in content for key in target.sources for share in sources[key].shares}
        writer = min(holders, key=lambda rank: (loads[rank], rank))
        loads[writer] += sum(target.num_bytes for target in content)
        header, entries = make_header([(target.name, target.dtype, target.shape) for target in content])
        plans[name] = FilePlan(name, writer, content, header, entries)
    return [plans[name] for name, _ in named]


def units_of(file: FilePlan, sources: Sources) -> Iterator[Unit]:
    """Yield the units of a file in the order in which they are appended to it."""
    for target in file.targets:
        nearest = {key: _nearest_shares(sources[key], file.writer) for key in target.sources}
        wholes = [(key, sources[key].shares[0].holding.whole) for key in target.sources]
        if target.make is not None:
            groups = [wholes]
        else:
            key, whole = wholes[0]
            groups = [[(key, box)] for box in whole.chunks(UNIT_BYTES // ITEM_BYTES[target.dtype])]
        for boxes in groups:
            moves = [move for index, (key, box) in enumerate(boxes) for move in _moves(index, box, nearest[key], key)]
            yield Unit(file, target, boxes, moves)


def _nearest_shares(source: Source, writer: int) -> list[tuple[Share, list[Block]]]:
    """Return, of shares that are equal, the one on the rank nearest to the writer, with its blocks."""
    nearest: dict[tuple[Holding, int, int], Share] = {}
    for share in source.shares:
        key = (share.holding, share.start, share.stop)
        if key not in nearest or abs(share.rank - writer) < abs(nearest[key].rank - writer):
            nearest[key] = share
    return [(share, list(share.holding.blocks(share.start, share.stop))) for share in nearest.values()]


def _moves(index: int, box: Box, shares: list[tuple[Share, list[Block]]], key: Key) -> list[Move]:
    moves = [
        Move(index, share, part)
        for share, blocks in shares
        for block in blocks
        if (part := block.within(box)) is not None
    ]
    held = sum(move.block.box.size for move in moves)
    assert held == box.size, f"{key}: the ranks hold {held} of the {box.size} elements of {box}"
    return moves


def rounds(files: Sequence[FilePlan], sources: Sources) -> Iterator[list[Unit]]:
    """Yield the units of all files, each writer's in order, so many at a time that no rank sends and puts together more
    than ROUND_BYTES (one unit that is larger, alone)."""
    files_of: dict[int, list[FilePlan]] = defaultdict(list)
    for file in files:
        files_of[file.writer].append(file)
    streams = {writer: (unit for file in mine for unit in units_of(file, sources)) for writer, mine in files_of.items()}
    heads = {writer: next(stream, None) for writer, stream in streams.items()}
    while any(heads.values()):
        chosen: list[Unit] = []
        loads: Counter[int] = Counter()
        for writer, stream in streams.items():
            while (unit := heads[writer]) and (not chosen or _fits(unit, loads)):
                loads += unit.bytes_by_rank()
                chosen.append(unit)
                heads[writer] = next(stream, None)
        yield chosen


def _fits(unit: Unit, loads: Counter[int]) -> bool:
    return all(loads[rank] + count <= ROUND_BYTES for rank, count in unit.bytes_by_rank().items())
