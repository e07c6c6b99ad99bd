"""A computation cut where it communicates, so that something else can be computed meanwhile.

    input -> compute -> (communicate) -> compute -> (communicate) -> compute -> output

A segment computes on this rank alone. What comes between two of them is a collective of the forward, one of the backward, or
both; for a pair of parallel linear layers these are (see parallax.collectives for the conjugates)

    into    before the column-parallel one    nothing      / all_reduce         all_gather     / reduce_scatter with sp
    out_of  after the row-parallel one        all_reduce   / nothing            reduce_scatter / all_gather with sp

parallax.pipeline.segments runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from parallax.collectives import (
    Pending,
    all_gather_start,
    all_reduce_start,
    join_ranks,
    reduce_scatter_start,
)
from parallax.mesh import Group
from parallax.tensor_parallel.linear import SEQUENCE_DIM

Tensors = tuple[torch.Tensor, ...]


class Arriving(Protocol):
    """A tensor that a communication in flight will bring."""

    def wait(self) -> torch.Tensor:
        """Return it when what is computed next may read it."""


Communicate = Callable[[torch.Tensor], Arriving]


@dataclass(frozen=True)
class Segment:
    """Computing, and what is communicated after it.

    compute: tensors to tensors; the first segment's get the stage's input (None on the first stage), the last one's
        return the stage's output alone. It may change nothing in place, and a parameter belongs to one segment only.
    forward: starts to communicate the first of the results; what arrives takes its place.
    backward: starts to communicate the gradient of what `forward` gave; what arrives is the gradient of the first result.
    """

    compute: Callable[..., Tensors]
    forward: Communicate | None = None
    backward: Communicate | None = None

    @property
    def communicates(self) -> bool:
        return self.forward is not None or self.backward is not None


def merged(segments: Iterable[Segment]) -> list[Segment]:
    """Return the same computation with no segment that does not communicate but the last."""
    result: list[Segment] = []
    for segment in segments:
        if result and not result[-1].communicates:
            segment = _after(result.pop(), segment)
        result.append(segment)
    return result


def _after(first: Segment, second: Segment) -> Segment:
    def compute(*tensors: torch.Tensor) -> Tensors:
        return second.compute(*first.compute(*tensors))

    return Segment(compute, second.forward, second.backward)


def into_columns(compute: Callable[..., Tensors], tp: Group | None, sequence_parallel: bool) -> Segment:
    """Return the segment whose first result is the input of column-parallel weights."""
    if tp is None:
        return Segment(compute)
    if not sequence_parallel:
        return Segment(compute, backward=lambda gradient: _sum(gradient, tp))
    return Segment(compute, lambda tensor: _gather(tensor, tp), lambda gradient: _scatter(gradient, tp))


def out_of_rows(compute: Callable[..., Tensors], tp: Group | None, sequence_parallel: bool) -> Segment:
    """Return the segment whose first result is this rank's part of a row-parallel weight's output."""
    if tp is None:
        return Segment(compute)
    if not sequence_parallel:
        return Segment(compute, forward=lambda tensor: _sum(tensor, tp))
    return Segment(compute, lambda tensor: _scatter(tensor, tp), lambda gradient: _gather(gradient, tp))


@dataclass(frozen=True)
class _Arriving:
    pending: Pending
    tensor: torch.Tensor
    joined: bool = True  # otherwise `[ranks, ...]`, still to be joined along the sequence

    def wait(self) -> torch.Tensor:
        self.pending.wait()
        return self.tensor if self.joined else join_ranks(self.tensor, SEQUENCE_DIM)


def _sum(tensor: torch.Tensor, tp: Group) -> Arriving:
    return _Arriving(all_reduce_start(tensor, tp), tensor)


def _gather(tensor: torch.Tensor, tp: Group) -> Arriving:
    gathered, pending = all_gather_start(tensor, tp)
    return _Arriving(pending, gathered, joined=False)


def _scatter(tensor: torch.Tensor, tp: Group) -> Arriving:
    part, pending = reduce_scatter_start(tensor, tp, SEQUENCE_DIM)
    return _Arriving(pending, part)
