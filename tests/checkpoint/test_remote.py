"""Checkpoints behind an address: as on a disk, where nothing can be renamed and objects appear whole."""

from __future__ import annotations

import json
import os
import random
import uuid
from pathlib import Path

import fsspec
import pytest

from parallax.checkpoint import place
from parallax.checkpoint.background import BackgroundSaver
from parallax.checkpoint.find import find_latest, find_model, list_checkpoints
from parallax.checkpoint.load import load, read_state
from parallax.checkpoint.open_model import open_model
from parallax.checkpoint.retention import replaced_checkpoints
from parallax.checkpoint.save import save
from parallax.checkpoint.verify import verify
from parallax.errors import ConfigError
from parallax.mesh import Layout, Mesh
from parallax.storage import RemotePath, location, names_below
from tests import objects
from tests.checkpoint.runs import LLAMA, build_parts, contents, differences, single_process_mesh
from tests.distributed.harness import run_layout

MESH = single_process_mesh()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a fake storage keeps objects://."""
    (tmp_path / "objects").mkdir()
    monkeypatch.setenv("PARALLAX_TEST_OBJECTS", str(tmp_path / "objects"))
    objects.Objects.log.clear()
    return tmp_path / "objects"


@pytest.fixture(params=["objects", "memory"])
def address(request: pytest.FixtureRequest, store: Path) -> str:
    return f"{request.param}://{uuid.uuid4().hex}/run"


def test_what_is_saved_behind_an_address_is_what_is_saved_on_a_disk(address: str, tmp_path: Path) -> None:
    parts = build_parts(MESH, LLAMA, zero=0, seed=1, fill=True)
    remote, local = save(address, 100, parts, MESH), save(tmp_path / "local", 100, parts, MESH)
    assert isinstance(remote, RemotePath) and str(remote) == f"{address}/step-00000100"
    assert names_below(remote) == sorted(contents(Path(str(local))))
    assert all((remote / name).read_bytes() == (local / name).read_bytes() for name in names_below(remote))  # type: ignore[operator]
    assert verify(remote) == verify(str(remote)) == []
    assert find_latest(address) == remote and read_state(remote)["step"] == 100
    loaded = build_parts(MESH, LLAMA, zero=0, seed=2)
    load(str(remote), loaded, MESH)
    assert differences(loaded, seed=1) == []


def test_a_model_behind_an_address_is_found_and_opened(address: str) -> None:
    parts = build_parts(MESH, LLAMA, zero=0, seed=1, fill=True)
    save(f"{address}/checkpoints", 100, parts, MESH)
    for given in (
        address,
        f"{address}/",
        f"{address}/checkpoints/step-00000100",
        f"{address}/checkpoints/step-00000100/model",
    ):
        assert str(find_model(given)) == f"{address}/checkpoints/step-00000100/model"
    opened = dict(open_model(find_model(address)).named_parameters())
    assert all(opened[name].equal(parameter) for name, parameter, _ in parts.parameters)


def _save_and_load(mesh: Mesh, address: str, folder: str) -> list[str]:
    from tests import objects  # noqa: F401  (registers the fake storage in this process)

    os.environ["PARALLAX_TEST_OBJECTS"] = folder  # the processes are forked from one that is older than this test
    parts = build_parts(mesh, LLAMA, zero=1, seed=1, fill=True)
    save(address, 50, parts, mesh)
    saver = BackgroundSaver(address, parts, mesh)
    saver.save(100)
    saver.wait()
    loaded = build_parts(mesh, LLAMA, zero=2, seed=2)
    newest = find_latest(address, mesh)
    assert newest is not None
    load(newest, loaded, mesh)
    return differences(loaded, seed=1)


def test_several_ranks_save_and_load_behind_one_address(store: Path) -> None:
    assert run_layout(Layout(tp=2, dp=2), _save_and_load, "objects://bucket/run", str(store)) == [[]] * 4
    assert [step for step, _ in list_checkpoints("objects://bucket/run")] == [100, 50]
    assert verify("objects://bucket/run/step-00000100") == []
    single = save(store.parent / "single", 100, build_parts(MESH, LLAMA, zero=0, seed=1, fill=True), MESH)
    assert contents(store / "bucket/run/step-00000100") == contents(Path(str(single)))


def test_a_rank_reads_just_the_ranges_that_it_needs(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parallax.checkpoint import blocks

    monkeypatch.setattr(blocks, "BLOCK_BYTES", 5000)
    remote = save("objects://bucket/run", 1, build_parts(MESH, LLAMA, zero=0, seed=1, fill=True), MESH)
    objects.Objects.log.clear()
    load(remote, build_parts(MESH, LLAMA, zero=0, seed=2), MESH)
    reads = [what.split()[1:] for what, path in objects.Objects.log if path.endswith(".safetensors")]
    assert reads and all("None" not in pair for pair in reads)
    # Blocks, and the headers, which begin at byte 8.
    assert all(int(stop) - int(start) <= 5000 for start, stop in reads if start != "8")
    assert all(int(stop) < 20_000 for start, stop in reads if start == "8")


def test_a_save_that_was_cut_anywhere_is_no_checkpoint_and_the_next_save_removes_it(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = build_parts(MESH, LLAMA, zero=0, seed=1, fill=True)
    good = save("objects://bucket/run", 50, parts, MESH)
    count = written = 0
    create = RemotePath.create

    def cut(self: RemotePath) -> object:
        nonlocal written
        written += 1
        if written > count:
            raise KeyboardInterrupt  # which nothing tidies up after, as a kill
        return create(self)

    while True:
        written = 0

        with monkeypatch.context() as patch:
            patch.setattr(RemotePath, "create", cut)
            try:
                save("objects://bucket/run", 100, parts, MESH)
                break
            except KeyboardInterrupt:
                pass
        assert find_latest("objects://bucket/run") == good, count
        count += 1
    assert count > 5
    assert [step for step, _ in list_checkpoints("objects://bucket/run")] == [100, 50]
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "create", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save("objects://bucket/run", 150, parts, MESH)
    (store / "bucket/run/step-00000150/model").mkdir(parents=True)
    (store / "bucket/run/step-00000150/partial").write_bytes(b"")
    (store / "bucket/run/step-00000150/model/config.json").write_bytes(b"{}")
    save("objects://bucket/run", 200, parts, MESH)
    assert [step for step, _ in list_checkpoints("objects://bucket/run")] == [200, 100, 50]


def test_a_storage_that_fails_is_one_sentence_and_nothing_is_left(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build_parts(MESH, LLAMA, zero=0, seed=1, fill=True)
    chance = random.Random(0)

    def fail(self: objects.ObjectFile, data: bytes) -> int:
        if chance.random() < 0.3:
            raise RuntimeError("token has expired")  # packages behind fsspec raise classes of their own
        return super(objects.ObjectFile, self).write(data)

    with monkeypatch.context() as patch:
        patch.setattr(objects.ObjectFile, "write", fail)
        with pytest.raises(ConfigError) as raised:
            save("objects://bucket/run", 100, parts, MESH)
    assert "rank 0 cannot write the checkpoint objects://bucket/run/step-00000100" in str(raised.value)
    assert "token has expired" in str(raised.value) and "\n" not in str(raised.value)
    assert [path for path in store.rglob("*") if path.is_file()] == []


def test_damage_is_found_where_it_is(store: Path) -> None:
    remote = save("objects://bucket/run", 100, build_parts(MESH, LLAMA, zero=0, seed=1, fill=True), MESH)
    chance, parts = random.Random(0), build_parts(MESH, LLAMA, zero=0, seed=2)
    for name in names_below(remote):
        path = store / "bucket/run/step-00000100" / name
        good = path.read_bytes()
        position = chance.randrange(len(good))
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(ConfigError) as raised:
            load(remote, parts, MESH)
        assert str(remote / name) in str(raised.value) and verify(remote)
        path.write_bytes(good[:-1])
        assert verify(remote) and find_latest("objects://bucket/run") is None
        path.unlink()
        assert verify(remote) and find_latest("objects://bucket/run") is None
        path.write_bytes(good)
    assert verify(remote) == []


def test_old_checkpoints_are_removed_manifest_first(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build_parts(MESH, LLAMA, zero=0, seed=1, fill=True)
    for step in (50, 100, 150):
        save("objects://bucket/run", step, parts, MESH)
    old = replaced_checkpoints(location("objects://bucket/run"), 1, 100, 150)
    assert [str(path) for path in old] == ["objects://bucket/run/step-00000050"]
    removed: list[str] = []
    rm = objects.Objects._rm

    def note(self: objects.Objects, path: str) -> None:
        removed.append(path.rpartition("/")[2])
        rm(self, path)

    monkeypatch.setattr(objects.Objects, "_rm", note)
    place.remove(old[0])
    assert removed[0] == "manifest.json" and [step for step, _ in list_checkpoints("objects://bucket/run")] == [
        150,
        100,
    ]


def test_no_such_kind_of_storage_and_a_missing_package_are_said() -> None:
    with pytest.raises(ConfigError, match=r"nothing://a/b cannot be opened: Protocol not known"):
        location("nothing://a/b")
    fsspec.register_implementation("absent", "no_such_package.System", clobber=True, errtxt="Install absentfs")
    with pytest.raises(
        ConfigError, match=r"absent://a needs a package that is not installed \(Install absentfs\); pip"
    ):
        location("absent://a")


def test_file_addresses_are_paths(tmp_path: Path) -> None:
    assert location(f"file://{tmp_path}/run") == tmp_path / "run" == location(f"local://{tmp_path}/run")
    assert json.dumps(str(location("runs/tiny"))) == '"runs/tiny"'
