"""What a rank computes in a step: forwards and backwards of its stages, a chunk being one stage's work on one micro-batch.

Of a forward is kept its input and the edge of the autograd graph at its output. The output itself is gone as soon as it has
been sent, unless the stage's own backward needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from parallax.errors import ConfigError
from parallax.pipeline.actions import Action, Pair, Schedule
from parallax.pipeline.segments import Steps, Trace, backward_steps, forward_steps
from parallax.tensor_parallel.segments import Segment
from parallax.tensor_parallel.weight_gradients import WeightQueue

Stage = Callable[[torch.Tensor | None, int], torch.Tensor]

_log = logging.getLogger(__name__)


class BackwardListener(Protocol):
    """Is told when gradients of a stage's weights are made."""

    def expect_last_backward(self, stage: int, /) -> None:
        """The run of autograd backward that comes next is the stage's last in this step."""

    def before_backward(self, stage: int, /) -> None:
        """The B, or after an I the W, that comes next completes the gradients of one of the stage's micro-batches."""

    def after_backward(self, stage: int, /) -> None:
        """They are complete."""


@runtime_checkable
class Cuttable(Protocol):
    """A stage that can be cut where it communicates."""

    def __call__(self, tensor: torch.Tensor | None, micro_batch: int, /) -> torch.Tensor: ...

    def segments(self, micro_batch: int, /) -> Sequence[Segment]: ...


class Chunks:
    """One step's chunks on one rank.

    stages: the function of each stage of this rank. weights: where its layers put off their weights' gradients.

    `outputs` are those of the last stage, by micro-batch. `peak_in_flight` is the most micro-batches of one stage each whose
    activations were held at once.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        weights: WeightQueue,
        listener: BackwardListener | None,
    ) -> None:
        self._schedule, self._stages, self._weights, self._listener = schedule, stages, weights, listener
        self._last_backwards = schedule.last_backwards(rank)
        self._are_cut = any(isinstance(entry, Pair) for entry in schedule.order[rank])
        self._forwarded: dict[tuple[int, int, int], Trace] = {}
        self._in_flight = self.peak_in_flight = 0
        self.outputs: dict[int, torch.Tensor] = {}

    def forward(self, action: Action, tensor: torch.Tensor | None) -> Steps[torch.Tensor | None]:
        """Do an F; return what it hands on, None for the last stage."""
        self._in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self._in_flight)
        is_last = action.stage == self._schedule.num_stages - 1
        train = not self._schedule.forward_only
        output, trace = yield from forward_steps(self._segments(action), tensor, train, keep_output=is_last)
        if is_last:
            if train and output.numel() != 1:
                raise ConfigError(
                    "the last stage must return the scalar loss to run backward on, not a tensor of shape "
                    f"{list(output.shape)}"
                )
            if trace is not None and not trace.has_gradient:
                raise ConfigError(
                    f"the loss of micro-batch {action.micro_batch} does not depend on anything that is trained; was it "
                    "detached, or made of integers?"
                )
            self.outputs[action.micro_batch] = output
        if trace is None:
            self._in_flight -= 1
        else:
            self._forwarded[action.chunk] = trace
        return None if is_last else output

    def backward(self, action: Action, gradient: torch.Tensor | None) -> Steps[torch.Tensor | None]:
        """Do a B, or an I, which leaves the weights' gradients to a W; return the gradient of the chunk's input, if it has one."""
        trace = self._forwarded.pop(action.chunk)
        split = action.kind == "I"
        if self._listener is not None:
            if action in self._last_backwards:
                self._listener.expect_last_backward(action.stage)
            if not split:
                self._listener.before_backward(action.stage)
        result = yield from backward_steps(trace, gradient, self._weights, action.chunk, split)
        if self._listener is not None and not split:
            self._listener.after_backward(action.stage)
        self._in_flight -= 1
        return result

    def weight_gradients(self, action: Action) -> int:
        """Do a W: compute the weights' gradients that the chunk's I put off; return how many there were."""
        if self._listener is not None:
            self._listener.before_backward(action.stage)
        num_products = self._weights.run(action.chunk)
        if self._listener is not None:
            self._listener.after_backward(action.stage)
        return num_products

    def _segments(self, action: Action) -> Sequence[Segment]:
        stage = self._stages[action.stage]
        if self._are_cut and isinstance(stage, Cuttable):
            return stage.segments(action.micro_batch)

        def whole(tensor: torch.Tensor | None) -> tuple[torch.Tensor]:
            output = stage(tensor, action.micro_batch)
            if not isinstance(output, torch.Tensor):
                raise ConfigError(f"stage {action.stage} must return one tensor, not {type(output).__name__}")
            return (output,)

        return [Segment(whole)]


def tell_of_empty(rank: int, stage: int) -> None:
    """Log that W has nothing to do."""
    _log.warning(
        "pipeline rank %d: W of stage %d has nothing to do, so its I takes as long as a whole backward: none of its "
        "layers puts off its weights' gradients, as the parallel layers do once attach_queue() has been called",
        rank,
        stage,
    )
