from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallax.cli.main import main
from parallax.data import IndexedDataset, load_tokenizer
from parallax.data.build import BuildOptions, build
from parallax.data.encoding import blocks as blocks_module
from parallax.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
ODD = "a\u2028b\u2029c\u0085d\x0be\x0c é 😀"


def jsonl(path: Path, texts: list[str], end: str = "\n") -> Path:
    content = end.join(json.dumps({"id": i, "text": text}, ensure_ascii=False) for i, text in enumerate(texts)) + end
    path.write_bytes(content.encode())
    return path


def built(folder: Path, *paths: Path, **options: object) -> list[str]:
    """Build with the byte tokenizer; return the documents as text, in which ids above 255 are U+FFFD."""
    build(BuildOptions([str(path) for path in paths], "bytes", str(folder / "out"), **{"workers": 1} | options))  # type: ignore[arg-type]
    data = IndexedDataset(folder / "out")
    assert data.num_documents == len(data)
    return ["".join(bytes(part).decode() for part in _split(ids.tolist())) for ids in data]


def _split(ids: list[int]) -> list[list[int]]:
    return [list("\ufffd".encode()) if i == 256 else [i] for i in ids] if max(ids) == 256 else [ids]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    done = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, done.out, done.err


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_every_kind_are_the_documents_they_were(tmp_path: Path, end: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["one", "", ODD, "two\r\nlines\n"], end)
    path.write_bytes(b"\xef\xbb\xbf" + end.encode() + path.read_bytes() + end.encode() * 2)
    assert built(tmp_path, path) == ["one", ODD, "two\r\nlines\n"]


def test_documents_end_with_the_end_of_text_when_that_is_asked_for(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["one", "", "ab"])
    with_eod = IndexedDataset(
        build(BuildOptions([str(path)], "bytes", str(tmp_path / "x"), 1, append_eod=True)).bin_path
    )
    assert [ids.tolist() for ids in with_eod] == [[*b"one", 256], [*b"ab", 256]]
    assert with_eod.dtype.name == "uint16"


def test_documents_that_run_into_each_other_are_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from parallax.cli.data import run_build

    path = tmp_path / "a.jsonl"
    for number, append, told in ((2, False, 1), (2, True, 0), (1, False, 0)):
        path.write_text('{"text": "hello"}\n' * number)
        assert run_build(BuildOptions([str(path)], "bytes", str(tmp_path / "out"), 1, append_eod=append)) == 0
        assert capsys.readouterr().err.count("--append-eod ends each with one") == told


def test_gz_zst_parquet_and_text_hold_the_same_documents(tmp_path: Path) -> None:
    texts = ["one", ODD, "x" * 5000]
    path = jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()[:40]) + gzip.compress(path.read_bytes()[40:]))
    assert built(tmp_path, tmp_path / "b.jsonl.gz") == texts
    (tmp_path / "c.txt").write_text(ODD)
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "e.json").write_bytes(path.read_bytes())
    assert built(tmp_path, tmp_path / "c.txt", path, tmp_path / "d.txt.gz") == [ODD, *texts, "packed"]
    assert built(tmp_path, tmp_path / "e.json", format="jsonl") == texts


def test_zst_files_of_several_frames_are_read_to_the_end_and_cut_ones_are_refused(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed: pip install -e '.[data]'")
    texts = ["one", ODD, "x" * 5_000_000, "last"]
    content = jsonl(tmp_path / "a.jsonl", texts).read_bytes()
    packed = zstandard.compress(content[:1000]) + zstandard.compress(content[1000:])
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    assert built(tmp_path, tmp_path / "a.jsonl.zst") == texts
    for cut in (1, 50):
        (tmp_path / "b.jsonl.zst").write_bytes(packed[:-cut])
        with pytest.raises(ConfigError, match=r"b\.jsonl\.zst: the compressed file is cut short or damaged"):
            built(tmp_path / "cut", tmp_path / "b.jsonl.zst")
    assert not list((tmp_path / "cut").iterdir())


def test_parquet_gives_a_document_a_row_and_names_the_columns_it_has(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[data]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = ["one", None, "", ODD] + [f"row {i}" for i in range(3000)]
    table = pyarrow.table({"text": texts, "number": range(len(texts)), "body": [f"b{i}" for i in range(len(texts))]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    assert built(tmp_path, tmp_path / "a.parquet") == [text for text in texts if text]
    assert built(tmp_path, tmp_path / "a.parquet", json_key="body")[:2] == ["b0", "b1"]
    with pytest.raises(ConfigError, match=r'a\.parquet: the table has no column "content"; it has text, number, body'):
        built(tmp_path, tmp_path / "a.parquet", json_key="content")
    with pytest.raises(ConfigError, match='the column "number" holds int64, not text'):
        built(tmp_path, tmp_path / "a.parquet", json_key="number")
    os.truncate(tmp_path / "a.parquet", 500)
    with pytest.raises(ConfigError, match=r"a\.parquet: it cannot be read as parquet"):
        built(tmp_path, tmp_path / "a.parquet")


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(blocks_module, "PIECE_CHARACTERS", 3000)
    paths = [jsonl(tmp_path / "a.jsonl", [f"document {i} " * (i % 40) for i in range(500)])]
    (tmp_path / "b.txt").write_text("one long text\n" * 3000)
    (tmp_path / "c.txt").write_text("short")
    paths += [tmp_path / "b.txt", tmp_path / "c.txt"]
    tokenizer = load_tokenizer()
    outputs = []
    for workers in (1, 2, 3):
        built = build(
            BuildOptions([str(p) for p in paths], None, str(tmp_path / f"w{workers}"), workers, append_eod=True)
        )
        outputs.append([(tmp_path / f"w{workers}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".build.json")])
    assert outputs[0] == outputs[1] == outputs[2] and built.num_documents == 487 + 2 and built.num_empty == 13
    data = IndexedDataset(tmp_path / "w3")
    assert data[7].tolist() == [*tokenizer.encode("document 8 " * 8), tokenizer.eos_id]
    assert tokenizer.decode(data[487].tolist()) == "one long text\n" * 3000


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "cut', "this is not valid JSON"),
        (b'["text"]', "found a list"),
        (b'{"content": "x"}', r"found an object with the keys \['content'\]"),
        (b'{"text": 5}', "found a number under that key"),
        (b'{"text": NaN}', "found a number under that key"),
        (b'{"text": null}', "found null under that key"),
        (b'{"text": "\\ud83d"}', r"half of a surrogate pair \(\\ud83d\)"),
        (b'{"text": "\xff"}', "byte 10 of the line is not UTF-8"),
        (b'{"text": "a\x00b"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"n": ' + b"1" * 5000 + b', "text": "x"}', "not valid JSON"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number_or_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, says: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\r\n\n' + line + b'\n{"text": "after"}\n' + line)
    with pytest.raises(
        ConfigError, match=rf"a\.jsonl, line 3: .*{says}(.|\n)*line 5: (.|\n)*--skip-bad leaves"
    ) as error:
        built(tmp_path / "refused", path)
    assert len(error.value.problems) == 3 and not list((tmp_path / "refused").iterdir())
    assert built(tmp_path, path, skip_bad=True) == ["x", "after"]
    status, out, err = run(capsys, "data", "build", path, "--tokenizer", "bytes", "--out", tmp_path / "y", "--skip-bad")
    assert status == 0 and "left out 2 broken lines" in out and err.count("left out: ") == 2


def test_lines_are_numbered_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", 100)
    path = jsonl(tmp_path / "a.jsonl", ["x" * (i % 90) for i in range(1000)])
    content = path.read_bytes().splitlines()
    content[776] = b"{"
    path.write_bytes(b"\r\n".join(content))
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 777: "):
        built(tmp_path, path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{tmp}/none.jsonl"], "{tmp}/none.jsonl: there is no such file or folder."),
        (["{tmp}/a.jsonl", "{tmp}/a.jsonl"], "{tmp}/a.jsonl is reached more than once;"),
        (["{tmp}/a.jsonl", "--workers", "0"], "--workers 0 must be 1 to 256;"),
        (["{tmp}/a.jsonl", "--tokenizer", "gpt2"], "--tokenizer gpt2: there is no such file or folder;"),
        (["{tmp}/a.jsonl", "--out", "{tmp}/"], "--out {tmp}/ names a folder;"),
        (["{tmp}/a.jsonl", "--json-key", "body"], "{tmp}/a.jsonl, line 1: found an object with the keys"),
        (["{tmp}/empty.jsonl"], "{tmp}/empty.jsonl holds no text"),
        (["{tmp}/fake.jsonl.gz"], "{tmp}/fake.jsonl.gz: the file is no .gz file, although its name says so."),
        (["{tmp}/cut.jsonl.gz"], "{tmp}/cut.jsonl.gz: the compressed file is cut short or damaged"),
        (["{tmp}/o.bin", "--out", "{tmp}/o"], "--out {tmp}/o would replace {tmp}/o.bin, which is read;"),
        (["{tmp}/a.jsonl", "--out", "{tmp}/a.jsonl/x"], "{tmp}/a.jsonl/x.bin cannot be written ("),
        (["{tmp}/image.png"], "{tmp}/image.png: the file is not UTF-8 text;"),
        (["{tmp}/a.jsonl", "--format", "csv"], "argument --format: invalid choice: 'csv'"),
        ([], "the following arguments are required: PATH"),
    ],
)
def test_each_mistake_is_one_sentence_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    jsonl(tmp_path / "a.jsonl", ["one"])
    (tmp_path / "empty.jsonl").write_text('\n{"text": ""}\n')
    (tmp_path / "fake.jsonl.gz").write_text("text")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 10_000)[:-20])
    (tmp_path / "o.bin").write_text("text")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\x00")
    before = sorted(tmp_path.iterdir())
    placed = [word.format(tmp=tmp_path) for word in words]
    defaults = [("--tokenizer", "bytes"), ("--out", str(tmp_path / "out"))]
    status, out, err = run(
        capsys, "data", "build", *placed, *(word for pair in defaults if pair[0] not in placed for word in pair)
    )
    assert (status, out) == (2, "") and err.startswith("parallax: error: " + says.format(tmp=tmp_path)), err
    assert err.count("\n") == 1 and sorted(tmp_path.iterdir()) == before


def test_a_build_that_is_killed_leaves_what_was_there_and_no_process(tmp_path: Path) -> None:
    assert built(tmp_path, jsonl(tmp_path / "a.jsonl", ["before"])) == ["before"]
    big = jsonl(tmp_path / "b.jsonl", [f"number {i} " * 50 for i in range(120_000)])
    command = [sys.executable, "-m", "parallax.cli.main", "data", "build", str(big), "--out", str(tmp_path / "out")]
    for deed in (signal.SIGKILL, signal.SIGINT):
        child = subprocess.Popen(
            [*command, "--workers", "2"],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            # A shell ignores it for what it runs in the background, and so would the child.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        partial = tmp_path / "out.bin.partial"
        deadline = time.monotonic() + 60
        workers: list[int] = []
        # Workers start after what an earlier process left was emptied.
        while not (len(workers) == 2 and partial.stat().st_size > 0):
            assert time.monotonic() < deadline and child.poll() is None
            workers = _workers(child.pid)
        os.kill(child.pid, deed)
        err = child.communicate(timeout=30)[1]
        assert child.returncode == (-deed if deed == signal.SIGKILL else 130), err
        while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
        assert IndexedDataset(tmp_path / "out")[0].tolist() == list(b"before")
    assert err.endswith("stopped; nothing was written\n") and not partial.exists()


def _workers(pid: int) -> list[int]:
    """Return the worker processes that a process has started."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if "encoding.worker" in line]


def test_a_worker_that_is_killed_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    big = jsonl(tmp_path / "b.jsonl", [f"number {i} " * 50 for i in range(120_000)])
    killed = False

    def kill_one(done: int, total: int, tokens: int) -> None:
        nonlocal killed
        if not killed:
            os.kill(_workers(os.getpid())[0], signal.SIGKILL)
            killed = True

    with pytest.raises(
        ConfigError, match=r"a worker process that was reading .*b\.jsonl from line \d+ on ended with signal 9"
    ):
        build(BuildOptions([str(big)], "bytes", str(tmp_path / "x" / "out"), 2), kill_one)
    assert not list((tmp_path / "x").iterdir())
