"""Where a weight's gradient goes, now or later: what splits a backward into its I and its W.

A parallel layer hands the two factors of its weight's gradient to the weight's sink. While a queue is deferring, the sink
puts their product off, and the schedule has it computed when it likes; nothing of the autograd graph is needed for it any
more. A zero-bubble schedule fills its bubbles so (Qi et al. 2024, arXiv:2401.10241), a pair hides communication behind it.

    with queue.deferring(chunk):  backward(...)        I: every layer puts its product off
    queue.run(chunk)                                   W: the products, in the order in which they were put off

Autograd runs each backward once, as always: hooks, recomputation and layers that know nothing of this stay right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn


class WeightQueue:
    """Products that were put off, by the chunk (stage and micro-batch) that they belong to; one for all stages of a rank."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}
        self._open: deque[Callable[[], None]] | None = None

    @property
    def is_deferring(self) -> bool:
        return self._open is not None

    @contextmanager
    def deferring(self, chunk: Hashable) -> Iterator[None]:
        """Put off what is handed over in here until `run(chunk)`."""
        assert self._open is None, "one backward at a time"
        self._open = self._waiting.setdefault(chunk, deque())
        try:
            yield
        finally:
            self._open = None

    def put_off(self, product: Callable[[], None]) -> None:
        assert self._open is not None
        self._open.append(product)

    def run(self, chunk: Hashable) -> int:
        """Compute the products of `chunk`, letting go of each one's factors at once; return how many there were."""
        products = self._waiting.pop(chunk, deque())
        count = len(products)
        while products:
            products.popleft()()
        return count

    def clear(self) -> None:
        """Forget what is left of a step that was broken off."""
        self._waiting.clear()
        self._open = None


class WeightSink:
    """Takes the factors of one weight's gradient, a matrix product; `queue`, where there is one, may put it off.

    This one adds the product to `parameter.grad`, as autograd would.
    """

    queue: WeightQueue | None = None
    num_waiting = 0  # products that were put off and not computed yet

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    def add_product(self, grad_output: torch.Tensor, input: torch.Tensor) -> None:
        """Add `grad_output^T @ input`, of `[tokens, out]` and `[tokens, in]`, to the gradient `[out, in]`, or put it off."""
        if self.queue is None or not self.queue.is_deferring:
            self.accumulate(grad_output, input)
            return
        self.num_waiting += 1
        self.queue.put_off(partial(self._accumulate_late, grad_output, input))

    @torch.no_grad()
    def _accumulate_late(self, grad_output: torch.Tensor, input: torch.Tensor) -> None:
        self.num_waiting -= 1
        self.accumulate(grad_output, input)

    def accumulate(self, grad_output: torch.Tensor, input: torch.Tensor) -> None:
        """Add the product to the gradient now."""
        if self.parameter.grad is None:
            self.parameter.grad = grad_output.t() @ input
        else:
            self.parameter.grad.addmm_(grad_output.t(), input)


def attach_queue(module: nn.Module, queue: WeightQueue) -> None:
    """Let `queue` put off the weight gradients of the parallel layers in `module`.

    Weights keep the sink that they have (that of their gradient bucket); the others get one that adds to `parameter.grad`.
    Modules that are not parallel layers compute all their gradients in the backward itself.
    """
    for parameter in module.parameters():
        sink = getattr(parameter, "gradient_sink", None)
        if sink is None:
            sink = WeightSink(parameter)
            vars(parameter)["gradient_sink"] = sink
        sink.queue = queue
