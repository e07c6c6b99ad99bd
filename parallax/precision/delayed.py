"""Delayed scaling: the scale of a whole tensor from its amaxes in steps gone by (Micikevicius et al. 2022, arXiv:2209.05433).

A tensor can be quantised as it is computed, without a pass over it to find its own amax first. The price is that the scale is
stale: a tensor that grows beyond what its history knows saturates. The margin leaves room for that, in powers of two.

    at the end of a step    history <- the step's amax, then those before, as many as fit
                            amax = the greatest in the history, or the newest
                            scale = fl32(fp8_max / amax) / 2^margin; kept as it was for an amax of 0, inf or NaN

The arithmetic is Transformer Engine's, and so is the order in which the history is stored: slot 0 takes the running step.
One object holds the scales of many tensors at once, elementwise, and their histories side by side.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from parallax.precision.tiles import MAXIMUM, check_format

ALGORITHMS = ("max", "most_recent")


class DelayedScaling:
    """The scales of tensors whose amaxes are told once a step.

    amax_history_len: steps whose amaxes count, this one included. margin: powers of two left above the amax.
    fp8_format: "e4m3" or "e5m2". algorithm: "max" of the history, or its "most_recent" amax.
    shape: of `scale`; () for one tensor. Before the first update every scale is 1.
    Raises ValueError for arguments that are none of these.
    """

    def __init__(
        self,
        amax_history_len: int = 16,
        margin: int = 0,
        fp8_format: str = "e4m3",
        algorithm: str = "max",
        *,
        shape: tuple[int, ...] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        check_format(fp8_format)
        if amax_history_len < 1:
            raise ValueError(f"amax_history_len={amax_history_len} must be at least 1")
        if algorithm not in ALGORITHMS:
            raise ValueError(f"the algorithm {algorithm!r} is unknown; use {' or '.join(map(repr, ALGORITHMS))}")
        self.margin, self.fp8_format, self.algorithm = margin, fp8_format, algorithm
        self.amax_history = torch.zeros((amax_history_len, *shape), dtype=torch.float32, device=device)
        self.scale = torch.ones(shape, dtype=torch.float32, device=device)
        self.num_updates = 0

    @property
    def scale_inv(self) -> torch.Tensor:
        return self.scale.reciprocal()

    @torch.no_grad()
    def update(self, amax: torch.Tensor | float) -> None:
        """Take in the amaxes of the step that is over, and make the scales of the next one.

        Warns when one is inf or NaN: it keeps its scale from changing until it has left the history.
        """
        now = torch.as_tensor(amax, dtype=torch.float32, device=self.scale.device).expand(self.scale.shape)
        if bad := int((~now.isfinite()).sum()):
            held = len(self.amax_history) if self.algorithm == "max" else 1
            warnings.warn(
                f"{bad} of {now.numel()} amaxes are infinite or not a number; their scales stay as they are "
                f"for the next {held} steps, until these amaxes have left the history",
                stacklevel=2,
            )
        self.amax_history[0] = now
        greatest = self.amax_history.amax(0) if self.algorithm == "max" else now
        fresh = torch.full_like(greatest, MAXIMUM[self.fp8_format]) / greatest
        fresh = (fresh / 2.0**self.margin).clamp(max=torch.finfo(torch.float32).max)
        usable = greatest.isfinite() & (greatest > 0)
        self.scale = torch.where(usable, fresh, self.scale)
        self.amax_history = self.amax_history.roll(-1, 0)
        self.amax_history[0] = 0.0
        self.num_updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors `scale` and `amax_history` and the number of updates."""
        return {
            "scale": self.scale.clone(),
            "amax_history": self.amax_history.clone(),
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; raises ValueError if it is of other shapes."""
        for name in ("scale", "amax_history"):
            stored, own = state[name], getattr(self, name)
            if stored.shape != own.shape:
                raise ValueError(f"{name} was saved with the shape {list(stored.shape)}, and is {list(own.shape)} here")
            setattr(self, name, stored.to(own))
        self.num_updates = int(state["num_updates"])
