"""Who reads a part of a checkpoint proves just the blocks that it reads, each once; together the ranks prove all."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
import xxhash

from parallax.checkpoint import blocks, plan
from parallax.checkpoint.blocks import BlockHasher, cut
from parallax.checkpoint.files import FileReader, hash_file
from parallax.checkpoint.load import load
from parallax.checkpoint.manifest import read_manifest, sealed
from parallax.checkpoint.save import save
from parallax.checkpoint.verify import verify
from parallax.errors import ConfigError
from parallax.mesh import Layout, Mesh
from tests.checkpoint.runs import GPT2, LLAMA, build_parts, differences, single_process_mesh
from tests.distributed.harness import run_layout

MESH = single_process_mesh()
SMALL = 5000  # bytes in a block: several in each file of these small models, with and without a part of a header


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", SMALL)
    monkeypatch.setattr(plan, "MIN_FILE_BYTES", 20_000)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path, 100, build_parts(MESH, LLAMA, zero=0, seed=1, fill=True), MESH)


@pytest.mark.parametrize("size", [0, 1, SMALL - 1, SMALL, SMALL + 1, 3 * SMALL, 3 * SMALL + 7])
def test_checksums_are_those_of_the_blocks_however_the_bytes_come(size: int) -> None:
    content, chance = random.Random(size).randbytes(size), random.Random(1)
    expected = [content[at : at + SMALL] for at in range(0, size, SMALL)] or [b""]
    for most in (1, 700, SMALL, 4 * SMALL):
        hasher, at = BlockHasher(), 0
        while at < size:
            step = chance.randint(1, most)
            hasher.update(content[at : at + step])
            at += step
        assert list(hasher.checksums()) == [xxhash.xxh3_128_hexdigest(part) for part in expected]


def test_ranges_are_cut_where_blocks_end() -> None:
    assert cut(7, 7) == [] and cut(0, SMALL) == [(0, SMALL)]
    assert cut(7, 2 * SMALL + 1) == [(7, SMALL), (SMALL, 2 * SMALL), (2 * SMALL, 2 * SMALL + 1)]


def test_loading_finds_flipped_bits_in_every_file_and_names_it(saved: Path) -> None:
    chance = random.Random(0)
    parts = build_parts(MESH, LLAMA, zero=0, seed=2, fill=True)
    for path in sorted(path for path in saved.rglob("*") if path.is_file()):
        good = path.read_bytes()
        for position in {0, 7, len(good) - 1, *(chance.randrange(len(good)) for _ in range(12))}:
            path.write_bytes(
                good[:position] + bytes([good[position] ^ (1 << chance.randrange(8))]) + good[position + 1 :]
            )
            with pytest.raises(ConfigError) as raised:
                load(saved, parts, MESH)
            assert str(path) in str(raised.value) and "\n" not in str(raised.value), (path, position)
        path.write_bytes(good)
    load(saved, parts, MESH)
    assert differences(parts, seed=1) == []


def _load_damaged(mesh: Mesh, folder: Path) -> str:
    blocks.BLOCK_BYTES = SMALL
    try:
        load(folder, build_parts(mesh, LLAMA, zero=1, seed=2), mesh)
    except ConfigError as error:
        return str(error)
    return ""


def test_damage_in_the_part_that_one_rank_reads_is_the_same_error_on_all(saved: Path) -> None:
    record = read_manifest(saved).optimizer["model.layers.2.mlp.down_proj.weight.exp_avg_sq"].slices[0]
    path = saved / record.file
    content = bytearray(path.read_bytes())
    content[record.offset] ^= 1
    path.write_bytes(content)
    first, second = run_layout(Layout(dp=2), _load_damaged, saved)
    assert first == second == f"{path} is damaged: its checksum is not the one that was saved"


# GPT-2's tensors are not in the order of the run's parameters: blocks that two of them share may be read again.
@pytest.mark.parametrize(("config", "times"), [(LLAMA, 1), (GPT2, 2)], ids=["llama", "gpt2"])
def test_one_process_reads_each_block_of_tensors_about_once(
    config: object, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, 1, build_parts(MESH, config, zero=0, seed=1, fill=True), MESH)  # type: ignore[arg-type]
    read: Counter[str] = Counter()
    as_it_is = FileReader._read_as_it_is

    def count(self: FileReader, target: memoryview, offset: int) -> None:
        read[self.path.name] += len(target)
        as_it_is(self, target, offset)

    monkeypatch.setattr(FileReader, "_read_as_it_is", count)
    parts = build_parts(MESH, config, zero=0, seed=2)  # type: ignore[arg-type]
    load(folder, parts, MESH)
    assert differences(parts, seed=1) == []
    for path in folder.rglob("*.safetensors"):
        header_blocks = 2 * SMALL  # once for what the header says, once for the tensors that begin in its blocks
        assert read[path.name] <= times * path.stat().st_size + header_blocks, path


def make_version_1(folder: Path) -> None:
    """Make a manifest as version 1 of the format had it: one checksum for each file."""
    fields = json.loads((folder / "manifest.json").read_bytes())
    del fields["checksum"]
    for name, record in fields["files"].items():
        del record["xxh128"]
        record["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_bytes(sealed(fields | {"version": 1}))


def test_a_checkpoint_of_version_1_is_read_and_its_damage_refused_before_anything_is_changed(saved: Path) -> None:
    make_version_1(saved)
    assert verify(saved) == []
    parts = build_parts(MESH, LLAMA, zero=0, seed=2, fill=True)
    load(saved, parts, MESH)
    assert differences(parts, seed=1) == []
    parts = build_parts(MESH, LLAMA, zero=0, seed=2, fill=True)
    for path in sorted(saved.rglob("*.safetensors")):
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(ConfigError, match="is damaged: its checksum is not the one that was saved"):
            load(saved, parts, MESH)
        assert verify(saved) == [f"{path} is damaged: its checksum is not the one that was saved"]
        path.write_bytes(good)
    assert differences(parts, seed=2) == []


@pytest.mark.parametrize("change", ["too few", "too many", "no list", "no text"])
def test_a_manifest_with_another_number_of_checksums_than_blocks_is_refused(change: str, saved: Path) -> None:
    fields = json.loads((saved / "manifest.json").read_bytes())
    del fields["checksum"]
    record = next(record for record in fields["files"].values() if len(record["xxh128"]) > 2)
    sums = record["xxh128"]
    record["xxh128"] = {"too few": sums[:-1], "too many": [*sums, sums[0]], "no list": 5, "no text": [5] * len(sums)}[
        change
    ]
    (saved / "manifest.json").write_bytes(sealed(fields))
    with pytest.raises(ConfigError, match="is damaged"):
        read_manifest(saved)


def test_what_is_checked_is_the_memory_that_is_used(tmp_path: Path) -> None:
    """A part of a block is copied out of the block that was proved; the file is not read a second time."""
    path = tmp_path / "a"
    path.write_bytes(bytes(range(250)) * 60)
    from parallax.checkpoint.manifest import FileRecord

    record = FileRecord(15_000, hash_file(path))
    with FileReader(path, record) as file:
        first = file.read(10, 20)
        path.write_bytes(bytes(15_000))
        assert first == bytes(range(10, 20)) and file.read(20, 30) == bytes(range(20, 30))
        with pytest.raises(ConfigError, match="is damaged"):
            file.read(SMALL, SMALL + 1)
    target = torch.zeros(10, dtype=torch.uint8)
    shutil.copy(path, tmp_path / "b")
    with FileReader(tmp_path / "b", record) as file, pytest.raises(ConfigError, match="is damaged"):
        file.read_into(target.numpy().data, 5)
    assert target.sum() == 0
