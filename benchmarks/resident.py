"""The memory that a contestant takes in a step, beyond that of a process which has everything imported.

Each contestant has processes of its own: it first trains a tiny model, so that libraries are loaded and ranks connected, then the
real one. What is told is the most that is resident in a step, less what was resident before the real model was built, of the
fullest rank. It has what an allocator keeps for later, so it is good to a few MiB. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contest import Comparison, run_world
from parallax.mesh import Mesh

if TYPE_CHECKING:
    from benchmarks.task import Task

_STEPS = 3
_RESET_PEAK = "5"  # what clear_refs understands, see proc(5)


def peak_memory(comparison: Comparison, task: Task) -> dict[str, int]:
    """Return the bytes of each contestant."""
    return {name: run_world(comparison, partial(_measure, task=task, name=name)) for name in comparison.contestants}


def _measure(mesh: Mesh, task: Task, name: str) -> int:
    import torch

    from benchmarks.peers import make_contestant
    from benchmarks.task import make_batches

    tiny = replace(task, model=replace(task.model, hidden_size=64, intermediate_size=64, head_dim=8), seq_len=16)
    make_contestant(name, mesh, tiny).step(make_batches(tiny, mesh, 1)[0])
    steps = make_batches(task, mesh, _STEPS)
    before = _resident("VmRSS")
    contestant = make_contestant(name, mesh, task)
    contestant.step(steps[0])
    _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    for batches in steps[1:]:
        contestant.step(batches)
    peak = torch.tensor(_resident("VmHWM", trim=False) - before)
    if mesh.connected:
        torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
    return int(peak)


def _resident(field: str, trim: bool = True) -> int:
    """Return a field of /proc/self/status in bytes; trim: after what is free was given back to the system."""
    if trim:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
