"""Measure how full best-fit decreasing makes rows of chats, against first-fit and padding.

    python benchmarks/packing.py
    python benchmarks/packing.py --samples 200000 --json packing.json

First-fit puts each sample, as it comes, into the first row that it fits into. The lengths are those of the embedded chats, and of
samples drawn from log-normal distributions, cut at the length of a row, as lengths of chats are about distributed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

# Running a file puts its own folder on the search path, and the checkout need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from benchmarks.options import at_least
from parallax.data.chat.options import ChatOptions
from parallax.data.chat.prepare import prepare_chats
from parallax.data.packing import RowDataset, pack


def first_fit(lengths: np.ndarray, capacity: int) -> int:
    """Return how many rows first-fit takes, found with a tree of the largest room in each half."""
    leaves = 1 << max(len(lengths) - 1, 1).bit_length()
    room = [capacity] * (2 * leaves)
    used = 0
    for length in lengths.tolist():
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < length)
        used = max(used, node - leaves + 1)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--samples", type=at_least(1), default=20_000, help="drawn from each distribution (default: 20000)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    machine = describe_machine()
    print("  ".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    cases = [(f"embedded chats, {seq_len}", embedded_lengths(seq_len), seq_len) for seq_len in (256, 1024)]
    for median, spread, seq_len in (
        (100, 1.0, 1024),
        (300, 1.0, 2048),
        (300, 1.0, 4096),
        (1000, 1.0, 4096),
        (1000, 0.5, 4096),
    ):
        drawn = np.random.RandomState(0).lognormal(np.log(median), spread, options.samples).astype(np.int64)
        cases.append((f"median {median}, spread {spread}, {seq_len}", drawn.clip(1, seq_len), seq_len))
    print(
        "\n| lengths, row | samples | padding | first-fit | best-fit decreasing | seconds |\n|---|---|---|---|---|---|"
    )
    results = []
    for name, lengths, seq_len in cases:
        rows, seconds = timed(partial(number_of_rows, lengths, seq_len))
        counts = {"padding": len(lengths), "first_fit": first_fit(lengths, seq_len), "best_fit_decreasing": rows}
        filled = {kind: float(lengths.sum() / (count * seq_len)) for kind, count in counts.items()}
        shares = " | ".join(f"{share:.1%}" for share in filled.values())
        print(f"| {name} | {len(lengths):,} | {shares} | {seconds:.2f} |", flush=True)
        results.append({"lengths": name, "samples": len(lengths), "filled": filled, "seconds": seconds})
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n", encoding="utf-8")


def embedded_lengths(seq_len: int) -> np.ndarray:
    """Return the lengths of the embedded chats with the default tokenizer, in the order of the data."""
    rows = prepare_chats(ChatOptions(eval_fraction=0), seq_len).train
    assert isinstance(rows, RowDataset)
    return rows.samples.lengths


def number_of_rows(lengths: np.ndarray, seq_len: int) -> int:
    return len(pack(lengths, seq_len))


def timed(function: Callable[[], int]) -> tuple[int, float]:
    """Return what `function` does and the seconds it takes."""
    started = time.perf_counter()
    result = function()
    return result, time.perf_counter() - started


if __name__ == "__main__":
    main()
