"""To see which path a layer takes for a tensor on a GPU where there is none."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch


class _Pretender(torch.Tensor):
    is_cuda = True


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose `is_cuda` is True; what is computed from it says so too."""
    return tensor.clone().as_subclass(_Pretender)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as an ordinary CPU tensor."""
    return tensor.detach().as_subclass(torch.Tensor)


def spy(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *names: str) -> list[str]:
    """Return a list to which each call of one of the module's functions adds its name."""
    calls: list[str] = []

    def watch(name: str) -> None:
        function = getattr(module, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, watched)

    for name in names:
        watch(name)
    return calls
