"""A computation cut where it communicates, so that something else can be computed meanwhile.

    input -> compute -> (communicate) -> compute -> (communicate) -> compute -> output

A segment computes on this rank alone. What comes between two of them is a collective of the forward, one of the backward, or
both; for a pair of parallel linear layers these are (see parallax.collectives for the conjugates)

    into    before the column-parallel one    nothing      / all_reduce         all_gather     / reduce_scatter with sp
    out_of  after the row-parallel one        all_reduce   / nothing            reduce_scatter / all_gather with sp

With sequence parallelism the input of column-parallel weights is gathered again in backward, as it is in a layer that is not cut:
that starts together with the all_gather before the backward of `out_of`, and is hidden like it (gathered_input.py).

parallax.pipeline.segments runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from parallax.collectives import Pending, all_reduce_start, reduce_scatter_start
from parallax.mesh import Group
from parallax.tensor_parallel.gathered_input import SEQUENCE_DIM, GatheredInput, Gathering

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


def into_columns(compute: Callable[..., Tensors], tp: Group | None, gathered: GatheredInput | None) -> Segment:
    """Return the segment whose first result is the input of column-parallel weights."""
    if tp is None:
        return Segment(compute)
    if gathered is None:
        return Segment(compute, backward=lambda gradient: _sum(gradient, tp))
    return Segment(compute, gathered.gather, lambda gradient: _scatter(gradient, tp))


def out_of_rows(compute: Callable[..., Tensors], tp: Group | None, gathered: GatheredInput | None) -> Segment:
    """Return the segment whose first result is this rank's part of a row-parallel weight's output.

    gathered: what its column-parallel weights read, with sequence parallelism.
    """
    if tp is None:
        return Segment(compute)
    if gathered is None:
        return Segment(compute, forward=lambda tensor: _sum(tensor, tp))

    def backward(gradient: torch.Tensor) -> Arriving:
        gathered.start()
        return Gathering(gradient, tp)

    return Segment(compute, lambda tensor: _scatter(tensor, tp), backward)


@dataclass(frozen=True)
class _Arriving:
    pending: Pending
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        self.pending.wait()
        return self.tensor


def _sum(tensor: torch.Tensor, tp: Group) -> Arriving:
    return _Arriving(all_reduce_start(tensor, tp), tensor)


def _scatter(tensor: torch.Tensor, tp: Group) -> Arriving:
    part, pending = reduce_scatter_start(tensor, tp, SEQUENCE_DIM)
    return _Arriving(pending, part)
