from __future__ import annotations

import gc
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.data import IndexedDataset, IndexedWriter
from parallax.data.indexed import writer as writer_module
from parallax.data.indexed.layout import index_dtype
from parallax.errors import ConfigError

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def index_of(code: int, lengths: list[int], itemsize: int, documents: list[int]) -> bytes:
    """Return the bytes of an index, written out by hand from the description of the format."""
    pointers = [sum(lengths[:i]) * itemsize for i in range(len(lengths))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    arrays = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *pointers)
    return head + arrays + struct.pack(f"<{len(documents)}q", *documents)


def put(folder: Path, index: bytes, tokens: bytes) -> Path:
    (folder / "a.idx").write_bytes(index)
    (folder / "a.bin").write_bytes(tokens)
    return folder / "a"


@pytest.mark.parametrize("name", CODES)
def test_every_byte_is_where_the_format_says(tmp_path: Path, name: str) -> None:
    with IndexedWriter(tmp_path / "a", name) as writer:
        writer.add_document([1, 2, 3])
        writer.add_sequence([4])
        writer.add_sequence([5, 6])
        writer.end_document()
        writer.add_document([])
    dtype = np.dtype(name)
    assert (tmp_path / "a.bin").read_bytes() == np.arange(1, 7).astype(dtype.newbyteorder("<")).tobytes()
    assert (tmp_path / "a.idx").read_bytes() == index_of(CODES[name], [3, 1, 2, 0], dtype.itemsize, [0, 1, 3, 4])
    data = IndexedDataset(tmp_path / "a")
    assert len(data) == 4 and data.num_documents == 3 and data.dtype == dtype
    assert [data[i].tolist() for i in range(4)] == [[1, 2, 3], [4], [5, 6], []]
    assert data.document_indices.tolist() == [0, 1, 3, 4]


@settings(deadline=None, max_examples=50)  # each example syncs two files to the disk
@given(st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=3), max_size=6))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]) -> None:
    prefix = tmp_path_factory.mktemp("indexed") / "a"
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(np.array(sequence, np.int64))
            writer.end_document()
    data = IndexedDataset(prefix)
    assert [sequence.tolist() for sequence in data] == [s for d in documents for s in d]
    assert data.document_indices.tolist() == [0, *np.cumsum([len(d) for d in documents]).tolist()]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=3), max_size=5),
    st.integers(1, 5),
    st.integers(2, 9),
)
def test_texts_added_together_are_documents_of_one_sequence(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], at_once: int, longest: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    texts = [(text, text is document[-1]) for document in documents for text in document]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "LONGEST_SEQUENCE", longest)
        with IndexedWriter(folder / "a", np.int32) as writer:
            for first in range(0, len(texts), at_once):
                ids, ends = zip(*texts[first : first + at_once], strict=True)
                content = np.array([i for text in ids for i in text], "<i4").tobytes()
                writer.add_texts(content, np.array([len(text) for text in ids], np.int32), np.array(ends))
        with IndexedWriter(folder / "b", np.int32) as writer:
            for document in documents:
                writer.add_document([i for text in document for i in text])
    for suffix in ("bin", "idx"):
        assert (folder / f"a.{suffix}").read_bytes() == (folder / f"b.{suffix}").read_bytes()


def test_a_sequence_stays_valid_after_the_data_set_and_its_files_are_gone(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document(np.arange(1000))
    data = IndexedDataset(str(tmp_path / "a"))
    sequence, documents = data[0], data.document_indices
    del data
    gc.collect()
    for path in tmp_path.iterdir():
        path.unlink()
    assert sequence.tolist() == list(range(1000)) and documents.tolist() == [0, 1]
    sequence[0] = 7  # one's own


def test_parts_of_a_sequence_are_taken_by_offset_and_length(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.int32) as writer:
        writer.add_document([8, 9])
        writer.add_document([1, 2, 3, 4])
    data = IndexedDataset(tmp_path / "a.idx")
    assert data.get(1).tolist() == [1, 2, 3, 4] and data.get(1, 1).tolist() == [2, 3, 4]
    assert data.get(1, 1, 2).tolist() == [2, 3] and data.get(1, 4).tolist() == [] and data.get(1, 2, 0).tolist() == []
    assert data[-1].tolist() == data[np.int64(1)].tolist() == [1, 2, 3, 4]
    for wrong in ((1, 0, 5), (1, -1, 1), (1, 5), (1, 1, -1), (2,), (-3,)):
        with pytest.raises(IndexError):
            data.get(*wrong)


def test_an_empty_data_set_is_one(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.uint16):
        pass
    assert len(IndexedDataset(tmp_path / "a")) == 0 and list(IndexedDataset(tmp_path / "a")) == []


def test_the_type_is_what_the_header_says_and_never_follows_from_a_vocabulary(tmp_path: Path) -> None:
    prefix = put(tmp_path, index_of(5, [2], 8, [0, 1]), np.array([3, 2**40], "<i8").tobytes())
    assert IndexedDataset(prefix)[0].tolist() == [3, 2**40]
    assert [index_dtype(n).name for n in (1, 65499, 65500, 65536)] == ["uint16", "uint16", "int32", "int32"]


@pytest.mark.parametrize(
    ("index", "tokens", "says"),
    [
        (index_of(6, [1], 8, [0, 1]), 8, r"a\.idx describes float64 numbers; token ids are whole numbers"),
        (index_of(7, [1], 4, [0, 1]), 4, r"float32"),
        (index_of(9, [1], 4, [0, 1]), 4, r"an unknown type \(code 9\)"),
        (b"MMIDIDX\x00\x01" + index_of(4, [], 4, [0])[9:], 0, "is no index of a token file"),
        (b"", 0, "is no index of a token file"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 2, 4, 0, 1) + bytes(8), 0, "version 2 .* version 1 can be read"),
        (index_of(4, [1, 1], 4, [0, 1, 2])[:-1], 8, r"a\.idx has 81 bytes, but its header speaks of 82; it is damaged"),
        (index_of(4, [1], 4, [0, 1]) + b"\x00", 4, "as of images"),
        (index_of(4, [1], 4, []), 4, "damaged"),
        (index_of(4, [2], 4, [0, 1]), 7, r"a\.bin has 7 bytes, but a\.idx describes 8; it is cut short"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2**60, 1), 0, "damaged"),
    ],
)
def test_what_is_no_token_file_is_one_sentence(tmp_path: Path, index: bytes, tokens: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        IndexedDataset(put(tmp_path, index, bytes(tokens)))


def test_a_missing_half_is_named(tmp_path: Path) -> None:
    put(tmp_path, index_of(4, [], 4, [0]), b"")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(ConfigError, match=r"a\.bin: there is no such file"):
        IndexedDataset(tmp_path / "a")


def test_a_pointer_out_of_the_token_file_is_found_when_it_is_followed(tmp_path: Path) -> None:
    index = bytearray(index_of(4, [1, 1], 4, [0, 1, 2]))
    index[34 + 8 : 34 + 16] = struct.pack("<q", 2**40)
    data = IndexedDataset(put(tmp_path, bytes(index), bytes(8)))
    with pytest.raises(ConfigError, match=r"sequence 0 lies outside of a\.bin"):
        data[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint32, np.uint64])
def test_types_that_the_format_does_not_have_are_refused(tmp_path: Path, dtype: type) -> None:
    with pytest.raises(
        ConfigError, match="token files hold whole numbers of type uint8, int8, int16, int32, int64, uint16"
    ):
        IndexedWriter(tmp_path / "a", dtype)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ids", "says"), [([65536], "65536 does not fit"), ([-1], "-1 does not"), ([0.5], "not float")]
)
def test_ids_that_do_not_fit_are_refused_and_nothing_is_left(tmp_path: Path, ids: list[float], says: str) -> None:
    with pytest.raises(ConfigError, match=says), IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([1])
        writer.add_document(ids)
    assert not list(tmp_path.iterdir())


def test_totals_beyond_two_to_the_31_tokens_and_bytes_do_not_wrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-LM 1672: 32-bit pointers wrap. The token file is sparse and takes a few KiB of disk."""
    lengths = [2**30, 2**30, 2**30, 5]
    prefix = tmp_path / "a"
    (tmp_path / "a.idx").write_bytes(index_of(4, lengths, 4, [0, 1, 2, 3, 4]))
    last = np.arange(11, 16, dtype="<i4")
    with open(tmp_path / "a.bin", "wb") as stream:
        stream.seek(3 * 2**32)
        stream.write(last.tobytes())
    assert (tmp_path / "a.bin").stat().st_blocks * 512 < 1 << 20
    data = IndexedDataset(prefix)
    assert data[3].tolist() == last.tolist()
    assert data.get(2, 2**30 - 2).tolist() == [0, 0] and data.get(3, 2, 2).tolist() == [13, 14]
    assert data.pointers.tolist() == [0, 2**32, 2**33, 3 * 2**32]

    class Sparse:
        """Takes only the length of what it is given."""

        def __init__(self, tokens: int) -> None:
            self.tokens = tokens

        def __len__(self) -> int:
            return 4 * self.tokens

    with IndexedWriter(tmp_path / "b", np.int32) as writer:
        monkeypatch.setattr(writer, "_write", lambda content: None)
        for tokens in lengths:
            writer.add_bytes(Sparse(tokens))  # type: ignore[arg-type]
            writer.end_document()
        assert writer.num_tokens == 3 * 2**30 + 5
    assert (tmp_path / "b.idx").read_bytes() == (tmp_path / "a.idx").read_bytes()


def test_a_document_too_long_for_one_sequence_becomes_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "LONGEST_SEQUENCE", 4)
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document(np.arange(9))
        writer.add_document(np.arange(4))
    data = IndexedDataset(tmp_path / "a")
    assert data.lengths.tolist() == [4, 4, 1, 4] and data.document_indices.tolist() == [0, 3, 4]


def test_pointers_are_right_where_blocks_of_them_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BLOCK", 3)
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        for length in (2, 0, 1, 5, 3, 0, 4):
            writer.add_document(np.arange(length))
    assert (tmp_path / "a.idx").read_bytes() == index_of(8, [2, 0, 1, 5, 3, 0, 4], 2, list(range(8)))


def test_a_killed_writer_leaves_the_files_before_it_whole_and_blocks_nobody(tmp_path: Path) -> None:
    prefix = tmp_path / "a"
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document([1, 2])
    program = (
        "import sys; from parallax.data import IndexedWriter; w = IndexedWriter(sys.argv[1], 'uint16'); "
        "w.add_document(range(5000)); w._bin.flush(); print('in the middle', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(prefix)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "in the middle\n"
    with pytest.raises(ConfigError, match=r"a\.bin is being written by another process"):
        IndexedWriter(prefix, np.uint16)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert IndexedDataset(prefix)[0].tolist() == [1, 2]
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document([3])
    assert IndexedDataset(prefix)[0].tolist() == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
