"""Bad steps: found on the device from the numbers that the step reduces anyway, so that no rank waits for another to decide.

    step          loss, gradient norm and weight are the same on all ranks after the step's one reduction over the world
    Judge         a verdict from them, on the device; the optimizer skips the update there if it is not good
    Report        brings the numbers to the host, where they may arrive a step later: nothing waits for them
    culprits      which ranks brought a number that is none; asked only after a bad step

A step is bad if its loss or its gradient norm is no finite number, or if its loss is a spike: more than `spike_factor` times
the running mean of the losses before it. Going back and past a spike's data is what the authors of PaLM did by hand (Chowdhery
et al. 2022, arXiv:2204.02311, section 5.1). An empty step, without a single target, is not bad: it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from parallax.collectives import gather_json
from parallax.mesh import Mesh

_MEAN_STEPS = 50  # over which the running mean forgets: long beside a spike, short beside the decline of the loss


class Verdict(IntEnum):
    """What a step was; only a good one changes the weights."""

    GOOD = 0
    NOT_FINITE = 1
    SPIKE = 2
    EMPTY = 3

    @property
    def is_bad(self) -> bool:
        return self in (Verdict.NOT_FINITE, Verdict.SPIKE)


class Judge:
    """Says on the device what a step was, and keeps the running mean of the losses of good steps there.

    mean_loss: float64 scalar, 0 before the first good step; a checkpoint keeps it. Without a spike_factor it stays as it is.
    """

    def __init__(self, device: torch.device, spike_factor: float | None = None) -> None:
        self.spike_factor = spike_factor
        self.mean_loss = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(self, loss: torch.Tensor, grad_norm: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return a Verdict, float64, from three float64 scalars that are the same on all ranks."""
        # x - x is 0 for a finite number and not a number otherwise.
        finite = (loss - loss + (grad_norm - grad_norm)) == 0
        verdict = torch.where(finite, float(Verdict.GOOD), float(Verdict.NOT_FINITE)).double()
        if self.spike_factor is not None:
            spike = (self.mean_loss > 0) & (loss > self.spike_factor * self.mean_loss) & finite
            verdict = verdict + float(Verdict.SPIKE) * spike
        verdict = torch.where(weight > 0, verdict, float(Verdict.EMPTY))
        if self.spike_factor is not None:
            mean = torch.where(self.mean_loss > 0, self.mean_loss.lerp(loss, 1 / _MEAN_STEPS), loss)
            self.mean_loss = torch.where(verdict == 0, mean, self.mean_loss)
        return verdict


class Report:
    """Numbers on their way from the device; `read` waits for those alone, not for what was started since."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers, self._event = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[float]:
        """Return the numbers."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


@dataclass(frozen=True)
class BadStep:
    """What is known of a step that did not change the weights.

    step: counted from 1. first_sample, last_sample: positions in the data order. ranks: that brought a number that is none.
    """

    step: int
    verdict: Verdict
    loss: float
    grad_norm: float
    learning_rate: float
    mean_loss: float
    first_sample: int
    last_sample: int
    ranks: Sequence[int] = ()

    def __str__(self) -> str:
        where = f"step {self.step} (samples {self.first_sample} to {self.last_sample} of the data order)"
        if self.verdict is Verdict.EMPTY:
            return f"{where} has no token to train on"
        if self.verdict is Verdict.SPIKE:
            return f"{where} has loss {self.loss:.4f}, a spike: the mean before it is {self.mean_loss:.4f}"
        ranks = (
            f", first seen on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}" if self.ranks else ""
        )
        return f"{where} has loss {self.loss} and gradient norm {self.grad_norm}{ranks}"

    def to_json(self) -> dict[str, Any]:
        """Return what skipped.jsonl says of it; numbers that are none are null."""
        fields: dict[str, Any] = {
            "step": self.step,
            "reason": self.verdict.name.lower(),
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.learning_rate,
            "first_sample": self.first_sample,
            "last_sample": self.last_sample,
            "ranks": list(self.ranks),
        }
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in fields.items()}


def culprits(local: torch.Tensor, mesh: Mesh) -> list[int]:
    """Return the ranks on which a bad number was first; called by all ranks.

    Those whose own loss is not finite or, if all are, whose gradients are not: these have been summed over dp by then, so that
    they are bad on other ranks too. local: what this rank brought to the step's reduction.
    """
    finite = gather_json(torch.isfinite(local[:2]).tolist(), mesh.world, mesh.device)
    by_loss = [rank for rank, (_, loss) in enumerate(finite) if not loss]
    return by_loss or [rank for rank, (norm, _) in enumerate(finite) if not norm]
