from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from parallax.data import BatchLoader, DataOptions, IndexedWriter, prepare_data
from parallax.data import token_files as token_files_module
from parallax.data.build import BuildOptions, build
from parallax.data.checksums import changed_files
from parallax.data.options import check
from parallax.data.token_files import token_files
from parallax.data.tokenizers import DEFAULT_TOKENIZER, ByteTokenizer, Tokenizer, load_tokenizer
from parallax.errors import ConfigError


def write(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> str:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def corpus(folder: Path, name: str, count: int = 400) -> Path:
    """Write a .jsonl whose documents have other lengths and other letters."""
    path = folder / f"{name}.jsonl"
    lines = (json.dumps({"text": f"{name} {i} " + name * (i % 7)}) for i in range(count))
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_token_files_train_as_the_text_does_that_they_were_built_from(tmp_path: Path) -> None:
    path = corpus(tmp_path, "a")
    prefix = str(tmp_path / "built")
    build(BuildOptions([str(path)], "bytes", prefix, 1, append_eod=True))
    text = prepare_data(DataOptions((str(path),), "bytes", document_attention=True), 32)
    for given in (prefix, prefix + ".bin", prefix + ".idx"):
        tokens = prepare_data(DataOptions((given,), "bytes", document_attention=True), 32)
        assert len(tokens.train) == len(text.train) > 100
        for i in range(0, len(text.train), 7):
            ours, theirs = tokens.train[i], text.train[i]
            assert isinstance(ours, dict) and isinstance(theirs, dict)
            assert ours["window"].tolist() == theirs["window"].tolist()
            assert ours["documents"].tolist() == theirs["documents"].tolist()
    assert "400 documents" in tokens.description


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_any_type_of_ids_is_read(tmp_path: Path, dtype: str) -> None:
    store = token_files(write(tmp_path / "a", [[1, 2], [], [3]], dtype), ByteTokenizer())
    assert store.tokens.dtype == dtype and store.tokens.tolist() == [1, 2, 3]
    assert store.document_starts.tolist() == [0, 2, 2, 3] and store.num_documents == 3


def test_documents_of_several_sequences_are_one_document_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with IndexedWriter(tmp_path / "a", "int32") as writer:
        for document in ([[1], [2, 3]], [], [[4]], [[], [5]], []):
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    expected = [0, 3, 3, 4, 5, 5]
    assert token_files(str(tmp_path / "a"), ByteTokenizer()).document_starts.tolist() == expected
    monkeypatch.setattr(token_files_module, "MAPPED_FROM", 1)
    monkeypatch.setattr(token_files_module, "BLOCK", 2)
    mapped = token_files(str(tmp_path / "a"), ByteTokenizer()).document_starts
    assert mapped.tolist() == expected and isinstance(mapped, np.memmap)


def test_a_file_that_does_not_fit_the_tokenizer_is_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 257]])
    with pytest.raises(ConfigError, match=r"a\.bin holds the id 257, but --tokenizer bytes has the ids 0 to 256; give"):
        token_files(prefix, ByteTokenizer())
    with pytest.raises(ConfigError, match=r"a\.bin holds the id -1"):
        token_files(write(tmp_path / "a", [[1, -1]], "int32"), ByteTokenizer())


def test_a_build_of_another_tokenizer_is_refused_by_its_record(tmp_path: Path) -> None:
    prefix = str(tmp_path / "built")
    build(BuildOptions([str(corpus(tmp_path, "a"))], "bytes", prefix, 1))
    record = Path(prefix + ".build.json")
    record.write_text(record.read_text().replace('tokenizer_fingerprint": "', 'tokenizer_fingerprint": "0'))
    with pytest.raises(
        ConfigError, match=r"built\.bin was made with bytes as it was then, and that is another tokenizer now"
    ):
        token_files(prefix, ByteTokenizer())
    for made_with, said in (
        (
            "./llama",
            r"with the tokenizer \./llama, and this run has --tokenizer bytes, .* run with --tokenizer \./llama, or",
        ),
        (
            DEFAULT_TOKENIZER,
            r"with the default tokenizer, and this run has --tokenizer bytes, .* leave out --tokenizer, or",
        ),
    ):
        record.write_text(record.read_text().replace('"tokenizer": "bytes"', f'"tokenizer": "{made_with}"'))
        with pytest.raises(
            ConfigError, match=r"built\.bin was made " + said + r" build .* \(.*built\.build\.json says so\)"
        ):
            token_files(prefix, ByteTokenizer())
        record.write_text(record.read_text().replace(f'"tokenizer": "{made_with}"', '"tokenizer": "bytes"'))
    write(tmp_path / "built", [[1, 2]])  # other files under the name: the record is not about them
    assert token_files(prefix, ByteTokenizer()).tokens.tolist() == [1, 2]
    record.write_text("{")
    with pytest.raises(ConfigError, match=r"built\.build\.json is damaged"):
        token_files(prefix, ByteTokenizer())


@pytest.mark.parametrize("kind", ["bytes", "default"])
def test_a_tokenizer_and_what_is_saved_of_it_are_no_two_tokenizers(
    kind: str, tmp_path: Path, default_tokenizer: Tokenizer
) -> None:
    ours = ByteTokenizer() if kind == "bytes" else default_tokenizer
    (tmp_path / "saved").mkdir()
    ours.save(tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert saved.fingerprint != ours.fingerprint
    prefix = str(tmp_path / "built")
    for given in (ours.given, saved.given):
        build(BuildOptions([str(corpus(tmp_path, "a"))], given, prefix, 1))
        for tokenizer in (ours, saved):
            assert len(token_files(prefix, tokenizer).tokens)
    text = (tmp_path / "saved" / "tokenizer.json").read_text()
    (tmp_path / "other.json").write_text(text.replace("{", "{ ", 1))  # whose ids could be any
    with pytest.raises(ConfigError, match="to which its ids may be other text"):
        token_files(prefix, load_tokenizer(tmp_path / "other.json"))


def test_files_of_different_builds_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2], [3]])
    with open(prefix + ".bin", "ab") as stream:
        stream.write(b"\0\0")
    with pytest.raises(
        ConfigError, match=r"a\.bin has 8 bytes, but a\.idx describes 6; the two are of different builds"
    ):
        token_files(prefix, ByteTokenizer())
    index = bytearray(Path(write(tmp_path / "b", [[1, 2], [3]]) + ".idx").read_bytes())
    index[34 + 8 + 8] = 2  # the second pointer
    (tmp_path / "b.idx").write_bytes(index)
    with pytest.raises(ConfigError, match=r"b\.idx: sequence 1 does not lie where the one before it ends"):
        token_files(str(tmp_path / "b"), ByteTokenizer())


def test_a_changed_file_is_named(tmp_path: Path) -> None:
    paths = [str(corpus(tmp_path, "text")), write(tmp_path / "a", [[7] * 5000]), write(tmp_path / "b", [[8] * 5000])]
    before = prepare_data(DataOptions(tuple(paths), "bytes"), 32)
    assert [file.name for file in before.files] == ["text.jsonl", "a.bin", "a.idx", "b.bin", "b.idx"]
    content = bytearray(Path(paths[2] + ".bin").read_bytes())
    content[5000] ^= 1  # one bit, in the middle
    Path(paths[2] + ".bin").write_bytes(content)
    now = prepare_data(DataOptions(tuple(paths), "bytes"), 32)
    assert changed_files(before.files, now.files) == ["the data file b.bin has changed"]
    assert before.train.fingerprint != now.train.fingerprint


def test_a_large_file_is_read_through_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parallax.data import checksums

    prefix = write(tmp_path / "a", [[1, 2, 3]])
    fresh = token_files(prefix, ByteTokenizer())
    later = os.stat(prefix + ".idx").st_ctime + 60
    monkeypatch.setattr(checksums, "LARGE_BYTES", 0)
    monkeypatch.setattr(checksums.time, "time", lambda: later)
    assert token_files(prefix, ByteTokenizer()).fingerprint == fresh.fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(token_files_module, "hash_file", None)
        again = token_files(prefix, ByteTokenizer())
        assert again.fingerprint == fresh.fingerprint and again.files == fresh.files
    write(tmp_path / "a", [[1, 2, 4]])
    assert token_files(prefix, ByteTokenizer()).fingerprint != fresh.fingerprint


def test_parts_of_a_file_are_hashed_and_looked_at_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parallax.data import checksums

    monkeypatch.setattr(checksums, "PART_BYTES", 4)
    prints = {token_files(write(tmp_path / "a", [ids]), ByteTokenizer()).fingerprint for ids in ([1, 2, 3], [3, 2, 1])}
    assert len(prints) == 2
    with pytest.raises(ConfigError, match="the id 300"):
        token_files(write(tmp_path / "a", [[1, 2, 3, 4, 300]]), ByteTokenizer())


def test_a_blend_takes_its_shares_of_each_source_and_of_what_is_held_out(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [[7] * 8000]), str(corpus(tmp_path, "b", 2000))
    data = prepare_data(DataOptions(("0.7", a, "0.3", b), "bytes", 0.1), 32)
    assert data.eval is not None and data.test is None
    for part, shuffle, count, step in ((data.train, True, 100, 3), (data.eval, False, 10, 1)):
        loader = BatchLoader(part, 0, count, 10, shuffle=shuffle)
        rows = [row for batch in loader.micro_batches(step) for row in batch["labels"].tolist()]
        assert sum(set(row) == {7} for row in rows) == 0.7 * count
    assert "0.7 " in data.description and "0.3 " in data.description
    other = prepare_data(DataOptions(("0.6", a, "0.4", b), "bytes", 0.1), 32)
    assert other.train.fingerprint != data.train.fingerprint
    scaled = prepare_data(DataOptions(("7", a, "3", b), "bytes", 0.1), 32)
    assert scaled.train.fingerprint == data.train.fingerprint


def test_a_source_that_is_too_small_is_named(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [[7] * 8000]), write(tmp_path / "b", [[8] * 40])
    with pytest.raises(ConfigError, match=rf"--data {b}: the data has 40 tokens, but --seq-len 32 needs 66"):
        prepare_data(DataOptions(("0.7", a, "0.3", b), "bytes"), 32)


def test_a_split_gives_three_parts_and_named_sets_are_whole(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [[k] * 50 for k in range(200)])
    b = write(tmp_path / "b", [[8] * 500])
    valid = (f"b={b}", f"text={corpus(tmp_path, 'text')}")
    data = prepare_data(DataOptions((a,), "bytes", split="80,15,5", valid=valid), 49)
    assert data.eval is not None and data.test is not None
    assert [part.num_tokens for part in (data.train, data.eval, data.test)] == [8000, 1500, 500]  # type: ignore[union-attr]
    assert list(data.valid) == ["b", "text"] and data.valid["b"].num_tokens == 500
    assert len(data.files) == 2  # what is only evaluated on does not change the training


def test_a_named_set_that_is_too_small_is_named(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [[7] * 8000]), write(tmp_path / "b", [[8] * 40])
    with pytest.raises(
        ConfigError, match=rf"--valid b={b}: the data has 40 tokens, but a sample of --seq-len 64 takes 65"
    ):
        prepare_data(DataOptions((a,), "bytes", valid=(f"b={b}",)), 64)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data": ("0.7", "{a}", "{b}")}, "--data 0.7 {a} {b}: in a blend a weight stands before each path,"),
        ({"data": ("0.7", "{a}", "0.3")}, "--data 0.7 {a} 0.3: in a blend a weight stands before each path,"),
        ({"data": ("0.7", "0.3", "{a}", "{b}")}, "--data 0.7 0.3 {a} {b}: in a blend"),
        ({"data": ("0", "{a}", "1", "{b}")}, "--data 0 {a}: a weight must be above 0;"),
        ({"data": ("-1", "{a}", "1", "{b}")}, "--data -1 {a}: a weight must be above 0;"),
        ({"data": ("0.5", "{a}", "0.5", "{a}")}, "--data names {a} more than once;"),
        ({"data": ("{tmp}/cut",)}, "--data {tmp}/cut: there is {tmp}/cut.bin, but its index {tmp}/cut.idx is missing."),
        ({"data": ("{tmp}/cut.bin",)}, "--data {tmp}/cut.bin: there is no {tmp}/cut.idx;"),
        ({"data": ("{tmp}/both",)}, "--data {tmp}/both: this is text and also the beginning of a pair of token files;"),
        ({"data": ("{tmp}/fake",)}, "--data {tmp}/fake: {tmp}/fake.idx is no index of a token file."),
        ({"data": ("{tmp}/none",)}, "--data {tmp}/none: there is no such file or folder."),
        ({"valid": ("{a}",)}, "--valid {a}: write NAME=PATH,"),
        ({"valid": ("x y={a}",)}, "--valid x y={a}: write NAME=PATH,"),
        ({"valid": ("x={a}", "x={b}")}, "--valid names x twice;"),
        ({"valid": ("x={tmp}/none",)}, "--valid x={tmp}/none: there is no such file or folder."),
        ({"split": "98;2"}, "--split 98;2 must be two or three numbers,"),
        ({"split": "98,2", "eval_fraction": 0.1}, "--split 98,2 and --eval-fraction 0.1 both say what is held out;"),
    ],
)
def test_each_mistake_is_one_sentence(tmp_path: Path, options: dict[str, object], says: str) -> None:
    names = {name: write(tmp_path / name, [[1]]) for name in ("a", "b", "cut", "both", "fake")} | {"tmp": str(tmp_path)}
    (tmp_path / "cut.idx").unlink()
    (tmp_path / "both").write_text("text")
    (tmp_path / "fake.idx").write_text("text")
    placed = {
        key: tuple(v.format(**names) for v in value) if isinstance(value, tuple) else value
        for key, value in options.items()
    }
    problems = check(DataOptions(**{"tokenizer": "bytes"} | placed))  # type: ignore[arg-type]
    assert len(problems) == 1 and problems[0].startswith(says.format(**names)), problems


def test_a_number_that_is_a_path_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "a.txt").write_text("text")
    assert check(DataOptions(("2024",), "bytes")) == []
