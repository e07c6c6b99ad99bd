"""Where a step's time goes, of each contestant of benchmarks/layouts.py, by torch.profiler.

    python benchmarks/profiles.py                      all layouts, a few minutes on two cores
    python benchmarks/profiles.py --only tp2,pp2

Of rank 0, in the second step of each contestant; the profiler makes a step a few percent longer, most where operators are
many. Each second is of one kind:

    products     matrix products
    attention    its kernel, forward and backward
    other        all other operators: norms, activations, rotary positions, sums, copies, the optimizer
    waits        communication: collectives, messages, and waiting for either, with the copies that they make in shared memory
    rest         in no operator: Python, autograd, dispatch; also waits inside of DistributedDataParallel's C++

"Products at" is their speed while they run, their operations over their seconds, as a share of what square products of the best
size reach on as many cores. Where ranks share cores, a part of every kind is waiting for a core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contest import COMPARISONS, run_world, say
from benchmarks.machine import describe_machine
from benchmarks.options import listed
from parallax.mesh import Mesh
from parallax.models.config import layer_matrix_parameters

if TYPE_CHECKING:
    from benchmarks.task import Task

KINDS = ("products", "attention", "other", "waits", "rest")
_LABEL = "communication"
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul")
_COMMUNICATION = ("c10d::", "_c10d_functional::", "gloo:", _LABEL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(COMPARISONS), help="layouts, with commas between (default: all)")
    parser.add_argument("--contestants", help="of each layout only these, with | between (default: all)")
    options = parser.parse_args()
    names = listed(parser, "--only", options.only, COMPARISONS)
    there = {each: None for name in names for each in COMPARISONS[name].possible().contestants}
    wanted = (
        list(there) if options.contestants is None else listed(parser, "--contestants", options.contestants, there, "|")
    )
    from benchmarks.task import Task

    task = Task()
    say("  ".join(f"{name}: {value}" for name, value in describe_machine().items()))
    say(f"\n| layout | | ms a step | {' | '.join(KINDS)} | products at |")
    say("|---|---|---|" + "---|" * (len(KINDS) + 1))
    for name in names:
        comparison = COMPARISONS[name].possible()
        contestants = tuple(each for each in comparison.contestants if each in wanted)
        if not contestants:
            continue
        profiles = run_world(comparison, partial(_profile_all, task=task, names=contestants))
        for contestant, (seconds, shares, speed) in profiles.items():
            cells = " | ".join(f"{shares[kind]:.0%}" for kind in KINDS)
            say(f"| {name} | {contestant} | {1000 * seconds:,.0f} | {cells} | {speed:.0%} |")


def product_flops(task: Task, mesh: Mesh) -> float:
    """Return the operations of a rank's matrix products in a step; a pipeline's are counted as its mean."""
    model = task.model
    weights = model.num_hidden_layers * layer_matrix_parameters(model) + model.vocab_size * model.hidden_size
    return 6.0 * weights * task.tokens_per_step / mesh.layout.world_size


def _profile_all(mesh: Mesh, task: Task, names: tuple[str, ...]) -> dict[str, tuple[float, dict[str, float], float]]:
    """Return of each contestant the seconds of a step, the share of each kind, and of the products' speed in the peak."""
    import torch

    from benchmarks.machine import products_peak, usable_cores
    from benchmarks.peers import make_contestant
    from benchmarks.task import make_batches
    from parallax.collectives import barrier

    _label_communication()
    steps = make_batches(task, mesh, 2)
    threads = torch.get_num_threads()
    cores_used = min(mesh.layout.world_size * threads, usable_cores())
    peak = products_peak(mesh) * threads / cores_used
    result = {}
    for name in names:
        contestant = make_contestant(name, mesh, task)
        for batches in steps:  # the first warms up, the profiler too
            barrier(mesh.world)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
                started = time.perf_counter()
                contestant.step(batches)
                elapsed = time.perf_counter() - started
        if mesh.rank == 0:
            seconds = _seconds_by_kind(recorded.events(), elapsed)
            shares = {kind: seconds[kind] / elapsed for kind in KINDS}
            result[name] = (elapsed, shares, product_flops(task, mesh) / seconds["products"] / peak)
    return result


def _seconds_by_kind(events: Any, elapsed: float) -> dict[str, float]:
    """Return the seconds of each kind on the thread that trains, which does most."""
    per_thread: dict[int, Any] = defaultdict(Counter)
    for event in events:
        per_thread[event.thread][_kind(event)] += event.self_cpu_time_total / 1e6
    busiest = max(per_thread.values(), key=lambda counted: counted.total())
    seconds = {kind: busiest[kind] for kind in KINDS if kind != "rest"}
    seconds["rest"] = elapsed - sum(seconds.values())
    return seconds


def _kind(event: Any) -> str:
    above = event
    while above is not None:
        if above.name.startswith(_COMMUNICATION):
            return "waits"
        above = above.cpu_parent
    if event.name in _PRODUCTS:
        return "products"
    if "attention" in event.name:
        return "attention"
    return "other" if event.name.startswith("aten::") else "rest"


def _label_communication() -> None:
    """Have the profiler see what communicates without an operator; changes this process for good."""
    import torch.distributed as dist

    from parallax.mail import Mail
    from parallax.shared_memory import SharedMemory

    for owner, names in (
        (SharedMemory, ("all_reduce_", "reduce_scatter", "all_gather", "broadcast_", "barrier")),
        (Mail, ("send", "receive")),
        (dist.Work, ("wait",)),
    ):
        for name in names:
            setattr(owner, name, _labelled(getattr(owner, name)))


def _labelled(function: Any) -> Any:
    from torch.profiler import record_function

    def call(*arguments: Any, **options: Any) -> Any:
        with record_function(_LABEL):
            return function(*arguments, **options)

    return call


if __name__ == "__main__":
    main()
