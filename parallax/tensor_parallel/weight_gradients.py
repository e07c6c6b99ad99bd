"""Where a weight's gradient goes, now or later: what splits a backward into its I and its W.

A parallel layer hands the two factors of its weight's gradient to the weight's sink. While a queue is deferring, the sink
puts their product off, and the schedule has it computed when it likes; nothing of the autograd graph is needed for it any
more. A zero-bubble schedule fills its bubbles so (Qi et al. 2024, arXiv:2401.10241), a pair hides communication behind it.

    with queue.deferring(chunk):  backward(...)        I: every layer puts its product off
    queue.run(chunk)                                   W: the products, in the order in which they were put off

Autograd runs each backward once, as always: hooks, recomputation and layers that know nothing of this stay right.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn


class WeightQueue:
    """Products that were put off, by the chunk (stage and micro-batch) that they belong to; one for all stages of a rank."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[tuple[Callable[[], None], bool]]] = {}
        self._open: deque[tuple[Callable[[], None], bool]] | None = None
        self.chunk: Hashable = None  # that is put off at the moment

    @property
    def is_deferring(self) -> bool:
        return self._open is not None

    @contextmanager
    def deferring(self, chunk: Hashable) -> Iterator[None]:
        """Put off what is handed over in here until `run(chunk)`."""
        assert self._open is None, "one backward at a time"
        self._open, self.chunk = self._waiting.setdefault(chunk, deque()), chunk
        try:
            yield
        finally:
            self._open = None

    def put_off(self, work: Callable[[], None], is_product: bool = True) -> None:
        assert self._open is not None
        self._open.append((work, is_product))

    def run(self, chunk: Hashable) -> int:
        """Do what was put off of `chunk`, letting go of each product's factors at once; return how many products there were."""
        waiting = self._waiting.pop(chunk, deque())
        count = sum(is_product for _, is_product in waiting)
        while waiting:
            waiting.popleft()[0]()
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

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.waiting: Counter[Hashable] = Counter()  # contributions that were put off and not made yet, by chunk

    def add_product(self, grad_output: torch.Tensor, input: torch.Tensor) -> None:
        """Add `grad_output^T @ input`, of `[tokens, out]` and `[tokens, in]`, to the gradient `[out, in]`, or put it off."""
        self._now_or_later(partial(self.accumulate, grad_output, input))

    def add(self, product: Callable[[torch.Tensor], None]) -> None:
        """Have `product` add itself to the gradient, or put it off; for products that are not of two plain matrices."""
        self._now_or_later(partial(self._add_to_total, product))

    def _now_or_later(self, contribution: Callable[[], None]) -> None:
        if self.queue is None or not self.queue.is_deferring:
            contribution()
            return
        chunk = self.queue.chunk
        self.waiting[chunk] += 1
        self.queue.put_off(partial(self._contribute_late, chunk, contribution))

    @torch.no_grad()
    def _contribute_late(self, chunk: Hashable, contribution: Callable[[], None]) -> None:
        contribution()
        self._made(chunk)

    def _made(self, chunk: Hashable) -> None:
        """Note that one of the contributions of `chunk` that were put off has been made."""
        self.waiting[chunk] -= 1
        if not self.waiting[chunk]:
            del self.waiting[chunk]

    def accumulate(self, grad_output: torch.Tensor, input: torch.Tensor) -> None:
        """Add the product to the gradient now."""
        if self.parameter.grad is None:
            self.parameter.grad = grad_output.t() @ input
        else:
            self.parameter.grad.addmm_(grad_output.t(), input)

    def total(self) -> torch.Tensor:
        """Return the tensor that contributions are added to, fp32 where it is not `parameter.grad`."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        return self.parameter.grad

    def _add_to_total(self, product: Callable[[torch.Tensor], None]) -> None:
        product(self.total())


def sink_of_bf16(parameter: torch.Tensor) -> WeightSink | None:
    """Return where the gradient of a bf16 parameter goes unrounded, to be summed in fp32; None where it does not.

    Parts of a sequence that are rounded before they are added up would be another gradient than that of the whole.
    """
    return getattr(parameter, "gradient_sink", None) if parameter.dtype == torch.bfloat16 else None


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
