from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.data import checksums
from parallax.data.checksums import changed_files, fingerprint_of
from parallax.data.corpus import Corpus, corpus_files, standard_library, user_corpus
from parallax.data.encoding import blocks as blocks_module
from parallax.data.encoding.blocks import BlockReader
from parallax.data.encoding.encode import Rules, encode_block
from parallax.data.tokenizers import ByteTokenizer
from parallax.errors import ConfigError

ODD = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei"  # all that str.splitlines splits at, but for CR and LF


def documents(*paths: Path) -> list[str]:
    """Return the documents of files, through the byte tokenizer, which loses nothing."""
    ids: list[int] = []
    for block in BlockReader(paths).blocks():
        encoded = encode_block(block, ByteTokenizer(), Rules("text", "<u2", 256))
        if encoded.problems:
            raise ConfigError([f"{block.file}, line {number}: {what}" for number, what in encoded.problems])
        ids += np.frombuffer(encoded.content, "<u2").tolist()
    texts, start = [], 0
    for end, i in enumerate(ids):
        if i == 256:
            texts.append(bytes(ids[start:end]).decode())
            start = end + 1
    assert start == len(ids)
    return texts


def corpus_digest(corpus: Corpus) -> str:
    return fingerprint_of(corpus_files(corpus))


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_records_end_only_where_json_strings_cannot_hold_the_character(
    tmp_path: Path, line_end: str, mark: str
) -> None:
    records = [{"text": ODD}, {"text": "two\r\nlines\r"}, {"id": 3, "text": " three "}]
    content = mark + line_end.join(json.dumps(record, ensure_ascii=False) for record in records)
    path = write(tmp_path / "a.jsonl", content)
    assert documents(path) == [ODD, "two\r\nlines\r", " three "]
    assert documents(write(path, content + line_end * 2)) == [ODD, "two\r\nlines\r", " three "]


def test_text_files_are_kept_exactly_but_for_the_byte_order_mark(tmp_path: Path) -> None:
    text = f"one\r\ntwo\rthree\n{ODD}\t \n\n"
    assert documents(write(tmp_path / "a.txt", text)) == [text]
    assert documents(write(tmp_path / "b.md", "\ufeff" + text)) == [text]
    assert documents(write(tmp_path / "c.txt", ""), tmp_path / "a.txt") == [text]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "cut', "not valid JSON"),
        ('["text"]', "found a list"),
        ('{"content": "x"}', r"the keys \['content'\]"),
        ('{"text": 5}', "a string under the key"),
        ('{"messages": []}', "; chats are for finetune_sft.py"),
        ('{"prompt": "a", "completion": "b"}', "; chats are for finetune_sft.py"),
        (r'{"text": "\ud83d"}', r"half of a surrogate pair \(\\ud83d\)"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"text": "{ODD[:6]}"}}\r\n\n{line}\n{{"text": "after"}}\n')
    with pytest.raises(ConfigError, match=rf"a\.jsonl, line 3: .*{says}"):
        documents(path)


@pytest.mark.parametrize(("name", "at"), [("a.jsonl", 10), ("a.txt", 14010)])
def test_a_byte_that_is_not_utf8_is_named_by_line_and_offset(tmp_path: Path, name: str, at: int) -> None:
    path = write(tmp_path / name, b'{"text": "x"}\n' * 1000 + b'{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match=rf"{name}, line 1001: byte {at} (of the line )?is not UTF-8"):
        documents(path)


@given(st.text(alphabet="ab\r\n\u2028é😀", max_size=60), st.integers(1, 9), st.integers(1, 30))
def test_documents_do_not_depend_on_how_files_are_cut(
    tmp_path_factory: pytest.TempPathFactory, text: str, piece: int, block: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    lines = "".join(
        json.dumps({"text": line + "\r\n"}, ensure_ascii=False) + "\r" * (i % 3) + "\n" * (i % 2 or i % 3 == 0)
        for i, line in enumerate(text.split("\n"))
    )
    paths = [write(folder / "a.txt", text), write(folder / "b.jsonl", lines), write(folder / "c.txt", "x" + text)]
    whole = [line for line in (text, *(line + "\r\n" for line in text.split("\n")), "x" + text) if line]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "PIECE_CHARACTERS", piece)
        patch.setattr(blocks_module, "BLOCK_BYTES", block)
        assert documents(*paths) == whole


def test_long_files_come_in_pieces_that_end_with_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "PIECE_CHARACTERS", 100)
    text = "".join(f"line {i}\r\n" for i in range(200)) + "x" * 450
    path = write(tmp_path / "a.txt", text)
    (block,) = BlockReader([path]).blocks()
    assert block.content.decode() == text and len(block.sizes) > 10 and block.ends.index(True) == len(block.sizes) - 1
    ends = np.cumsum(block.sizes)
    assert max(block.sizes) <= 200 and all(text[end - 1] == "\n" for end in ends[:-3])


def test_a_folder_gives_its_files_in_one_order_without_hidden_and_binary_ones(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/a.py", "a.txt", "Z.md", "é.txt", ".hidden/x.txt", ".x.txt", "b/.y"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, name)
    write(tmp_path / "b" / "image.png", b"\x89PNG\r\n\x00\x00")
    write(tmp_path / "utf16.txt", "text".encode("utf-16"))
    os.symlink(tmp_path, tmp_path / "b" / "loop")
    found = user_corpus([str(tmp_path)])
    assert [file.name for file in found.files] == ["Z.md", "a.txt", "b/a.py", "b/z.txt", "é.txt"]
    assert found.num_skipped == 2


def test_a_file_that_is_reached_twice_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "text")
    with pytest.raises(ConfigError, match="more than once"):
        user_corpus([str(tmp_path), str(path)])


def test_the_digest_changes_with_content_and_name_but_not_with_the_place(tmp_path: Path) -> None:
    digests = []
    for folder, name, content in (("1", "a.txt", "x"), ("2", "a.txt", "x"), ("3", "b.txt", "x"), ("4", "a.txt", "y")):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / name, content)
        digests.append(corpus_digest(user_corpus([str(tmp_path / folder)])))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_changed_new_and_missing_files_are_named() -> None:
    before = [["a", 1, "x"], ["b", 2, "y"], ["c", 3, "z"], ["d", 4, "u"], ["d", 4, "v"]]
    now = [("a", 1, "x"), ("b", 2, "changed"), ("e", 3, "z"), ("d", 4, "u"), ("d", 4, "w")]
    assert changed_files(before, now) == [
        "the data file c is no longer among them",
        "the data file e is new",
        "the data file b has changed",
        "the data file d has changed",
    ]
    assert changed_files(before, before) == []
    many = [(f"{number}.py", 1, "x") for number in range(700)]
    assert changed_files(before, many) == [
        "4 data files are no longer among them, such as a",
        "700 data files are new, such as 0.py",
    ]


def test_the_digest_of_a_large_corpus_is_cached_until_a_file_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "LARGE_BYTES", 0)
    path = write(tmp_path / "a.txt", "x")
    corpus = user_corpus([str(path)])
    fresh = corpus_digest(corpus)
    assert not cache.exists()  # just written: what stat says of it is not trusted yet
    later = os.stat(path).st_ctime + 60
    monkeypatch.setattr(checksums.time, "time", lambda: later)
    assert corpus_digest(corpus) == corpus_digest(corpus) == fresh
    assert len(list(cache.glob("checksums-*/answer.json"))) == 1
    write(path, "y")
    assert corpus_digest(corpus) != fresh


def test_the_default_corpus_is_source_text_without_tests() -> None:
    found = standard_library()
    names = [file.name for file in found.files]
    assert "argparse.py" in names and "json/decoder.py" in names and names == sorted(names, key=lambda n: n.split("/"))
    assert not [n for n in names if "/test/" in n or n.startswith("test/") or "-packages" in n]
    assert sum(file.path.stat().st_size for file in found.files) > 5e6
