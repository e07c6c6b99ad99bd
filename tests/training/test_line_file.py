"""Lines outlive a disk that is full for a while, and a file is cut where a run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from parallax.errors import ConfigError
from parallax.training.line_file import LineFile


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_wait_while_the_disk_is_full_and_are_written_later(tmp_path: Path) -> None:
    path, said = tmp_path / "lines.jsonl", []
    file = LineFile(path, said.append)
    file.append({"step": 1})
    path.rename(tmp_path / "aside")
    path.symlink_to("/dev/full")
    file.append({"step": 2})
    file.append({"step": 3})
    assert len(said) == 1 and "cannot be written (No space left on device)" in said[0]
    path.unlink()
    (tmp_path / "aside").rename(path)
    file.append({"step": 4})
    file.close()
    assert _steps(path) == [1, 2, 3, 4]
    assert len(said) == 2 and "complete again" in said[1]


def test_a_line_that_is_written_in_part_is_taken_back(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    path, said = tmp_path / "lines.jsonl", []
    file = LineFile(path, said.append)
    file.append({"step": 1})
    whole = os.write
    writes: list[int] = []

    def write(descriptor: int, content: memoryview) -> int:
        writes.append(len(content))
        if len(writes) == 2:
            raise OSError(28, "No space left on device")
        return whole(descriptor, content[:5])

    monkeypatch.setattr(os, "write", write)
    file.append({"step": 2})
    monkeypatch.undo()
    assert _steps(path) == [1] and len(said) == 1
    file.close()
    assert _steps(path) == [1, 2]


def test_what_could_never_be_written_is_told_at_the_end(tmp_path: Path) -> None:
    path, said = tmp_path / "lines.jsonl", []
    path.symlink_to("/dev/full")
    file = LineFile(path, said.append)
    file.append({"step": 1})
    file.append({"step": 2})
    file.close()
    assert said[-1].endswith(f"the last 2 lines of {path} are lost")


def test_a_file_is_cut_after_a_step_and_where_a_crash_cut_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lines.jsonl"
    file = LineFile(path, print)
    file.keep_up_to(5)
    for step in (1, 2, 3):
        file.append({"step": step})
    with path.open("a") as stream:
        stream.write('{"step": 4')
    file.keep_up_to(5)
    assert _steps(path) == [1, 2, 3]
    file.keep_up_to(2)
    assert _steps(path) == [1, 2]
    file.keep_up_to(0)
    assert path.read_bytes() == b""


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for name in ("endless", "pipe"):
        path = tmp_path / name
        path.symlink_to("/dev/zero") if name == "endless" else os.mkfifo(path)
        with pytest.raises(ConfigError, match=f"{name} is no file that lines could be added to; remove it"):
            LineFile(path, print).keep_up_to(1)


def test_lines_of_what_a_rollback_passed_over_stay_before_a_good_one(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    file = LineFile(path, print)
    for step in (8, 6, 9):
        file.append({"step": step})
    file.keep_up_to(7)
    assert _steps(path) == [8, 6]
