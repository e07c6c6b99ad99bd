"""Start real processes that talk over gloo, cheaply: a fork server imports torch once, and each world is forked.

    results = run_ranks(4, function, argument, ...)       # function(mesh, argument, ...) on every rank

`function` must be importable (a module-level function of a test module). Its result, one per rank, comes back through a
pipe. An exception on any rank is raised here with that rank's traceback, and the others are stopped.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from parallax.mesh import Layout

_context = multiprocessing.get_context("forkserver")
# torch.optim and the meta device import torch._dynamo, which takes a second and a half in each process.
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "numpy", "parallax.collectives"])


def _rank_main(
    pipe: Any, rank: int, layout: Layout, store: str, timeout: float, function: Callable, args: tuple
) -> None:
    import torch
    import torch.distributed as dist

    from parallax.mesh import Mesh

    torch.set_num_threads(1)
    try:
        if layout.world_size > 1:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, layout.world_size),
                rank=rank,
                world_size=layout.world_size,
                timeout=timedelta(seconds=timeout),
            )
        mesh = Mesh(layout, rank, torch.device("cpu"), connected=layout.world_size > 1, timeout_seconds=timeout)
        pipe.send(("result", function(mesh, *args)))
        pipe.poll(timeout)  # tensors are handed over through this process: stay until they have been taken
        if layout.world_size > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        pipe.send(("error", f"rank {rank}:\n{traceback.format_exc()}"))


def run_layout(layout: Layout, function: Callable, *args: Any, timeout: float = 180.0) -> list[Any]:
    """Run `function(mesh, *args)` on every rank of `layout` in its own process; return the results in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(layout.world_size):
            here, there = _context.Pipe()
            process = _context.Process(
                target=_rank_main,
                args=(there, rank, layout, str(Path(folder) / "store"), timeout, function, args),
                daemon=True,
            )
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        try:
            results = _collect(pipes, timeout)
            for pipe in pipes:
                pipe.send("taken")
            return results
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()


def _collect(pipes: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting)} gave no result within {timeout} seconds")
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                kind, value = waiting.pop(rank).recv()
            except EOFError:
                kind, value = "error", f"rank {rank} died without a word"
            if kind == "error":
                raise AssertionError(value)
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def run_ranks(ranks: int, function: Callable, *args: Any, timeout: float = 180.0) -> list[Any]:
    """Run `function(mesh, *args)` on `ranks` ranks along dp."""
    return run_layout(Layout(dp=ranks), function, *args, timeout=timeout)
