"""What a run tells: a line in the terminal, metrics.jsonl and TensorBoard events, all from rank 0.

metrics.jsonl holds one JSON object per logged step with the keys

    step              steps done, counted from 1
    loss              the optimised loss: mean over the step's targets, nats
    grad_norm         global norm of the gradient before clipping
    lr                learning rate of the step
    tokens            targets trained on so far: all tokens in pretraining, in fine-tuning those that are learned
    tokens_per_second targets over all ranks, since the last logged step
    mfu               share of the devices' peak used by the model's own operations, 0 to 1; padding is none; null where the peak
                      that was measured is too low, because others used the machine meanwhile
    step_seconds      wall time of a step, mean since the last logged step
    memory_bytes      peak memory of rank 0: of its GPU, or of its process on a CPU
    phases            seconds of the step by what they went into (parallax.training.record), of each: the least and the most of
                      all ranks, and those of each rank
    straggler         the rank that worked longest, waits left out; straggler_seconds: by how much longer than the median rank
    memory            bytes of each rank by what they went into (parallax.training.measured_memory); in the first line of a start
    sent              along tp, pp and dp: communications of the step, and the bytes that rank 0 sent in them, with rings
    eval_loss         on the held-out part, at the steps where it was evaluated
    eval_loss/NAME    on the set that --valid NAME=PATH names, at those steps
    test_loss         on the last part of --split, after the last step

A step that was skipped (parallax.training.faults) has no line, or one with its evaluations alone.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from parallax.training.event_file import EventFile
from parallax.training.flops import NO_WORK, Work
from parallax.training.line_file import LineFile


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank so far: allocated on its GPU, or resident in its process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes on Linux


class Metrics:
    """Writes what rank 0 reports; on other ranks every method does nothing.

    out: the run's folder; total_steps: for the progress bar; first_step: steps already done, whose lines are kept and
    whose later lines (of a run that went on after its last checkpoint) are dropped; first_sample: how far in the data they came.
    Raises OSError if the folder cannot be written at the start; later that costs a notice, and no run.
    """

    def __init__(self, out: Path, rank: int, total_steps: int, first_step: int = 0, first_sample: int = 0) -> None:
        self.enabled = rank == 0
        if not self.enabled:
            return
        self.console = Console(soft_wrap=True, highlight=False)
        self.file = LineFile(out / "metrics.jsonl", self.say)
        self.file.keep_up_to(first_step)
        self.skipped_file = LineFile(out / "skipped.jsonl", self.say)
        if self.skipped_file.path.exists():
            # By the place in the data: a rollback goes on with an earlier step, and never with earlier data.
            self.skipped_file.keep_up_to(first_sample - 1, "last_sample")
        self.events = EventFile(out / "tensorboard", first_step + 1)
        self._events_fail = False
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("training", total=total_steps, completed=first_step)

    def __enter__(self) -> Metrics:
        if self.enabled:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self.progress.stop()
            for file in (self.file, self.skipped_file):
                file.close()
            self.events.close()

    def say(self, text: str) -> None:
        """Print a notice."""
        if self.enabled:
            self.console.print(text, markup=False)

    def show(self, renderable: RenderableType) -> None:
        """Print a table."""
        if self.enabled:
            self.console.print(renderable)

    def advance(self, step: int) -> None:
        """Move the progress bar to `step`."""
        if self.enabled:
            self.progress.update(self.task, completed=step)

    def rewind(self, step: int) -> None:
        """Forget the lines after `step`, to which the run went back."""
        if not self.enabled:
            return
        try:
            self.file.keep_up_to(step)
            self.events.begin_again(step + 1)
        except OSError as error:
            self.say(f"notice         what was written of the steps after {step} stays ({error.strerror})")
        self.progress.update(self.task, completed=step)

    def write(self, values: dict[str, Any]) -> None:
        """Record one logged step and print its line."""
        if not self.enabled:
            return
        self.file.append(values)

        try:
            self.events.add(values["step"], _scalars(values))
            self._events_fail = False
        except OSError as error:
            if not self._events_fail:
                self._events_fail = True
                self.say(
                    f"notice         TensorBoard's events cannot be written ({error.strerror}); training goes on without them"
                )
        self.console.print(_line(values), markup=False)

    def skipped(self, values: dict[str, Any]) -> None:
        """Record a step that changed nothing in skipped.jsonl."""
        if self.enabled:
            self.skipped_file.append(values)


def _scalars(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers that TensorBoard draws: of phases the most of all ranks."""
    for name, value in values.items():
        if name == "phases":
            yield from ((f"phases/{phase}", of["max"]) for phase, of in value.items())
        elif isinstance(value, int | float) and name != "step":
            yield name, value


def _line(values: dict[str, Any]) -> str:
    parts = [f"step {values['step']:>6}"]
    if "loss" in values:
        parts += [
            f"loss {values['loss']:.4f}",
            f"grad norm {values['grad_norm']:.3f}",
            f"lr {values['lr']:.2e}",
            f"{values['tokens_per_second']:,.0f} tokens/s",
            *([] if values["mfu"] is None else [f"mfu {values['mfu']:.1%}"]),
            f"{values['step_seconds'] * 1000:,.0f} ms/step",
            f"{values['memory_bytes'] / 2**30:.2f} GiB",
        ]
    for name, value in values.items():
        if name.startswith(("eval_loss", "test_loss")):
            parts.append(f"{name.replace('_', ' ').replace('/', ' ', 1)} {value:.4f}")
    return "  ".join(parts)


class Stopwatch:
    """Wall time, steps and their work since the last reading, without the time that was paused (evaluation, saving)."""

    def __init__(self) -> None:
        self.started, self.steps, self.work, self.paused = time.perf_counter(), 0, NO_WORK, 0.0

    def read(self) -> tuple[float, int, Work]:
        """Return (seconds, steps, work) since the last reading and start again."""
        now = time.perf_counter()
        result = now - self.started - self.paused, self.steps, self.work
        self.started, self.steps, self.work, self.paused = now, 0, NO_WORK, 0.0
        return result

    def pause(self, seconds: float) -> None:
        """Leave `seconds` out of the next reading."""
        self.paused += seconds
