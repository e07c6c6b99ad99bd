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

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from parallax.mesh import Layout

if TYPE_CHECKING:
    from parallax.tensor_parallel.facts import ParameterFacts

Parameter = TypeVar("Parameter", bound=Hashable)

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
    unit: what uses the parameters: under ZeRO 2 the stages whose backwards complete them, under ZeRO 3 the scopes that they
        are gathered for; () where that does not matter.
    rule: what updates them, as `ParameterFacts` and the optimizer say.
    """

    holders: tuple[int, ...]
    scale: float
    dtype: str
    across_stages: bool = False
    unit: tuple[str, ...] = ()
    rule: str = "adamw"


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

    def owned(self, position: int) -> slice:
        """Return the elements that the holder at `position` counts in the norm."""
        return self.part(position, len(self.key.holders))

    def part(self, index: int, count: int) -> slice:
        """Return the `index`-th of `count` equal parts, `count` dividing the number of holders."""
        return slice(index * self.size // count, (index + 1) * self.size // count)


@dataclass(frozen=True)
class Levels:
    """How the holders of a parameter divide it, seen from one of them; global ranks, ascending, its own included.

        bucket   |      0      |      1      |    parts of `inner`
                 |  0   |  1   |  0   |  1   |    of each, parts of `across`: what a rank keeps and updates
                 |0 |1 |0 |1 |0 |1 |0 |1 |        of each, what one of the `copies` owns: counts in the norm

    inner: over these a gradient is reduce-scattered first. They are at the same place of the schedule at the same time, so
        under ZeRO 2 and 3 it can be after each backward, and parameters can be gathered over them.
    across: pipeline ranks that hold it too; over these it is reduce-scattered further, once a step.
    copies: those that keep the same part; over these it is all-reduced, once a step.
    """

    inner: tuple[int, ...]
    across: tuple[int, ...]
    copies: tuple[int, ...]

    @property
    def num_shards(self) -> int:
        return len(self.inner) * len(self.across)

    def shard(self, rank: int) -> int:
        """Return which of the `num_shards` parts the global rank keeps."""
        return self.inner.index(rank) * len(self.across) + self.across.index(rank)

    def position(self, rank: int) -> int:
        """Return which of all the holders' parts the global rank owns."""
        return self.shard(rank) * len(self.copies) + self.copies.index(rank)


def split_holders(
    holders: tuple[int, ...], layout: Layout, global_rank: int, zero: int, zero_group: int | None = None
) -> Levels:
    """Return how the holders divide a parameter under a ZeRO stage.

    zero_group: number of neighbouring dp ranks that shard, and beyond which they replicate (hybrid sharding, Zhao et al. 2023,
        arXiv:2304.11277, section 3.2.2); None: all.
    """
    alone = (global_rank,)
    if zero == 0:
        return Levels(alone, alone, holders)
    size = zero_group or layout.dp

    def coordinates(rank: int) -> tuple[int, int, int, int]:
        """Position in the pipeline, along tp, among the groups, and within one."""
        here = layout.coordinates(rank)
        return here["pp"], here["tp"], here["dp"] // size, here["dp"] % size

    pp, tp, group, place = coordinates(global_rank)
    where = {rank: coordinates(rank) for rank in holders}
    copies = tuple(rank for rank, at in where.items() if (at[0], at[1], at[3]) == (pp, tp, place))
    if zero == 1:
        return Levels(tuple(rank for rank, at in where.items() if at[2] == group), alone, copies)
    inner = tuple(rank for rank, at in where.items() if (at[0], at[2]) == (pp, group))
    across = tuple(rank for rank, at in where.items() if at[1:] == (tp, group, place))
    return Levels(inner, across, copies)


def units_of(
    zero: int,
    stages: Mapping[int, Iterable[Parameter]],
    scopes: Mapping[str, Iterable[Parameter]],
    apart: Iterable[Parameter] = (),
) -> dict[Parameter, tuple[str, ...]]:
    """Return what parameters may share a bucket by, beside what they have in common: who uses them (see `BucketKey`).

    stages: the parameters that each stage of the rank uses. scopes: those that are gathered together, by name. apart: those that
        share with no other, because not all holders use them in the same stages and scopes.
    """
    users: dict[Parameter, tuple[str, ...]] = {}
    if zero == 2:
        for stage, used in stages.items():
            for parameter in dict.fromkeys(used):
                users[parameter] = (*users.get(parameter, ()), f"stage {stage}")
    if zero == 3:
        for name, used in scopes.items():
            for parameter in dict.fromkeys(used):
                users[parameter] = (*users.get(parameter, ()), name)
    if zero >= 2:
        for parameter in apart:
            users[parameter] = (*users.get(parameter, ()), "apart")
    return users


def bucket_key(
    facts: ParameterFacts,
    layout: Layout,
    global_rank: int,
    dtype: str,
    unit: tuple[str, ...] = (),
    rule: str = "adamw",
) -> BucketKey:
    """Return the key of a parameter that `global_rank` holds."""
    replicas = facts.replicas
    # Holders along tp that each compute the whole gradient would count it replicas.tp times.
    scale = 1.0 if facts.partial else 1.0 / replicas.tp
    across_stages = len(set(replicas.stages)) > 1
    return BucketKey(replicas.ranks(layout, global_rank), scale, dtype, across_stages, unit, rule)


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
