"""Parts of a model whose parameters are used together: what ZeRO 3 gathers before a use and frees after it.

    hidden = scope.entered(hidden)      forward: gather         backward: free
    ...                                 the parameters are used here only
    output = scope.left(hidden)         forward: free           backward: gather

Both are identities of one tensor that goes through the part; in backward autograd passes them in the opposite order, after and
before everything in between. A part that is cut into segments enters in its first and leaves in its last.

Without a keeper (a model that is not sharded) nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn


class Keeper(Protocol):
    """Who has the parameters of scopes between uses. Uses may nest and overlap: it counts."""

    def gather(self, scope: ParameterScope, backward: bool) -> None:
        """Have the parameters here until `release`; backward: whether it is for one, which decides what comes next."""

    def release(self, scope: ParameterScope) -> None:
        """End one use."""


class ParameterScope:
    """The parameters of one part of a model.

    name: unique in the model. parameters: returns them; asked when they have their values, not before.
    used_in_backward: whether backward reads them, as that of a matrix product does and that of an embedding does not.
    """

    def __init__(
        self, name: str, parameters: Callable[[], Iterable[nn.Parameter]], used_in_backward: bool = True
    ) -> None:
        self.name, self.parameters, self.used_in_backward = name, parameters, used_in_backward
        self.keeper: Keeper | None = None

    def entered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, the input of the part; its parameters may be used from here on."""
        if self.keeper is None:
            return tensor
        self.keeper.gather(self, backward=False)
        if not self.used_in_backward or not torch.is_grad_enabled():
            return tensor
        if not tensor.requires_grad and tensor.is_floating_point():
            # Nothing before is trained. The end of the part's backward must be seen all the same.
            tensor = tensor.detach().requires_grad_()
        return _Entered.apply(tensor, self)

    def left(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, the output of the part; its parameters may not be used any more."""
        if self.keeper is None:
            return tensor
        self.keeper.release(self)
        return _Left.apply(tensor, self) if self.used_in_backward and tensor.requires_grad else tensor


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scope: ParameterScope) -> torch.Tensor:
        ctx.scope = scope
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.scope.keeper.release(ctx.scope)
        return gradient, None


class _Left(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scope: ParameterScope) -> torch.Tensor:
        ctx.scope = scope
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.scope.keeper.gather(ctx.scope, backward=True)
        return gradient, None


def around(name: str, module: nn.Module, used_in_backward: bool = True) -> ParameterScope:
    """Return a scope around the calls of a module that takes and returns one tensor; for models of the user's own."""
    scope = ParameterScope(name, module.parameters, used_in_backward)
    module.register_forward_pre_hook(lambda _, inputs: (scope.entered(inputs[0]), *inputs[1:]))
    module.register_forward_hook(lambda _, inputs, output: scope.left(output))
    return scope
