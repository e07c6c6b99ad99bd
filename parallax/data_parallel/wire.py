"""Sums of flat gradients over a group, sent in a type of their own.

fp32, fp64     reduce_scatter, all_reduce: the backend adds in that type; gradients of another one are converted before and
               rounded after the sum
bf16           each part goes to the rank that sums it (all_to_all), which adds in fp32: a gradient is rounded once on its way
               and not again for each rank that is added, as it would be by a reduce_scatter of bf16
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from parallax.collectives import (
    DONE,
    Pending,
    all_gather_into_start,
    all_reduce_start,
    all_to_all_sum_start,
    reduce_scatter_into_start,
)
from parallax.mesh import Group


class Then:
    """A communication, and what is to be done once it has ended."""

    def __init__(self, first: Pending, then: Callable[[], None]) -> None:
        self._first, self._then = first, then

    def wait(self) -> None:
        self._first.wait()
        self._then()


def scatter_sum_start(whole: torch.Tensor, group: Group | None, wire: torch.dtype) -> Pending:
    """Begin to sum flat `whole` over the group in place: rank r's r-th equal slice is valid after `.wait()`, no other."""
    if group is None:
        return DONE
    part = whole.view(group.size, -1)[group.rank]
    if _is_narrow(wire):
        return all_to_all_sum_start(whole.to(wire), part, group)
    if wire == whole.dtype:
        return reduce_scatter_into_start(whole, group)
    sent = whole.to(wire)
    summed = sent.view(group.size, -1)[group.rank]
    return Then(reduce_scatter_into_start(sent, group), partial(_copy, part, summed))


def sum_start(whole: torch.Tensor, group: Group | None, wire: torch.dtype) -> Pending:
    """Begin to sum flat `whole`, of a size that divides among the group, in place; valid after `.wait()`, equal on all ranks."""
    if group is None:
        return DONE
    if not _is_narrow(wire):
        if wire == whole.dtype:
            return all_reduce_start(whole, group)
        sent = whole.to(wire)
        return Then(all_reduce_start(sent, group), partial(_copy, whole, sent))
    part = whole.view(group.size, -1)[group.rank]

    def spread() -> None:
        rounded = torch.empty(whole.shape, dtype=wire, device=whole.device)
        rounded.view(group.size, -1)[group.rank].copy_(part)
        all_gather_into_start(rounded, group).wait()
        whole.copy_(rounded)

    return Then(scatter_sum_start(whole, group, wire), spread)


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.itemsize < torch.float32.itemsize


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source)
