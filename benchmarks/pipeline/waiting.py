"""Stages that compute by waiting: a rank that waits yields its core, so four ranks on two cores keep to their schedule.

A stage is y = x + w, with the forward's wait at the end of the forward and the waits of the two halves of the backward where
autograd computes them: the input's gradient in one node, the weight's in another. A wait ends when the time is over since its
computing began, less what PyTorch needs around it (`find_unseen`), so that the whole takes what it should. Whoever splits the
backward, by whatever means, pays for each half where it runs it.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn

from parallax.collectives import copy_to, reduce_from
from parallax.mesh import Group
from parallax.tensor_parallel.segments import Segment, into_columns, merged, out_of_rows
from parallax.tensor_parallel.weight_gradients import WeightSink

_LATE = 0.0001  # seconds by which sleep() may be late: so much before the end a wait begins to watch the clock
_PR_SET_TIMERSLACK = 29


def sleep_precisely() -> None:
    """Ask Linux to end this thread's sleeps on time, and not with others up to 50 microseconds later (man 2 prctl)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


@dataclass
class Times:
    """Seconds of a stage's forward and of the halves of its backward; `waited` counts what was done.

    unseen: seconds that each takes around its wait, in PyTorch, which therefore ends earlier.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    unseen: float = 0.0
    waited: Counter[str] = field(default_factory=Counter)

    def wait(self, kind: str, part: float = 1.0, began: float | None = None) -> None:
        """Compute a part of `kind` of one micro-batch; began: when, if it was before now."""
        seconds = {"F": self.forward, "I": self.input_gradient, "W": self.weight_gradient}[kind]
        end = (time.perf_counter() if began is None else began) + seconds * part - self.unseen
        while (left := end - time.perf_counter()) > 0:
            time.sleep(max(left - _LATE, 0.0))
        self.waited[kind] += part  # type: ignore[assignment]


class _ThroughInput(torch.autograd.Function):
    """The input's part. Its backward is the stage's last node."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, times: Times, part: float) -> torch.Tensor:
        ctx.times, ctx.part = times, part
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        began, result = time.perf_counter(), gradient.clone()
        ctx.times.wait("I", ctx.part, began)
        return result, None, None


class _ThroughWeight(torch.autograd.Function):
    """The weight's part; with a sink its gradient goes there, as that of a parallel layer does."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rows: int, times: Times, part: float) -> torch.Tensor:
        ctx.times, ctx.part, ctx.sink = times, part, getattr(weight, "gradient_sink", None)
        return weight.expand(rows, -1).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        if ctx.sink is not None:
            ctx.sink.add_part(gradient, ctx.part)
            return None, None, None, None
        began, result = time.perf_counter(), gradient.sum(0, keepdim=True)
        ctx.times.wait("W", ctx.part, began)
        return result, None, None, None


class _WaitingSink(WeightSink):
    def __init__(self, parameter: nn.Parameter, times: Times) -> None:
        super().__init__(parameter)
        self.times = times

    def add_part(self, gradient: torch.Tensor, part: float) -> None:
        self.add_product(gradient, torch.tensor(part))

    def accumulate(self, grad_output: torch.Tensor, input: torch.Tensor) -> None:
        began = time.perf_counter()
        summed = grad_output.sum(0, keepdim=True)
        self.parameter.grad = summed if self.parameter.grad is None else self.parameter.grad + summed
        self.times.wait("W", input.item(), began)


class WaitingStage(nn.Module):
    """`[rows, width]` to the same shape. sinks: let a queue put off the weight's half, as our executor does.

    tp: the stage is `cuts` blocks that communicate as tensor-parallel ones do: the forward sums their outputs over this group,
        the backward the gradients of their inputs.
    """

    def __init__(self, times: Times, width: int, sinks: bool = False, tp: Group | None = None, cuts: int = 1) -> None:
        super().__init__()
        self.times, self.tp, self.cuts = times, tp, cuts
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(1, width)) for _ in range(cuts)])
        if sinks:
            for weight in self.weights:
                vars(weight)["gradient_sink"] = _WaitingSink(weight, times)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not input.requires_grad and torch.is_grad_enabled():
            input = input.detach().requires_grad_()  # the first stage is to take as long as the others
        for weight in self.weights:
            input = reduce_from(self._compute(weight, copy_to(input, self.tp)), self.tp)
        return input

    def _compute(self, weight: nn.Parameter, input: torch.Tensor) -> torch.Tensor:
        began, part = time.perf_counter(), 1.0 / self.cuts
        through = _ThroughInput.apply(input, self.times, part)
        output = through + _ThroughWeight.apply(weight, len(input), self.times, part)
        self.times.wait("F", part, began)
        return output

    def segments(self) -> list[Segment]:
        """Return the same computation cut where it communicates."""
        blocks = [
            (
                into_columns(lambda tensor: (tensor,), self.tp, None),
                out_of_rows(lambda tensor, weight=weight: (self._compute(weight, tensor),), self.tp, None),
            )
            for weight in self.weights
        ]
        return [segment for block in blocks for segment in block]


def find_unseen(seconds: float, width: int, rows: int, micro_batches: int = 20) -> float:
    """Return how many seconds more than its wait a plain loop of PyTorch takes for each part of a stage: the median.

    A few tenths of a millisecond after a wait of many, since by then others have had the caches.
    """
    stage, taken = WaitingStage(Times(seconds, seconds, seconds), width), []
    function = PipelineFunction(stage, True, True, (rows, width))
    for number in range(micro_batches):
        started = time.perf_counter()
        function(None, number).backward()
        taken.append((time.perf_counter() - started) / 3 - seconds)
    return median(taken)


@dataclass(frozen=True, eq=False)
class PipelineFunction:
    """A waiting stage as the executor calls it: the first makes its input, the last a loss."""

    stage: WaitingStage
    is_first: bool
    is_last: bool
    shape: tuple[int, int]

    def __call__(self, tensor: torch.Tensor | None, micro_batch: int) -> torch.Tensor:
        output = self.stage(torch.ones(self.shape) if tensor is None else tensor)
        return output.sum() if self.is_last else output

    def segments(self, micro_batch: int) -> Sequence[Segment]:
        segments = self.stage.segments()
        if self.is_first:
            segments.insert(0, Segment(lambda _: (torch.ones(self.shape, requires_grad=True),)))
        segments.append(Segment(lambda tensor: (tensor.sum() if self.is_last else tensor,)))
        return merged(segments)
