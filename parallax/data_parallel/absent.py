"""A parameter that is not here: under ZeRO 3, between its uses, it has a shape and a type but no memory.

Whoever reads it would read freed memory, and the process would crash. While it is away it has another class, whose operations are
errors that say so; what only asks for its shape, or sets its gradient, goes on. Changing the class costs less than a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# What asks for no value. Besides, attributes: only `data` and the transposes are views of the values.
_HARMLESS = {
    "__hash__",
    "dim",
    "empty_like",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "ndimension",
    "numel",
    "ones_like",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
    "stride",
    "untyped_storage",
    "zeros_like",
}
_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}


class AbsentParameter(nn.Parameter):
    """A parameter whose values are divided over the ranks, and not here now."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        is_attribute = name in ("__get__", "__set__", "__delete__") and attribute not in _VIEWS
        if is_attribute or name in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        (absent, *_) = [value for value in _flat(args, kwargs) if isinstance(value, AbsentParameter)]
        what = vars(absent)["gradient_sink"].name
        raise RuntimeError(
            f"{what} was read ({name}) between its uses, when --zero 3 has divided it over the ranks; read it inside of the "
            f"model's forward, or this rank's part by `GradientBuckets.weights({what!r})`, or train with ZeRO 2"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({vars(self)['gradient_sink'].name}, {list(self.shape)}, {self.dtype})"


def _flat(args: tuple, kwargs: dict[str, Any] | None) -> list[Any]:
    values: list[Any] = []
    for value in (*args, *(kwargs or {}).values()):
        values += value if isinstance(value, (list, tuple)) else [value]
    return values


def set_present(parameter: nn.Parameter, present: bool) -> None:
    """Say whether a parameter's values are here. Parameters of another class stay as they are: they are somebody else's tensors."""
    if type(parameter) in (nn.Parameter, AbsentParameter):
        parameter.__class__ = nn.Parameter if present else AbsentParameter
