"""How closely a pipeline keeps to theory: measured steps beside the simulator's, and beside torch.distributed.pipelining's.

    python benchmarks/schedules.py efficiency      every schedule, 4 ranks, 8 and 16 micro-batches, plain loopback
    python benchmarks/schedules.py links           links on which a message takes half a forward (root, Linux)
    python benchmarks/schedules.py overlap         links on which communication takes a third of the computing (root, Linux)
    python benchmarks/schedules.py all --json FILE

Stages compute by waiting (benchmarks/pipeline/waiting.py), 20 ms each for forward, input gradient and weight gradient of a
rank's whole share of the model; messages are real, over gloo. Contestants take turns round by round; medians are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

# Running a file puts its own folder on the search path, and the checkout need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.options import above_zero, at_least, listed

ROOT = Path(__file__).resolve().parents[1]

RANKS = 4
OVER_LINKS = ("1f1b", "1f1b-eager", "zb-h1", "dualpipe")  # of our schedules
OVERLAPPED = ("1f1b", "dualpipe", "dualpipev")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("efficiency", "links", "overlap", "all"))
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--slower", type=above_zero, default=1.0, help="multiply all times, for a machine that is busy")
    parser.add_argument("--only", help="schedules, with commas between (default: all of a table)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from benchmarks.machine import describe_machine
    from benchmarks.pipeline.links import NoNamespaces
    from parallax.pipeline.schedules import ALL_SCHEDULES

    tables: dict[str, tuple[Callable[..., list[dict[str, Any]]], Sequence[str]]] = {
        "efficiency": (efficiency, list(ALL_SCHEDULES)),
        "links": (links, OVER_LINKS),
        "overlap": (overlap, OVERLAPPED),
    }
    tables = {name: table for name, table in tables.items() if options.table in (name, "all")}
    known = dict.fromkeys(schedule for _, schedules in tables.values() for schedule in schedules)
    wanted = set(known if options.only is None else listed(parser, "--only", options.only, known))
    machine = describe_machine()
    print("  ".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    found: dict[str, Any] = {"machine": machine}
    for name, (table, schedules) in tables.items():
        try:
            if wanted.intersection(schedules):
                found[name] = table(options, [schedule for schedule in schedules if schedule in wanted])
        except NoNamespaces as error:
            print(f"\n{name}: not measured: {error}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def run(plan: dict[str, Any], where: Any = None, bits_per_second: float | None = None) -> list[list[Any]]:
    """Run the ranks of a plan, in namespaces if `where` makes them, and return what rank 0 says."""
    world = plan["pp"] * plan.get("tp", 1)
    plan = {"over_links": where is not None, **plan}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = nullcontext([(list[str](), {"MASTER_ADDR": "127.0.0.1"})] * world)
    with where(world, bits_per_second) if where is not None else places as ranks:
        processes = [
            subprocess.Popen(
                [*prefix, sys.executable, str(ROOT / "benchmarks/pipeline/rank.py"), json.dumps(plan)],
                env=os.environ
                | {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
                | environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, (prefix, environment) in enumerate(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=900)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        failed = [rank for rank, process in enumerate(processes) if process.returncode]
        assert not failed, f"ranks {failed} failed"
    return json.loads(outputs[0].splitlines()[-1])


def simulated(name: str, micro_batches: int, task: Any, **links: Any) -> float:
    """Return the simulator's makespan, in seconds."""
    from benchmarks.pipeline.contestants import TORCH_SCHEDULES, costs_of
    from parallax.pipeline.schedules import make_schedule
    from parallax.pipeline.simulator import simulate

    schedule = make_schedule(TORCH_SCHEDULES.get(name, name), RANKS, micro_batches)
    return simulate(schedule, costs_of(task, schedule, **links)).makespan


def theirs(options: argparse.Namespace) -> list[str]:
    """Return torch's schedules: all, or those that are ours of --only."""
    from benchmarks.pipeline.contestants import TORCH_SCHEDULES

    return [name for name, ours in TORCH_SCHEDULES.items() if options.only is None or ours in options.only.split(",")]


def efficiency(options: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Every schedule on plain loopback."""
    from benchmarks.pipeline.contestants import Task

    task = slower(options.slower)
    contestants = [["parallax", name, m, task] for m in (8, 16) for name in names]
    contestants += [["torch", name, m, task] for m in (8, 16) for name in theirs(options)]
    rows = []
    for who, name, m, _, seconds in run({"pp": RANKS, "contestants": contestants, "rounds": options.rounds}):
        rows.append(row(who, name, m, median(seconds), simulated(name, m, Task(**task))))
    show(f"efficiency: {RANKS} ranks, F = I = W = {20 * options.slower:g} ms for a rank's share, loopback", rows)
    return rows


def slower(factor: float, **more: int) -> dict[str, Any]:
    """Return what a task changes when everything takes `factor` times as long."""
    times = {name: 0.020 * factor for name in ("forward", "input_gradient", "weight_gradient")}
    return {**times, **more}


def row(who: str, name: str, micro_batches: int, measured: float, theory: float) -> dict[str, Any]:
    return {"who": who, "schedule": name, "micro-batches": micro_batches, "measured": measured, "theory": theory}


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{title}\n{'':10}{'schedule':20}{'micro-batches':>14}{'measured':>11}{'theory':>10}{'above':>8}", flush=True
    )
    for one in rows:
        above = f"{one['measured'] / one['theory'] - 1:+.1%}"
        print(
            f"{one['who']:10}{one['schedule']:20}{one['micro-batches']:14}{one['measured'] * 1e3:8.0f} ms"
            f"{one['theory'] * 1e3:7.0f} ms{above:>8}",
            flush=True,
        )


def links(options: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Messages that take half a forward."""
    from benchmarks.pipeline.contestants import Task
    from benchmarks.pipeline.links import namespaces

    sizes = slower(options.slower, rows=16, width=1024)  # 64 KiB
    task, rate = Task(**sizes), Task(**sizes).message_bytes * 8 / (0.010 * options.slower)
    contestants = [["parallax", name, 8, sizes] for name in names]
    contestants += [["torch", name, 8, sizes] for name in theirs(options)]
    plan = {"pp": RANKS, "contestants": contestants, "rounds": options.rounds}
    rows = []
    for who, name, m, _, seconds in run(plan, namespaces, rate):
        theory = simulated(name, m, task, message_bytes=task.message_bytes, bandwidth=rate / 8)
        rows.append(row(who, name, m, median(seconds), theory))
    show(f"links: as above, messages of 64 KiB at {rate / 1e6:.0f} Mbit/s take half a forward", rows)
    return rows


def overlap(options: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Show what of the communication is hidden: of pp's messages with 4 stages, of tp's sums with 2 stages of 2 ranks.

    A micro-batch takes a rank 60 ms of computing and 20 ms of communication: two messages of 10 ms, or four sums of 5 ms.
    Hidden is what the limit of the links does not add to the step. The stages of 1F1B are not cut, so their sums are waited for;
    our layers hide those of the backward behind their weights' gradients.
    """
    from benchmarks.pipeline.contestants import Task
    from benchmarks.pipeline.links import namespaces

    sizes, factor = slower(options.slower, rows=16, width=1024), options.slower
    bits = Task(**sizes).message_bytes * 8
    kinds = {
        "messages": (4, 1, sizes, bits / (0.010 * factor)),
        "tp sums": (2, 2, sizes | {"cuts": 2}, bits / (0.005 * factor)),
    }
    rows, micro_batches = [], 32
    for kind, (pp, tp, changes, rate) in kinds.items():
        contestants = [["parallax", name, micro_batches, changes] for name in names]
        plan = {"pp": pp, "tp": tp, "contestants": contestants, "rounds": options.rounds}
        free, limited = run(plan, namespaces, None), run(plan, namespaces, rate)
        for (_, name, m, _, without), (*_, with_limit) in zip(free, limited, strict=True):
            communication = m * 0.020 * factor
            added = median(with_limit) - median(without)
            rows.append(
                {
                    "communication": kind,
                    "schedule": name,
                    "free": median(without),
                    "limited": median(with_limit),
                    "communication seconds": communication,
                    "hidden": 1 - added / communication,
                }
            )
    print(f"\noverlap: {micro_batches} micro-batches, communication takes a third of the computing", flush=True)
    print(f"{'':12}{'schedule':14}{'free links':>12}{'limited':>10}{'communication':>15}{'hidden':>8}")
    for one in rows:
        print(
            f"{one['communication']:12}{one['schedule']:14}{one['free'] * 1e3:9.0f} ms{one['limited'] * 1e3:7.0f} ms"
            f"{one['communication seconds'] * 1e3:12.0f} ms{one['hidden']:8.0%}",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
