"""Collectives and messages of ranks on one host: shared memory against gloo, in the same processes, interleaved.

    python -m benchmarks.collectives                     2, 4 and 8 ranks; 4 KiB, 512 KiB and 16 MiB of fp32
    python -m benchmarks.collectives --ranks 2           as many as that alone

For each collective, size and number of ranks: the time of one call in microseconds, minimum and median over the rounds, on
rank 0, and the ratio of the medians. A round is a few calls of one and as many of the other, after a barrier. `message` is one
to a neighbour and back.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.options import at_least, run_or_exit
from parallax.collectives import all_gather, all_reduce_, barrier, reduce_scatter
from parallax.mesh import Group, Layout, Mesh, connect

RANKS = (2, 4, 8)
SIZES = {"4 KiB": 4 << 10, "512 KiB": 512 << 10, "16 MiB": 16 << 20}


def send_and_get_back(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Send to the neighbour, who sends it back; of an odd number of ranks the last does nothing."""
    neighbour, is_first = group.rank ^ 1, group.rank % 2 == 0
    if neighbour >= group.size:
        return tensor
    for sends in (is_first, not is_first):
        if group.shared_memory is not None and group.shared_memory.mail is not None:
            mail = group.shared_memory.mail
            if sends:
                mail.send(neighbour, 1, tensor)
            else:
                tensor = mail.receive(neighbour, 1)
        elif sends:
            dist.send(tensor, group=group.process_group, group_dst=neighbour)
        else:
            tensor = torch.empty_like(tensor)
            dist.recv(tensor, group=group.process_group, group_src=neighbour)
    return tensor


COLLECTIVES: dict[str, Callable[[torch.Tensor, Group], torch.Tensor]] = {
    "all_reduce": all_reduce_,
    "reduce_scatter": reduce_scatter,
    "all_gather": lambda tensor, group: all_gather(tensor[: len(tensor) // group.size], group),
    "message": send_and_get_back,
}
SECONDS_PER_CASE = 1.0


def seconds_per_call(run: Callable[[], object], group: Group, calls: int) -> float:
    """Return the mean time of a few calls in a row."""
    barrier(group)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def measure(collective: str, size: int, shared: Group, gloo: Group) -> tuple[list[float], list[float]]:
    """Return the times of one call in each round, through shared memory and through gloo."""
    tensor = torch.zeros(size // 4)

    def once(group: Group) -> Callable[[], object]:
        return lambda: COLLECTIVES[collective](tensor, group)

    for group in (shared, gloo):
        seconds_per_call(once(group), shared, 2)
    guess = all_reduce_(torch.tensor([seconds_per_call(once(gloo), shared, 2)]), shared, "max").item()
    calls = max(1, min(50, int(0.02 / guess)))
    rounds = max(5, min(50, int(SECONDS_PER_CASE / (guess * calls))))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        times[0].append(seconds_per_call(once(shared), shared, calls))
        times[1].append(seconds_per_call(once(gloo), shared, calls))
    return times


def measure_all(shared: Group, gloo: Group) -> None:
    """Print a line for each collective and size, on rank 0."""
    for collective in COLLECTIVES:
        for size, size_bytes in SIZES.items():
            fast, slow = ([1e6 * t for t in times] for times in measure(collective, size_bytes, shared, gloo))
            medians = statistics.median(fast), statistics.median(slow)
            if shared.rank == 0:
                print(
                    f"{shared.size:5}  {collective:15}{size:>8}  {min(fast):9.0f} {medians[0]:9.0f}  "
                    f"{min(slow):9.0f} {medians[1]:9.0f}  {medians[1] / medians[0]:6.1f}",
                    flush=True,
                )


def main() -> None:
    if "RANK" not in os.environ:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--ranks", type=at_least(2), nargs="+", default=RANKS, help="(default: 2 4 8)")
        options = parser.parse_args()
        print(f"{os.cpu_count()} cores, torch {torch.__version__}; microseconds a call, ratio of the medians")
        print("ranks  collective         size   shared min    median   gloo min    median   ratio")
        for ranks in options.ranks:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            run_or_exit([*launcher, "-m", "benchmarks.collectives"])
        return
    torch.set_num_threads(1)
    layout = Layout(dp=int(os.environ["WORLD_SIZE"]))
    with connect(layout) as mesh:
        through_gloo = Mesh(layout, mesh.rank, mesh.device, connected=True, shared_memory=False)
        shared, gloo = mesh.world, through_gloo.world
        assert shared is not None and gloo is not None
        if shared.shared_memory is None:
            raise SystemExit(f"shared memory is not used here: {shared.why_not_shared}")
        measure_all(shared, gloo)


if __name__ == "__main__":
    main()
