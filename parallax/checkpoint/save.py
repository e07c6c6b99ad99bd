"""Write a checkpoint: all ranks together, each its files, into a folder that gets its name when it is complete.

    all        say what they hold; plan who writes what
    rank 0     make the folder, write config.json, tokenizer files, state.json
    all        round by round send parts to their writers, who append them to their files
    all        sync their files; say size and checksum of each, or what went wrong
    rank 0     write the index and the manifest, make it the checkpoint step-N (parallax.checkpoint.place)

What goes wrong on one rank (a full disk, a missing permission) is kept until the others have heard of it: that rank goes
on taking part, then all raise the same error and rank 0 removes the folder. A save that is killed leaves a folder which nothing
reads and the next save removes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial as bind
from pathlib import PurePosixPath
from typing import Any

from parallax.checkpoint import place
from parallax.checkpoint.agreement import Ranks, exchange_or_raise
from parallax.checkpoint.files import FileThreads, HashingFile, write_file
from parallax.checkpoint.holdings import gather_sources
from parallax.checkpoint.manifest import FileRecord, Manifest, Slice, TensorRecord
from parallax.checkpoint.names import CONFIG, INDEX, MANIFEST, MODEL, OPTIMIZER, STATE, step_name
from parallax.checkpoint.parts import CheckpointParts
from parallax.checkpoint.plan import FilePlan, Unit, model_targets, optimizer_targets, plan_files, rounds
from parallax.checkpoint.transfer import LocalTensors, transfer
from parallax.collectives import barrier
from parallax.errors import ConfigError
from parallax.models.hugging_face_config import to_hugging_face
from parallax.storage import Location, location


def save(
    folder: str | Location, step: int, parts: CheckpointParts, mesh: Ranks, plan: SavePlan | None = None
) -> Location:
    """Save the run as `folder/step-N` and return that; called by all ranks, which all see the same file system or address.

    A checkpoint of the same step is replaced. plan: what `make_plan` returned for an earlier step of the run, which for a large one
    takes seconds; None to make it. Needs up to 300 MiB of memory beside what the run holds, or four times the
    largest tensor where tensors are not stored as they are (GPT-2's transposed weights).

    Raises ConfigError, the same on all ranks, when a rank cannot write; then nothing is left of the attempt.
    """
    content = small_files(step, parts)  # on every rank, so that a state that is no JSON is every rank's error
    plan = plan or make_plan(parts, mesh)
    return write(location(folder), step, content, parts, plan, LocalTensors(parts), mesh)


@dataclass
class SavePlan:
    """Who writes what: all files, and what this rank sends or puts together in each round. The same for every step of a run."""

    files: list[FilePlan]
    rounds: list[list[Unit]]

    def units(self) -> Iterator[Unit]:
        """Yield all that concerns this rank."""
        return (unit for units in self.rounds for unit in units)


def make_plan(parts: CheckpointParts, ranks: Ranks) -> SavePlan:
    """Return the plan of this rank; called by all ranks. Raises ConfigError on all if the model is not what its parts say."""
    sources = gather_sources(parts, ranks)
    model = model_targets(parts, sources)
    optimizer = optimizer_targets(model, sources)
    files = plan_files({f"{MODEL}/model": model, f"{OPTIMIZER}/optimizer": optimizer}, sources)
    mine = [[unit for unit in units if unit.concerns(ranks.rank)] for units in rounds(files, sources)]
    return SavePlan(files, [units for units in mine if units])


def write(
    folder: Location,
    step: int,
    content: Mapping[str, bytes],
    parts: CheckpointParts,
    plan: SavePlan,
    local: LocalTensors,
    ranks: Ranks,
) -> Location:
    """Write `folder/step-N` from tensors that stay as they are meanwhile; called by all ranks.

    content: of the small files, by path. Of `parts` only the tokenizer is used. Raises ConfigError as `save` does.
    """
    final = folder / step_name(step)
    written = place.written_as(final)
    writer = _Writer(written, ranks)
    small: dict[str, FileRecord] = {}
    try:
        if ranks.rank == 0:
            writer.attempt(lambda: small.update(_begin(final, content, parts)))
        exchange_or_raise(writer.problems, None, ranks)
        writer.write_tensors(plan, local)
        rows = exchange_or_raise(writer.problems, writer.records, ranks)
        if ranks.rank == 0:
            records = {name: FileRecord(size, tuple(sums)) for row in rows for name, (size, sums) in row.items()}
            writer.attempt(lambda: _commit(final, step, plan.files, small | records))
        exchange_or_raise(writer.problems, None, ranks)
    except ConfigError:
        if ranks.rank == 0:
            place.discard(final)
        barrier(ranks.world)  # who goes on from here may end the job, and the folder must be gone by then
        raise
    return final


def small_files(step: int, parts: CheckpointParts) -> dict[str, bytes]:
    """Return the content of the files that are not tensors, by path; those of the tokenizer are left to it."""
    config = to_hugging_face(parts.config.resolved(), str(parts.dtype).removeprefix("torch."))
    if parts.tokenizer is not None:
        config |= {"bos_token_id": parts.tokenizer.bos_id, "eos_token_id": parts.tokenizer.eos_id}
    config |= parts.config_fields
    optimizer = {} if parts.optimizer is None else {"step_count": parts.optimizer.step_count}
    state = {"step": step, "optimizer": optimizer, "training": parts.state}
    more = {f"{MODEL}/{name}": content for name, content in parts.model_files.items()}
    return more | {CONFIG: _json(config), STATE: _json(state)}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _begin(final: Location, content: Mapping[str, bytes], parts: CheckpointParts) -> dict[str, FileRecord]:
    """Make the folder and its small files; return what the manifest says of them."""
    place.begin(final, (MODEL, OPTIMIZER))
    written = place.written_as(final)
    tokenizer = {} if parts.tokenizer is None else parts.tokenizer.files()
    # The run's word on a file, such as its chat template, goes before the tokenizer's.
    content = {**{f"{MODEL}/{name}": data for name, data in tokenizer.items()}, **content}
    return {name: write_file(written / name, data) for name, data in content.items()}


class _Writer:
    """One rank's writing: after its first failure it writes nothing more, but goes on taking part."""

    def __init__(self, folder: Location, ranks: Ranks) -> None:
        self._folder, self._ranks = folder, ranks
        self._opened: dict[str, HashingFile] = {}
        self._threads = FileThreads()
        self.problems: list[str] = []
        self.records: dict[str, tuple[int, list[str]]] = {}  # size and checksums of each file of tensors

    def attempt(self, action: Callable[[], None]) -> None:
        """Do it unless something failed before; keep what the operating system says against it."""
        try:
            if not self.problems:
                action()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            self.problems.append(
                f"rank {self._ranks.rank} cannot write the checkpoint {self._folder} "
                f"({getattr(error, 'strerror', None) or error}); "
                "give all ranks write access and enough room there, or another --out"
            )

    def write_tensors(self, plan: SavePlan, local: LocalTensors) -> None:
        """Take part in all rounds and write the files that the plan gives to this rank."""
        with self._threads:
            for units in plan.rounds:
                for assembled in transfer(units, local, self._ranks):
                    self.attempt(bind(self._append, assembled.unit.file, assembled.content()))
            for file in plan.files:
                if file.writer == self._ranks.rank:
                    self.attempt(bind(self._finish, file))
            for opened in self._opened.values():
                opened.abandon()

    def _append(self, file: FilePlan, content: bytes | memoryview = b"") -> None:
        if file.name not in self._opened:
            self._opened[file.name] = HashingFile(self._folder / file.name, file.num_bytes, self._threads)
            self._opened[file.name].write(file.header)
        self._opened[file.name].write(content)

    def _finish(self, file: FilePlan) -> None:
        self._append(file)  # a file of empty tensors has had no unit
        record = self._opened[file.name].finish()
        self.records[file.name] = (record.bytes, list(record.checksums))


def _commit(final: Location, step: int, files: Sequence[FilePlan], records: Mapping[str, FileRecord]) -> None:
    """Write what names everything else, and make it a checkpoint."""
    written = place.written_as(final)
    tensors: dict[str, dict[str, TensorRecord]] = {MODEL: {}, OPTIMIZER: {}}
    for file in files:
        for name, entry in file.entries.items():
            where = Slice(file.name, entry.offset, (0,) * len(entry.shape), entry.shape)
            tensors[file.name.partition("/")[0]][name] = TensorRecord(entry.dtype, entry.shape, (where,))
    model_files = [file for file in files if file.name.startswith(f"{MODEL}/")]
    weight_map = {name: PurePosixPath(file.name).name for file in model_files for name in file.entries}
    total = sum(entry.num_bytes for file in model_files for entry in file.entries.values())
    index = write_file(written / INDEX, _json({"metadata": {"total_size": total}, "weight_map": weight_map}))
    manifest = Manifest(step, {**records, INDEX: index}, tensors[MODEL], tensors[OPTIMIZER])
    write_file(written / MANIFEST, manifest.encode())
    place.commit(final)
