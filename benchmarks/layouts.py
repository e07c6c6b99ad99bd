"""Compare Parallax with PyTorch's own parts and with Megatron Core, layout by layout, on this machine.

    python benchmarks/layouts.py                                  all layouts, a few minutes on two cores
    python benchmarks/layouts.py --only tp2,pp2 --rounds 20
    python benchmarks/layouts.py --only dp2,dp4 --gbit 1          each rank behind a link of its own of 1 Gbit/s (Linux, root)
    python benchmarks/layouts.py --json layouts.json              the figures, with the machine and the date

    one       one process, 2 threads       a plain PyTorch loop; Megatron Core
    dp2, dp4  2 or 4 processes             DDP; DDP with ZeroRedundancyOptimizer; FSDP2, dividing as much as each stage of ZeRO
    tp2       2 processes                  DTensor's tensor-parallel plan; Megatron Core
    pp2       2 processes                  torch.distributed.pipelining's Schedule1F1B; Megatron Core
    tp2pp2    4 processes                  DTensor's plan in Schedule1F1B; Megatron Core

All train one model from the same weights on the same tokens: 8 layers, hidden 256, ffn 688, 8 heads, 4 KV heads,
vocabulary 512, sequence 256, global batch 16, micro-batch 2, fp32, AdamW. That they do is checked by the losses of the
first three steps. Figures to quote are the ratios: our tokens per second over those of the fastest peer; and the share of the
peak, which is the FLOP/s of matrix products on all ranks at once, measured before and after the rounds. --memory adds what a rank
holds at most in a step, each contestant in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

# Running a file puts its own folder on the search path, and the checkout need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contest import COMPARISONS, Comparison, Result, run_comparison, say
from benchmarks.machine import describe_machine
from benchmarks.options import above_zero, at_least, listed
from benchmarks.pipeline.links import NoNamespaces
from benchmarks.resident import peak_memory
from parallax.models.config import flops_per_token

if TYPE_CHECKING:
    from benchmarks.task import Task


def main() -> None:
    options = parse()
    from benchmarks.peers import DESCRIPTIONS  # here, for these import torch, which takes seconds
    from benchmarks.task import Task

    task, results, memory = Task(), {}, {}
    machine = describe_machine()
    say("  ".join(f"{name}: {value}" for name, value in machine.items()))
    for name in options.only:
        comparison = COMPARISONS[name].possible()
        say(f"\n{name}: {comparison.layout.world_size} processes of {comparison.threads} threads")
        for contestant in comparison.contestants:
            say(f"  {contestant}: {DESCRIPTIONS[contestant]}")
        for contestant in COMPARISONS[name].missing():
            say(f"  {contestant}: not installed (pip install {contestant})")
        started = time.perf_counter()
        try:
            results[name] = run_comparison(comparison, task, options.rounds, options.gbit and options.gbit * 1e9)
        except NoNamespaces as error:
            sys.exit(f"not measured: {error}")
        say(f"  peak of matrix products: {results[name].peak_flops / 1e9:,.0f} GFLOP/s")
        if options.memory:
            memory[name] = peak_memory(comparison, task)
            held = ", ".join(f"{contestant} {peak / 2**20:,.0f}" for contestant, peak in memory[name].items())
            say(f"  memory of a step, MiB on the fullest rank: {held}")
        say(f"  {time.perf_counter() - started:.0f} seconds")
    say("\n" + table(results, task, memory))
    if options.json is not None:
        record = {
            "machine": machine,
            "rounds": options.rounds,
            "gbit": options.gbit,
            "layouts": figures(results, task),
            "memory_bytes": memory,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=8, help="timed steps of each contestant (default: 8)")
    parser.add_argument("--only", default=",".join(COMPARISONS), help="layouts, with commas between (default: all)")
    parser.add_argument(
        "--memory", action="store_true", help="measure the memory too, for ten seconds of each contestant"
    )
    parser.add_argument("--gbit", type=above_zero, help="rate of each rank's link, in a network namespace of its own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    options.only = listed(parser, "--only", options.only, COMPARISONS)
    if options.memory and not Path("/proc/self/clear_refs").exists():
        parser.error("--memory reads /proc/self, which only Linux has; leave it out")
    return options


def table(results: dict[str, Result], task: Task, memory: dict[str, dict[str, int]]) -> str:
    """Return the figures as a table in Markdown: tokens per second, and for ours the ratios to the fastest peer."""
    lines = [
        "| layout | | best tokens/s | median tokens/s | of the peak | MiB | ours / fastest peer, best | median of rounds | aim |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for layout, result in results.items():
        comparison = COMPARISONS[layout]
        for name, row in rows_of(comparison, result, task).items():
            ratios = " | | "
            if name in comparison.ours:
                ratios = f"{row['ratio_best']:.2f} | {row['ratio_median']:.2f} | {comparison.aim}"
            held = f"{memory[layout][name] / 2**20:,.0f}" if layout in memory else ""
            speed = f"{row['best']:,.0f} | {row['median']:,.0f} | {row['share_of_peak']:.0%}"
            lines.append(f"| {layout} | {name} | {speed} | {held} | {ratios} |")
    return "\n".join(lines)


def rows_of(comparison: Comparison, result: Result, task: Task) -> dict[str, dict[str, float]]:
    """Return the figures of each contestant of a comparison."""
    rows = {}
    for name, seconds in result.seconds.items():
        rates = sorted(task.tokens_per_step / second for second in seconds)
        middle = (rates[(len(rates) - 1) // 2] + rates[len(rates) // 2]) / 2
        share = rates[-1] * flops_per_token(task.model, task.seq_len) / result.peak_flops
        rows[name] = {"best": rates[-1], "median": middle, "share_of_peak": share}
        if name in comparison.ours:
            rivals = tuple(
                peer for peer in comparison.rivals_of(name) if peer in result.seconds
            )  # those that are installed
            rows[name]["ratio_best"] = result.ratio_of_bests(name, rivals)
            rows[name]["ratio_median"] = result.median_ratio(name, rivals)
    return rows


def figures(results: dict[str, Result], task: Task) -> dict[str, dict]:
    """Return all figures as JSON has them."""
    return {
        layout: {
            "tokens_per_second": rows_of(COMPARISONS[layout], result, task),
            "seconds": result.seconds,
            "peak_flops": result.peak_flops,
            "losses": result.losses,
            "largest_difference_of_losses": result.disagreement(),
        }
        for layout, result in results.items()
    }


if __name__ == "__main__":
    main()
