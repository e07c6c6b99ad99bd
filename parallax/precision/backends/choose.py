"""Which backend computes: the one that was asked for, or the best that this machine can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallax.errors import ConfigError
from parallax.precision.backends.reference import ReferenceBackend
from parallax.precision.options import Fp8Options
from parallax.precision.products import Backend
from parallax.precision.recipe import Recipe


@dataclass(frozen=True)
class Candidate:
    """A backend: what keeps it from running a recipe on a device (None: nothing does), and how it is made."""

    name: str
    why_not: Callable[[Recipe, torch.device], str | None]
    make: Callable[[], Backend]


def candidates() -> list[Candidate]:
    """Return all backends, the best first."""
    return [Candidate("reference", lambda recipe, device: None, ReferenceBackend)]


@dataclass(frozen=True)
class Choice:
    """A backend, and why it is this one, as a sentence."""

    backend: Backend
    reason: str


def choose_backend(options: Fp8Options, device: torch.device) -> Choice:
    """Return what computes in FP8 on `device`; raises ConfigError when the one that was asked for cannot run here."""
    asked = options.fp8_backend
    reasons: list[str] = []
    for candidate in candidates():
        if asked not in ("auto", candidate.name):
            continue
        why_not = candidate.why_not(options.recipe, device)
        if why_not is None:
            asked_for = "it was asked for" if asked != "auto" else "; ".join(reasons) or "it is the best there is"
            return Choice(candidate.make(), asked_for)
        reasons.append(f"{candidate.name}: {why_not}")
    raise ConfigError(f"--fp8-backend {reasons[0]}; use --fp8-backend auto, which takes the best that runs here")
