"""How a parameter's gradient reaches its bucket, and when it is complete.

Gradients arrive on two ways, and a parameter used twice (the tied embedding and head of one stage) may use both:

    a layer's backward calls `sink.add_product`    the product goes straight into the main gradient; autograd gets None
    a layer's backward returns a gradient          autograd sums it into parameter.grad; the hook moves it over

The hook stands behind the parameter's AccumulateGrad node, which autograd runs exactly once in a backward that reaches the
parameter, after every use has contributed, also when all it got was None. Tensor hooks and
`register_post_accumulate_grad_hook` do not run then. Reducing before the last contribution is a fault that Megatron-LM had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


class GradientSink:
    """Where one parameter's gradient is summed in fp32: `main_grad`, a view of its bucket of the parameter's shape.

    add_product is the one place through which layers deliver weight gradients; a schedule that splits backward into
    input and weight gradients can defer them here.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, main_grad: torch.Tensor, on_complete: Callable[[], None]
    ) -> None:
        assert parameter.grad is None, f"{name} has a gradient from before it had a bucket"
        self.name, self.parameter, self.main_grad = name, parameter, main_grad
        self.last_backward = False  # whether the backward that is about to run contributes last
        self.closed = False  # whether the reduction has begun
        self._on_complete = on_complete
        # The node remembers what the parameter was, so `parameter.data` must not be set any more. The parameter refers to it only
        # weakly: without this reference the hook would be lost.
        self._node = get_gradient_edge(parameter).node
        self._node.register_hook(self._after_backward)

    def add_product(self, grad_output: torch.Tensor, input: torch.Tensor) -> None:
        """Add `grad_output^T @ input`, of `[tokens, out]` and `[tokens, in]`, to the main gradient `[out, in]`."""
        self._check_open()
        if grad_output.dtype == input.dtype == self.main_grad.dtype:
            self.main_grad.addmm_(grad_output.t(), input)
        else:
            # The product of one micro-batch is rounded to the layers' dtype, sums over micro-batches are not.
            self.main_grad.add_(grad_output.t() @ input)

    def _after_backward(self, _inputs: Sequence[torch.Tensor], _outputs: Sequence[torch.Tensor]) -> None:
        if self.parameter.grad is not None:
            self._check_open()
            self.main_grad.add_(self.parameter.grad)
            self.parameter.grad = None
        if self.last_backward:
            self.last_backward = False
            self._on_complete()

    def _check_open(self) -> None:
        assert not self.closed, f"a gradient of {self.name} arrived after its bucket's reduction had begun"
