"""Which parameters share a flat bucket, and where in it each one lies: pure arithmetic, the same on all holders.

Parameters that are summed over the same ranks in the same way share buckets. They are taken in the reverse order of the
model, so that a bucket fills, and its reduction starts, while backward goes on with earlier layers:

    | head.weight ...... | layer 7's matrices ......... || norms, biases | padding |
    0                    16k                            ^decay_stop                 size = ranks * 16 * n
    |        owned by rank 0         |       owned by rank 1        | ...

What decays comes first in a bucket, so matrices and norms share one reduction and a slice has at most two decay regions.
Offsets are multiples of 16 elements (64 bytes of fp32, a cache line), and so are the slices: whatever the sharding, an
element goes through the same vector instructions, and ZeRO 0 and 1 agree bitwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallax.mesh import Layout

if TYPE_CHECKING:
    from parallax.tensor_parallel.facts import ParameterFacts

ALIGNMENT = 16  # elements: 64 bytes of fp32

# 16 MiB of fp32: large enough that a link's latency is small beside its transfer, small enough that several are in flight.
DEFAULT_BUCKET_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class BucketKey:
    """What parameters must have in common to share a bucket.

    holders: global ranks, ascending, that hold a copy: the gradient is summed, and ZeRO shards, over them.
    scale: of the local gradient before the sum; below 1 where several holders compute the same whole gradient.
    dtype: of the parameters, as torch prints it ("torch.bfloat16").
    across_stages: whether holders are on several pipeline stages.
    """

    holders: tuple[int, ...]
    scale: float
    dtype: str
    across_stages: bool = False


@dataclass(frozen=True)
class ParameterSize:
    """One parameter as the plan sees it: `numel` elements on this rank, tp padding included."""

    name: str
    numel: int
    key: BucketKey
    decays: bool = True


@dataclass(frozen=True)
class Place:
    """Elements [offset, offset + numel) of a bucket belong to the parameter `name`."""

    name: str
    offset: int
    numel: int

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class BucketPlan:
    """One bucket of `size` elements; those before `decay_stop` decay, padding included, the others do not."""

    key: BucketKey
    places: tuple[Place, ...]
    decay_stop: int
    size: int

    def owned(self, rank: int) -> slice:
        """Return the elements that the holder at position `rank` updates and counts in the norm."""
        part = self.size // len(self.key.holders)
        return slice(rank * part, (rank + 1) * part)


def bucket_key(facts: ParameterFacts, layout: Layout, global_rank: int, dtype: str) -> BucketKey:
    """Return the key of a parameter that `global_rank` holds."""
    replicas = facts.replicas
    # Holders along tp that each compute the whole gradient would count it replicas.tp times.
    scale = 1.0 if facts.partial else 1.0 / replicas.tp
    return BucketKey(replicas.ranks(layout, global_rank), scale, dtype, across_stages=len(set(replicas.stages)) > 1)


def plan_buckets(
    parameters: Sequence[ParameterSize], bucket_elements: int = DEFAULT_BUCKET_ELEMENTS
) -> list[BucketPlan]:
    """Return the buckets in the order in which they are reduced.

    parameters: in the order of the model's forward. bucket_elements: a bucket is closed before it would grow beyond
    this; a parameter that is larger has a bucket of its own.

    A bucket is complete once the parameter used earliest in forward has its gradient, so the order is that of completion.
    Buckets across stages come last: their members finish backward at different times, and must not keep others waiting.
    Members of a group hold the same parameters of its keys in the same order, so they agree on the order of its buckets.
    """
    assert bucket_elements > 0, bucket_elements
    assert len({parameter.name for parameter in parameters}) == len(parameters), "two parameters of one name"
    open_members: dict[BucketKey, list[ParameterSize]] = {}
    closed: list[list[ParameterSize]] = []
    for parameter in reversed(parameters):
        members = open_members.setdefault(parameter.key, [])
        filled = sum(_aligned(member.numel) for member in members)
        if members and filled + _aligned(parameter.numel) > bucket_elements:
            closed.append(members)
            members = open_members[parameter.key] = []
        members.append(parameter)
    closed += open_members.values()
    position = {parameter.name: index for index, parameter in enumerate(parameters)}
    closed.sort(key=lambda members: (members[0].key.across_stages, -position[members[-1].name]))
    return [_lay_out(members) for members in closed]


def _lay_out(members: Iterable[ParameterSize]) -> BucketPlan:
    places: list[Place] = []
    offset = decay_stop = 0
    for parameter in sorted(members, key=lambda member: not member.decays):
        places.append(Place(parameter.name, offset, parameter.numel))
        offset += _aligned(parameter.numel)
        if parameter.decays:
            decay_stop = offset
        key = parameter.key
    unit = ALIGNMENT * len(key.holders)
    return BucketPlan(key, tuple(places), decay_stop, size=-(-offset // unit) * unit)


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
