"""FP8 training: what of a linear layer runs in 8 bits, with what scales, and what computes it.

    recipe      which layers, which formats and scales: one frozen dataclass, and the table that follows from it (no torch)
    options     the recipe and the backend as flags, with their checks (no torch)
    tiles       quantisation with a scale for each tile, bit-defined
    delayed     one scale for a tensor, from the amaxes of steps gone by
    operands    a matrix in FP8 with its scales, and how shards that cut a tile agree on one
    products    fprop, dgrad and wgrad of one layer, on a backend
    backends/   reference (any device), torch, triton, te (Transformer Engine); `choose` picks

x is a tensor, q what is stored: q = x * scale, x = q * scale_inv. See docs/fp8.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallax.precision.delayed import DelayedScaling
    from parallax.precision.recipe import Recipe
    from parallax.precision.tiles import dequantize_tiles, quantize_tiles

_HOMES = {
    "DelayedScaling": "delayed",
    "Recipe": "recipe",
    "dequantize_tiles": "tiles",
    "quantize_tiles": "tiles",
}

__all__ = ["DelayedScaling", "Recipe", "dequantize_tiles", "quantize_tiles"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
