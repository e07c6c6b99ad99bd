"""Headers against the public safetensors library, and files that lie about themselves."""

import json
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch

from parallax.checkpoint.safetensors_file import Entry, make_header, read_header
from parallax.errors import ConfigError


def test_the_public_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {"wide": torch.arange(6.0).view(2, 3), "empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    header, _ = make_header([(name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items()])
    path = tmp_path / "a.safetensors"
    path.write_bytes(header + b"".join(tensor.numpy().tobytes() for tensor in tensors.values()))
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_what_the_public_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(5).int(), "b": torch.randn(3, 2).bfloat16(), "c": torch.ones(4, dtype=torch.bool)}
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    entries = _header(path)
    assert {name: (entry.dtype, entry.shape) for name, entry in entries.items()} == {
        "a": ("I32", (5,)),
        "b": ("BF16", (3, 2)),
        "c": ("BOOL", (4,)),
    }
    where = entries["b"].offset
    assert path.read_bytes()[where : where + 12] == tensors["b"].view(torch.uint8).numpy().tobytes()


def field(begin: int, end: int, shape: object = None, dtype: object = "F32") -> dict:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


LIES = {
    "overlap": {"a": field(0, 8), "b": field(4, 12)},
    "hole": {"a": field(0, 4), "b": field(8, 12)},
    "beyond the end": {"a": field(0, 1 << 60)},
    "rest unused": {"a": field(0, 8)},
    "negative shape": {"a": field(0, 12, [-3])},
    "negative offset": {"a": field(-4, 8)},
    "shape that is no list": {"a": field(0, 12, 3)},
    "fraction": {"a": field(0, 12, [3.0])},
    "truth": {"a": field(0, 4, [True]), "b": field(4, 12)},
    "huge shape": {"a": field(0, 12, [1 << 62, 1 << 62])},
    "unknown type": {"a": field(0, 12, None, "F31")},
    "type that is a list": {"a": field(0, 12, None, ["F32"])},
    "missing field": {"a": {"dtype": "F32", "shape": [3]}},
    "no object": [1, 2],
    "three offsets": {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12, 12]}},
    "number for a tensor": {"a": 7},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_in_one_sentence(lie: str, tmp_path: Path) -> None:
    text = json.dumps(LIES[lie]).encode()
    _refused(len(text).to_bytes(8, "little") + text + bytes(12), tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        (1 << 62).to_bytes(8, "little") + b"{}",
        (99_999_999).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"\xff\xfe{}",
        (30_000).to_bytes(8, "little") + b"[" * 30_000,
        pickle.dumps({"a": list(range(100))}),
    ],
    ids=["empty", "short", "gigantic header", "header beyond the end", "no text", "deep nesting", "pickle"],
)
def test_what_is_no_safetensors_file_is_refused_in_one_sentence(content: bytes, tmp_path: Path) -> None:
    _refused(content, tmp_path)


def test_a_tensor_named_twice_is_refused(tmp_path: Path) -> None:
    one = json.dumps(field(0, 12))
    text = f'{{"a":{one},"a":{one}}}'.encode()
    _refused(len(text).to_bytes(8, "little") + text + bytes(12), tmp_path)


def _refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        _header(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def _header(path: Path) -> dict[str, Entry]:
    content = path.read_bytes()
    return read_header(path, len(content), lambda start, stop: content[start:stop])
