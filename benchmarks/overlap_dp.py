"""How much of data parallelism's communication is hidden behind computing, on links of a limited rate.

    python benchmarks/overlap_dp.py                      2 ranks, each behind a link of 1 Gbit/s (root, Linux)
    python benchmarks/overlap_dp.py --gbit 0.1 --forward 0.1    ten times slower, for a machine that is busy
    python benchmarks/overlap_dp.py --loopback           no namespaces: only whether it runs

Blocks compute by waiting, so that ranks on few cores keep their times and gloo's threads have the cores; gradients, buckets,
communication and AdamW are real. Three steps take turns: whole; computing alone, in a mesh of one rank; communication
alone, with no waiting. Of medians,

    hidden = 1 - (whole - computing) / (communication - computing without waiting)
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

# Running a file puts its own folder on the search path, and the checkout need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.options import above_zero, at_least

SIDE = 512  # of a block's square matrix: 1 MiB of fp32
CONTESTANTS = {
    "zero 0": {"zero": 0},
    "zero 1, --overlap-param-gather off": {"zero": 1},
    "zero 1": {"zero": 1, "overlap_gather": True},
    "zero 2": {"zero": 2, "overlap_gather": True},
    "zero 3": {"zero": 3},
    "DDP": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=at_least(2), default=2)
    parser.add_argument("--gbit", type=above_zero, default=1.0, help="rate of each rank's link")
    parser.add_argument(
        "--forward", type=above_zero, default=0.010, help="seconds of a block's forward; its backward has twice that"
    )
    parser.add_argument(
        "--blocks",
        type=at_least(1),
        default=24,
        help="what is sent for the last one in backward can't be hidden by any other",
    )
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--only", default="", help="contestants that have this in their name")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(json.loads(options.rank))
        return
    if not any(options.only in name for name in CONTESTANTS):
        parser.error(f"--only {options.only} is in no contestant's name; they are {', '.join(CONTESTANTS)}")
    from benchmarks.machine import describe_machine
    from benchmarks.pipeline.links import NoNamespaces

    machine = describe_machine()
    print("  ".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    try:
        found = run(options)
    except NoNamespaces as error:
        sys.exit(f"not measured: {error}")
    links = "loopback" if options.loopback else f"links of {options.gbit:g} Gbit/s"
    print(
        f"\n{options.ranks} ranks, {links}; {options.blocks} blocks of {SIDE * SIDE * 4 / 2**20:g} MiB, milliseconds of a step"
    )
    print(f"{'':34}{'whole':>9}{'computing':>11}{'communication':>15}{'exposed':>9}{'hidden':>9}")
    rows = {}
    for name, seconds in found.items():
        whole, computing, communication, neither = (median(seconds[kind]) for kind in KINDS)
        exposed = whole - computing
        hidden = 1 - exposed / (communication - neither)
        rows[name] = {"whole": whole, "computing": computing, "communication": communication, "hidden": hidden}
        cells = (whole, computing, communication - neither, exposed)
        print(
            f"{name:34}"
            + "".join(f"{cell * 1e3:{width}.0f}" for cell, width in zip(cells, (9, 11, 15, 9), strict=True)),
            end="",
        )
        print(f"{hidden:9.0%}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")


KINDS = ("whole", "computing", "communication", "neither")


def run(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Start the ranks and return what rank 0 says: seconds of each kind of step of each contestant."""
    from benchmarks.pipeline.links import namespaces

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = [name for name in CONTESTANTS if options.only in name]
    plan = json.dumps(
        {name: getattr(options, name) for name in ("forward", "rounds", "ranks", "blocks")} | {"names": names}
    )
    loopback: Any = nullcontext([([], {"MASTER_ADDR": "127.0.0.1"})] * options.ranks)
    with loopback if options.loopback else namespaces(options.ranks, options.gbit * 1e9) as places:
        processes = [
            subprocess.Popen(
                [*prefix, sys.executable, str(Path(__file__).resolve()), "--rank", plan],
                env=os.environ
                | {"RANK": str(rank), "WORLD_SIZE": str(options.ranks), "MASTER_PORT": str(port)}
                | {"OMP_NUM_THREADS": "1"}
                | environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, (prefix, environment) in enumerate(places)
        ]
        try:
            outputs = [process.communicate(timeout=900)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        failed = [rank for rank, process in enumerate(processes) if process.returncode]
        assert not failed, f"ranks {failed} failed"
    return json.loads(outputs[0].splitlines()[-1])


def measure(plan: dict[str, Any]) -> None:
    """Be one rank."""
    import torch

    from parallax.collectives import all_reduce_, barrier
    from parallax.mesh import Layout, Mesh, connect

    torch.set_num_threads(1)
    # What is measured goes over the links, so nothing may pass through shared memory.
    with connect(Layout(dp=plan["ranks"]), 120.0, shared_memory=False) as mesh:
        alone = Mesh(Layout(), 0, mesh.device)
        steps = {}
        for name in plan["names"]:
            choices = CONTESTANTS[name]
            for kind in KINDS:
                forward = plan["forward"] if kind in ("whole", "computing") else 0.0
                where = mesh if kind in ("whole", "communication") else alone
                make = _replicated if name == "DDP" else _parallax
                steps[name, kind] = make(where, plan["blocks"], forward, **choices)
        seconds: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in plan["names"]}
        for number in range(plan["rounds"] + 1):
            for (name, kind), step in steps.items():
                step()  # parameters that are under way from here arrive in the step that is measured, as in training
                barrier(mesh.world)
                started = time.perf_counter()
                step()
                taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
                all_reduce_(taken, mesh.world, "max")
                if number:
                    seconds[name][kind].append(taken.item())
        if mesh.rank == 0:
            print(json.dumps(seconds), flush=True)


def _blocks(number: int, forward: float) -> Any:
    """Return blocks that wait: forward once, backward twice as long, before their gradients are there."""
    import torch
    from torch import nn

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(weight)
            time.sleep(forward)
            return input + weight[0, 0] * 0

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            (weight,) = ctx.saved_tensors
            time.sleep(2 * forward)
            return gradients[0], torch.ones_like(weight)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(SIDE, SIDE))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return Wait.apply(input, self.weight)

    return nn.Sequential(*(Block() for _ in range(number)))


def _parallax(mesh: Any, blocks: int, forward: float, **choices: Any) -> Callable[[], None]:
    import torch

    from parallax.data_parallel import GradientBuckets, ShardedAdamW
    from parallax.tensor_parallel.facts import named_parameters_with_facts
    from parallax.tensor_parallel.scopes import around

    model = _blocks(blocks, forward)
    scopes = [around(f"block {number}", block) for number, block in enumerate(model)]
    named = list(named_parameters_with_facts(model))
    buckets = GradientBuckets(named, mesh, bucket_elements=SIDE * SIDE, scopes=[scopes], **choices)
    optimizer = ShardedAdamW(buckets)
    input = torch.ones(4, 4, requires_grad=True)

    def step() -> None:
        buckets.zero_grad()
        buckets.expect_last_backward()
        output = model(input).sum()
        buckets.before_backward()
        output.backward()
        buckets.after_backward()
        buckets.finish()
        optimizer.step(1e-3)

    return step


def _replicated(mesh: Any, blocks: int, forward: float) -> Callable[[], None]:
    """torch's DistributedDataParallel, with buckets of the same size, and its fused AdamW."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = _blocks(blocks, forward)
    trained = DistributedDataParallel(model, bucket_cap_mb=SIDE * SIDE * 4 / 2**20) if mesh.world is not None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    input = torch.ones(4, 4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        trained(input).sum().backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
