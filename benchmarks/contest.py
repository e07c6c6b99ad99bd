"""Contestants in one world: check that they train the same model, then let them take turns at the clock.

In the processes of one run every contestant is built, does three steps whose losses must agree, and then, round after
round, each does one timed step on the same tokens. Whatever else the machine is doing slows all of them alike, and the
ratio of two steps of one round is free of what changes from round to round. Who goes first changes every round.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.pipeline.links import NAMESPACE, enter, namespaces
from parallax.mesh import Layout, Mesh

if TYPE_CHECKING:
    import torch

    from benchmarks.task import Task

CHECKED_STEPS = 3
TOLERANCE = 1e-4  # relative, of the losses of these steps
PACKAGES = {"megatron-core": "megatron"}  # peers that are a package of their own, and its module

Returned = TypeVar("Returned")


@dataclass(frozen=True)
class Comparison:
    """A layout, and who trains in it; ours first.

    threads: of each process. rivals: of ours, the peers that it is compared with; all of those in `peers` if none are named.
    """

    layout: Layout
    ours: tuple[str, ...]
    peers: tuple[str, ...]
    aim: float
    threads: int = 1
    rivals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def contestants(self) -> tuple[str, ...]:
        return self.ours + self.peers

    def rivals_of(self, ours: str) -> tuple[str, ...]:
        """Return the peers that one of ours is compared with."""
        return self.rivals.get(ours, self.peers)

    def missing(self) -> list[str]:
        """Return the peers whose packages are not installed."""
        return [name for name in self.peers if name in PACKAGES and not importlib.util.find_spec(PACKAGES[name])]

    def possible(self) -> Comparison:
        """Return the comparison without the peers that are missing."""
        return replace(self, peers=tuple(name for name in self.peers if name not in self.missing()))


# Each stage of ZeRO against what divides as much: gradients that are whole, or reduced in each micro-batch; weights that are
# gathered once a step, or for each use.
_WHOLE_GRADIENTS = ("DDP", "DDP + ZeRO", "FSDP2")
_DIVIDED = ("FSDP2, zero 2", "FSDP2, zero 3")
_BY_STAGE = {
    "parallax": _WHOLE_GRADIENTS,
    "parallax, gather at once": _WHOLE_GRADIENTS,
    "parallax, zero 0": _WHOLE_GRADIENTS,
    "parallax, zero 2": ("FSDP2, zero 2",),
    "parallax, zero 3": ("FSDP2, zero 3",),
}

COMPARISONS = {
    "one": Comparison(Layout(), ("parallax",), ("plain loop", "megatron-core"), aim=1.1, threads=2),
    "dp2": Comparison(Layout(dp=2), tuple(_BY_STAGE), _WHOLE_GRADIENTS + _DIVIDED, aim=1.1, rivals=_BY_STAGE),
    "dp4": Comparison(Layout(dp=4), tuple(_BY_STAGE), _WHOLE_GRADIENTS + _DIVIDED, aim=1.3, rivals=_BY_STAGE),
    "tp2": Comparison(Layout(tp=2), ("parallax",), ("DTensor", "megatron-core"), aim=1.3),
    "pp2": Comparison(
        Layout(pp=2), ("parallax", "parallax, zb-h1", "parallax, zb-v"), ("1F1B", "ZBV", "megatron-core"), aim=1.1
    ),
    "tp2pp2": Comparison(
        Layout(tp=2, pp=2), ("parallax", "parallax, zb-h1"), ("DTensor + 1F1B", "megatron-core"), aim=1.3
    ),
}


@dataclass(frozen=True)
class Result:
    """losses: of the checked steps, and seconds: of each round's step, by contestant.

    peak_flops: FLOP/s of matrix products, on all ranks at once; the most of what was measured before and after the rounds.
    """

    losses: dict[str, list[float]]
    seconds: dict[str, list[float]]
    peak_flops: float = 0.0

    def disagreement(self) -> float:
        """Return the largest relative difference of a peer's loss from that of the first contestant."""
        first, *others = self.losses.values()
        return max((abs(a - b) / abs(a) for other in others for a, b in zip(first, other, strict=True)), default=0.0)

    def best(self, name: str) -> float:
        """Return the seconds of the contestant's fastest step."""
        return min(self.seconds[name])

    def ratio_of_bests(self, ours: str, peers: tuple[str, ...]) -> float:
        """Return our tokens per second over those of the fastest peer, each in its best step."""
        return min(self.best(peer) for peer in peers) / self.best(ours)

    def median_ratio(self, ours: str, peers: tuple[str, ...]) -> float:
        """Return the median over the rounds of our tokens per second over a peer's; of the peer where that is lowest."""
        return min(
            median(theirs / our for our, theirs in zip(self.seconds[ours], self.seconds[peer], strict=True))
            for peer in peers
        )


def compete(mesh: Mesh, task: Task, names: tuple[str, ...], rounds: int) -> Result:
    """Build the contestants, check their losses, time them; called by every rank of the world, with the same result.

    Raises AssertionError if the losses of the first steps do not agree.
    """
    import torch

    from benchmarks.machine import products_peak
    from benchmarks.peers import make_contestant
    from benchmarks.task import make_batches
    from parallax.collectives import all_gather, all_reduce_, barrier

    steps = make_batches(task, mesh, CHECKED_STEPS + rounds)
    contestants = {name: make_contestant(name, mesh, task) for name in names}
    losses = {
        name: all_reduce_(
            torch.stack([contestant.step(batches).double() for batches in steps[:CHECKED_STEPS]]), mesh.world
        ).tolist()
        for name, contestant in contestants.items()
    }
    peak = products_peak(mesh) if rounds else 0.0
    result = Result(losses, {name: [] for name in names}, peak)
    assert result.disagreement() < TOLERANCE, f"the contestants do not train the same model: {losses}"
    if mesh.rank == 0 and rounds:
        say(f"  same model: losses {_listed(losses[names[0]])}, apart by {result.disagreement():.0e} at most")
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            barrier(mesh.world)
            started = time.perf_counter()
            contestants[name].step(steps[CHECKED_STEPS + number])
            span = torch.tensor([[started, time.perf_counter()]], dtype=torch.float64)
            # Where ranks share cores, the first may be halfway before another has left the barrier.
            first_start, last_end = _outermost(all_gather(span, mesh.world))
            result.seconds[name].append(last_end - first_start)
        if mesh.rank == 0:
            latest = ", ".join(f"{name} {task.tokens_per_step / result.seconds[name][-1]:,.0f}" for name in names)
            say(f"  round {number + 1}: {latest}")
    return replace(result, peak_flops=max(peak, products_peak(mesh) if rounds else 0.0))


def _outermost(spans: torch.Tensor) -> tuple[float, float]:
    """Return the first start and the last end of `[ranks, 2]`; processes of one machine share a clock."""
    return spans[:, 0].min().item(), spans[:, 1].max().item()


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def _listed(numbers: list[float]) -> str:
    return " ".join(f"{number:.5f}" for number in numbers)


def _rank_main(
    pipe: Any, environment: dict[str, str], comparison: Comparison, work: Callable[[Mesh], Returned]
) -> None:
    os.environ.update(environment)
    links_are_limited = NAMESPACE in environment
    if links_are_limited:
        enter(environment[NAMESPACE])  # while there is one thread: those that come later are where it is
    import torch

    from parallax.host_memory import keep_freed_memory
    from parallax.mesh import connect

    torch.set_num_threads(comparison.threads)
    keep_freed_memory()  # as a run does; all contestants of a process have its allocator
    with connect(comparison.layout, shared_memory=not links_are_limited) as mesh:
        result = work(mesh)
    if mesh.rank == 0:
        pipe.send(result)


def run_comparison(comparison: Comparison, task: Task, rounds: int, bits_per_second: float | None = None) -> Result:
    """Compare the contestants in processes of their own, as `run_world` does; return what rank 0 measured."""
    work = partial(compete, task=task, names=comparison.contestants, rounds=rounds)
    if bits_per_second is None:
        return run_world(comparison, work)
    with namespaces(comparison.layout.world_size, bits_per_second) as places:
        return run_world(comparison, work, [place | {"MASTER_PORT": "29500"} for _, place in places])


def run_world(
    comparison: Comparison, work: Callable[[Mesh], Returned], places: Sequence[Mapping[str, str]] = ()
) -> Returned:
    """Start the processes of a comparison, as torchrun would, and return what rank 0 returns of the work that each does.

    places: for each rank what to add to its environment, to be in a network namespace of its own.
    Raises RuntimeError if a process fails; its traceback is on stderr.
    """
    import torch.distributed as dist

    world_size = comparison.layout.world_size
    # Held by this process and shared by the ranks, so that no port has to be guessed.
    store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    here_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    processes = []
    for rank in range(world_size):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            **(places[rank] if places else here_all),
        }
        processes.append(context.Process(target=_rank_main, args=(there, environment, comparison, work)))
        processes[-1].start()
    try:
        while any(process.is_alive() for process in processes):
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.1)
        if any(process.exitcode for process in processes):
            raise RuntimeError("a process of the comparison failed")
        return here.recv()
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
