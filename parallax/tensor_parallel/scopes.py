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
        self._end_is_seen = True  # whether backward will pass by the input of the part that is entered now

    def entered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, the input of the part; its parameters may be used from here on."""
        if self.keeper is None:
            return tensor
        self.keeper.gather(self, backward=False)
        if not self.used_in_backward or not torch.is_grad_enabled():
            return tensor
        self._end_is_seen = tensor.is_floating_point()
        if not self._end_is_seen:
            return tensor  # token ids, which have no gradient
        if not tensor.requires_grad:
            # Nothing before is trained. The end of the part's backward must be seen all the same.
            tensor = tensor.detach().requires_grad_()
        return _Entered.apply(tensor, self)

    def left(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, the output of the part; its parameters may not be used any more."""
        if self.keeper is None:
            return tensor
        self.keeper.release(self)
        if not self.used_in_backward or not tensor.requires_grad:
            return tensor
        return _Left.apply(tensor, self, self._end_is_seen)

    def given_up(self) -> None:
        """End the use of a part whose forward raised an error, or recomputation went no further than it had to."""
        if self.keeper is not None:
            self.keeper.release(self)


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
    def forward(ctx: Any, tensor: torch.Tensor, scope: ParameterScope, end_is_seen: bool) -> torch.Tensor:
        ctx.scope, ctx.end_is_seen = scope, end_is_seen
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        scope = ctx.scope
        scope.keeper.gather(scope, backward=True)
        if not ctx.end_is_seen:  # then at the end of all of backward
            torch.autograd.Variable._execution_engine.queue_callback(lambda: scope.keeper.release(scope))
        return gradient, None, None


def around(name: str, module: nn.Module, used_in_backward: bool = True) -> ParameterScope:
    """Return a scope around the calls of a module that takes and returns one tensor; for models of the user's own."""
    scope = ParameterScope(name, module.parameters, used_in_backward)

    def leave(_module: nn.Module, _inputs: Any, output: torch.Tensor | None) -> torch.Tensor | None:
        if output is None:  # an error is on its way; torch.utils.checkpoint ends a recomputation so
            scope.given_up()
            return None
        return scope.left(output)

    module.register_forward_pre_hook(lambda _, inputs: (scope.entered(inputs[0]), *inputs[1:]))
    module.register_forward_hook(leave, always_call=True)
    return scope
