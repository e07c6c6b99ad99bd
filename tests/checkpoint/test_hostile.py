"""A checkpoint that someone made to do harm is refused: nothing runs, and no more memory is taken than its files have bytes."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallax.checkpoint.files import hash_file
from parallax.checkpoint.find import find_latest
from parallax.checkpoint.initial_weights import load_weights
from parallax.checkpoint.load import load
from parallax.checkpoint.manifest import sealed
from parallax.checkpoint.save import save
from parallax.checkpoint.verify import verify
from parallax.errors import ConfigError
from tests.checkpoint.runs import LLAMA, build_parts, differences, single_process_mesh

MESH = single_process_mesh()
SOME_MEMORY = 20 << 20  # what reading and refusing may take: a few times the files, which have 0.6 MB


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved"), 100, build_parts(MESH, LLAMA, zero=0, seed=1, fill=True), MESH)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def refused(folder: Path) -> str:
    """Return the sentence with which it is refused, after seeing that nothing was changed and little was allocated."""
    parts = build_parts(MESH, LLAMA, zero=0, seed=2, fill=True)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as raised:
            load(folder, parts, MESH)
        assert tracemalloc.get_traced_memory()[1] < SOME_MEMORY
    finally:
        tracemalloc.stop()
    assert differences(parts, seed=2) == []
    assert verify(folder) != []
    assert "\n" not in str(raised.value)
    return str(raised.value)


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and seal it again, as its own checksum keeps nobody from doing."""
    fields = json.loads((folder / "manifest.json").read_bytes())
    del fields["checksum"]
    change(fields)
    (folder / "manifest.json").write_bytes(sealed(fields))


def accept_files(folder: Path) -> None:
    """Make the manifest agree with the files as they are now."""

    def change(fields: dict[str, Any]) -> None:
        for name, record in fields["files"].items():
            record |= {"bytes": (folder / name).stat().st_size, "xxh128": hash_file(folder / name)}

    change_manifest(folder, change)


def _tensor_file(folder: Path) -> Path:
    return next((folder / "optimizer").iterdir())


def _change_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of a tensor file, keep its data, and make the manifest agree about size and checksum."""
    path = _tensor_file(folder)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    fields = json.loads(content[8 : 8 + length])
    text = change(fields)
    text = json.dumps(fields).encode() if text is None else text
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    accept_files(folder)


def _first(fields: dict[str, Any]) -> dict[str, Any]:
    return next(field for name, field in fields.items() if name != "__metadata__")


def _overlap(fields: dict[str, Any]) -> None:
    first, second = [field for name, field in fields.items() if name != "__metadata__"][:2]
    second["data_offsets"] = first["data_offsets"]
    second["shape"] = first["shape"]


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "overlapping tensors": _overlap,
    "a negative dimension": lambda fields: _first(fields).update(shape=[-1, -4096]),
    "a negative offset": lambda fields: _first(fields).update(data_offsets=[-4096, 0]),
    "a shape of exabytes": lambda fields: _first(fields).update(shape=[1 << 40, 1 << 20]),
    "a shape and an extent of exabytes": lambda fields: _first(fields).update(
        shape=[1 << 58], data_offsets=[0, 1 << 60]
    ),
    "many huge dimensions": lambda fields: _first(fields).update(shape=[1 << 62] * 10_000),
    "a dimension that is no integer": lambda fields: _first(fields).update(shape=[1e300]),
    "a dimension of a million digits": lambda fields: b'{"a": {"dtype": "F32", "shape": [' + b"9" * 1_000_000 + b"]}}",
    "a key that comes twice": lambda fields: json.dumps(fields)[:-1].encode() + b', "__metadata__": {"format": "pt"}}',
    "nesting without end": lambda fields: b"[" * 200_000 + b"]" * 200_000,
    "an unknown type": lambda fields: _first(fields).update(dtype="object"),
    "a list": lambda fields: b"[]" + b" " * 20_000,
    "no UTF-8": lambda fields: b"\xff\xfe" * 10_000,
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies_is_refused(case: str, folder: Path) -> None:
    _change_header(folder, HEADERS[case])
    assert str(_tensor_file(folder)) in refused(folder)


@pytest.mark.parametrize("length", [0, 1, 7, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_longer_than_its_file_is_refused(length: int, folder: Path) -> None:
    path = _tensor_file(folder)
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    accept_files(folder)
    assert "safetensors file" in refused(folder)


def _rename_in_manifest(fields: dict[str, Any], new: str) -> None:
    old = next(name for name in fields["files"] if name.startswith("optimizer/"))
    fields["files"][new] = fields["files"].pop(old)
    for record in fields["tensors"]["optimizer"].values():
        for one in record["slices"]:
            one["file"] = new if one["file"] == old else one["file"]


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/secret.safetensors", "model/../../secret.safetensors"])
def test_a_path_out_of_the_folder_is_refused(name: str, folder: Path) -> None:
    shutil.copy(_tensor_file(folder), folder.parent / "secret.safetensors")
    change_manifest(folder, lambda fields: _rename_in_manifest(fields, name))
    assert "leads out of the checkpoint" in refused(folder)


def test_a_link_to_a_folder_outside_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "optimizer", tmp_path / "outside")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "optimizer").mkdir()
    name = f"link/{next((tmp_path / 'outside').iterdir()).name}"
    change_manifest(folder, lambda fields: _rename_in_manifest(fields, name))
    assert "is no regular file inside the checkpoint" in refused(folder)


def test_a_pipe_in_the_place_of_the_manifest_is_refused_and_not_waited_for(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    assert verify(folder) == [f"{folder}/manifest.json is no manifest of a checkpoint"]
    assert find_latest(folder.parent) is None


def test_a_slice_that_starts_nowhere_is_refused(folder: Path) -> None:
    def change(fields: dict[str, Any]) -> None:
        name = next(name for name, record in fields["tensors"]["model"].items() if record["shape"])
        fields["tensors"]["model"][name]["slices"][0]["start"] = []

    change_manifest(folder, change)
    (problem,) = verify(folder)
    assert "manifest.json is damaged" in problem


def test_slices_of_exabytes_are_refused(folder: Path) -> None:
    def change(fields: dict[str, Any]) -> None:
        record = next(iter(fields["tensors"]["optimizer"].values()))
        record["shape"] = record["slices"][0]["extent"] = [1 << 60]
        record["slices"][0]["start"] = [0]

    change_manifest(folder, change)
    assert "lies outside of the files" in refused(folder)


@pytest.mark.parametrize("count", [-1, 1 << 70, 1.5, "8", None, True])
def test_a_step_count_that_no_run_has_is_refused(count: object, folder: Path) -> None:
    path = folder / "state.json"
    state = json.loads(path.read_text())
    state["optimizer"]["step_count"] = count
    path.write_text(json.dumps(state))
    accept_files(folder)
    parts = build_parts(MESH, LLAMA, zero=0, seed=2, fill=True)
    with pytest.raises(ConfigError, match="no step count of an optimizer"):
        load(folder, parts, MESH)
    assert differences(parts, seed=2) == []


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("it ran",))


@pytest.mark.parametrize("name", ["state.json", "manifest.json", "model/config.json", "safetensors"])
def test_a_pickle_in_the_place_of_any_file_is_refused_and_does_not_run(
    name: str, folder: Path, capfd: pytest.CaptureFixture
) -> None:
    path = _tensor_file(folder) if name == "safetensors" else folder / name
    path.write_bytes(pickle.dumps([_Bomb()] * 1000))
    if name != "manifest.json":
        accept_files(folder)
    parts = build_parts(MESH, LLAMA, zero=0, seed=2, fill=True)
    with pytest.raises(ConfigError) as raised:
        load(folder, parts, MESH)
    assert "\n" not in str(raised.value) and "it ran" not in capfd.readouterr().out


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/outside.safetensors", "a/../../outside.safetensors"])
def test_an_index_that_leads_out_of_a_model_folder_is_refused(name: str, folder: Path) -> None:
    model = folder / "model"
    shutil.copy(next(model.glob("*.safetensors")), folder / "outside.safetensors")
    index = model / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"] = dict.fromkeys(fields["weight_map"], name)
    index.write_text(json.dumps(fields))
    parts = build_parts(MESH, LLAMA, zero=0, seed=2)
    before = [parameter.detach().clone() for _, parameter, _ in parts.parameters]
    with pytest.raises(ConfigError) as raised:
        load_weights(model, parts, MESH)
    assert "\n" not in str(raised.value)
    assert all((parameter == old).all() for (_, parameter, _), old in zip(parts.parameters, before, strict=True))


def test_hundreds_of_flips_and_truncations_are_all_found(folder: Path) -> None:
    chance = random.Random(5)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        good = path.read_bytes()
        for _ in range(60):
            damaged = bytearray(good)
            if chance.random() < 0.5:
                damaged[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
            else:
                del damaged[chance.randrange(len(good)) :]
            path.write_bytes(damaged)
            problems = verify(folder)
            assert problems and str(path) in problems[0], path
            # What a start sees without reading everything: it never takes a file of another length.
            assert len(damaged) == len(good) or find_latest(folder.parent) is None
        path.write_bytes(good)
    assert verify(folder) == [] and len(files) * 60 >= 300


def test_why_a_checkpoint_is_passed_over_is_told(folder: Path) -> None:
    older = Path(shutil.copytree(folder, folder.with_name("step-00000050")))
    change_manifest(older, lambda fields: fields.update(step=50))
    (folder / "manifest.json").write_bytes(b"{}")
    told: list[str] = []
    assert find_latest(folder.parent, notice=told.append) == older
    (notice,) = told
    assert "manifest.json is damaged" in notice and notice.endswith("step-00000100 is passed over")
    shutil.rmtree(folder / "optimizer")
    (folder / "manifest.json").unlink()
    told.clear()
    assert find_latest(folder.parent, notice=told.append) == older and "manifest.json" in told[0]
