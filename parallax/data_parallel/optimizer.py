"""AdamW on the slices of the buckets that are kept on this rank.

torch's fused AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) does the arithmetic; it sees one flat tensor for the part
of a slice that decays and one for the part that does not. Its state is the moments of those, cut up by parameter only when a
checkpoint asks: neither buckets nor ZeRO show in what is saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallax.data_parallel.bucket import Bucket, GradientBuckets


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
    """Elements [start, stop) of a bucket, all kept here, that decay alike; `main_param` is what torch's AdamW updates."""

    bucket: Bucket
    start: int
    stop: int
    decays: bool
    main_param: nn.Parameter


def _regions(bucket: Bucket) -> Iterator[_Region]:
    plan, kept = bucket.plan, bucket.kept
    for first, last, decays in ((0, plan.decay_stop, True), (plan.decay_stop, plan.size, False)):
        start, stop = max(first, kept.start), min(last, kept.stop)
        if start < stop:
            main_param = nn.Parameter(bucket.main_params[start - kept.start : stop - kept.start])
            main_param.grad = bucket.main_grad[start:stop]
            yield _Region(bucket, start, stop, decays, main_param)


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
        self._regions = [region for bucket in buckets.buckets for region in _regions(bucket)]
        groups: list[dict[str, Any]] = [
            {"params": [region.main_param for region in self._regions if region.decays]},
            {"params": [region.main_param for region in self._regions if not region.decays], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=0.0,  # each step gives its own
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            fused=True,
        )
        # Made now and not at the first step, so that there is something to load into.
        for region in self._regions:
            self._adamw.state[region.main_param] = {
                "step": torch.zeros((), dtype=torch.float32, device=region.main_param.device),
                "exp_avg": torch.zeros_like(region.main_param),
                "exp_avg_sq": torch.zeros_like(region.main_param),
            }
        self._step_count = 0

    @property
    def step_count(self) -> int:
        """Number of updates done, for the bias correction; set when a state is loaded."""
        return self._step_count

    @step_count.setter
    def step_count(self, steps: int) -> None:
        self._step_count = steps
        for region in self._regions:
            self._adamw.state[region.main_param]["step"].fill_(steps)

    @torch.no_grad()
    def step(self, learning_rate: float, clip_coefficient: torch.Tensor | None = None) -> None:
        """Update the parameters on all holders; called by every rank after `finish()`.

        clip_coefficient: scalar that the gradients are multiplied by first, in place.
        """
        for region in self._regions:
            if clip_coefficient is not None and region.main_param.grad is not None:
                region.main_param.grad.mul_(clip_coefficient)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._step_count += 1
        self.buckets.spread_parameters()

    def pieces(self, name: str) -> list[StatePiece]:
        """Return what this rank keeps of the state of the parameter `name`; nothing if other holders keep all of it."""
        return [
            self._piece(region, place.offset, place.stop)
            for region in self._regions
            for place in region.bucket.plan.places
            if place.name == name and max(place.offset, region.start) < min(place.stop, region.stop)
        ]

    def _piece(self, region: _Region, offset: int, stop: int) -> StatePiece:
        """Cut the parameter that lies at [offset, stop) of the bucket out of a region."""
        first, last = max(offset, region.start), min(stop, region.stop)
        here = slice(first - region.start, last - region.start)
        state = self._adamw.state[region.main_param]
        tensors = {name: state[name][here] for name in ("exp_avg", "exp_avg_sq")}
        if region.bucket.has_own_main_params:
            tensors["main_param"] = region.main_param.detach()[here]
        return StatePiece(first - offset, last - offset, tensors)
