"""A manifest proves what it names, or is refused: damage, paths that lead out, slices that do not cover."""

import dataclasses
import json
from pathlib import Path

import pytest

from parallax.checkpoint.manifest import FileRecord, Manifest, Slice, TensorRecord, read_manifest, sealed
from parallax.errors import ConfigError

FILE = "model/a.safetensors"
GOOD = Manifest(
    step=100,
    files={FILE: FileRecord(1000, ("0" * 32,)), "model/b.safetensors": FileRecord(1000, ("1" * 32,))},
    model={
        "whole": TensorRecord("F32", (4, 6), (Slice(FILE, 100, (0, 0), (4, 6)),)),
        "cut": TensorRecord(
            "BF16", (4, 6), (Slice(FILE, 200, (0, 0), (1, 6)), Slice("model/b.safetensors", 8, (1, 0), (3, 6)))
        ),
        "scalar": TensorRecord("F32", (), (Slice(FILE, 300, (), ()),)),
    },
    optimizer={"whole.exp_avg": TensorRecord("F32", (4, 6), (Slice("model/b.safetensors", 800, (0, 0), (4, 6)),))},
)


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(GOOD.encode())
    assert read_manifest(tmp_path) == GOOD


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    good = GOOD.encode()
    path = tmp_path / "manifest.json"
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ (1 << position % 8)]) + good[position + 1 :])
        with pytest.raises(ConfigError):
            read_manifest(tmp_path)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    good = GOOD.encode()
    for length in range(len(good)):
        (tmp_path / "manifest.json").write_bytes(good[:length])
        with pytest.raises(ConfigError):
            read_manifest(tmp_path)


def _refused(folder: Path, fields: dict) -> str:
    """Write a manifest of these fields with a checksum that holds; return what is said against it."""
    fields = {key: value for key, value in fields.items() if key != "checksum"}
    (folder / "manifest.json").write_bytes(sealed(fields))
    with pytest.raises(ConfigError) as raised:
        read_manifest(folder)
    assert str(folder / "manifest.json") in str(raised.value) and "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../step-1/a", "model/../../a", "model//a", "./a", "", "model\\a", "..", "model/a/", "a\0b"]
)
def test_a_path_that_leads_out_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    fields = json.loads(GOOD.encode())
    fields["files"][name] = {"bytes": 1, "xxh128": [""]}
    assert "leads out of the checkpoint" in _refused(tmp_path, fields)


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    fields = json.loads(GOOD.encode())
    fields["files"]["model/\ud800"] = {"bytes": 1, "xxh128": [""]}
    assert r"the path 'model/\ud800' is no valid text" in _refused(tmp_path, fields)
    fields = json.loads(GOOD.encode())
    fields["tensors"]["model"]["\ud800"] = fields["tensors"]["model"].pop("scalar")
    assert "no valid text" in _refused(tmp_path, fields)


CUT = GOOD.model["cut"].slices
BAD_SLICES = {
    "hole": (CUT[0], dataclasses.replace(CUT[1], start=(2, 0), extent=(2, 6))),
    "overlap": (CUT[0], dataclasses.replace(CUT[1], start=(0, 0), extent=(4, 6))),
    "missing end": (CUT[0], dataclasses.replace(CUT[1], extent=(2, 6))),
    "beyond the shape": (CUT[0], dataclasses.replace(CUT[1], extent=(4, 6))),
    "nothing": (),
    "columns only": (dataclasses.replace(CUT[0], extent=(4, 5)),),
    "column offset": (dataclasses.replace(CUT[0], start=(0, 1), extent=(4, 6)),),
    "other number of dims": (dataclasses.replace(CUT[0], start=(0,), extent=(4, 6)),),
    "outside of the file": (dataclasses.replace(CUT[0], offset=990, extent=(4, 6)),),
    "file without a record": (dataclasses.replace(CUT[0], file="model/c.safetensors", extent=(4, 6)),),
    "file that holds no tensors": (dataclasses.replace(CUT[0], file="model/config.json", extent=(4, 6)),),
    "two slices in one file": (CUT[0], dataclasses.replace(CUT[1], file=FILE)),
}


@pytest.mark.parametrize("case", BAD_SLICES)
def test_slices_that_do_not_cover_their_tensor_once_are_refused(case: str, tmp_path: Path) -> None:
    model = {"cut": TensorRecord("BF16", (4, 6), BAD_SLICES[case])}
    assert "cut" in _refused(tmp_path, json.loads(dataclasses.replace(GOOD, model=model).encode()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 3),
        ("version", 0),
        ("version", 1),
        ("format", "other"),
        ("step", -1),
        ("step", "100"),
        ("files", []),
        ("tensors", {"model": {}}),
    ],
)
def test_a_field_of_another_kind_is_refused(key: str, value: object, tmp_path: Path) -> None:
    _refused(tmp_path, json.loads(GOOD.encode()) | {key: value})


def test_a_missing_folder_and_a_missing_manifest_are_said_differently(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        read_manifest(tmp_path / "step-00000001")
    with pytest.raises(ConfigError, match="is no complete checkpoint"):
        read_manifest(tmp_path)
