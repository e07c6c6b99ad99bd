"""How a parameter's gradient reaches its bucket, and when it is complete.

Gradients arrive on three ways, and a parameter used twice (the tied embedding and head of one rank) may use them all:

    a layer's backward calls `sink.add_product`    the product goes straight into the main gradient; autograd gets None
    the same while a queue defers                  the product comes later, when the schedule does the chunk's W
    a layer's backward returns a gradient          autograd sums it into parameter.grad; the hook moves it over

The hook stands behind the parameter's AccumulateGrad node, which autograd runs exactly once in a backward that reaches the
parameter, after every use has contributed, also when all it got was None. Tensor hooks and
`register_post_accumulate_grad_hook` do not run then. Reducing before the last contribution is a fault that Megatron-LM had.

ZeRO 0 and 1 reduce once a step: a gradient is complete after the last backward of every stage that uses the parameter, once
no product is waiting. ZeRO 2 and 3 reduce after each backward: a gradient's part of a chunk (a stage and a micro-batch) is
complete when the chunk's backward has passed and none of its products is waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from parallax.tensor_parallel.accumulate import add_product_
from parallax.tensor_parallel.weight_gradients import WeightSink

# A gradient that autograd makes in a chunk's I, and that is at most this share of its bucket, waits for W: else the bucket would
# be there from I to W for it.
_SMALL_SHARE = 1 / 8


class GradientSink(WeightSink):
    """Where one parameter's gradient is summed.

    main_grad: returns the tensor to add to, of the parameter's shape; it may be made only now.
    on_complete: is called when the gradient, or its part of a chunk, is complete.
    num_stages: of this rank that use the parameter; each has a last backward in a step.
    each_backward: whether each backward completes the gradient anew. bucket_elements: of its bucket.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        main_grad: Callable[[], torch.Tensor],
        on_complete: Callable[[GradientSink], None],
        num_stages: int = 1,
        *,
        each_backward: bool = False,
        bucket_elements: int = 0,
    ) -> None:
        assert parameter.grad is None, f"{name} has a gradient from before it had a bucket"
        super().__init__(parameter)
        self.name = name
        self.last_backward = False  # whether the backward that is about to run is the last through one of the stages
        self.closed = False  # whether the reduction of the step has begun
        self.complete = False  # the part of a chunk that has not been reduced yet
        self._main_grad, self._on_complete = main_grad, on_complete
        self._num_stages = self._stages_to_come = num_stages
        self._each_backward = each_backward
        self._is_small = each_backward and parameter.numel() <= _SMALL_SHARE * bucket_elements
        # The node remembers what the parameter was, so `parameter.data` must not be set any more. The parameter refers to it only
        # weakly: without this reference the hook would be lost.
        self._node = get_gradient_edge(parameter).node
        self._node.register_hook(self._after_backward)

    def open(self) -> None:
        """Begin a step, in which contributions arrive again."""
        self.closed = self.last_backward = self.complete = False
        self._stages_to_come = self._num_stages
        self.waiting.clear()

    def accumulate(self, grad_output: torch.Tensor, input: torch.Tensor) -> None:
        """Add `grad_output^T @ input`, of `[tokens, out]` and `[tokens, in]`, to the main gradient `[out, in]`, now."""
        add_product_(self.total(), grad_output, input)

    def _add_late(self, chunk: Hashable, gradient: torch.Tensor) -> None:
        self.total().add_(gradient)
        self._made(chunk)

    def _made(self, chunk: Hashable) -> None:
        super()._made(chunk)
        if self._each_backward:
            if chunk not in self.waiting:
                self._on_complete(self)
        elif not self._stages_to_come and not self.waiting:
            self._on_complete(self)

    def _after_backward(self, _inputs: Sequence[torch.Tensor], _outputs: Sequence[torch.Tensor]) -> None:
        queue = self.queue if self.queue is not None and self.queue.is_deferring else None
        if self.parameter.grad is not None:
            gradient, self.parameter.grad = self.parameter.grad, None
            if queue is not None and self._is_small:
                self.waiting[queue.chunk] += 1
                queue.put_off(partial(self._add_late, queue.chunk, gradient), is_product=False)
            else:
                self.total().add_(gradient)
        if self._each_backward:
            if queue is None or queue.chunk not in self.waiting:
                self._on_complete(self)
        elif self.last_backward:
            self.last_backward = False
            self._stages_to_come -= 1
            if not self._stages_to_come and not self.waiting:
                self._on_complete(self)

    def total(self) -> torch.Tensor:
        """Return the main gradient, to be added to."""
        if self.closed:
            raise RuntimeError(
                f"a gradient of {self.name} arrived after its bucket's reduction had begun; call zero_grad() when a step begins, "
                f"and expect_last_backward() before its last backward only"
            )
        return self._main_grad()
