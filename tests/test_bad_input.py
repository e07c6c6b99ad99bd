"""What a user can get wrong ends with one sentence, status 2, from one rank, within seconds, and leaves nothing hanging."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SECONDS = 60.0  # torch alone takes several to import on a busy core


def run(words: list[str], out: Path, launcher: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    started = time.perf_counter()
    result = subprocess.run(
        [*(launcher or [sys.executable]), str(ROOT / "pretrain.py"), "--out", str(out / "run"), *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=out,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PARALLAX_CACHE": str(out / "cache")},
    )
    assert time.perf_counter() - started < SECONDS
    return result


def without_notices(text: str) -> list[str]:
    """Return the lines that are not about data being prepared."""
    return [line for line in text.splitlines() if not line.startswith("parallax: ")]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--tp 2",
            "--tp 2 --pp 1 takes a multiple of 2 processes, but there is 1; use torchrun --nproc-per-node 2, or other sizes",
        ),
        ("--data missing.txt", "--data missing.txt: there is no such file or folder."),
        ("--model gpt-5", "--model gpt-5 is no preset and no file; use one of tiny, gpt2-124m, llama-1b,"),
        ("--model broken.json", "--model broken.json cannot be read as JSON"),
        ("--config broken.toml", "--config broken.toml is no valid TOML"),
        (
            "--global-batch 15",
            "--global-batch 15 must be a multiple of --micro-batch 2 times dp 1, which is 2; use 14 or 16",
        ),
        ("--data empty.txt --tokenizer bytes", "empty.txt holds no text at all; give --data with text."),
        ("--data short.txt --tokenizer bytes", "the data has"),
    ],
)
def test_one_process_says_one_sentence(words: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "broken.toml").write_text("tp = = 2")
    result = run(words.split(), tmp_path)
    assert result.returncode == 2, result.stderr
    (line,) = without_notices(result.stderr)
    assert line.startswith(f"pretrain.py: error: {sentence}")
    assert not (tmp_path / "run").exists()


def test_all_errors_of_a_command_are_said_at_once(tmp_path: Path) -> None:
    result = run("--tpp 2 --lr -1 --data missing.txt --heads 3".split(), tmp_path)
    assert result.returncode == 2
    assert [line.split()[2] for line in without_notices(result.stderr)] == [
        "--tpp",
        "--lr",
        "--data",
        "--heads",
        "--kv-heads",
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--tp 4", "--tp 4 --pp 1 takes a multiple of 4 processes, but there are 2; use torchrun --nproc-per-node 4"),
        ("--tp 2 --heads 1 --kv-heads 1", "--tp 2 must divide num_attention_heads=1; use 1"),
        ("--pp 2 --layers 1", "--pp 2 needs at least 2 layers, the model has 1"),
        ("--data short.txt --tokenizer bytes", "the data has"),
    ],
)
def test_under_a_launcher_one_rank_speaks(words: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    result = run(words.split(), tmp_path, [*TORCHRUN, "2"])
    assert result.returncode != 0
    ours = [line for line in result.stderr.splitlines() if line.startswith("pretrain.py: error: ")]
    assert len(ours) == 1, result.stderr
    assert ours[0].startswith(f"pretrain.py: error: {sentence}")
    assert f'File "{ROOT}' not in result.stderr  # a frame of ours in a traceback
    assert "exitcode  : 2" in result.stderr


@pytest.mark.parametrize("option", ["--help", "--dry-run"])
def test_a_reader_that_has_enough_of_the_output_gets_no_traceback(option: str) -> None:
    process = subprocess.Popen([sys.executable, ROOT / "pretrain.py", option], stdout=-1, stderr=-1, cwd=ROOT)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 1
