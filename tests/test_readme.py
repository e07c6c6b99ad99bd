"""What the README shows runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _losses(launcher: list[str], script: Path) -> list[float]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    result = subprocess.run(
        [*launcher, str(script)],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return [float(line.split()[1]) for line in result.stdout.splitlines()]


def _example(word: str) -> str:
    """Return the example with `word` in it."""
    (found,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if word in block]
    return found


def test_the_example_model_trains_alike_in_one_process_and_in_two(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(_example("ColumnParallelLinear"))
    alone = _losses([sys.executable], script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    split = _losses(torchrun, script)
    assert len(alone) == 10 and alone[-1] < alone[0]
    assert split == pytest.approx(alone, rel=1e-5)


def test_the_pipelined_example_trains(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(_example("DualPipe"))
    losses = _losses([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"], script)
    assert len(losses) == 10 and losses[-1] < losses[0]


def test_the_two_commands_stand_at_the_top() -> None:
    head = README[:800]
    assert "pip install -e . && torchrun --nproc-per-node 8 pretrain.py --tp 2 --pp 2" in head
    assert "pip install -e '.[test]' && pytest" in head


def test_every_linked_page_exists() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (ROOT / link).is_file(), link


def test_every_command_is_understood() -> None:
    from parallax.config import PretrainOptions
    from parallax.resolve import read_options

    lines = README.replace("\\\n", " ").splitlines()
    commands = [
        line.split("#")[0].split("pretrain.py", 1)[1]
        for line in lines
        if re.match(r"    (?!\$).*\bpretrain\.py -", line)
    ]
    assert len(commands) >= 8
    for command in commands:
        _, problems = read_options([word for word in command.split() if word != "--help"], PretrainOptions)
        assert not problems, command
