from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallax.data.options import DataOptions, check

ROOT = Path(__file__).resolve().parents[2]


def test_the_defaults_are_right() -> None:
    assert check(DataOptions()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data": ("{tmp}/none.txt",)}, "--data {tmp}/none.txt: there is no such file or folder."),
        ({"data": ("{tmp}/empty",)}, "--data {tmp}/empty: the folder holds no text file;"),
        ({"data": ("{tmp}/image",)}, "--data {tmp}/image: the folder holds no text file;"),
        ({"data": ("{tmp}/image/a.png",)}, "--data {tmp}/image/a.png: the file is not UTF-8 text;"),
        ({"data": ("{tmp}/latin1.txt",)}, "--data {tmp}/latin1.txt: the file is not UTF-8 text;"),
        (
            {"data": ("{tmp}/chat.jsonl",)},
            "--data {tmp}/chat.jsonl, line 1: found an object with the keys ['messages'];",
        ),
        ({"data": ("{tmp}/good.txt", "{tmp}/good.txt")}, "--data names {tmp}/good.txt more than once;"),
        ({"data": ("/dev/null",)}, "--data /dev/null: this is neither a file nor a folder."),
        ({"tokenizer": "gpt2"}, "--tokenizer gpt2: there is no such file or folder; give a sentencepiece .model,"),
        ({"tokenizer": "{tmp}/empty"}, "--tokenizer {tmp}/empty: the folder holds neither tokenizer.json nor"),
        ({"tokenizer": "{tmp}/good.txt"}, "--tokenizer {tmp}/good.txt: the file is no sentencepiece model;"),
        ({"tokenizer": "{tmp}/list.json"}, "--tokenizer {tmp}/list.json: the file is no tokenizer.json;"),
        ({"eval_fraction": 0.6}, "--eval-fraction 0.6 is not between 0 and 0.5;"),
        ({"eval_fraction": -0.1}, "--eval-fraction -0.1 is not between 0 and 0.5;"),
        ({"eval_fraction": float("nan")}, "--eval-fraction nan is not between 0 and 0.5;"),
    ],
)
def test_each_mistake_is_one_sentence(tmp_path: Path, options: dict[str, object], says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "a.png").write_bytes(b"\x89PNG\x00")
    (tmp_path / "latin1.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "list.json").write_text("[]")
    placed = {
        key: tuple(v.format(tmp=tmp_path) for v in value) if isinstance(value, tuple) else value
        for key, value in options.items()
    }
    if isinstance(placed.get("tokenizer"), str):
        placed["tokenizer"] = str(placed["tokenizer"]).format(tmp=tmp_path)
    started = time.monotonic()
    problems = check(DataOptions(**placed))  # type: ignore[arg-type]
    assert len(problems) == 1
    assert problems[0].startswith(says.format(tmp=tmp_path))
    assert time.monotonic() - started < 5  # nothing is tokenized


def test_all_mistakes_are_said_at_once(tmp_path: Path) -> None:
    wrong = DataOptions((str(tmp_path / "a"), str(tmp_path / "b")), "gpt2", 2.0)
    assert len(check(wrong)) == 4


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("parallax.data.corpus.os.scandir", refuse)
    assert check(DataOptions((str(tmp_path),))) == [f"--data {tmp_path}: it cannot be read (Permission denied)."]


def test_the_options_are_checked_without_the_libraries_that_are_slow_to_import() -> None:
    program = (
        "import sys; from parallax.data.options import *; assert check(DataOptions()) == []; "
        "print([n for n in ('torch', 'numpy', 'sentencepiece', 'tokenizers', 'transformers') if n in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "[]\n"
