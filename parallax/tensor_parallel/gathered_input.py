"""The input of column-parallel weights that is gathered outside of their layers, where a computation is cut (segments.py).

    forward     gather(part) ... its wait() | the layers compute, and keep the part
    backward    start() | others compute meanwhile | again() gives the layers the whole once more, for their weights' gradients

So a computation that is cut keeps what one that is not does (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

import torch

from parallax.collectives import Pending, all_gather_start, join_ranks
from parallax.mesh import Group

SEQUENCE_DIM = 1  # of [batch, seq, hidden]


class Gathering:
    """Parts of a sequence on their way."""

    def __init__(self, part: torch.Tensor, tp: Group) -> None:
        self._gathered: torch.Tensor
        self._pending: Pending
        self._gathered, self._pending = all_gather_start(part, tp)

    def wait(self) -> torch.Tensor:
        """Return the whole."""
        self._pending.wait()
        return join_ranks(self._gathered, SEQUENCE_DIM)


class GatheredInput:
    """One input, `[batch, seq/tp, in]` on this rank and `[batch, seq, in]` whole, for one forward and its backward."""

    def __init__(self, tp: Group) -> None:
        self._tp = tp
        self._part: torch.Tensor | None = None
        self._again: Gathering | None = None

    def gather(self, part: torch.Tensor) -> Gathering:
        """Begin to gather it for the forward."""
        self._part = part
        return Gathering(part, self._tp)

    def kept(self, for_backward: bool) -> torch.Tensor:
        """Return the part, which the layers keep in place of the whole. for_backward: whether there will be one."""
        assert self._part is not None, "it comes from gather()"
        part = self._part
        if not for_backward:
            self._part = None
        return part

    def start(self) -> None:
        """Begin to gather it again, if a backward will ask for it."""
        if self._part is not None:
            self._again, self._part = Gathering(self._part, self._tp), None

    def again(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole in the backward. part: what was kept."""
        gathering = Gathering(part, self._tp) if self._again is None else self._again
        self._again = self._part = None
        return gathering.wait()


def gathered_input(tp: Group | None, sequence_parallel: bool) -> GatheredInput | None:
    """Return what the segments before and after a gathering share; None where nothing is gathered."""
    return GatheredInput(tp) if tp is not None and sequence_parallel else None
