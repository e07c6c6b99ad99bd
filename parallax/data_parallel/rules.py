"""How an optimizer updates the regions of a rank: flat pieces of buckets that are treated alike.

A rule sees flat slices and no parameters, so it works on any sharding; Muon, which needs whole matrices, gathers them
(parallax.data_parallel.muon). The arithmetic is torch's fused AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and SGD.

States in a narrow type are widened for the update and rounded after it, a region at a time, as are narrow gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

# The classes in torch.optim would do as well, but making one imports torch's compiler: 1.2 seconds in every process.
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from parallax.data_parallel.flat import Bucket
from parallax.kernels.table import has_kernel


@dataclass(frozen=True, eq=False)
class Region:
    """Elements [start, stop) of a bucket, all kept here, that decay alike; the tensors are flat views or states of them.

    states: by name. step: of the updates done, fp32, on the device.
    """

    bucket: Bucket
    start: int
    stop: int
    decays: bool
    main_param: torch.Tensor
    main_grad: torch.Tensor
    states: dict[str, torch.Tensor]
    step: torch.Tensor

    @property
    def is_wide(self) -> bool:
        """Whether gradients and states have the type of the main parameters."""
        tensors = (self.main_grad, *self.states.values())
        return all(tensor.dtype == self.main_param.dtype for tensor in tensors)

    @contextmanager
    def widened(self) -> Iterator[Region]:
        """Give a region whose gradient and states have the main parameters' type; round its states back at the end."""
        dtype = self.main_param.dtype
        states = {name: state.to(dtype) for name, state in self.states.items()}
        yield Region(
            self.bucket,
            self.start,
            self.stop,
            self.decays,
            self.main_param,
            self.main_grad.to(dtype),
            states,
            self.step,
        )
        for name, state in self.states.items():
            if states[name] is not state:
                state.copy_(states[name])


def make_regions(
    bucket: Bucket, states: Sequence[str], dtype: torch.dtype | None, most: int | None = None
) -> Iterator[Region]:
    """Yield the regions of a bucket that are kept here, of at most `most` elements.

    states: their names; dtype: theirs, None for the main parameters'. They lie where the main parameters do.
    """
    plan, kept = bucket.plan, bucket.kept
    for first, last, decays in ((0, plan.decay_stop, True), (plan.decay_stop, plan.size, False)):
        begin, end = max(first, kept.start), min(last, kept.stop)
        for start in range(begin, end, most or max(1, end - begin)):
            stop = min(end, start + (most or end - begin))
            main_param = bucket.main_params[start - kept.start : stop - kept.start]
            yield Region(
                bucket,
                start,
                stop,
                decays,
                main_param=main_param,
                main_grad=bucket.grad(slice(start, stop)),
                states={name: torch.zeros_like(main_param, dtype=dtype) for name in states},
                step=torch.zeros((), dtype=torch.float32, device=bucket.main_grad.device),
            )


@dataclass(frozen=True)
class Update:
    """What all regions have in common in one update.

    clip: fp64 or fp32 scalar that multiplies the gradients; None for 1. skip: fp32 scalar, 1 to leave everything as it is.
    """

    learning_rate: float
    clip: torch.Tensor | None
    skip: torch.Tensor | None

    @property
    def divisor(self) -> torch.Tensor | None:
        """What the fused kernels divide gradients by as they read them, so that clipping takes no pass of its own."""
        return None if self.clip is None else self.clip.reciprocal().float()


class Rule(Protocol):
    """states: what it keeps of each element, by name, all zero at first."""

    @property
    def states(self) -> Sequence[str]: ...

    def update(self, regions: Sequence[Region], update: Update) -> None:
        """Update main parameters and states in place; called by every rank, also without a region."""


class _Elementwise:
    """A rule that treats each element for itself, all regions of one type in one call of a fused kernel."""

    def update(self, regions: Sequence[Region], update: Update) -> None:
        for decays in (True, False):
            alike = [region for region in regions if region.decays == decays]
            self._update([region for region in alike if region.is_wide], update, decays)
            for region in alike:
                if not region.is_wide:
                    with region.widened() as wide:
                        self._update([wide], update, decays)

    def _update(self, regions: Sequence[Region], update: Update, decays: bool) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class AdamW(_Elementwise):
    """AdamW with decoupled weight decay on what decays. eps: added to the root of the second moment."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    states = ("exp_avg", "exp_avg_sq")

    def update(self, regions: Sequence[Region], update: Update) -> None:
        if all(has_kernel("adamw", region.main_param) for region in regions):
            for region in regions:
                self._update_by_kernel(region, update)
        else:
            super().update(regions, update)

    def _update_by_kernel(self, region: Region, update: Update) -> None:
        """Update a region in one pass, whatever the types of its gradient and states."""
        from parallax.kernels.adamw.kernel import adamw_  # here, for it needs triton, which only a GPU needs

        adamw_(
            region.main_param,
            region.main_grad,
            region.states["exp_avg"],
            region.states["exp_avg_sq"],
            None,  # the model's parameters are rounded from it when they are spread
            region.step,
            None if update.clip is None else update.clip.float(),
            update.skip,
            learning_rate=update.learning_rate,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decay=self.weight_decay if region.decays else 0.0,
        )

    def _update(self, regions: Sequence[Region], update: Update, decays: bool) -> None:
        adamw(
            [region.main_param for region in regions],
            [region.main_grad for region in regions],
            [region.states["exp_avg"] for region in regions],
            [region.states["exp_avg_sq"] for region in regions],
            [],
            [region.step for region in regions],
            fused=True,
            grad_scale=update.divisor,
            found_inf=update.skip,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=update.learning_rate,
            weight_decay=self.weight_decay if decays else 0.0,
            eps=self.eps,
            maximize=False,
        )


@dataclass(frozen=True)
class SGD(_Elementwise):
    """torch's SGD: weight decay is added to the gradient of what decays, and both go through the momentum."""

    momentum: float = 0.9
    weight_decay: float = 0.1

    @property
    def states(self) -> Sequence[str]:
        return ("momentum_buffer",) if self.momentum else ()

    def _update(self, regions: Sequence[Region], update: Update, decays: bool) -> None:
        # Without a buffer torch begins with the gradient itself; momentum times zero plus the gradient is the same.
        sgd(
            [region.main_param for region in regions],
            [region.main_grad for region in regions],
            [region.states.get("momentum_buffer") for region in regions],
            fused=True,
            grad_scale=update.divisor,
            found_inf=update.skip,
            weight_decay=self.weight_decay if decays else 0.0,
            momentum=self.momentum,
            lr=update.learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
