"""When a run saves and from where it starts: the trainer's side of parallax.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallax.checkpoint.find import find_latest
from parallax.checkpoint.load import load, read_state
from parallax.checkpoint.parts import CheckpointParts
from parallax.checkpoint.save import save
from parallax.collectives import gather_json
from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.training.state import TrainState

# What this run is: its configuration and the fingerprints of its data and tokenizer; stored with each checkpoint.
Identity = dict[str, Any]
# Given what a checkpoint's run was and what this one is, a sentence for each thing that keeps one from continuing the other.
Compare = Callable[[Identity, Identity], list[str]]


def agree(identity: Identity, mesh: Mesh) -> None:
    """Raise ConfigError on all ranks if they were not all asked for the same; nodes can differ in files and versions."""
    rows = gather_json(identity, mesh.world, mesh.device)
    for rank, row in enumerate(rows):
        for key in identity:
            if row[key] != rows[0][key]:
                raise ConfigError(
                    f"rank {rank} has another {key} than rank 0; give all ranks the same command, files and versions"
                )


def find_start(resume: str, root: Path, identity: Identity, compare: Compare, mesh: Mesh) -> Path | None:
    """Return the checkpoint that `--resume auto|none|PATH` means, or None for a fresh start; called by all ranks.

    Raises ConfigError if going on from there would not continue the run that was saved; no model is built yet.
    """
    if resume == "none":
        return None
    start = find_latest(root, mesh) if resume == "auto" else Path(resume).expanduser()
    if start is None:
        return None
    stored = read_state(start)["training"]
    if not isinstance(stored, dict) or not {"identity", "counters"} <= stored.keys():
        raise ConfigError(f"{start} was not saved by pretrain.py; give --resume none or the path of one that was")
    problems = compare(stored["identity"], identity)
    if problems:
        raise ConfigError(
            [
                f"{start} is of another run: {problem}; ask for the same, or give --resume none or another --out"
                for problem in problems
            ]
        )
    return start


def restore(start: Path | None, parts: CheckpointParts, mesh: Mesh) -> TrainState:
    """Load weights, optimizer states and counters from `start` in place; called by all ranks. None: a fresh state."""
    if start is None:
        return TrainState()
    return TrainState.from_dict(load(start, parts, mesh)["training"]["counters"])


def save_to(root: Path, parts: CheckpointParts, identity: Identity, mesh: Mesh) -> Callable[[TrainState], Path]:
    """Return the function that saves a run as it is, called by all ranks."""

    def save_now(state: TrainState) -> Path:
        parts.state = {"counters": state.to_dict(), "identity": identity}
        return save(root, state.step, parts, mesh)

    return save_now
