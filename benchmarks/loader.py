"""Measure how fast batches are made, against how fast training takes them.

    python benchmarks/loader.py
    python benchmarks/loader.py --seq-len 4096 --json loader.json

Both are of one process, with one thread: batches of the embedded corpus as pretrain.py makes them, and pretrain.py itself, which
trains its smallest model. The loader does the same whatever the model, so a larger one only makes the ratio larger.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

# Running a file puts its own folder on the search path, and the checkout need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from benchmarks.options import above_zero, at_least, run_or_exit
from parallax.data import BatchLoader, DataOptions, prepare_data
from parallax.data.build import BuildOptions, build
from parallax.data.corpus import standard_library

ROOT = Path(__file__).resolve().parents[1]
GLOBAL_BATCH, MICRO_BATCH = 64, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=at_least(1), default=128, help="tokens in a sample (default: 128)")
    parser.add_argument("--seconds", type=above_zero, default=2.0, help="for each kind of batches (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    machine = describe_machine()
    print("  ".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        figures = {"training": training_speed(options.seq_len, Path(folder))}
        for name, data in kinds_of_data(Path(folder)).items():
            figures[name] = loader_speed(data, options.seq_len, options.seconds)
    print("\n| | tokens/s | times what training takes |\n|---|---|---|")
    for name, speed in figures.items():
        print(f"| {name} | {speed:,.0f} | {speed / figures['training']:,.0f} |")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "tokens_per_second": figures}, indent=1) + "\n")


def kinds_of_data(folder: Path) -> dict[str, DataOptions]:
    """Return the data that batches are made of: the embedded corpus, and token files of its two halves in a blend."""
    files = [str(file.path) for file in standard_library().files]
    prefixes = []
    for name, half in (("a", files[::2]), ("b", files[1::2])):
        prefixes.append(str(folder / name))
        build(BuildOptions(half, None, prefixes[-1], append_eod=True))
    blend = ("0.7", prefixes[0], "0.3", prefixes[1])
    return {
        "text from the cache": DataOptions(),
        "a blend of token files": DataOptions(blend),
        "the same, with documents and positions": DataOptions(blend, document_attention=True, reset_positions=True),
    }


def loader_speed(options: DataOptions, seq_len: int, seconds: float) -> float:
    """Return the tokens per second of the steps' batches, one step after the other."""
    data = prepare_data(options, seq_len)
    loader = BatchLoader(data.train, 0, GLOBAL_BATCH, MICRO_BATCH)
    loader.micro_batches(0)  # makes the order of the epoch
    started, step = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        step += 1
        loader.micro_batches(step)
    return step * GLOBAL_BATCH * seq_len / (time.perf_counter() - started)


def training_speed(seq_len: int, folder: Path) -> float:
    """Return the tokens per second of a few steps of pretrain.py."""
    words = f"--steps 8 --seq-len {seq_len} --eval-every 0 --out {folder / 'run'}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "pretrain.py", *words.split()]
    run_or_exit(command, folder=ROOT, environment=environment, quiet=True)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["tokens_per_second"] for line in lines[1:])


if __name__ == "__main__":
    main()
