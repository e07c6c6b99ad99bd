"""ZeRO 3: parameters are gathered for each use by a part of the model, the next part's while this one computes, and freed after.

    forward     gather 0 | use 0, gather 1 | free 0, use 1, gather 2 | ...
    backward    gather 3 | use 3, gather 2 | free 3, use 2, gather 1 | ...

A bucket belongs to the scopes (parallax.tensor_parallel.scopes) that use its parameters; it is there as long as one of them is
in use, or is the next. Only its memory comes and goes: the parameters stay views of it, also those that autograd has saved.

All ranks that gather together run the same scopes in the same order, so they start the same collectives in one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import nn

from parallax.data_parallel.flat import Bucket
from parallax.tensor_parallel.scopes import ParameterScope


class ParameterArrival:
    """Waits, before a scope's use, for the parameters that the last update sent on their way (ZeRO 1 and 2)."""

    def __init__(self, chains: Iterable[Sequence[ParameterScope]], bucket_of: dict[nn.Parameter, Bucket]) -> None:
        self._buckets: dict[ParameterScope, list[Bucket]] = {}
        for scope in (scope for chain in chains for scope in chain):
            used = (bucket_of[parameter] for parameter in scope.parameters() if parameter in bucket_of)
            self._buckets[scope] = list(dict.fromkeys(used))
            scope.keeper = self

    def gather(self, scope: ParameterScope, backward: bool) -> None:
        for bucket in self._buckets[scope]:
            bucket.arrive()

    def release(self, scope: ParameterScope) -> None:
        pass


class ParameterGathering:
    """Keeps the parameters of scopes between their uses.

    chains: the scopes of each stage, in the order of its forward. bucket_of: of each trained parameter.
    """

    def __init__(self, chains: Iterable[Sequence[ParameterScope]], bucket_of: dict[nn.Parameter, Bucket]) -> None:
        self._buckets: dict[ParameterScope, list[Bucket]] = {}
        self._next: dict[tuple[ParameterScope, bool], ParameterScope] = {}  # by scope and whether in backward
        for chain in chains:
            for scope in chain:
                used = (bucket_of[parameter] for parameter in scope.parameters() if parameter in bucket_of)
                self._buckets[scope] = [bucket for bucket in dict.fromkeys(used) if bucket.is_gathered]
                scope.keeper = self
            for first, second in pairwise(chain):
                self._next[first, False] = second
                if first.used_in_backward:
                    self._next[second, True] = first

    def gather(self, scope: ParameterScope, backward: bool) -> None:
        """Have the parameters here until `release`, and start to gather those that will be used next."""
        for bucket in self._buckets[scope]:
            bucket.hold()
        following = self._next.get((scope, backward))
        if following is not None:
            for bucket in self._buckets[following]:
                bucket.start_gather()

    def release(self, scope: ParameterScope) -> None:
        """End one use; what no other use needs is freed."""
        for bucket in self._buckets[scope]:
            bucket.let_go()
