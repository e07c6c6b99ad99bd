"""What the data's options do in whole runs of pretrain.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from parallax.data import IndexedWriter
from parallax.differences import changes_that_matter

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    model = "--tokenizer bytes --layers 1 --hidden 32 --heads 2 --kv-heads 2"
    small = f"{model} --seq-len 16 --global-batch 4 --warmup-steps 1 --lr-decay-steps 9"
    command = [sys.executable, str(ROOT / "pretrain.py"), *map(str, words), *small.split(), "--out", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_a_blend_is_split_evaluated_by_name_and_a_changed_file_is_named_on_resuming(tmp_path: Path) -> None:
    for name, letter in (("a", 97), ("b", 98)):
        with IndexedWriter(tmp_path / name, "uint16") as writer:
            for _ in range(100):
                writer.add_document([letter] * 10)
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "run"
    words = ["--data", "0.7", a, "0.3", b, "--split", "80,10,10", "--valid", f"A={a}", f"B={b}", "--eval-steps", 1]
    done = run(out, *words, "--steps", 2, "--eval-every", 1)
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    sets = ["eval_loss", "eval_loss/A", "eval_loss/B"]
    assert [[key for key in line if "_loss" in key] for line in metrics] == [sets, [*sets, "test_loss"]]
    # Each batch of 4 has 3 of a and 1 of b, or 2 and 2: what is mixed lies between its parts.
    for line in metrics:
        assert (
            min(line["eval_loss/A"], line["eval_loss/B"])
            < line["eval_loss"]
            < max(line["eval_loss/A"], line["eval_loss/B"])
        )
    content = bytearray(b.with_suffix(".bin").read_bytes())
    content[1000] = 99
    b.with_suffix(".bin").write_bytes(content)
    changed = run(out, *words, "--steps", 3)
    assert changed.returncode == 2 and changed.stderr.count("\n") == 1
    assert "is of another run: the data file b.bin has changed; give it as it was" in changed.stderr


def test_data_that_differs_without_a_changed_file_is_another_run_too() -> None:
    files = [["a.bin", 10, "x"]]
    one, other = {"data": "1", "data_files": files}, {"data": "2", "data_files": files}
    assert changes_that_matter(one, one) == []
    assert changes_that_matter(one, other) == ["the data is not the same"]
    moved = {"data": "2", "data_files": [["c.bin", 10, "x"]]}
    assert changes_that_matter(one, moved) == [
        "the data file a.bin is no longer among them",
        "the data file c.bin is new",
    ]
