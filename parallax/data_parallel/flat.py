"""One flat bucket: where its parameters, gradients and main parameters lie, and how they are summed and spread.

    ZeRO                          0        1        2                         3
    parameters                    whole    whole    whole                     this rank's part; whole while they are used
    main_grad                     whole    whole    this rank's part; whole from a backward's first contribution until it has
                                                    been reduced and added to the part
    main_params, moments          whole    what is kept

What a rank's part is and what it keeps, `Levels` says; they differ where pipeline ranks share a bucket (tied embeddings,
DualPipe), which reach it at different times and meet once a step only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from parallax.collectives import DONE, Pending, all_gather_into_start
from parallax.data_parallel.absent import set_present
from parallax.data_parallel.plan import BucketPlan, Levels
from parallax.data_parallel.sink import GradientSink
from parallax.data_parallel.wire import scatter_sum_start, sum_start
from parallax.mesh import Group


@dataclass(frozen=True)
class BucketGroups:
    """The groups of `Levels`; None for this rank alone."""

    inner: Group | None
    across: Group | None
    copies: Group | None


@dataclass(frozen=True)
class GradientTypes:
    """Types of gradients; None: the main parameters', fp32 or fp64.

    main: where they are summed over micro-batches. wire: as they are sent; sums over ranks are at least fp32.
    """

    main: torch.dtype | None = None
    wire: torch.dtype | None = None


@dataclass(eq=False)
class Bucket:
    """Everything about one bucket.

    parameters: flat `[size]`, the model's dtype; the parameters are views of it.
    shard: what is here of them between uses; the same tensor, or a copy of this rank's part where parameters are sharded.
    inner_part: this rank's part of `levels.inner`. part, grad_part: what `shard` and `main_grad` are of the bucket: all or that.
    kept: whose optimizer state is here. owned: what this rank counts in the norm; a part of `kept`.
    main_params: flat fp32 values of `kept`; for an fp32 model the same memory as the parameters. has_offloaded_main_params: they
        are on the host, and whoever updates them rounds them on the device (parallax.data_parallel.offload).
    """

    plan: BucketPlan
    levels: Levels
    groups: BucketGroups
    wire: torch.dtype
    parameters: torch.Tensor
    shard: torch.Tensor
    main_grad: torch.Tensor
    main_params: torch.Tensor
    part: slice
    inner_part: slice
    grad_part: slice
    kept: slice
    owned: slice
    sinks: list[GradientSink] = field(default_factory=list)
    has_offloaded_main_params: bool = False
    missing: int = (
        0  # parameters whose contribution is still to come: the last one, or with ZeRO 2 and 3 that of a chunk
    )
    reduction: Pending = DONE
    num_reductions: int = 0  # of this step
    whole_grad: torch.Tensor | None = None  # from a backward's first contribution to its reduction, under ZeRO 2 and 3
    _gathering: Pending | None = None  # of parameters that are gathered for each use; None while they are not here
    _spreading: Pending = DONE  # of updated parameters, where the next forward waits for them
    _num_uses: int = 0
    _steps: list[Callable[[], Pending]] = field(default_factory=list)  # of the step's reduction that are still to come

    @property
    def has_own_main_params(self) -> bool:
        return self.main_params.dtype != self.parameters.dtype

    @property
    def is_scattered(self) -> bool:
        """Whether gradients are reduced after each backward."""
        return len(self.main_grad) < self.plan.size

    @property
    def is_gathered(self) -> bool:
        """Whether parameters are gathered for each use."""
        return len(self.shard) < self.plan.size

    def grad(self, part: slice) -> torch.Tensor:
        """Return the main gradient of a part of the bucket that lies in `grad_part`."""
        return self.main_grad[part.start - self.grad_part.start : part.stop - self.grad_part.start]

    def open(self) -> None:
        """Zero the gradient and accept contributions; what is in flight of a step that was given up is waited for."""
        self.reduction.wait()
        self.reduction = DONE
        if self.is_gathered and self._num_uses:  # by a forward or backward that raised an error
            self._num_uses = 0
            self.drop()
        self.main_grad.zero_()
        self.whole_grad = None
        self.missing, self.num_reductions = len(self.sinks), 0
        self._steps = self._levels_to_reduce()
        for sink in self.sinks:
            sink.open()

    def grad_to_add_to(self) -> torch.Tensor:
        """Return the whole flat gradient, made of zeros if a backward's first contribution asks for it."""
        if not self.is_scattered:
            return self.main_grad
        if self.whole_grad is None:
            self.whole_grad = torch.zeros(self.plan.size, dtype=self.main_grad.dtype, device=self.main_grad.device)
        return self.whole_grad

    def grad_of(self, part: slice, shape: torch.Size) -> torch.Tensor:
        """Return where the gradient of the parameter at `part` is added up."""
        return self.grad_to_add_to()[part].view(shape)

    def start_scatter(self) -> tuple[torch.Tensor, Pending]:
        """Begin to sum what has come since the last time over `inner`; return the flat tensor where, for `add_scattered`."""
        whole = self.grad_to_add_to()
        self.whole_grad = None
        self.missing = len(self.sinks)
        self.num_reductions += 1
        for sink in self.sinks:
            sink.complete = False
        if self.plan.key.scale != 1.0:
            whole.mul_(self.plan.key.scale)
        return whole, scatter_sum_start(whole, self.groups.inner, self.wire)

    def add_scattered(self, whole: torch.Tensor) -> None:
        """Add this rank's part of a sum over `inner` to the main gradient."""
        self.main_grad.add_(whole[self.grad_part])

    def close(self) -> None:
        """Refuse contributions from here on; the step's reduction begins."""
        for sink in self.sinks:
            sink.closed = True
        if not self.is_scattered and self.plan.key.scale != 1.0:
            self.main_grad.mul_(self.plan.key.scale)

    def advance(self) -> bool:
        """Wait for the level of the step's reduction that is under way and begin the next; return False at its end."""
        self.reduction.wait()
        self.reduction = DONE
        if not self._steps:
            return False
        self.reduction = self._steps.pop(0)()
        return True

    def _levels_to_reduce(self) -> list[Callable[[], Pending]]:
        groups, wire = self.groups, self.wire
        steps: list[Callable[[], Pending]] = []
        if groups.inner is not None and not self.is_scattered:
            steps.append(lambda: scatter_sum_start(self.main_grad, groups.inner, wire))
        if groups.across is not None:
            steps.append(lambda: scatter_sum_start(self.grad(self.inner_part), groups.across, wire))
        if groups.copies is not None:
            steps.append(lambda: sum_start(self.grad(self.kept), groups.copies, wire))
        return steps

    @torch.no_grad()
    def start_gather(self) -> None:
        """Begin to bring the whole bucket's parameters here, for `hold`."""
        if self._gathering is None:
            self.parameters.untyped_storage().resize_(self.parameters.nbytes)
            self.parameters[self.part].copy_(self.shard)
            self._gathering = all_gather_into_start(self.parameters, self.groups.inner)

    def hold(self) -> None:
        """Have the whole bucket's parameters here until `let_go` has been called as often."""
        self.start_gather()
        assert self._gathering is not None
        self._gathering.wait()
        self._gathering = DONE
        if not self._num_uses:
            self._mark(present=True)
        self._num_uses += 1

    def let_go(self) -> None:
        self._num_uses -= 1
        assert self._num_uses >= 0
        if not self._num_uses:
            self.drop()

    def drop(self) -> None:
        """Free the parameters that are not in `shard`."""
        if self._gathering is not None:
            self._gathering.wait()
        self._gathering = None
        self.parameters.untyped_storage().resize_(0)
        self._mark(present=False)

    def _mark(self, present: bool) -> None:
        for sink in self.sinks:
            set_present(sink.parameter, present)

    def values(self, part: slice) -> torch.Tensor:
        """Return a part of the bucket's parameters that is here between uses."""
        return self.shard[part.start - self.part.start : part.stop - self.part.start]

    def round_main_params(self) -> None:
        """Set the parameters of `kept` to the main parameters, rounded; what was gathered before is of no use any more."""
        if self.is_gathered and self._gathering is not None:
            assert not self._num_uses, "parameters are updated while a backward or forward uses them"
            self.drop()
        if self.has_own_main_params and not self.has_offloaded_main_params:
            self.values(self.kept).copy_(self.main_params)

    def adopt_parameters(self) -> None:
        """Set the main parameters to the parameters of `kept`."""
        if self.has_own_main_params:
            self.main_params.copy_(self.values(self.kept))

    def start_spread_across(self) -> Pending:
        """Begin to bring what each pipeline rank updated to the others."""
        return all_gather_into_start(self.values(self.inner_part), self.groups.across)

    def start_spread(self) -> None:
        """Begin to bring what each rank of `inner` updated to the others, for `arrive`, unless it is gathered for each use."""
        if not self.is_gathered:
            self._spreading = all_gather_into_start(self.parameters, self.groups.inner)

    def arrive(self) -> None:
        """Return when the parameters that `start_spread` sent are here."""
        self._spreading.wait()
        self._spreading = DONE


def make_bucket(
    plan: BucketPlan,
    levels: Levels,
    groups: BucketGroups,
    rank: int,
    members: list[nn.Parameter],
    types: GradientTypes,
    zero: int,
    fill: Callable[[str, torch.Tensor], None] | None = None,
) -> Bucket:
    """Make the buffers of a bucket, and its parameters views of one of them.

    rank: the global one. fill: writes a parameter's values, given its name, into zeros; None: copy those that it has.
    """
    dtype, device = members[0].dtype, members[0].device
    main_dtype = torch.promote_types(dtype, torch.float32)
    flat = torch.zeros(plan.size, dtype=dtype, device=device)
    for place, parameter in zip(plan.places, members, strict=True):
        view = flat[place.offset : place.stop].view(parameter.shape)
        if fill is None:
            view.copy_(parameter.detach())
        else:
            fill(place.name, view)
        parameter.data = view
    whole = slice(0, plan.size)
    inner_part = plan.part(levels.inner.index(rank), len(levels.inner))
    kept = plan.part(levels.shard(rank), levels.num_shards)
    grad_part = inner_part if zero >= 2 else whole
    part = inner_part if zero == 3 and plan.key.unit else whole
    shard = flat if part == whole else flat[part].clone()
    main_params = shard[kept.start - part.start : kept.stop - part.start].to(main_dtype)
    if shard is not flat:
        flat.untyped_storage().resize_(0)
    wire = types.wire or main_dtype
    grad_dtype = types.main or main_dtype
    return Bucket(
        plan,
        levels,
        groups,
        wire,
        parameters=flat,
        shard=shard,
        main_grad=torch.zeros(grad_part.stop - grad_part.start, dtype=grad_dtype, device=device),
        main_params=main_params,
        part=part,
        inner_part=inner_part,
        grad_part=grad_part,
        kept=kept,
        owned=plan.owned(levels.position(rank)),
    )
