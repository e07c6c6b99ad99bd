"""Whole runs whose checkpoints are behind an address: they end, go on and start others as runs in a folder do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallax.checkpoint.verify import verify
from parallax.cli.main import main
from parallax.mesh import Layout, Mesh
from tests import objects
from tests.distributed.harness import run_layout
from tests.training.runs import contents, metrics, run, write_text

ALWAYS = "--lr-decay-steps 6 --warmup-steps 1 --eval-every 0"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARALLAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PARALLAX_TEST_OBJECTS", str(tmp_path / "objects"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "objects").mkdir()
    write_text(tmp_path)
    return tmp_path


def register(mesh: Mesh) -> None:
    """Make the fake storage known in this process."""
    assert objects.Objects.protocol == "objects"


@pytest.mark.slow
def test_a_run_behind_an_address_goes_on_with_the_bits_of_a_run_in_a_folder(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    remote = f"{ALWAYS} --out objects://bucket/run"
    commands = [
        f"{remote} --steps 4 --save-every 2 --keep 1",
        f"{remote} --steps 6",
        f"{ALWAYS} --out {folder}/local --steps 6",
        f"{ALWAYS} --out {folder}/other --resume objects://bucket/run/checkpoints/step-00000004 --steps 6",
    ]
    assert run_layout(Layout(dp=2), run, commands, str(folder), register) == [[[]] * 4] * 2
    checkpoints = folder / "objects/bucket/run/checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000004", "step-00000006"]
    assert verify("objects://bucket/run/checkpoints/step-00000006") == []
    last = "checkpoints/step-00000006"
    assert (
        contents(checkpoints / "step-00000006")
        == contents(folder / "local" / last)
        == contents(folder / "other" / last)
    )
    assert [row["step"] for row in metrics(folder / "runs/objects-bucket-run")] == [1, 2, 3, 4, 5, 6]
    capsys.readouterr()
    for command in ("list objects://bucket/run", "verify objects://bucket/run"):
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", *command.split()])
        out = capsys.readouterr().out
        assert ended.value.code == 0 and out.count("objects://bucket/run/checkpoints/step-0000000") == 2, out
    words = f"--init objects://bucket/run --data {folder}/text.txt --out {folder}/more --steps 1 --seq-len 16 --eval-every 0"
    started = subprocess.run(
        [sys.executable, "-c", "import tests.objects, pretrain; pretrain.main()", *words.split()],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert started.returncode == 0 and "starting from  objects://bucket/run" in started.stdout, started.stderr
    assert metrics(folder / "more")[0]["loss"] < 3.5  # of the trained model; fresh weights have 5.5
    with pytest.raises(SystemExit) as ended:
        main("generate objects://bucket/run --prompt line --max-tokens 3".split())
    assert ended.value.code == 0 and "3 generated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--out nowhere://bucket/run", "--out nowhere://bucket/run cannot be used: "),
        ("--init nowhere://bucket/run", "--init nowhere://bucket/run: "),
        ("--init memory://bucket/absent", "--init memory://bucket/absent: there is no folder memory://bucket/absent"),
        ("--resume memory://bucket/absent", "--resume memory://bucket/absent: there is no such checkpoint"),
        ("--tokenizer memory://bucket/absent", "--tokenizer memory://bucket/absent: "),
        ("--data memory://bucket/text.txt", "--data memory://bucket/text.txt: "),
    ],
)
def test_what_is_not_behind_an_address_is_one_sentence_and_status_2(words: str, said: str, folder: Path) -> None:
    command = [sys.executable, str(ROOT / "pretrain.py"), "--steps", "1", "--data", "text.txt", *words.split()]
    if words.startswith("--data"):
        command[4:6] = []
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert ended.returncode == 2 and ended.stderr.startswith(f"pretrain.py: error: {said}"), ended.stderr
    assert ended.stderr.count("\n") == 1
