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

import operator
import warnings
from typing import Any

import torch

from parallax.precision.options import LARGEST_MARGIN
from parallax.precision.tiles import MAXIMUM, check_format

ALGORITHMS = ("max", "most_recent")
MOST_UPDATES = torch.iinfo(torch.int64).max


class DelayedScaling:
    """The scales of tensors whose amaxes are told once a step.

    amax_history_len: steps whose amaxes count, this one included. margin: powers of two left above the amax, 0 to 8: with more,
    the scale of the greatest amax would have no reciprocal in fp32.
    fp8_format: "e4m3" or "e5m2". algorithm: "max" of the history, or its "most_recent" amax.
    shape: of `scale`; () for one tensor. Before the first update every scale is 1.
    Raises ValueError for arguments that are none of these, TypeError for a shape that is no tuple.
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
        if type(amax_history_len) is not int or amax_history_len < 1:
            raise ValueError(f"amax_history_len={amax_history_len} must be at least 1, and a whole number")
        if type(margin) is not int or not 0 <= margin <= LARGEST_MARGIN:
            raise ValueError(f"margin={margin} must be between 0 and {LARGEST_MARGIN}, and a whole number")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise ValueError(f"the algorithm {algorithm!r} is unknown; use {' or '.join(map(repr, ALGORITHMS))}")
        _check_shape(shape)
        self.margin, self.fp8_format, self.algorithm = margin, fp8_format, algorithm
        self.amax_history = torch.zeros((amax_history_len, *shape), dtype=torch.float32, device=device)
        self.scale = torch.ones(shape, dtype=torch.float32, device=device)
        self.num_updates = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def scale_inv(self) -> torch.Tensor:
        return self.scale.reciprocal()

    def update(self, amax: torch.Tensor | float) -> None:
        """Take in the amaxes of the step that is over, and make the scales of the next one.

        amax: in the shape of `scale`, or one number for all. Raises ValueError for another shape, or one below 0.
        Warns when one is inf or NaN: it keeps its scale from changing until it has left the history.
        """
        try:
            now = torch.as_tensor(amax, dtype=torch.float32, device=self.scale.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"amax is {amax!r}, which makes no tensor ({error}); pass numbers of at least 0") from error
        if now.shape not in ((), self.scale.shape):
            raise ValueError(f"amax has the shape {list(now.shape)}, and the scales have {list(self.scale.shape)}")
        if (now < 0).any():
            raise ValueError(
                f"an amax of {now.min().item():g} is below 0; pass the greatest magnitude, as x.abs().amax()"
            )
        now = now.expand(self.scale.shape)
        self.advance(now)
        if infinite := int((~now.isfinite()).sum()):
            warnings.warn(self.describe_infinite(infinite), stacklevel=2)

    @torch.no_grad()
    def advance(self, amax: torch.Tensor, skip: torch.Tensor | None = None) -> None:
        """Do as `update` does, without a look at the values: nothing waits for the device, and nothing is said.

        amax: fp32, in the shape of `scale`. skip: scalar on the device; where it is not 0 all stays as it is.
        """
        history = self.amax_history.clone()
        history[0] = amax.nan_to_num(
            nan=torch.inf, posinf=torch.inf
        )  # of the same effect, and a maximum of ranks keeps it
        greatest = history.amax(0) if self.algorithm == "max" else amax
        fresh = torch.full_like(greatest, MAXIMUM[self.fp8_format]) / greatest
        fresh = (fresh / 2.0**self.margin).clamp(max=torch.finfo(torch.float32).max)
        usable = greatest.isfinite() & (greatest > 0)
        history = history.roll(-1, 0)
        history[0] = 0.0
        counts = torch.ones_like(self.num_updates, dtype=torch.bool) if skip is None else skip == 0
        self.scale = torch.where(usable & counts, fresh, self.scale)
        self.amax_history = torch.where(counts, history, self.amax_history)
        self.num_updates += counts

    def describe_infinite(self, count: int) -> str:
        """Return what it means that so many amaxes of a step are infinite or not a number."""
        held = len(self.amax_history) if self.algorithm == "max" else 1
        return (
            f"amaxes that are infinite or not a number: {count}; their scales stay as they are "
            f"for the next {held} steps, until these amaxes have left the history"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors `scale` and `amax_history` and the number of updates."""
        return {
            "scale": self.scale.clone(),
            "amax_history": self.amax_history.clone(),
            "num_updates": int(self.num_updates),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a copy of what `state_dict` gave.

        Raises ValueError, and stays as it is, for other shapes, no state, or numbers that no state has: scales that are not
        finite and above 0, amaxes below 0 or NaN.
        """
        missing = [name for name in ("scale", "amax_history", "num_updates") if name not in state]
        if missing:
            raise ValueError(f"{missing[0]} is missing in the state; pass what state_dict() returned")
        taken = {}
        for name in ("scale", "amax_history"):
            stored, own = state[name], getattr(self, name)
            if not isinstance(stored, torch.Tensor):
                raise ValueError(f"{name} was saved as {type(stored).__name__}, and is a tensor here")
            if stored.shape != own.shape:
                raise ValueError(f"{name} was saved with the shape {list(stored.shape)}, and is {list(own.shape)} here")
            if not stored.is_floating_point():
                raise ValueError(f"{name} was saved as {stored.dtype}, and is {own.dtype} here")
            taken[name] = stored.detach().to(own, copy=True)
        scale, history = taken["scale"], taken["amax_history"]
        if not (scale.isfinite() & (scale > 0)).all():
            raise ValueError(
                "scale was saved with numbers that are not finite and above 0, and no update makes such a one"
            )
        if not (history >= 0).all():
            raise ValueError("amax_history was saved with numbers that are below 0 or NaN, and an amax is neither")
        count = _whole_number(state["num_updates"])
        self.scale, self.amax_history = scale, history
        self.num_updates.fill_(count)


def _whole_number(saved: Any) -> int:
    try:
        count = -1 if isinstance(saved, bool) else operator.index(saved)
    except TypeError:
        count = -1
    if not 0 <= count <= MOST_UPDATES:
        raise ValueError(f"num_updates was saved as {saved!r}, and is a whole number of at least 0, in 64 bits")
    return count


def _check_shape(shape: object) -> None:
    if not isinstance(shape, tuple | list):
        raise TypeError(f"shape={shape!r} must be a tuple of sizes, as in (3,) for three tensors")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"shape={shape!r} must hold whole numbers of at least 0, as in (3,) for three tensors")
