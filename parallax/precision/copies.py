"""Bytes of the copies that a backend makes of a weight, by arithmetic: while it is used again, it is kept in FP8. No torch here.

    r x c    the weight in FP8, a byte an element; where tensor parallelism cuts a tile, from that tile's beginning on
    tiles    an fp32 scale for each tile of 128x128; with delayed scaling a single one

    reference    r x c, and its values in float64, for both directions
    torch        r x c, and transposed: both operands of a product lie along the dim that is summed over. Scales as cuBLAS wants
                 them, for each. What ends inside a tile is padded to whole tiles, for each
    triton       the same, with scales as they are
    te           r x c and transposed, from the beginning, with padded scales for each. By its source, for it has not been run
                 on a GPU yet; on Blackwell delayed scaling needs no transposed one

A forward makes what fprop takes, a backward what dgrad takes; who keeps the copies for a step ends with both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from parallax.precision.options import ROW_PARALLEL, Layers
from parallax.precision.recipe import Recipe

TILE = 128
FP32_BYTES, FP64_BYTES = 4, 8


@dataclass(frozen=True)
class Copies:
    """Bytes of one or more weights' copies: after a forward, after a backward alone, and after both."""

    forward: int = 0
    backward: int = 0
    both: int = 0


def copies_of(backend: str, recipe: Recipe, shape: Sequence[int], lead: Sequence[int] = (0, 0)) -> Copies:
    """Return what a backend makes of a weight of this shape; lead: rows and columns of its first tile that are before it."""
    rows, columns = shape
    if recipe.scaling == "delayed":
        return _of_tensor(backend, rows * columns)
    height, width = lead[0] + rows, lead[1] + columns
    down, across = -(-height // TILE), -(-width // TILE)
    data, scales = height * width, FP32_BYTES * down * across
    if backend == "reference":
        return _always(data + scales + FP64_BYTES * data)
    for_cublas = FP32_BYTES * down * _to_four(across), FP32_BYTES * across * _to_four(down)
    if backend == "te":
        return _always(2 * data + sum(for_cublas))
    is_padded = (height, width) != (TILE * down, TILE * across) or any(lead)
    padded = TILE * down * TILE * across if is_padded else 0
    # Scales in one row or column are the same transposed.
    more = for_cublas if backend == "torch" else (0, scales if min(down, across) > 1 else 0)
    return _apart(data + scales, padded + more[0], (padded or data) + more[1])


def _of_tensor(backend: str, data: int) -> Copies:
    """Return the same with one scale, where sizes are whole lines of 16 elements."""
    own = data + FP32_BYTES
    if backend == "reference":
        return _always(own + FP64_BYTES * data)
    return _always(own + data) if backend == "te" else _apart(own, 0, data)


def _always(size: int) -> Copies:
    return Copies(size, size, size)


def _apart(own: int, for_forward: int, for_backward: int) -> Copies:
    return Copies(own + for_forward, own + for_backward, own + for_forward + for_backward)


def _to_four(count: int) -> int:
    return -(-count // 4) * 4


@dataclass(frozen=True)
class RankCopies:
    """The copies that a rank makes. layers: {number of a transformer layer: {name of a weight in FP8: its copies}}.

    gathered, below: names of weights that are gathered for each use, and whose copies go with them.
    """

    layers: dict[int, dict[str, Copies]]

    def kept(self, layers: Iterable[int], gathered: Collection[str] = ()) -> int:
        """Return the bytes at the end of a step, of these layers' copies that stay."""
        return sum(
            copies.both
            for layer in layers
            for name, copies in self.layers.get(layer, {}).items()
            if name not in gathered
        )

    def most_in(self, layers: Iterable[int], gathered: Collection[str], measure: Callable[[Copies], int]) -> int:
        """Return the bytes of that one of these layers whose copies that go take the most."""
        return max(
            (
                sum(measure(copies) for name, copies in self.layers.get(layer, {}).items() if name in gathered)
                for layer in layers
            ),
            default=0,
        )


def copies_of_ranks(backend: str, recipe: Recipe, layers: Layers, tp: int) -> Sequence[RankCopies]:
    """Return what each of the tp ranks that share the layers makes; layers: {name: (outputs, inputs)} of the whole model."""
    return [_of_rank(backend, recipe, layers, tp, rank) for rank in range(tp)]


def _of_rank(backend: str, recipe: Recipe, layers: Layers, tp: int, rank: int) -> RankCopies:
    @cache
    def share_of(sizes: tuple[int, int], dim: int) -> Copies:
        shape, lead = list(sizes), [0, 0]
        shape[dim] //= tp
        lead[dim] = rank * shape[dim] % TILE
        return copies_of(backend, recipe, shape, lead)

    held: dict[int, dict[str, Copies]] = {}
    for name, sizes in layers.items():
        number = re.search(r"\.(\d+)\.", name)
        if number is not None and not recipe.keeps(name):
            share = share_of(sizes, int(name.split(".")[-1] in ROW_PARALLEL))
            held.setdefault(int(number.group(1)), {})[f"{name}.weight"] = share
    return RankCopies(held)
