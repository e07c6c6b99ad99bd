from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from parallax.data import DataOptions, prepare_data
from parallax.data import corpus as corpus_module
from parallax.data import token_store as token_store_module
from parallax.data.corpus import user_corpus
from parallax.data.encoding import blocks as blocks_module
from parallax.data.token_store import open_token_store, token_dtype, token_store
from parallax.data.tokenizers import ByteTokenizer
from parallax.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of three documents and an empty file."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one"}\n{"text": ""}\n{"text": "zwei é"}\n')
    (folder / "b.txt").write_bytes(b"three\r\nlines\r\n")
    (folder / "empty.txt").write_bytes(b"")
    return folder


EXPECTED = [*b"one", 256, *"zwei é".encode(), 256, *b"three\r\nlines\r\n", 256]


def test_documents_become_tokens_ended_by_eos(folder: Path, cache: Path) -> None:
    store = token_store(user_corpus([str(folder)]), ByteTokenizer())
    assert store.tokens.tolist() == EXPECTED
    assert store.document_starts.tolist() == [0, 4, 12, 27] and store.document_starts.dtype == np.dtype("<i8")
    assert store.num_documents == 3
    record = json.loads(next(cache.glob("tokens-*/record.json")).read_text())
    assert record["dtype"] == "<u2" and record["num_tokens"] == 27 and record["tokenizer"] == "bytes"


def test_pieces_and_batches_of_any_size_give_the_same_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for piece, batch in ((1, 1), (1, 3), (2, 5), (3, 100), (100, 1)):
        monkeypatch.setattr(blocks_module, "PIECE_CHARACTERS", piece)
        monkeypatch.setattr(blocks_module, "BLOCK_BYTES", batch)
        monkeypatch.setenv("PARALLAX_CACHE", str(folder.parent / f"cache-{piece}-{batch}"))
        store = token_store(user_corpus([str(folder)]), ByteTokenizer())
        assert store.tokens.tolist() == EXPECTED
        assert store.document_starts.tolist() == [0, 4, 12, 27]


def test_worker_processes_make_the_same_tokens(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store_module, "WORKERS_FROM_BYTES", 0)
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", 8)
    monkeypatch.setattr(blocks_module, "PIECE_CHARACTERS", 5)
    store = token_store(user_corpus([str(folder)]), ByteTokenizer())
    assert store.tokens.tolist() == EXPECTED
    assert store.document_starts.tolist() == [0, 4, 12, 27]


class WideTokenizer(ByteTokenizer):
    """Bytes, far up in a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size = 100_000
        self.eos_id = 99_999
        self.fingerprint = "wide"

    def encode_batch(self, texts):  # type: ignore[no-untyped-def]
        return [ids.astype(np.int64) + 80_000 for ids in super().encode_batch(texts)]


def test_ids_take_two_bytes_where_the_vocabulary_allows_it_else_four(folder: Path) -> None:
    assert token_dtype(65536) == np.dtype("<u2") and token_dtype(65537) == np.dtype("<u4")
    store = token_store(user_corpus([str(folder)]), WideTokenizer())
    assert store.tokens.dtype == np.dtype("<u4")
    assert store.tokens[:4].tolist() == [80_000 + b for b in b"one"] + [99_999]


def test_the_cache_is_used_until_a_file_or_the_tokenizer_changes(folder: Path, cache: Path) -> None:
    def stores() -> int:
        return len(list(cache.glob("tokens-*/tokens.bin")))

    corpus = user_corpus([str(folder)])
    first = token_store(corpus, ByteTokenizer())
    os.utime(folder / "b.txt")
    assert token_store(corpus, ByteTokenizer()).fingerprint == first.fingerprint and stores() == 1
    token_store(corpus, WideTokenizer())
    assert stores() == 2
    (folder / "b.txt").write_bytes(b"three\r\nlinez\r\n")
    changed = token_store(corpus, ByteTokenizer())
    assert changed.fingerprint != first.fingerprint and stores() == 3
    assert bytes(changed.tokens[-5:-3].tolist()) == b"ez"


def test_a_damaged_cache_is_named(folder: Path, cache: Path) -> None:
    token_store(user_corpus([str(folder)]), ByteTokenizer())
    (made,) = (path.parent for path in cache.glob("tokens-*/tokens.bin"))
    os.truncate(made / "tokens.bin", 10)
    with pytest.raises(ConfigError, match=rf"{made} is damaged .*delete that folder"):
        open_token_store(made)


def test_files_left_out_are_counted_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "x.bin").write_bytes(b"\0\1")
    for _ in range(2):
        token_store(user_corpus([str(folder)]), ByteTokenizer())
    assert capfd.readouterr().err.count("left out 1 files that are not UTF-8 text") == 1


def test_data_without_any_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match="holds no text at all"):
        prepare_data(DataOptions((str(tmp_path / "a.txt"),), "bytes"), 8)


def test_a_tokenizer_without_end_of_text_is_an_error(folder: Path) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.eos_id = None
    with pytest.raises(ConfigError, match="names no end-of-text token"):
        token_store(user_corpus([str(folder)]), tokenizer)


def test_one_call_gives_both_parts_of_the_data(folder: Path) -> None:
    (folder / "long.txt").write_text("".join(f"line {i}\n" for i in range(1000)))
    data = prepare_data(DataOptions((str(folder),), "bytes", 0.1), seq_len=16)
    assert data.eval is not None
    assert data.train.num_tokens + data.eval.num_tokens == 27 + 8891
    assert 880 <= data.eval.num_tokens <= 891
    assert "4 documents" in data.description and "257 ids" in data.description
    again = prepare_data(DataOptions((str(folder),), "bytes", 0.1), seq_len=16)
    assert again.train.fingerprint == data.train.fingerprint != data.eval.fingerprint
    with pytest.raises(ConfigError, match="--eval-fraction 3"):
        prepare_data(DataOptions((str(folder),), "bytes", 3), seq_len=16)


def test_ranks_that_start_together_tokenize_once_and_agree(folder: Path, cache: Path) -> None:
    """Fault 20: one builder per file system, and all ranks can check that they hold the same data."""
    program = (
        "import sys; from parallax.data import DataOptions, prepare_data; "
        "print(prepare_data(DataOptions((sys.argv[1],), 'bytes', 0), 8).train.fingerprint)"
    )
    command = [sys.executable, "-c", program, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(8)
    ]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert len({out for out, _ in outputs}) == 1 and len(outputs[0][0].strip()) == 32
    assert sum("preparing the tokens" in err for _, err in outputs) == 1


@pytest.mark.slow
def test_the_default_corpus_is_prepared_in_seconds_and_comes_back_exactly(cache: Path) -> None:
    data = prepare_data(DataOptions(), 256)
    assert data.eval is not None
    assert data.tokenizer.vocab_size == 4096 and data.train.num_tokens > 2_000_000 and len(data.eval) > 50
    (made,) = (path.parent for path in cache.glob("tokens-*/tokens.bin"))
    store = open_token_store(made)
    files = [file for file in corpus_module.standard_library().files if file.path.stat().st_size]
    assert store.num_documents == len(files)
    for i in range(0, len(files), 7):
        ids = store.tokens[store.document_starts[i] : store.document_starts[i + 1]]
        assert ids[-1] == 1
        assert data.tokenizer.decode(ids.tolist()) == files[i].path.read_bytes().decode()
