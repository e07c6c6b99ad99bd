"""Who runs the waiting stages: our executor under each schedule, and torch.distributed.pipelining's schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.pipeline.waiting import PipelineFunction, Times, WaitingStage
from parallax.mesh import Mesh
from parallax.pipeline.actions import Schedule
from parallax.pipeline.costs import Costs
from parallax.pipeline.executor import PipelineExecutor
from parallax.pipeline.schedules import make_schedule
from parallax.pipeline.transport import ActivationSpec
from parallax.tensor_parallel.weight_gradients import WeightQueue, attach_queue

TORCH_SCHEDULES = {
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipev",
}  # the torch classes, by what follows Schedule in their names, and our names for the same schedules


@dataclass(frozen=True)
class Task:
    """Seconds of a rank's whole share of the model for one micro-batch, and the size of what stages hand on.

    cuts: in how many segments, with a sum over tp after each, a stage computes. unseen: see `Times`.
    """

    forward: float = 0.020
    input_gradient: float = 0.020
    weight_gradient: float = 0.020
    rows: int = 4
    width: int = 64
    cuts: int = 1
    unseen: float = 0.0

    def times(self, chunks: int) -> Times:
        """Return the times of a stage where a rank's share is cut into `chunks`."""
        return Times(self.forward / chunks, self.input_gradient / chunks, self.weight_gradient / chunks, self.unseen)

    @property
    def message_bytes(self) -> int:
        return self.rows * self.width * 4


@dataclass(frozen=True)
class Contestant:
    """`step` does one step on this rank; `waited` tells how many micro-batches its stages have waited for."""

    step: Callable[[], Any]
    times: Times


def chunks_of(schedule: Schedule) -> int:
    """Return into how many stages a rank's share of the model is cut."""
    return schedule.num_stages // schedule.num_ranks


def costs_of(task: Task, schedule: Schedule, **links: Any) -> Costs:
    """Return what a stage of the schedule costs, in seconds; nothing is gained by pairs, which wait one after the other."""
    chunks = chunks_of(schedule)
    costs = Costs(task.forward / chunks, task.input_gradient / chunks, task.weight_gradient / chunks)
    return replace(costs, **links)


def parallax(name: str, mesh: Mesh, micro_batches: int, task: Task) -> Contestant:
    """Our executor."""
    schedule = make_schedule(name, mesh.layout.pp, micro_batches)
    times, last = task.times(chunks_of(schedule)), schedule.num_stages - 1
    weights, shape = WeightQueue(), (task.rows, task.width)
    functions = {}
    for index in schedule.stages_of(mesh.pp_rank):
        stage = WaitingStage(times, task.width, sinks=True, tp=mesh.tp, cuts=task.cuts)
        attach_queue(stage, weights)
        functions[index] = PipelineFunction(stage, index == 0, index == last, shape)
    spec = ActivationSpec(shape, torch.float32)
    executor = PipelineExecutor(schedule, mesh.pp, functions, spec, weights=weights)
    return Contestant(executor.run, times)


def torch_pipelining(name: str, mesh: Mesh, micro_batches: int, task: Task) -> Contestant:
    """torch.distributed.pipelining."""
    from torch.distributed import pipelining

    assert mesh.pp is not None
    rank, ranks, group = mesh.pp_rank, mesh.layout.pp, mesh.pp.process_group
    mine = {
        "1F1B": [rank],
        "Interleaved1F1B": [rank, rank + ranks],
        "ZBVZeroBubble": [rank, 2 * ranks - 1 - rank],
        "DualPipeV": [rank, 2 * ranks - 1 - rank],
    }[name]
    times = task.times(len(mine))
    stages = [
        pipelining.PipelineStage(
            WaitingStage(times, task.width), index, ranks * len(mine), torch.device("cpu"), group=group
        )
        for index in mine
    ]
    kind = getattr(pipelining, f"Schedule{name}")
    given = stages[0] if name == "1F1B" else stages
    schedule = kind(given, micro_batches, loss_fn=lambda output, target: output.sum(), scale_grads=False)
    inputs = torch.ones(task.rows * micro_batches, task.width)

    def step() -> None:
        first = [inputs] if 0 in mine else []
        target = inputs if ranks * len(mine) - 1 in mine else None
        schedule.step(*first, target=target, losses=[] if target is not None else None)

    return Contestant(step, times)
