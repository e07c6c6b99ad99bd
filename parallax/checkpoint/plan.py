"""Who writes what, and who sends what to whom: made alike on every rank from what all say that they hold.

    source   a full tensor of the run: a parameter, or one of its optimizer states, cut into shares held by the ranks
    target   a tensor of the checkpoint, made of one source (or, GPT-2's fused projections, of three)
    file     some targets, in the model's order; how targets are divided into files depends on the model only
    unit     a few MiB of a target, put together on the rank that writes its file, then appended to it
    move     a box of a unit that one rank has and the writer needs

No rank ever holds more than a round's units; a share that several ranks hold is sent by the one nearest to the writer,
which is the writer itself where it can be. Replicas hold the same, so they are described once (parallax.checkpoint.holdings):
the plan of thousands of ranks takes as long as that of one copy of the model.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from parallax.checkpoint.geometry import Block, Box, Holding
from parallax.checkpoint.holdings import WEIGHT, Key, Share, Source, Sources
from parallax.checkpoint.parts import CheckpointParts
from parallax.checkpoint.safetensors_file import ITEM_BYTES, Entry, make_header
from parallax.errors import ConfigError
from parallax.models.hugging_face import hugging_face_tensors

UNIT_BYTES = 32 << 20  # put together at once; large enough for the disk and the network, small beside a model
ROUND_BYTES = 128 << 20  # that one rank sends and puts together between two waits
FILES = 32  # that a large model is divided into, unless this makes them smaller or larger than
MIN_FILE_BYTES, MAX_FILE_BYTES = 16 << 20, 4 << 30


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

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(target.num_bytes for target in self.targets)


@dataclass(frozen=True)
class Move:
    """A box that the rank `sender` has of a share, and the writer puts into buffer number `index` of the unit."""

    index: int
    sender: int
    share: Share
    block: Block


@dataclass
class Unit:
    """Boxes of sources that are put together on `file.writer`; a part of one target, or all of it. shapes: of those sources."""

    file: FilePlan
    target: Target
    boxes: list[tuple[Key, Box]]
    shapes: list[tuple[int, ...]]
    moves: list[Move]

    @property
    def num_bytes(self) -> int:
        return sum(box.size for _, box in self.boxes) * ITEM_BYTES[self.target.dtype]

    def bytes_by_rank(self) -> Counter[int]:
        """Return what each rank has to send for this unit, and the writer to put together."""
        counts = Counter({self.file.writer: self.num_bytes})
        for move in self.moves:
            if move.sender != self.file.writer:
                counts[move.sender] += move.block.box.size * ITEM_BYTES[self.target.dtype]
        return counts

    def concerns(self, rank: int) -> bool:
        """Return whether `rank` sends a part of this unit or puts it together."""
        return self.file.writer == rank or any(move.sender == rank for move in self.moves)


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
    """Return all files, `stem` to its targets given.

    Each is written by who holds the most of it, of those that write less than their share of all; else by who writes least.
    """
    named = []
    for stem, targets in groups.items():
        files = divide_into_files(stem, targets)
        for number, content in enumerate(files, 1):
            # Wide types first, so that every tensor is aligned to its own type.
            content = sorted(content, key=lambda target: -ITEM_BYTES[target.dtype])
            named.append((f"{stem}-{number:05d}-of-{len(files):05d}.safetensors", content))
    sizes = {name: sum(target.num_bytes for target in content) for name, content in named}
    held = {name: _held_bytes(content, sources) for name, content in named}
    share = sum(sizes.values()) / len({rank for counts in held.values() for rank in counts})

    def freedom(name: str) -> tuple[bool, bool]:
        """What one rank alone has comes first, and what all have in the same way last: it evens out."""
        return len(held[name]) > 1, len(set(held[name].values())) == 1

    loads: Counter[int] = Counter()
    plans = {}
    for name, content in sorted(named, key=lambda item: (*freedom(item[0]), -sizes[item[0]])):
        counts = held[name]
        able = [rank for rank in counts if loads[rank] < share]
        writer = min(able or counts, key=lambda rank: (-counts[rank] if able else 0, loads[rank], rank))
        loads[writer] += sizes[name]
        header, entries = make_header([(target.name, target.dtype, target.shape) for target in content])
        plans[name] = FilePlan(name, writer, content, header, entries)
    return [plans[name] for name, _ in named]


def _held_bytes(targets: Sequence[Target], sources: Sources) -> Counter[int]:
    """Return how many bytes of the targets, padding included, each rank that holds any has itself."""
    by_ranks: Counter[tuple[int, ...]] = Counter()
    for target in targets:
        for key in target.sources:
            for share in sources[key].shares:
                by_ranks[share.ranks] += (share.stop - share.start) * ITEM_BYTES[target.dtype]
    held: Counter[int] = Counter()
    for ranks, count in by_ranks.items():
        for rank in ranks:
            held[rank] += count
    return held


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
            yield Unit(file, target, boxes, [sources[key].shape for key, _ in boxes], moves)


def _nearest_shares(source: Source, writer: int) -> list[tuple[int, Share, list[Block]]]:
    """Return, of shares that are equal, the one on the rank nearest to the writer: that rank, the share, its blocks."""
    nearest: dict[tuple[Holding, int, int], tuple[int, Share]] = {}
    for share in source.shares:
        key = (share.holding, share.start, share.stop)
        rank = share.nearest(writer)
        if key not in nearest or abs(rank - writer) < abs(nearest[key][0] - writer):
            nearest[key] = rank, share
    return [(rank, share, list(share.holding.blocks(share.start, share.stop))) for rank, share in nearest.values()]


def _moves(index: int, box: Box, shares: list[tuple[int, Share, list[Block]]], key: Key) -> list[Move]:
    moves = [
        Move(index, sender, share, part)
        for sender, share, blocks in shares
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
