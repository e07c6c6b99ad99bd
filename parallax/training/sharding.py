"""What data parallelism holds and sends on one rank, from the shapes of its stages alone; exact to the byte.

A bucket of S elements that n ranks divide, of e bytes as sent: a reduce_scatter or an all_gather sends S e (n - 1) / n from each,
an all_reduce twice that. The levels are those of `parallax.data_parallel.plan.Levels`; what is reduced over them in turn sends
as much as in one go, since S (n - 1) / n + (S / n) (m - 1) / m = S (n m - 1) / (n m).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from parallax.data_parallel.optimizer import rule_of
from parallax.data_parallel.options import OptimizerOptions, num_moments
from parallax.data_parallel.plan import (
    BucketKey,
    BucketPlan,
    Levels,
    ParameterSize,
    bucket_key,
    plan_buckets,
    split_holders,
    units_of,
)
from parallax.mesh import Group, Layout, Replicas
from parallax.models.config import DecoderConfig
from parallax.models.decoder import DecoderStage
from parallax.models.stages import shape_stages
from parallax.pipeline.actions import Schedule
from parallax.tensor_parallel.facts import named_parameters_with_facts
from parallax.training.memory import ELEMENT_BYTES, FP32_BYTES, StateTypes, model_state_bytes


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket of the first rank at a position in the pipeline; those of its others have the same sizes.

    reductions: of its gradient over the inner level in a step. gathers: of its parameters over it, for uses.
    cell: number of ranks that between them keep its matrices whole, where Muon updates them; else 1.
    """

    plan: BucketPlan
    levels: Levels
    reductions: int
    gathers: int
    cell: int

    @property
    def inner(self) -> int:
        """Elements that one reduce_scatter or all_gather over the inner level sends."""
        inner = len(self.levels.inner)
        return self.plan.size // inner * (inner - 1)

    @property
    def across(self) -> int:
        """The same of the level above it."""
        across = len(self.levels.across)
        return self.plan.size // self.levels.num_shards * (across - 1)

    @property
    def copies(self) -> int:
        """What the all_reduce over the copies sends."""
        copies = len(self.levels.copies)
        return 2 * (self.plan.size // self.levels.num_shards // copies) * (copies - 1)


@dataclass(frozen=True)
class RankSharding:
    """What the optimizer's options make of the buckets of a rank. chains: units of each stage, in the order of its forward."""

    buckets: list[PlannedBucket]
    chains: list[list[str]]
    optimizer: OptimizerOptions
    precision: str

    def state_bytes(self) -> tuple[int, int, int]:
        """Return the bytes of (weights, gradients, optimizer states) between micro-batches."""
        options = self.optimizer
        types = {
            rule: StateTypes(self.precision, options.main_grad_dtype, options.moment_dtype, count)
            for rule, count in num_moments(options).items()
        }
        rows = [
            model_state_bytes(
                bucket.plan.size,
                options.zero,
                len(bucket.levels.inner),
                len(bucket.levels.across),
                types[bucket.plan.key.rule],
            )
            for bucket in self.buckets
        ]
        weights, gradients, states = (sum(column) for column in zip(*rows, strict=True))
        return weights, gradients, states

    @property
    def gathered(self) -> set[str]:
        """The names of the parameters that are here only while they are used; of one layer, some may be and others not."""
        if self.optimizer.zero < 3:
            return set()
        return {place.name for bucket in self.buckets if len(bucket.levels.inner) > 1 for place in bucket.plan.places}

    def working_bytes(self) -> int:
        """Return what ZeRO 2 and 3 need beside: a whole gradient on its way and one that fills; the weights of two layers."""
        divided = [bucket for bucket in self.buckets if len(bucket.levels.inner) > 1]
        zero = self.optimizer.zero
        if zero < 2 or not divided:
            return 0
        gradients = 2 * max(bucket.plan.size for bucket in divided) * ELEMENT_BYTES[self.optimizer.main_grad_dtype]
        if zero == 2:
            return gradients
        gathered = 0
        for chain in self.chains:
            for pair in zip(chain, chain[1:] or chain, strict=False):
                used = (bucket.plan.size for bucket in divided if set(pair) & set(bucket.plan.key.unit))
                gathered = max(gathered, sum(used))
        return gradients + gathered * ELEMENT_BYTES[self.precision]

    def bytes_sent(self) -> int:
        """Return what the rank sends in a step for gradients, and for parameters: once updated, or for each use.

        Exact but for Muon, whose matrices go to their owners and back: that is as if each were cut evenly over its cell, as tp cuts
        them. Slices of ZeRO mostly hold whole matrices, which stay where they are, so there it is less.
        """
        total = 0
        for bucket in self.buckets:
            gradients = bucket.reductions * bucket.inner + bucket.across + bucket.copies
            parameters = bucket.gathers * bucket.inner + bucket.across
            total += gradients * ELEMENT_BYTES[self.optimizer.grad_reduce_dtype]
            total += parameters * ELEMENT_BYTES[self.precision]
            kept = bucket.plan.size // bucket.levels.num_shards
            total += 2 * kept * (bucket.cell - 1) // bucket.cell * FP32_BYTES
        return total


def rank_sharding(
    config: DecoderConfig,
    layout: Layout,
    layers: Sequence[range],
    schedule: Schedule,
    pp_rank: int,
    sequence_parallel: bool,
    optimizer: OptimizerOptions,
    precision: str,
) -> RankSharding:
    """Return how the parameters at a position in the pipeline are held. layers: of each stage."""
    rank = layout.global_rank(pp=pp_rank)
    tp = Group("tp", layout.ranks_along(["tp"], rank), 0) if layout.tp > 1 else None
    stages = shape_stages(config, layers, schedule.holders, pp_rank, tp=tp, sequence_parallel=sequence_parallel)
    rule = rule_of(optimizer)
    scopes = {scope.name: scope.parameters() for stage in stages.values() for scope in stage.scopes}
    units = units_of(optimizer.zero, {index: list(stage.parameters()) for index, stage in stages.items()}, scopes)
    # Lists of holders are long: one for each kind of parameter.
    keys: dict[tuple[Replicas, bool, tuple[str, ...], str], BucketKey] = {}
    sizes: dict[str, ParameterSize] = {}
    for stage in stages.values():
        for name, parameter, facts in named_parameters_with_facts(stage):
            kind = facts.replicas, facts.partial, units.get(parameter, ()), rule(facts)
            if kind not in keys:
                keys[kind] = bucket_key(facts, layout, rank, str(parameter.dtype), *kind[2:])
            sizes.setdefault(name, ParameterSize(name, parameter.numel(), keys[kind], facts.decays))
    levels = {
        key.holders: split_holders(key.holders, layout, rank, optimizer.zero, optimizer.zero_group)
        for key in keys.values()
    }
    uses = _Uses.of(stages, schedule, pp_rank, optimizer.zero)
    buckets = [
        PlannedBucket(
            plan,
            levels[plan.key.holders],
            uses.reductions(plan.key.unit),
            uses.gathers(plan.key.unit),
            _cell_size(plan.key, layout, optimizer),
        )
        for plan in plan_buckets(list(sizes.values()))
    ]
    chains = [[scope.name for scope in stage.scopes] for stage in stages.values()]
    return RankSharding(buckets, chains, optimizer, precision)


def _cell_size(key: BucketKey, layout: Layout, optimizer: OptimizerOptions) -> int:
    """See `PlannedBucket.cell`; the ranks are those of `parallax.data_parallel.muon.cell_ranks`."""
    if key.rule != "muon":
        return 1
    if optimizer.zero == 0:
        return layout.tp
    stages = {layout.coordinates(rank)["pp"] for rank in key.holders}
    return layout.tp * (optimizer.zero_group or layout.dp) * len(stages)


@dataclass(frozen=True)
class _Uses:
    """How often what uses parameters does so in a step.

    stage_of, in_backward: of each user. actions: numbers of (kind, stage) that the rank does.
    """

    zero: int
    stage_of: dict[str, int]
    in_backward: dict[str, bool]
    actions: Counter[tuple[str, int]]

    @classmethod
    def of(cls, stages: dict[int, DecoderStage], schedule: Schedule, pp_rank: int, zero: int) -> _Uses:
        actions = Counter((action.kind, action.stage) for action in schedule.actions_of(pp_rank))
        if zero < 3:
            return cls(zero, {f"stage {index}": index for index in stages}, {}, actions)
        scopes = {scope.name: (index, scope) for index, stage in stages.items() for scope in stage.scopes}
        stage_of = {name: index for name, (index, _) in scopes.items()}
        return cls(zero, stage_of, {name: scope.used_in_backward for name, (_, scope) in scopes.items()}, actions)

    def reductions(self, unit: tuple[str, ...]) -> int:
        if self.zero < 2:
            return 1
        return sum(self.actions[kind, stage] for stage in {self.stage_of[user] for user in unit} for kind in ("B", "W"))

    def gathers(self, unit: tuple[str, ...]) -> int:
        if self.zero < 3:
            return min(self.zero, 1)
        return sum(
            self.actions["F", self.stage_of[user]]
            + self.in_backward[user] * sum(self.actions[kind, self.stage_of[user]] for kind in ("B", "I"))
            for user in unit
        )
