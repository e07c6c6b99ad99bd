"""Prove that a checkpoint is what was saved: cheap checks for all of it, and the content of each file."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath

from parallax.checkpoint.files import THREADS, FileReader, damaged, file_inside, hash_file
from parallax.checkpoint.manifest import FileRecord, Manifest, Slice, read_manifest
from parallax.checkpoint.names import STATE, is_step, step_name
from parallax.checkpoint.safetensors_file import Entry, read_header
from parallax.checkpoint.state_file import read_state_file
from parallax.errors import ConfigError
from parallax.storage import Location, RemotePath, location, names_below, num_bytes

# What torch.save and its users name their files; loading one runs code that is in it.
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


def verify(path: str | Location) -> list[str]:
    """Return what is wrong with the checkpoint at `path`, a sentence each; nothing if all of it is as it was saved."""
    folder = location(path)
    try:
        manifest = read_manifest(folder)
    except ConfigError as error:
        return error.problems
    return (
        check_files(folder, manifest)
        or check_contents(folder, manifest, manifest.files)
        or _check_state(folder, manifest)
    )


def check_files(folder: Location, manifest: Manifest) -> list[str]:
    """Return which files are missing, are no plain files inside the folder, have another size, or are pickles.

    And whether the folder is named after another step, or has no state of a run.
    """
    problems = []
    if is_step(folder.name) and folder.name != step_name(manifest.step):
        problems.append(f"{folder} holds step {manifest.step}, not the one that it is named after")
    if STATE not in manifest.files:
        problems.append(f"{folder} is no checkpoint of a run: it has no {STATE}")
    sizes = folder.sizes() if isinstance(folder, RemotePath) else None  # all in one request
    for name, record in manifest.files.items():
        try:
            if sizes is None:
                size = num_bytes(file_inside(folder, name))
            elif name in sizes:
                size = sizes[name]
            else:
                raise ConfigError(f"{folder / name} is missing")
            if size != record.bytes:
                problems.append(f"{folder / name} has {size} bytes, {record.bytes} were saved")
        except (ConfigError, OSError) as error:
            problems.append(str(error))
    for path in names_below(folder) if sizes is None else sizes:
        if PurePosixPath(path).suffix in PICKLE_SUFFIXES:
            problems.append(f"{folder / path} looks like a pickle, which can run code when it is loaded; remove it")
    return problems


def check_contents(folder: Location, manifest: Manifest, names: Iterable[str], tensors_too: bool = True) -> list[str]:
    """Return which of the files `names` have another checksum, or other tensors inside than the manifest says.

    tensors_too: whether tensors are read; who reads them block by block later (parallax.checkpoint.reader) proves them then.
    """
    slices, given_up = _slices_by_file(manifest), threading.Event()

    def check(name: str) -> list[str]:
        path, record = folder / name, manifest.files[name]
        holds_tensors = path.suffix == ".safetensors"
        try:
            if tensors_too or not holds_tensors or not record.is_cut:
                if hash_file(path, not record.is_cut, given_up.is_set) != record.checksums:
                    return [damaged(path)]
            return _check_tensors(path, record, slices.get(name, {})) if holds_tensors else []
        except ConfigError as error:
            return error.problems
        except OSError as error:
            return [f"{folder / name} cannot be read: {error.strerror or error}"]

    threads = ThreadPoolExecutor(THREADS, "verify")  # a disk is faster when it is asked for more than one thing
    try:
        return [problem for found in threads.map(check, names) for problem in found]
    finally:
        given_up.set()  # with Ctrl-C, say
        threads.shutdown(cancel_futures=True)


def _check_state(folder: Location, manifest: Manifest) -> list[str]:
    try:
        read_state_file(folder, manifest)
    except ConfigError as error:
        return error.problems
    except OSError as error:
        return [f"{folder / STATE} cannot be read: {error.strerror or error}"]
    return []


def _slices_by_file(manifest: Manifest) -> dict[str, dict[str, tuple[str, Slice]]]:
    """Return for each file the tensors in it: their type, and their place."""
    found: dict[str, dict[str, tuple[str, Slice]]] = {}
    for records in (manifest.model, manifest.optimizer):
        for name, record in records.items():
            for one in record.slices:
                found.setdefault(one.file, {})[name] = (record.dtype, one)
    return found


def _check_tensors(path: Location, record: FileRecord, expected: dict[str, tuple[str, Slice]]) -> list[str]:
    """Return whether the file's own header and the manifest disagree."""
    # The header alone, not all of the block that it is in: who reads that block's tensors proves it.
    with FileReader(path) as file:
        try:
            header = read_header(path, record.bytes, file.read)
        except ConfigError:
            header = {}
    problems = _disagreements(path, header, expected)
    if problems or not expected:
        with FileReader(path, record) as file:
            read_header(path, record.bytes, file.read)  # says so where the block is not what was saved
    return problems


def _disagreements(path: Location, header: Mapping[str, Entry], expected: Mapping[str, tuple[str, Slice]]) -> list[str]:
    for name in sorted(header.keys() | expected.keys()):
        entry, (dtype, one) = header.get(name), expected.get(name, (None, None))
        if entry is None or one is None or (entry.dtype, entry.shape, entry.offset) != (dtype, one.extent, one.offset):
            return [f"{path} and the manifest disagree about the tensor {name}"]
    return []


def files_to_verify(manifest: Manifest, share: int, shares: int) -> list[str]:
    """Return the files that rank `share` of `shares` reads through, the bytes divided about equally."""
    loads = [0] * shares
    mine = []
    for name, record in sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0])):
        chosen = loads.index(min(loads))
        loads[chosen] += record.bytes
        if chosen == share:
            mine.append(name)
    return mine
