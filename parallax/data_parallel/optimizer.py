"""AdamW on the slices of the buckets that are kept on this rank.

torch's fused AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) does the arithmetic; it sees one flat tensor for the part
of a slice that decays and one for the part that does not. The moments are cut up by parameter only when a checkpoint asks:
neither buckets nor ZeRO show in what is saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# The class torch.optim.AdamW would do as well, but making one imports torch's compiler: 1.2 seconds in every process.
from torch.optim.adamw import adamw

from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.flat import Bucket


@dataclass(frozen=True)
class StatePiece:
    """The part of one parameter's optimizer state that is kept on this rank.

    It is the flat range [start, stop) of the local parameter (tp-sharded, padded, row-major). tensors: "exp_avg",
    "exp_avg_sq" and, if the parameter is not its own, "main_param"; live views `[stop - start]`, to be copied before the
    next step by who saves them and overwritten in place by who loads them.
    """

    start: int
    stop: int
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class _Region:
    """Elements [start, stop) of a bucket, all kept here, that decay alike; the tensors are flat views or states of them."""

    bucket: Bucket
    start: int
    stop: int
    decays: bool
    main_param: torch.Tensor
    main_grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor

    def piece(self, offset: int, stop: int) -> StatePiece | None:
        """Return what lies here of the parameter at [offset, stop) of the bucket."""
        first, last = max(offset, self.start), min(stop, self.stop)
        if first >= last:
            return None
        here = slice(first - self.start, last - self.start)
        tensors = {"exp_avg": self.exp_avg[here], "exp_avg_sq": self.exp_avg_sq[here]}
        if self.bucket.has_own_main_params:
            tensors["main_param"] = self.main_param[here]
        return StatePiece(first - offset, last - offset, tensors)


def _regions(bucket: Bucket) -> Iterator[_Region]:
    plan, kept = bucket.plan, bucket.kept
    for first, last, decays in ((0, plan.decay_stop, True), (plan.decay_stop, plan.size, False)):
        start, stop = max(first, kept.start), min(last, kept.stop)
        if start < stop:
            main_param = bucket.main_params[start - kept.start : stop - kept.start]
            yield _Region(
                bucket,
                start,
                stop,
                decays,
                main_param=main_param,
                main_grad=bucket.grad(slice(start, stop)),
                exp_avg=torch.zeros_like(main_param),
                exp_avg_sq=torch.zeros_like(main_param),
                step=torch.zeros((), dtype=torch.float32, device=main_param.device),
            )


class ShardedAdamW:
    """AdamW with decoupled weight decay on what decays, sharded as the buckets are.

    betas: decay rates of the two moments. eps: added to the root of the second moment.
    """

    def __init__(
        self,
        buckets: GradientBuckets,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self.buckets = buckets
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self._regions = [region for bucket in buckets.buckets for region in _regions(bucket)]
        self._step_count = 0

    @property
    def step_count(self) -> int:
        """Number of updates done, for the bias correction; set when a state is loaded."""
        return self._step_count

    @step_count.setter
    def step_count(self, steps: int) -> None:
        self._step_count = steps
        for region in self._regions:
            region.step.fill_(steps)

    @torch.no_grad()
    def step(
        self,
        learning_rate: float,
        clip_coefficient: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Update the parameters on all holders; called by every rank after `finish()`.

        clip_coefficient: scalar that multiplies the gradients, on their device; None for 1.
        skip: fp32 scalar there, the same on all ranks; 1 leaves parameters and states as they are, and `take_back_count`
            is to be called once that is known here. Nothing waits for its value.
        """
        # The kernel divides gradients by a scale as it reads them, so clipping takes no pass of its own.
        scale = None if clip_coefficient is None else clip_coefficient.reciprocal().float()
        for decays in (True, False):
            regions = [region for region in self._regions if region.decays == decays]
            adamw(
                [region.main_param for region in regions],
                [region.main_grad for region in regions],
                [region.exp_avg for region in regions],
                [region.exp_avg_sq for region in regions],
                [],
                [region.step for region in regions],
                fused=True,
                grad_scale=scale,
                found_inf=skip,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=learning_rate,
                weight_decay=self.weight_decay if decays else 0.0,
                eps=self.eps,
                maximize=False,
            )
        self._step_count += 1
        self.buckets.spread_parameters()

    def take_back_count(self) -> None:
        """Count one update less: one that was skipped."""
        self._step_count -= 1  # that of the regions, on the device, has not moved

    def pieces(self, name: str) -> list[StatePiece]:
        """Return what this rank keeps of the state of the parameter `name`; nothing if other holders keep all of it."""
        pieces = (
            region.piece(place.offset, place.stop)
            for region in self._regions
            for place in region.bucket.plan.places
            if place.name == name
        )
        return [piece for piece in pieces if piece is not None]
