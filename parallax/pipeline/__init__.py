"""Pipeline parallelism: schedules as data, and one executor that runs them.

    schedule = SCHEDULES["1f1b"](num_stages, num_micro_batches)   # a table: for each rank its actions, in order
    check_schedule(schedule)                                      # complete, possible, free of deadlock
    simulate(schedule).bubble                                     # what it costs, before anything runs
    PipelineExecutor(schedule, mesh.pp, stages).run()             # the step; what is sent follows from the table

Everything but the executor and its transport is pure and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallax.pipeline.actions import Action, Schedule
    from parallax.pipeline.check import check_schedule
    from parallax.pipeline.executor import PipelineExecutor
    from parallax.pipeline.schedules import SCHEDULES, forward_only
    from parallax.pipeline.simulator import Costs, simulate
    from parallax.pipeline.transport import ActivationSpec

_HOMES = {
    "SCHEDULES": "schedules",
    "Action": "actions",
    "ActivationSpec": "transport",
    "Costs": "simulator",
    "PipelineExecutor": "executor",
    "Schedule": "actions",
    "check_schedule": "check",
    "forward_only": "schedules",
    "simulate": "simulator",
}

__all__ = [
    "SCHEDULES",
    "Action",
    "ActivationSpec",
    "Costs",
    "PipelineExecutor",
    "Schedule",
    "check_schedule",
    "forward_only",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
