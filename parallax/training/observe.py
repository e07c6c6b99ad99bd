"""Which steps are recorded, and what is told of them: shares of the step and traffic in the metrics, files of --profile and
--trace-pipeline.

A step that is neither logged nor asked for is not recorded, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

from parallax.collectives import all_gather, barrier
from parallax.training.measured_memory import MemoryReport
from parallax.training.options import RunOptions
from parallax.training.pipeline_trace import write_pipeline_trace
from parallax.training.profile import write_profile
from parallax.training.record import SHARES, WAITING, Clock, StepRecorder, shares_of
from parallax.training.step import TrainStep

MOST_RANKS = 64  # beyond which a line of metrics has the least and the most of each share, and not every rank's


class Observer:
    """Records steps of a run; all methods are called by all ranks. say: prints a notice."""

    def __init__(self, train_step: TrainStep, options: RunOptions, out: Path, steps_done: int = 0) -> None:
        self.train_step, self.mesh, self.options, self.out = train_step, train_step.mesh, options, out
        self._clock: Clock | None = None
        self._recorder: StepRecorder | None = None
        self._is_first = True
        self._memory: dict[str, Any] = {}  # until a line of metrics has it
        self._notices: list[str] = []
        for flag, step in (("profile", options.profile), ("trace-pipeline", options.trace_pipeline)):
            if step is not None and step <= steps_done:
                self._notices.append(
                    f"not recorded   step {step} of --{flag} is done already; name one after {steps_done}"
                )
        if any(stage.is_compiled for stage in train_step.runner.stages.values()):
            self._notices.append("compiling      in the first step, which takes up to a minute longer")
        if train_step.optimizer.offload_is_idle:
            self._notices.append(
                "offload        nothing to do: on a CPU the optimizer's states are in the host's memory anyway"
            )

    @contextmanager
    def step(self, step: int, logged: bool) -> Iterator[StepRecorder | None]:
        """Record what is done in here if the step, counted from 1, is logged or asked for."""
        with self._measured() if self._is_first else nullcontext(), self._recorded(step, logged) as recorder:
            yield recorder

    @contextmanager
    def _measured(self) -> Iterator[None]:
        self._is_first = False
        report = MemoryReport(self.train_step.buckets, self.train_step.optimizer, self.train_step.fp8)
        with report.watching():
            yield
        parts = report.parts()
        row = torch.tensor(list(parts.values()), dtype=torch.int64, device=self.mesh.device)
        rows = all_gather(row.view(1, -1), self.mesh.world).cpu()
        self._memory = {name: _told(rows[:, place]) for place, name in enumerate(parts)}
        most = ", ".join(f"{name} {part['max'] / 2**20:,.1f}" for name, part in self._memory.items())
        self._notices += [f"memory         {most} MiB" + (", the most of any rank" if len(rows) > 1 else "")]

    @contextmanager
    def _recorded(self, step: int, logged: bool) -> Iterator[StepRecorder | None]:
        self._recorder = None
        asked = step in (self.options.profile, self.options.trace_pipeline)
        if not (logged or asked):
            yield None
            return
        if self._clock is None:
            self._clock = Clock(self.mesh)
        self._recorder = StepRecorder(self.mesh, self._clock, together=asked)
        yield self._recorder
        self._recorder.end(together=True)

    def notices(self, step: int) -> list[str]:
        """Write the files that were asked for of the step that is just over; return what there is to say about it."""
        notices, self._notices = self._notices, []
        if step == self.options.profile and self._recorder is not None:
            spans = self._recorder.spans()
            with _told_if_not_written("profile", self.out, notices):
                path = write_profile(spans, self.mesh, step, self.out)
                notices.append(f"profiled       step {step}: {path}, for ui.perfetto.dev")
        if step == self.options.trace_pipeline and self._recorder is not None:
            schedule = self.train_step.runner.training.schedule
            trace = self._recorder.trace(f"{schedule.name} step {step}")  # the first of the pipelines is written
            if self.mesh.rank == 0:
                with _told_if_not_written("trace-pipeline", self.out, notices):
                    paths = write_pipeline_trace(trace, self.out)
                    notices.append(f"traced         step {step}: {', '.join(map(str, paths))}")
        if step in (self.options.profile, self.options.trace_pipeline):
            barrier(self.mesh.world)  # nobody's next step waits for who writes
        return notices

    def values(self, seconds: float | None = None) -> dict[str, Any]:
        """Return what metrics.jsonl says of the step that was recorded last, nothing if none was.

        seconds: what it took by the clock that tells of its time, with what this rank did before and after the record.
        """
        memory, self._memory = self._memory, {}
        if self._recorder is None:
            return {}
        shares = shares_of(self._recorder.spans(), seconds)
        spec = self.train_step.runner.spec
        traffic = self._recorder.traffic(torch.Size(spec.shape).numel() * spec.dtype.itemsize)
        self._recorder = None
        row = torch.tensor([shares[name] for name in SHARES], dtype=torch.float64, device=self.mesh.device)
        rows = all_gather(row.view(1, -1), self.mesh.world).cpu()
        return {
            "phases": {name: _told(rows[:, place]) for place, name in enumerate(SHARES)},
            **_straggler(rows),
            **({"memory": memory} if memory else {}),
            "sent": {axis: {"calls": calls, "bytes": sent} for axis, (calls, sent) in traffic.items()},
        }


@contextmanager
def _told_if_not_written(option: str, out: Path, notices: list[str]) -> Iterator[None]:
    """Make a notice of an error of the disk: no run ends for what it tells of itself."""
    try:
        yield
    except OSError as error:
        notices.append(
            f"notice         what --{option} asks for cannot be written: {error.strerror} ({error.filename or out}); "
            f"training goes on"
        )


def _told(column: torch.Tensor) -> dict[str, Any]:
    values = [round(value, 6) for value in column.tolist()]  # microseconds, or bytes
    return {"min": min(values), "max": max(values)} | ({"ranks": values} if len(values) <= MOST_RANKS else {})


def _straggler(rows: torch.Tensor) -> dict[str, Any]:
    """Return the rank that worked longest, that is waited least for others, and by how much longer than the median rank.

    Of an even number the lower one in the middle: with two ranks a mean would tell half of what lies between them.
    """
    working = rows[:, [place for place, name in enumerate(SHARES) if name not in WAITING]].sum(1).tolist()
    longest = max(working)
    return {"straggler": working.index(longest), "straggler_seconds": round(longest - median_low(working), 6)}
