"""How a parameter's gradient reaches its bucket, and when it is complete.

Gradients arrive on three ways, and a parameter used twice (the tied embedding and head of one rank) may use them all:

    a layer's backward calls `sink.add_product`    the product goes straight into the main gradient; autograd gets None
    the same while a queue defers                  the product comes later, when the schedule does the chunk's W
    a layer's backward returns a gradient          autograd sums it into parameter.grad; the hook moves it over

The hook stands behind the parameter's AccumulateGrad node, which autograd runs exactly once in a backward that reaches the
parameter, after every use has contributed, also when all it got was None. Tensor hooks and
`register_post_accumulate_grad_hook` do not run then. Reducing before the last contribution is a fault that Megatron-LM had.

A gradient is complete after the last backward of every stage that uses the parameter, once no product is waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from parallax.tensor_parallel.weight_gradients import WeightSink


class GradientSink(WeightSink):
    """Where one parameter's gradient is summed in fp32: `main_grad`, a view of its bucket of the parameter's shape.

    num_stages: of this rank that use the parameter; each has a last backward in a step.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        main_grad: torch.Tensor,
        on_complete: Callable[[], None],
        num_stages: int = 1,
    ) -> None:
        assert parameter.grad is None, f"{name} has a gradient from before it had a bucket"
        super().__init__(parameter)
        self.name, self.main_grad = name, main_grad
        self.last_backward = False  # whether the backward that is about to run is the last through one of the stages
        self.closed = False  # whether the reduction has begun
        self._num_stages = self._stages_to_come = num_stages
        self._on_complete = on_complete
        # The node remembers what the parameter was, so `parameter.data` must not be set any more. The parameter refers to it only
        # weakly: without this reference the hook would be lost.
        self._node = get_gradient_edge(parameter).node
        self._node.register_hook(self._after_backward)

    def open(self) -> None:
        """Begin a step, in which contributions arrive again."""
        self.closed = self.last_backward = False
        self.num_waiting, self._stages_to_come = 0, self._num_stages

    def accumulate(self, grad_output: torch.Tensor, input: torch.Tensor) -> None:
        """Add `grad_output^T @ input`, of `[tokens, out]` and `[tokens, in]`, to the main gradient `[out, in]`, now."""
        self._check_open()
        if grad_output.dtype == input.dtype == self.main_grad.dtype:
            self.main_grad.addmm_(grad_output.t(), input)
        else:
            # The product of one micro-batch is rounded to the layers' dtype, sums over micro-batches are not.
            self.main_grad.add_(grad_output.t() @ input)
        if not self._stages_to_come and not self.num_waiting:
            self._on_complete()

    def _after_backward(self, _inputs: Sequence[torch.Tensor], _outputs: Sequence[torch.Tensor]) -> None:
        if self.parameter.grad is not None:
            self._check_open()
            self.main_grad.add_(self.parameter.grad)
            self.parameter.grad = None
        if self.last_backward:
            self.last_backward = False
            self._stages_to_come -= 1
            if not self._stages_to_come and not self.num_waiting:
                self._on_complete()

    def _check_open(self) -> None:
        assert not self.closed, f"a gradient of {self.name} arrived after its bucket's reduction had begun"
