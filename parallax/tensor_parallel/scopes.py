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


class _Use:
    """One use of a part in one backward: whether that has its parameters."""

    is_held = False


class ParameterScope:
    """The parameters of one part of a model.

    name: unique in the model. parameters: returns them; asked when they have their values, not before.
    used_in_backward: whether backward reads them, as that of a matrix product does and that of an embedding does not.
    in_one_backward: whether uses lie in each other, and the backward of the whole part is run at once; then its use is over when
        that is, also where no gradient passes by the input. A part that is cut into segments has several, and uses may overlap.
    """

    def __init__(
        self,
        name: str,
        parameters: Callable[[], Iterable[nn.Parameter]],
        used_in_backward: bool = True,
        in_one_backward: bool = False,
    ) -> None:
        self.name, self.parameters = name, parameters
        self.used_in_backward, self.in_one_backward = used_in_backward, in_one_backward
        self.keeper: Keeper | None = None
        self._entered: list[_Use] = []  # and not left yet

    def entered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, the input of the part; its parameters may be used from here on."""
        if self.keeper is None:
            return tensor
        self.keeper.gather(self, backward=False)
        use = _Use() if self.in_one_backward else None
        if use is not None:
            self._entered.append(use)
        if not self.used_in_backward or not torch.is_grad_enabled() or not tensor.is_floating_point():
            return tensor
        if not tensor.requires_grad:
            # Nothing before is trained. The end of the part's backward must be seen all the same.
            tensor = tensor.detach().requires_grad_()
        return _Entered.apply(tensor, self, use)

    def left(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, the output of the part; its parameters may not be used any more."""
        if self.keeper is None:
            return tensor
        use = self._entered.pop() if self.in_one_backward else None
        self.keeper.release(self)
        if not self.used_in_backward or not tensor.requires_grad:
            return tensor
        return _Left.apply(tensor, self, use)

    def given_up(self) -> None:
        """End the use, if there is one, of a part whose forward raised an error, or was recomputed only as far as needed."""
        if self.keeper is not None and self._entered:
            self._entered.pop()
            self.keeper.release(self)

    def begin_backward(self, use: _Use | None) -> None:
        assert self.keeper is not None
        self.keeper.gather(self, backward=True)
        if use is not None:
            use.is_held = True
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.end_backward(use))

    def end_backward(self, use: _Use | None) -> None:
        assert self.keeper is not None
        if use is None or use.is_held:
            self.keeper.release(self)
        if use is not None:
            use.is_held = False


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scope: ParameterScope, use: _Use | None) -> torch.Tensor:
        ctx.scope, ctx.use = scope, use
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.scope.end_backward(ctx.use)
        return gradient, None, None


class _Left(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scope: ParameterScope, use: _Use | None) -> torch.Tensor:
        ctx.scope, ctx.use = scope, use
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.scope.begin_backward(ctx.use)
        return gradient, None, None


def around(name: str, module: nn.Module, used_in_backward: bool = True) -> ParameterScope:
    """Return a scope around the calls of a module that takes tensors and returns one; for models of the user's own."""
    scope = ParameterScope(name, module.parameters, used_in_backward, in_one_backward=True)

    def enter(_module: nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        for place, value in enumerate(inputs):
            if isinstance(value, torch.Tensor):
                return (*inputs[:place], scope.entered(value), *inputs[place + 1 :]), named
        for key, value in named.items():
            if isinstance(value, torch.Tensor):
                return inputs, named | {key: scope.entered(value)}
        raise TypeError(f"{name} was called without a tensor, by which its scope could see when it is used")

    def leave(_module: nn.Module, _inputs: Any, output: torch.Tensor | None) -> torch.Tensor | None:
        if output is None:  # an error is on its way; torch.utils.checkpoint ends a recomputation so
            scope.given_up()
            return None
        return scope.left(output)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
    return scope
