"""Which backend computes: the one that was asked for, or the best that this machine can run.

The order of preference is that of the makers' own products before ours, and a GPU before the plain reference; none has been
measured by us on a GPU yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallax.collectives import gather_json
from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.precision.backends import te, torch_scaled, triton
from parallax.precision.backends.reference import ReferenceBackend
from parallax.precision.options import Fp8Options, Layers
from parallax.precision.products import Backend
from parallax.precision.recipe import Recipe
from parallax.precision.tiles import TILE_SIZE


@dataclass(frozen=True)
class Candidate:
    """A backend: what keeps it from running a recipe on a device (None: nothing does), and how it is made."""

    name: str
    why_not: Callable[[Recipe, torch.device], str | None]
    make: Callable[[], Backend]


def candidates() -> list[Candidate]:
    """Return all backends, the best first."""
    return [
        Candidate("te", te.why_not, te.TransformerEngineBackend),
        Candidate("torch", torch_scaled.why_not, torch_scaled.TorchBackend),
        Candidate("triton", triton.why_not, triton.TritonBackend),
        Candidate("reference", lambda recipe, device: None, ReferenceBackend),
    ]


@dataclass(frozen=True)
class Choice:
    """A backend, and why it is this one, as a sentence."""

    backend: Backend
    reason: str


def agree_on_backend(options: Fp8Options, mesh: Mesh, layers: Layers | None = None, tp: int = 1) -> Choice:
    """Return `choose_backend` on this rank's device, where all ranks compute with the same one; called by all ranks.

    Raises ConfigError on all ranks if it does on any, or if they would compute with different ones.
    """
    problems: list[str] = []
    try:
        choice = choose_backend(options, mesh.device, layers, tp)
        name = choice.backend.name
    except ConfigError as error:
        problems, name = error.problems, ""
    rows = gather_json([problems, name], mesh.world, mesh.device)
    for found, _ in rows:
        if found:
            raise ConfigError(found)
    for rank, (_, other) in enumerate(rows):
        if other != rows[0][1]:
            raise ConfigError(
                f"--fp8-backend {options.fp8_backend} is {other} on rank {rank} and {rows[0][1]} on rank 0; use the same software "
                "on GPUs of one kind, or a backend that runs everywhere: --fp8-backend reference"
            )
    return choice


def this_device() -> torch.device:
    """Return the device of this process, as `parallax.mesh.connect` takes it."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def choose_backend(options: Fp8Options, device: torch.device, layers: Layers | None = None, tp: int = 1) -> Choice:
    """Return what computes in FP8 on `device`.

    layers: of the model, {name: (outputs, inputs)}, over tp ranks. Raises ConfigError for shares of them that no GPU takes,
    on every device, and when the backend that was asked for cannot run here.
    """
    layers = layers or {}
    if problems := options.check_shares(layers, tp):
        raise ConfigError(problems)
    whole_tiles = all(share % TILE_SIZE == 0 for share in options.shares(layers, tp).values())
    asked = options.fp8_backend
    reasons: list[str] = []
    for candidate in candidates():
        if asked not in ("auto", candidate.name):
            continue
        why_not = candidate.why_not(options.recipe, device)
        if why_not is None and candidate.name == "te" and options.recipe.scaling == "tile" and not whole_tiles:
            why_not = (
                "needs tensor-parallel shares of whole tiles of 128; use another --tp, or sizes that divide by 128 tp"
            )
        if why_not is None:
            chosen = "it was asked for" if asked != "auto" else "; ".join(reasons) or "it is the best there is"
            return Choice(candidate.make(), chosen)
        reasons.append(f"{candidate.name}: {why_not}")
    raise ConfigError(f"--fp8-backend {reasons[0]}; use --fp8-backend auto, which takes the best that runs here")
