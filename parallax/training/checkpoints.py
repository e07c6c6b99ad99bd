"""When a run saves and from where it starts: the trainer's side of parallax.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallax.checkpoint.find import find_latest
from parallax.checkpoint.load import load, read_state
from parallax.checkpoint.parts import CheckpointParts
from parallax.checkpoint.save import save
from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.training.state import TrainState

# Given what a checkpoint's run and this one were asked for, what keeps this one from going on where that one stopped.
Compare = Callable[[dict[str, Any], dict[str, Any]], list[str]]


def find_start(resume: str, root: Path, mesh: Mesh) -> Path | None:
    """Return the checkpoint that `--resume auto|none|PATH` means, or None for a fresh start; called by all ranks."""
    if resume == "none":
        return None
    if resume == "auto":
        return find_latest(root, mesh)
    return Path(resume).expanduser()


def check_start(start: Path | None, identity: dict[str, Any], compare: Compare) -> None:
    """Raise ConfigError if going on from `start` would not continue the run that was saved; before any model is built.

    identity: what this run is (its configuration, the fingerprints of its data and tokenizer), as `save_to` stores it.
    """
    if start is None:
        return
    problems = compare(read_state(start)["training"]["identity"], identity)
    if problems:
        raise ConfigError(
            [
                f"{start} is of another run: {problem}; ask for the same, or give --resume none or another --out"
                for problem in problems
            ]
        )


def restore(start: Path | None, parts: CheckpointParts, mesh: Mesh) -> TrainState:
    """Load weights, optimizer states and counters from `start` in place; called by all ranks. None: a fresh state."""
    if start is None:
        return TrainState()
    return TrainState.from_dict(load(start, parts, mesh)["training"]["counters"])


def save_to(root: Path, parts: CheckpointParts, identity: dict[str, Any], mesh: Mesh) -> Callable[[TrainState], Path]:
    """Return the function that saves a run as it is, called by all ranks."""

    def save_now(state: TrainState) -> Path:
        parts.state = {"counters": state.to_dict(), "identity": identity}
        return save(root, state.step, parts, mesh)

    return save_now
