"""Write a checkpoint: all ranks together, each its files, into a folder that gets its name when it is complete.

    rank 0     make step-N.partial, write config.json, tokenizer files, state.json
    all        say what they hold; plan; round by round send parts to their writers, who append them to their files
    all        sync their files; say size and checksum of each, or what went wrong
    rank 0     write the index and the manifest, sync the folders, rename to step-N

What goes wrong on one rank (a full disk, a missing permission) is kept until the others have heard of it: that rank goes
on taking part, then all raise the same error and rank 0 removes the folder. A save that is killed leaves the .partial
folder, which nothing reads and the next save removes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial as bind
from pathlib import Path
from typing import Any

from parallax.checkpoint.agreement import exchange_or_raise
from parallax.checkpoint.files import HashingFile, hash_file, sync, write_file
from parallax.checkpoint.manifest import FileRecord, Manifest, Slice, TensorRecord
from parallax.checkpoint.names import CONFIG, INDEX, MANIFEST, MODEL, OPTIMIZER, PARTIAL, STATE, step_name
from parallax.checkpoint.parts import CheckpointParts
from parallax.checkpoint.plan import (
    FilePlan,
    Sources,
    collect,
    describe,
    model_targets,
    optimizer_targets,
    plan_files,
    rounds,
)
from parallax.checkpoint.retention import remove_leftovers
from parallax.checkpoint.transfer import LocalTensors, transfer
from parallax.collectives import barrier
from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.models.hugging_face_config import to_hugging_face


def save(folder: str | Path, step: int, parts: CheckpointParts, mesh: Mesh) -> Path:
    """Save the run as `folder/step-N` and return that path; called by all ranks, which all see the same file system.

    A checkpoint of the same step is replaced. Needs up to 300 MiB of memory beside what the run holds, or four times the
    largest tensor where tensors are not stored as they are (GPT-2's transposed weights).

    Raises ConfigError, the same on all ranks, when a rank cannot write; then nothing is left of the attempt.
    """
    final = Path(folder) / step_name(step)
    partial = final.with_name(final.name + PARTIAL)
    small_files = _small_files(step, parts)  # on every rank, so that a state that is no JSON is every rank's error
    writer = _Writer(partial, mesh)
    try:
        if mesh.rank == 0:
            writer.attempt(lambda: _begin(partial, small_files, parts))
        files, sources = _plan(exchange_or_raise(writer.problems, describe(parts), mesh), parts)
        writer.write_tensors(files, sources, parts)
        rows = exchange_or_raise(writer.problems, writer.records, mesh)
        if mesh.rank == 0:
            records = {name: FileRecord(*pair) for row in rows for name, pair in row.items()}
            writer.attempt(lambda: _commit(final, partial, step, files, records))
        exchange_or_raise(writer.problems, None, mesh)
    except ConfigError:
        if mesh.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        barrier(mesh.world)  # who goes on from here may end the job, and the folder must be gone by then
        raise
    return final


def _small_files(step: int, parts: CheckpointParts) -> dict[str, bytes]:
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


def _begin(partial: Path, small_files: dict[str, bytes], parts: CheckpointParts) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(partial.parent)
    for folder in (MODEL, OPTIMIZER):
        (partial / folder).mkdir(parents=True)
    if parts.tokenizer is not None:
        parts.tokenizer.save(partial / MODEL)
    for name, content in small_files.items():
        (partial / name).unlink(missing_ok=True)  # the run's word on it, such as its chat template, not the tokenizer's
        write_file(partial / name, content)


def _plan(held: Sequence[list[Any]], parts: CheckpointParts) -> tuple[list[FilePlan], Sources]:
    sources = collect(held)
    model = model_targets(parts, sources)
    optimizer = optimizer_targets(model, sources)
    return plan_files({f"{MODEL}/model": model, f"{OPTIMIZER}/optimizer": optimizer}, sources), sources


class _Writer:
    """One rank's writing: after its first failure it writes nothing more, but goes on taking part."""

    def __init__(self, partial: Path, mesh: Mesh) -> None:
        self._partial, self._mesh = partial, mesh
        self._opened: dict[str, HashingFile] = {}
        self.problems: list[str] = []
        self.records: dict[str, tuple[int, str]] = {}  # size and checksum of each file of tensors

    def attempt(self, action: Callable[[], None]) -> None:
        """Do it unless something failed before; keep what the operating system says against it."""
        try:
            if not self.problems:
                action()
        except OSError as error:
            self.problems.append(
                f"rank {self._mesh.rank} cannot write the checkpoint {self._partial} ({error.strerror or error}); "
                "give all ranks write access and enough room there, or another --out"
            )

    def write_tensors(self, files: Sequence[FilePlan], sources: Sources, parts: CheckpointParts) -> None:
        """Take part in all rounds and write the files that the plan gives to this rank."""
        local = LocalTensors(parts)
        for units in rounds(files, sources):
            for assembled in transfer(units, local, self._mesh):
                content = assembled.content([sources[key].shape for key, _ in assembled.unit.boxes])
                self.attempt(bind(self._append, assembled.unit.file, content))
        for file in files:
            if file.writer == self._mesh.rank:
                self.attempt(bind(self._finish, file))
        for opened in self._opened.values():
            opened.abandon()

    def _append(self, file: FilePlan, content: bytes | memoryview = b"") -> None:
        if file.name not in self._opened:
            self._opened[file.name] = HashingFile(self._partial / file.name)
            self._opened[file.name].write(file.header)
        self._opened[file.name].write(content)

    def _finish(self, file: FilePlan) -> None:
        self._append(file)  # a file of empty tensors has had no unit
        record = self._opened[file.name].finish()
        self.records[file.name] = (record.bytes, record.sha256)


def _commit(
    final: Path, partial: Path, step: int, files: Sequence[FilePlan], records: Mapping[str, FileRecord]
) -> None:
    """Write what names everything else, see that the disk has it, and give the folder its name."""
    tensors: dict[str, dict[str, TensorRecord]] = {MODEL: {}, OPTIMIZER: {}}
    for file in files:
        for name, entry in file.entries.items():
            place = Slice(file.name, entry.offset, (0,) * len(entry.shape), entry.shape)
            tensors[file.name.partition("/")[0]][name] = TensorRecord(entry.dtype, entry.shape, (place,))
    model_files = [file for file in files if file.name.startswith(f"{MODEL}/")]
    weight_map = {name: Path(file.name).name for file in model_files for name in file.entries}
    total = sum(entry.num_bytes for file in model_files for entry in file.entries.values())
    write_file(partial / INDEX, _json({"metadata": {"total_size": total}, "weight_map": weight_map}))
    records = dict(records)
    for path in sorted(partial.rglob("*")):
        name = path.relative_to(partial).as_posix()
        if path.is_file() and name not in records:
            sync(path)
            records[name] = FileRecord(path.stat().st_size, hash_file(path))
    write_file(partial / MANIFEST, Manifest(step, records, tensors[MODEL], tensors[OPTIMIZER]).encode())
    for folder in (partial / MODEL, partial / OPTIMIZER, partial):
        sync(folder)
    replaced = final.with_name(f"{final.name}.replaced{PARTIAL}")
    if final.exists():
        os.rename(final, replaced)
    os.rename(partial, final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
