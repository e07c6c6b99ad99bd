"""Stages in segments with communication between them, run by generators, so that two chunks can take turns.

The generators yield each time a collective has been started: whoever drives them does the other chunk's next segment
meanwhile. That is how a pair of a forward and a backward hides the communication of both, in one thread, with NCCL and with
gloo alike (DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1, cuts layers up like this for its pairs).

Each segment has its own small autograd graph, entered by a function that catches the gradients of its inputs: leaves would keep
the inputs themselves, also those that no operator keeps. A stage that cannot be cut is a single segment.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallax.tensor_parallel.segments import Arriving, Segment
from parallax.tensor_parallel.weight_gradients import WeightQueue

Result = TypeVar("Result")
Other = TypeVar("Other")
Steps = Generator[None, None, Result]


class Entry:
    """Where an input enters the graph of a segment, and what backward finds there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self.gradient: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """Return the input's gradient; zeros if nothing depended on it, since the stage before waits for one."""
        if self.gradient is None:
            return torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self.gradient


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, entry: Entry, _trained: torch.Tensor) -> torch.Tensor:
        ctx.entry = entry
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.entry.gradient = gradient
        return None, None, None


@dataclass
class Trace:
    """What a forward leaves for the backward: of each segment, where its inputs enter its graph, and the graph's roots."""

    segments: Sequence[Segment]
    entries: list[tuple[Entry | None, ...]]
    roots: list[tuple[torch.Tensor | GradientEdge | None, ...]]

    @property
    def has_gradient(self) -> bool:
        """Whether the output depends on anything that has one."""
        root = self.roots[-1][0]
        return root.requires_grad if isinstance(root, torch.Tensor) else root is not None


def forward_steps(
    segments: Sequence[Segment], input: torch.Tensor | None, train: bool, keep_output: bool
) -> Steps[tuple[torch.Tensor, Trace | None]]:
    """Run the segments; return the detached output and, if `train`, the trace.

    keep_output: whether the output itself is needed to enter its graph, as a loss is. The others may be freed before.
    """
    trace = Trace(segments, [], [])
    tensors: tuple[torch.Tensor | None, ...] = (input,)
    for place, segment in enumerate(segments):
        if train:
            entries = tuple(
                Entry(tensor) if tensor is not None and has_gradient(tensor) else None for tensor in tensors
            )
            trace.entries.append(entries)
            tensors = tuple(map(_entered, tensors, entries))
        outputs = segment.compute(*tensors)
        last = place == len(segments) - 1
        if train:
            trace.roots.append(outputs if last and keep_output else tuple(map(_root, outputs)))
        tensors = tuple(output.detach() for output in outputs)
        del outputs
        if segment.forward is not None and tensors[0] is not None:
            arriving = segment.forward(tensors[0])
            yield
            tensors = (arriving.wait(), *tensors[1:])
    (output,) = tensors
    assert output is not None
    return output, trace if train else None


def backward_steps(
    trace: Trace, gradient: torch.Tensor | None, queue: WeightQueue, chunk: Hashable, split: bool
) -> Steps[torch.Tensor | None]:
    """Run backward through a trace, which is used up; return the gradient of the stage's input, None if it has none.

    split: leave the weights' products in the queue under `chunk`. Otherwise they are computed here: at once where nothing is
    communicated, and behind the communication that was just started where something is.
    """
    gradients: tuple[torch.Tensor | None, ...] = (gradient,)
    defers = split or len(trace.segments) > 1
    for segment in reversed(trace.segments):
        arriving: Arriving | None = None
        if segment.backward is not None and gradients[0] is not None:
            arriving = segment.backward(gradients[0])
        if not split:
            queue.run(chunk)
        if arriving is not None:
            yield
            gradients = (arriving.wait(), *gradients[1:])
        roots, entries = trace.roots.pop(), trace.entries.pop()
        if defers:
            with queue.deferring(chunk):
                _backward(roots, gradients)
        else:
            _backward(roots, gradients)
        gradients = tuple(None if entry is None else entry.take() for entry in entries)
        del roots, entries
    if not split:
        queue.run(chunk)
    return gradients[0]


def alone(steps: Steps[Result]) -> Result:
    """Run a generator to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def in_turn(first: Steps[Result], second: Steps[Other]) -> tuple[Result, Other]:
    """Run two generators to their ends, a segment of each in turn.

    The order does not depend on what is done when: all ranks of a group start their collectives in the same one.
    """
    results: dict[int, Any] = {}
    running: list[tuple[int, Steps[Any]]] = [(0, first), (1, second)]
    while running:
        for entry in tuple(running):
            try:
                next(entry[1])
            except StopIteration as end:
                results[entry[0]] = end.value
                running.remove(entry)
    return results[0], results[1]


def has_gradient(tensor: torch.Tensor) -> bool:
    """Whether tensors of its type have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def _entered(tensor: torch.Tensor | None, entry: Entry | None) -> torch.Tensor | None:
    if tensor is None or entry is None:
        return tensor
    # Something that is trained has to go in for anything to come out with a gradient.
    return _Enter.apply(tensor, entry, torch.empty(0, device=tensor.device, requires_grad=True))


def _root(output: torch.Tensor) -> GradientEdge | None:
    return get_gradient_edge(output) if output.requires_grad else None


def _backward(roots: Sequence[torch.Tensor | GradientEdge | None], gradients: Sequence[torch.Tensor | None]) -> None:
    pairs = [
        (root, gradient)
        for root, gradient in zip(roots, gradients, strict=True)
        if root is not None
        and (not isinstance(root, torch.Tensor) or root.requires_grad)
        and (gradient is not None or isinstance(root, torch.Tensor))
    ]
    if pairs:  # none: nothing in this stage or before it is trained
        edges: list[Any] = [root for root, _ in pairs]  # torch takes tensors and edges mixed, and says less
        torch.autograd.backward(edges, [gradient for _, gradient in pairs])
