"""Flat buckets of parameters and gradients, reduced while backward runs.

    zero_grad()                 open a step: main gradients are zero
    expect_last_backward()      the backward that comes next is the last of a stage
      ... backward ...          a bucket that is complete starts its reduction, once all earlier ones have
    finish()                    start what is left (unused parameters, tied embeddings) and wait
      ... optimizer ...         updates the main parameters of the slices kept here
    spread_parameters()         round them to the model's dtype and, under ZeRO 1, gather them from their owners

Parameters become views of a flat buffer in their dtype, gradients of a flat fp32 one (fp64 for an fp64 model). The main
parameters are that buffer's own slice for an fp32 model, a separate fp32 slice otherwise. ZeRO 0 keeps a bucket's whole
optimizer state on every holder, ZeRO 1 the owned slice only; the slice that a rank counts in the norm is the same.
Reductions are started in one order on all members of a group (`plan_buckets` says why that holds).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from parallax.collectives import (
    DONE,
    Pending,
    all_gather_into_start,
    all_reduce_start,
    gather_json,
    reduce_scatter_into_start,
)
from parallax.data_parallel.plan import (
    DEFAULT_BUCKET_ELEMENTS,
    BucketKey,
    BucketPlan,
    ParameterSize,
    bucket_key,
    plan_buckets,
)
from parallax.data_parallel.sink import GradientSink
from parallax.mesh import Group, Mesh, rank_of
from parallax.tensor_parallel.facts import ParameterFacts

NamedParameter = tuple[str, nn.Parameter, ParameterFacts]


@dataclass(eq=False)
class Bucket:
    """Everything about one bucket.

    parameters: flat `[size]`, the model's dtype; the parameters are views of it. main_grad: flat `[size]`, fp32.
    owned: the slice that this rank counts in the norm, and updates for all holders under ZeRO 1.
    kept: the slice whose optimizer state is here: all under ZeRO 0, the owned one under ZeRO 1.
    main_params: flat fp32 values of `kept`; the same memory as `parameters` for an fp32 model.
    """

    plan: BucketPlan
    group: Group | None
    parameters: torch.Tensor
    main_grad: torch.Tensor
    main_params: torch.Tensor
    owned: slice
    kept: slice
    sinks: list[GradientSink] = field(default_factory=list)
    missing: int = 0  # parameters whose last contribution is still to come
    reduction: Pending = DONE

    @property
    def has_own_main_params(self) -> bool:
        return self.main_params.dtype != self.parameters.dtype

    def open(self) -> None:
        """Zero the gradient and accept contributions."""
        self.main_grad.zero_()
        self.missing = len(self.sinks)
        for sink in self.sinks:
            sink.open()

    def start_reduction(self) -> None:
        """Begin to sum the gradient over the holders; what does not lie in `kept` is undefined afterwards."""
        for sink in self.sinks:
            sink.closed = True
        if self.plan.key.scale != 1.0:
            self.main_grad.mul_(self.plan.key.scale)
        start = all_reduce_start if self.kept.stop - self.kept.start == self.plan.size else reduce_scatter_into_start
        self.reduction = start(self.main_grad, self.group)


def _key(parameter: nn.Parameter, facts: ParameterFacts, mesh: Mesh) -> BucketKey:
    return bucket_key(facts, mesh.layout, mesh.rank, str(parameter.dtype))


def _make_bucket(plan: BucketPlan, group: Group | None, members: list[nn.Parameter], zero: int) -> Bucket:
    """Make the buffers of a bucket, and its parameters views of one of them."""
    dtype, device = members[0].dtype, members[0].device
    main_dtype = torch.promote_types(dtype, torch.float32)
    flat = torch.zeros(plan.size, dtype=dtype, device=device)
    for place, parameter in zip(plan.places, members, strict=True):
        view = flat[place.offset : place.stop].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    owned = plan.owned(rank_of(group))
    kept = slice(0, plan.size) if zero == 0 else owned
    main_params = flat[kept].to(main_dtype)  # the same memory when there is nothing to convert
    return Bucket(plan, group, flat, torch.zeros(plan.size, dtype=main_dtype, device=device), main_params, owned, kept)


class GradientBuckets:
    """The buckets of a rank's parameters, in the order of their reduction.

    parameters: (name, parameter, facts) in the order of the model's forward, the same on all holders; frozen ones are
        left alone. Their values must be there: each becomes a view of a flat copy, and gets the attributes
        `main_grad` (fp32, its shape) and `gradient_sink`.
    zero: 0 or 1. bucket_elements: see `plan_buckets`.
    stages: where this rank has several pipeline stages, the parameters that each of them uses.

    Made by every rank of the mesh at the same time, since the groups of holders are created here.
    """

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        mesh: Mesh,
        *,
        zero: int = 1,
        bucket_elements: int = DEFAULT_BUCKET_ELEMENTS,
        stages: Mapping[int, Iterable[nn.Parameter]] | None = None,
    ) -> None:
        assert zero in (0, 1), zero
        self.zero, self.device = zero, mesh.device
        self._stages = {stage: list(used) for stage, used in (stages or {}).items()}
        self._uses = Counter(parameter for used in self._stages.values() for parameter in used)
        trained = {name: (parameter, facts) for name, parameter, facts in parameters if parameter.requires_grad}
        groups = mesh.holders({facts.replicas for _, facts in trained.values()})
        sizes = [
            ParameterSize(name, parameter.numel(), _key(parameter, facts, mesh), facts.decays)
            for name, (parameter, facts) in trained.items()
        ]
        self.buckets: list[Bucket] = []
        self._sinks: dict[nn.Parameter, GradientSink] = {}
        for plan in plan_buckets(sizes, bucket_elements):
            members = [trained[place.name][0] for place in plan.places]
            bucket = _make_bucket(plan, groups[trained[plan.places[0].name][1].replicas], members, zero)
            self.buckets.append(bucket)
            self._add_sinks(bucket, members)
        self._num_overlapped = sum(not bucket.plan.key.across_stages for bucket in self.buckets)
        self._num_started = 0
        if mesh.connected:
            self._check_agreement()

    def _add_sinks(self, bucket: Bucket, members: list[nn.Parameter]) -> None:
        for place, parameter in zip(bucket.plan.places, members, strict=True):
            main_grad = bucket.main_grad[place.offset : place.stop].view(parameter.shape)
            sink = GradientSink(
                place.name, parameter, main_grad, partial(self._complete, bucket), self._uses.get(parameter, 1)
            )
            vars(parameter).update(main_grad=main_grad, gradient_sink=sink)
            bucket.sinks.append(sink)
            self._sinks[parameter] = sink
        bucket.missing = len(bucket.sinks)

    def _check_agreement(self) -> None:
        """Let the members of each group compare their plans: different ones would hang or mix up parameters."""
        plans: dict[Group, list[BucketPlan]] = {}
        for bucket in self.buckets:
            if bucket.group is not None:
                plans.setdefault(bucket.group, []).append(bucket.plan)
        for group, mine in plans.items():
            digests = gather_json(hashlib.sha256(repr(mine).encode()).hexdigest(), group, self.device)
            assert len(set(digests)) == 1, f"the members of {group} hold different parameters"

    def zero_grad(self) -> None:
        """Open a step: set all main gradients to zero."""
        assert all(bucket.reduction is DONE for bucket in self.buckets), (
            "a reduction is in flight; finish() comes first"
        )
        self._num_started = 0
        for bucket in self.buckets:
            bucket.open()

    def expect_last_backward(self, stage: int | None = None) -> None:
        """Say that the next backward is the last of this step through `stage`; None: through everything."""
        for parameter in self._sinks if stage is None or not self._stages else self._stages[stage]:
            if parameter.requires_grad:
                self._sinks[parameter].last_backward = True

    def _complete(self, bucket: Bucket) -> None:
        bucket.missing -= 1
        while self._num_started < self._num_overlapped and not self.buckets[self._num_started].missing:
            self.buckets[self._num_started].start_reduction()
            self._num_started += 1

    def finish(self) -> None:
        """Reduce what has not been, and return when all gradients may be read; called by every rank, once a step."""
        for bucket in self.buckets[self._num_started :]:
            bucket.start_reduction()
        self._num_started = len(self.buckets)
        for bucket in self.buckets:
            bucket.reduction.wait()
            bucket.reduction = DONE

    @torch.no_grad()
    def spread_parameters(self) -> None:
        """Bring updated main parameters into the model's parameters on all holders; called by every rank."""
        gathers = []
        for bucket in self.buckets:
            if bucket.has_own_main_params:
                bucket.parameters[bucket.kept].copy_(bucket.main_params)
            if self.zero == 1:
                gathers.append(all_gather_into_start(bucket.parameters, bucket.group))
        for gather in gathers:
            gather.wait()

    @torch.no_grad()
    def adopt_parameters(self) -> None:
        """Set the main parameters to the model's, after these were loaded from elsewhere."""
        for bucket in self.buckets:
            if bucket.has_own_main_params:
                bucket.main_params.copy_(bucket.parameters[bucket.kept])
