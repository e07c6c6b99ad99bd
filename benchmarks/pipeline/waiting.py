"""Stages that compute by waiting: a rank that waits yields its core, so four ranks on two cores keep to their schedule.

A stage is y = x + w, with the forward's wait in the forward and the waits of the two halves of the backward where autograd
computes them: the input's gradient in one node, the weight's in another. Whoever splits the backward, by whatever means, pays
for each half where it runs it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallax.collectives import copy_to, reduce_from
from parallax.mesh import Group
from parallax.tensor_parallel.segments import Segment, into_columns, merged, out_of_rows
from parallax.tensor_parallel.weight_gradients import WeightSink

_LATE = 0.0002  # seconds by which sleep() may be late: so much before the end a wait begins to watch the clock


@dataclass
class Times:
    """Seconds of a stage's forward and of the halves of its backward; `waited` counts what was done."""

    forward: float
    input_gradient: float
    weight_gradient: float
    waited: Counter[str] = field(default_factory=Counter)

    def wait(self, kind: str, part: float = 1.0, began: float | None = None) -> None:
        """Compute a part of `kind` of one micro-batch; began: when, if it was before now."""
        seconds = {"F": self.forward, "I": self.input_gradient, "W": self.weight_gradient}[kind]
        end = (time.perf_counter() if began is None else began) + seconds * part
        while (left := end - time.perf_counter()) > 0:
            time.sleep(max(left - _LATE, 0.0))
        self.waited[kind] += part  # type: ignore[assignment]


class _ThroughInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, times: Times, part: float, began: float) -> torch.Tensor:
        ctx.times, ctx.part = times, part
        result = input.clone()
        times.wait("F", part, began)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        began, result = time.perf_counter(), gradient.clone()
        ctx.times.wait("I", ctx.part, began)
        return result, None, None, None


class _ThroughWeight(torch.autograd.Function):
    """The weight's part; with a sink its gradient goes there, as that of a parallel layer does."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rows: int, times: Times, part: float) -> torch.Tensor:
        ctx.times, ctx.part, ctx.sink = times, part, getattr(weight, "gradient_sink", None)
        return weight.expand(rows, -1).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        if ctx.sink is None:
            ctx.times.wait("W", ctx.part)
            return gradient.sum(0, keepdim=True), None, None, None
        ctx.sink.add_part(gradient, ctx.part)
        return None, None, None, None


class _WaitingSink(WeightSink):
    def __init__(self, parameter: nn.Parameter, times: Times) -> None:
        super().__init__(parameter)
        self.times = times

    def add_part(self, gradient: torch.Tensor, part: float) -> None:
        self.add_product(gradient, torch.tensor(part))

    def accumulate(self, grad_output: torch.Tensor, input: torch.Tensor) -> None:
        self.times.wait("W", input.item())
        summed = grad_output.sum(0, keepdim=True)
        self.parameter.grad = summed if self.parameter.grad is None else self.parameter.grad + summed


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
        others = _ThroughWeight.apply(weight, len(input), self.times, part)
        return _ThroughInput.apply(input, self.times, part, began) + others

    def segments(self) -> list[Segment]:
        """Return the same computation cut where it communicates."""
        blocks = [
            (
                into_columns(lambda tensor: (tensor,), self.tp, False),
                out_of_rows(lambda tensor, weight=weight: (self._compute(weight, tensor),), self.tp, False),
            )
            for weight in self.weights
        ]
        return [segment for block in blocks for segment in block]


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
