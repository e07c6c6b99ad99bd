"""Measure what importing Parallax costs beyond importing torch, and how soon the command line answers.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --rounds 10 --json import_time.json

Each figure is the fastest of several fresh processes, which take turns. Files are in the operating system's cache by then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

# Running a file puts its own folder on the search path, and the checkout need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from benchmarks.options import at_least

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import torch, parallax": ["-c", "import torch, parallax"],
    "import torch, parallax.layers": ["-c", "import torch, parallax.layers"],
    "import torch, all that pretrain.py needs": [
        "-c",
        "import torch, parallax.checkpoint.parts, parallax.training.build, parallax.training.checkpoints, "
        "parallax.training.fit, parallax.training.metrics, parallax.objectives.next_token",
    ],
    "pretrain.py --help": ["pretrain.py", "--help"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="processes for each figure (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    machine = describe_machine()
    print("  ".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    seconds: dict[str, float] = {name: float("inf") for name in COMMANDS}
    for _ in range(options.rounds):
        for name, arguments in COMMANDS.items():
            seconds[name] = min(seconds[name], seconds_of(arguments))
    print("\n| | seconds | beyond `import torch` |\n|---|---|---|")
    for name, fastest in seconds.items():
        beyond = f"{fastest - seconds['import torch']:.2f}" if name.startswith("import torch,") else ""
        print(f"| {name} | {fastest:.2f} | {beyond} |")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "seconds": seconds}, indent=1) + "\n", encoding="utf-8")


def seconds_of(arguments: list[str]) -> float:
    """Return how long a fresh python takes for `arguments`, from the checkout."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
