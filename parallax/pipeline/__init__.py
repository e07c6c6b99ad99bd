"""Pipeline parallelism: schedules as data, and one executor that runs them.

    schedule = SCHEDULES["1f1b"](num_stages, num_micro_batches)   # a table: for each rank its actions, in order
    check_schedule(schedule)                                      # complete, possible, free of deadlock
    simulate(schedule).bubble                                     # what it costs, before anything runs
    PipelineExecutor(schedule, mesh.pp, stages).run()             # the step; what is sent follows from the table
    DualPipe(modules, mesh, num_micro_batches).step(...)          # the same for models and loops of your own

Everything but the executor and its transport is pure and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallax.pipeline.actions import Action, Pair, Schedule
    from parallax.pipeline.check import check_schedule
    from parallax.pipeline.costs import Costs, Memory
    from parallax.pipeline.driver import DualPipe, Pipeline
    from parallax.pipeline.executor import PipelineExecutor
    from parallax.pipeline.schedules import ALL_SCHEDULES, SCHEDULES, forward_only, make_schedule
    from parallax.pipeline.schedules.automatic import choose_schedule
    from parallax.pipeline.simulator import simulate
    from parallax.pipeline.tables import read_schedule
    from parallax.pipeline.transport import ActivationSpec

_HOMES = {
    "ALL_SCHEDULES": "schedules",
    "SCHEDULES": "schedules",
    "Action": "actions",
    "ActivationSpec": "transport",
    "Costs": "costs",
    "DualPipe": "driver",
    "Memory": "costs",
    "Pair": "actions",
    "Pipeline": "driver",
    "PipelineExecutor": "executor",
    "Schedule": "actions",
    "check_schedule": "check",
    "choose_schedule": "schedules.automatic",
    "forward_only": "schedules",
    "make_schedule": "schedules",
    "read_schedule": "tables",
    "simulate": "simulator",
}

__all__ = [
    "ALL_SCHEDULES",
    "SCHEDULES",
    "Action",
    "ActivationSpec",
    "Costs",
    "DualPipe",
    "Memory",
    "Pair",
    "Pipeline",
    "PipelineExecutor",
    "Schedule",
    "check_schedule",
    "choose_schedule",
    "forward_only",
    "make_schedule",
    "read_schedule",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
