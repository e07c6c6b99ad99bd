"""The flat buckets of a rank: gradients are reduced while backward runs, updated parameters spread to all who hold them.

    zero_grad()                 open a step: main gradients are zero
    expect_last_backward()      ZeRO 0, 1: the backward that comes next is the last of a stage
    before_backward()           ZeRO 2, 3: the backward, or its W, that comes next completes a chunk of a stage
      ... backward ...          a bucket that is complete starts its reduction, once all earlier ones have
    after_backward()            ZeRO 2, 3: reduce what that chunk left (unused parameters)
    finish()                    reduce what is left (unused parameters, what several pipeline ranks hold) and wait
      ... optimizer ...         updates the main parameters of the slices kept here
    spread_parameters()         round them to the model's dtype and gather them from who updated them

ZeRO 0 and 1 reduce once a step, in the last backward. ZeRO 2 and 3 reduce after each backward, exactly once for each chunk
whatever it used, so that all ranks agree on the number of reductions. They are started in one order on all members of a
group (`plan_buckets` says why that holds).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from parallax.collectives import DONE, Pending
from parallax.data_parallel.checks import NamedParameter, check_agreement, check_scopes, trained_parameters
from parallax.data_parallel.flat import Bucket, BucketGroups, GradientTypes, make_bucket
from parallax.data_parallel.gather import ParameterArrival, ParameterGathering
from parallax.data_parallel.options import ZERO_STAGES
from parallax.data_parallel.plan import (
    DEFAULT_BUCKET_ELEMENTS,
    BucketPlan,
    ParameterSize,
    bucket_key,
    plan_buckets,
    split_holders,
    units_of,
)
from parallax.data_parallel.sink import GradientSink
from parallax.mesh import Mesh
from parallax.tensor_parallel.facts import ParameterFacts
from parallax.tensor_parallel.scopes import ParameterScope

# Whole buckets whose reduction may be under way at once; each holds its memory until it is done.
_MOST_IN_FLIGHT = 2


class GradientBuckets:
    """The buckets of a rank's parameters, in the order of their reduction.

    parameters: (name, parameter, facts) in the order of the model's forward, the same on all holders; frozen ones are
        left alone. Each becomes a view of a flat copy of its values, and gets the attribute `gradient_sink` and, where its
        gradient is whole all the time, `main_grad` (its shape).
    zero: 0 to 3. zero_group: shard over so many neighbouring dp ranks and replicate beyond; None: over all.
    bucket_elements: see `plan_buckets`.
    stages: where this rank has several pipeline stages, the parameters that each of them uses.
    scopes: with ZeRO 3, the parts of each stage whose parameters are gathered together, in the order of forward. Parameters
        that are in none stay whole: without scopes, ZeRO 3 is ZeRO 2.
    apart: names of parameters that other holders use in other stages: under ZeRO 2 and 3 each has buckets of its own.
    overlap_gather: let the next forward wait for updated parameters, each part for its own, and not the update (ZeRO 1 and 2; all
        trained parameters are in `scopes`).
    rule: what updates a parameter, by its facts; parameters of different rules do not share buckets.
    fill: writes the first values of a parameter, given its name and facts, into zeros of its shape; then parameters need not have
        memory, and a bucket's is made when those before are divided. None: they have their values.

    Made by every rank of the mesh at the same time, since the groups of holders are created here, once for a model: it has its
    type and device by then, and what is trained of it stays so. Values may be loaded later, in place, before `adopt_parameters`.

    Raises ValueError for what these cannot be, RuntimeError where holders of a parameter do not give the same ones.
    """

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        mesh: Mesh,
        *,
        zero: int = 1,
        zero_group: int | None = None,
        bucket_elements: int = DEFAULT_BUCKET_ELEMENTS,
        stages: Mapping[int, Iterable[nn.Parameter]] | None = None,
        scopes: Iterable[Sequence[ParameterScope]] = (),
        overlap_gather: bool = False,
        apart: Iterable[str] = (),
        types: GradientTypes | None = None,
        rule: Callable[[ParameterFacts], str] = lambda facts: "adamw",
        fill: Callable[[str, ParameterFacts, torch.Tensor], None] | None = None,
    ) -> None:
        if zero not in ZERO_STAGES:
            raise ValueError(f"there is no ZeRO stage {zero}; zero is {', '.join(map(str, ZERO_STAGES))}")
        if zero_group is not None and (zero_group < 1 or mesh.layout.dp % zero_group):
            raise ValueError(f"zero_group {zero_group} does not divide the {mesh.layout.dp} ranks of dp")
        self.zero, self.zero_group, self.mesh, self.device = zero, zero_group, mesh, mesh.device
        self.trained = trained_parameters(parameters)
        self._stages = {stage: list(used) for stage, used in (stages or {}).items()}
        self._uses = Counter(parameter for used in self._stages.values() for parameter in used)
        chains = list(scopes)
        if overlap_gather and zero in (1, 2):
            check_scopes(chains, self.trained)
        parts = {scope.name: scope.parameters() for chain in chains for scope in chain}
        units = units_of(zero, self._stages, parts, [self.trained[name][0] for name in apart if name in self.trained])
        sizes = []
        for name, (parameter, facts) in self.trained.items():
            key = bucket_key(facts, mesh.layout, mesh.rank, str(parameter.dtype), units.get(parameter, ()), rule(facts))
            sizes.append(ParameterSize(name, parameter.numel(), key, facts.decays))
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._sinks: dict[nn.Parameter, GradientSink] = {}
        self._make_buckets(plan_buckets(sizes, bucket_elements), types or GradientTypes(), fill)
        if zero == 3:
            ParameterGathering(chains, self._bucket_of)  # the scopes keep it
        self._overlaps_gather = overlap_gather and zero in (1, 2)
        if self._overlaps_gather:
            ParameterArrival(chains, self._bucket_of)
        # What is reduced once a step while backward runs; those across stages end at different times on their holders.
        self._overlapped = [bucket for bucket in self.buckets if zero < 2 and not bucket.plan.key.across_stages]
        self._num_started = 0
        self._scattered = [bucket for bucket in self.buckets if bucket.is_scattered]
        self._rounds: dict[int, list[Bucket]] = {}  # of each stage: what one of its backwards completes
        self._round: Sequence[Bucket] | None = None  # what the backward that is under way completes
        self._num_scattered = 0  # of them
        self._in_flight: deque[tuple[Bucket, torch.Tensor, Pending]] = deque()
        self.is_finished = False  # whether the step's gradients are summed

    def _make_buckets(
        self,
        plans: list[BucketPlan],
        types: GradientTypes,
        fill: Callable[[str, ParameterFacts, torch.Tensor], None] | None,
    ) -> None:
        mesh = self.mesh

        def fill_by_name(name: str, zeros: torch.Tensor) -> None:
            assert fill is not None
            fill(name, self.trained[name][1], zeros)

        levels = [split_holders(plan.key.holders, mesh.layout, mesh.rank, self.zero, self.zero_group) for plan in plans]
        sets = [ranks for level in levels for ranks in (level.inner, level.across, level.copies)]
        holders = [plan.key.holders for plan in plans]
        groups = mesh.groups_of("holders", [*sets, *holders])
        if mesh.connected:
            check_agreement(plans, levels, mesh)
        for plan, level in zip(plans, levels, strict=True):
            members = [self.trained[place.name][0] for place in plan.places]
            its_groups = BucketGroups(groups[level.inner], groups[level.across], groups[level.copies])
            filler = None if fill is None else fill_by_name
            bucket = make_bucket(plan, level, its_groups, mesh.rank, members, types, self.zero, filler)
            self.buckets.append(bucket)
            self._add_sinks(bucket, members)
            bucket.open()
            if bucket.is_gathered:
                bucket.drop()

    def _add_sinks(self, bucket: Bucket, members: list[nn.Parameter]) -> None:
        for place, parameter in zip(bucket.plan.places, members, strict=True):
            main_grad = partial(bucket.grad_of, slice(place.offset, place.stop), parameter.shape)
            if not bucket.is_scattered:
                stays = vars(parameter)["main_grad"] = main_grad()
                main_grad = partial(_same, stays)
            sink = GradientSink(
                place.name,
                parameter,
                main_grad,
                partial(self._complete, bucket),
                self._uses.get(parameter, 1),
                each_backward=bucket.is_scattered,
                bucket_elements=bucket.plan.size,
            )
            vars(parameter)["gradient_sink"] = sink
            bucket.sinks.append(sink)
            self._sinks[parameter] = sink
            self._bucket_of[parameter] = bucket

    def weights(self, name: str) -> list[tuple[int, int, torch.Tensor]] | None:
        """Return what is here of a trained parameter between uses, as flat ranges of it: (start, stop, values).

        None if all of it is, as it is unless parameters are sharded.
        """
        bucket = self._bucket_of[self.trained[name][0]] if name in self.trained else None
        if bucket is not None:
            bucket.arrive()
        if bucket is None or not bucket.is_gathered:
            return None
        (place,) = (place for place in bucket.plan.places if place.name == name)
        start, stop = max(place.offset, bucket.part.start), min(place.stop, bucket.part.stop)
        if start >= stop:
            return []
        return [(start - place.offset, stop - place.offset, bucket.values(slice(start, stop)))]

    def zero_grad(self) -> None:
        """Open a step: set all main gradients to zero. What a step that was given up has left is waited for, and forgotten.

        Raises RuntimeError if a parameter is no longer what it was when the buckets were made.
        """
        self._check_parameters()
        while self._in_flight:
            self._in_flight.popleft()[2].wait()
        self._round, self._num_started, self.is_finished = None, 0, False
        for bucket in self.buckets:
            bucket.open()

    def expect_last_backward(self, stage: int | None = None) -> None:
        """Say that the next backward is the last of this step through `stage`; None: through everything."""
        for parameter in self._sinks if stage is None or not self._stages else self._stages[stage]:
            if parameter.requires_grad:
                self._sinks[parameter].last_backward = True

    def before_backward(self, stage: int | None = None) -> None:
        """Say that what comes next completes the gradients of one micro-batch of `stage`, no more; None: of everything."""
        if self._round is not None:
            raise RuntimeError(
                "before_backward() is called in a backward; call after_backward() at its end, or zero_grad() to give the step up"
            )
        self._round, self._num_scattered = self._completed_by(stage), 0
        self._scatter_complete()

    def after_backward(self, stage: int | None = None) -> None:
        """Say that the gradients of one micro-batch of `stage` are complete; None: of everything."""
        buckets = self._completed_by(stage) if self._round is None else self._round[self._num_scattered :]
        self._round = None
        for bucket in buckets:
            self._scatter(bucket)

    def _completed_by(self, stage: int | None) -> Sequence[Bucket]:
        if stage is None or not self._stages or not self._scattered:
            return self._scattered
        if stage not in self._rounds:
            used = {self._bucket_of.get(parameter) for parameter in self._stages[stage]}
            self._rounds[stage] = [bucket for bucket in self._scattered if bucket in used]
        return self._rounds[stage]

    def _complete(self, bucket: Bucket, sink: GradientSink) -> None:
        if not sink.complete:
            sink.complete = True
            bucket.missing -= 1
        if not bucket.is_scattered:
            overlapped = self._overlapped
            while self._num_started < len(overlapped) and not overlapped[self._num_started].missing:
                overlapped[self._num_started].close()
                overlapped[self._num_started].advance()
                self._num_started += 1
        elif self._round is not None:
            self._scatter_complete()

    def _scatter_complete(self) -> None:
        assert self._round is not None
        while self._num_scattered < len(self._round) and not self._round[self._num_scattered].missing:
            self._scatter(self._round[self._num_scattered])
            self._num_scattered += 1

    def _scatter(self, bucket: Bucket) -> None:
        whole, pending = bucket.start_scatter()
        self._in_flight.append((bucket, whole, pending))
        while self._in_flight and (len(self._in_flight) > _MOST_IN_FLIGHT or self._in_flight[0][2] is DONE):
            self._settle()

    def _settle(self) -> None:
        bucket, whole, pending = self._in_flight.popleft()
        pending.wait()
        bucket.add_scattered(whole)

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what has not been, and return when all gradients may be read; called by every rank, once a step."""
        for bucket in self._scattered:
            if bucket.whole_grad is not None or not bucket.num_reductions:
                self._scatter(bucket)
        while self._in_flight:
            self._settle()
        started = set(self._overlapped[: self._num_started])
        self._num_started = len(self._overlapped)
        under_way = self.buckets
        for bucket in under_way:
            if bucket not in started:
                bucket.close()
                bucket.advance()
        while under_way:
            under_way = [bucket for bucket in under_way if bucket.advance()]
        self.is_finished = True

    def check_finished(self, what: str) -> None:
        """Raise RuntimeError unless the step's gradients are summed, as `what` needs them."""
        if not self.is_finished:
            raise RuntimeError(f"{what} comes after finish(), which sums the step's gradients over the ranks")

    def _check_parameters(self) -> None:
        for bucket in self.buckets:
            for sink in bucket.sinks:
                parameter = sink.parameter
                # One that is away under ZeRO 3 has another class, which makes looking at it slow.
                flat = bucket.parameters
                is_here = type(parameter) is nn.Parameter
                if not parameter.requires_grad or (
                    is_here and (parameter.dtype != flat.dtype or parameter.device != flat.device)
                ):
                    raise RuntimeError(
                        f"{sink.name} was frozen, cast or moved after its GradientBuckets were made; do that before"
                    )

    @torch.no_grad()
    def spread_parameters(self) -> None:
        """Bring updated main parameters into the model's parameters on all holders; called by every rank."""
        for bucket in self.buckets:
            bucket.arrive()
            bucket.round_main_params()
        for gather in [bucket.start_spread_across() for bucket in self.buckets]:
            gather.wait()
        for bucket in reversed(self.buckets):  # what forward uses first, first
            bucket.start_spread()
        if not self._overlaps_gather:
            self.arrive()

    def arrive(self) -> None:
        """Return when updated parameters are here: with `overlap_gather` forward waits for them; who else uses them calls this."""
        for bucket in self.buckets:
            bucket.arrive()

    @torch.no_grad()
    def adopt_parameters(self) -> None:
        """Set the main parameters to the model's, after these were loaded from elsewhere, which `arrive` comes before."""
        for bucket in self.buckets:
            bucket.adopt_parameters()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
