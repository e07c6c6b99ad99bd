"""Remove checkpoints that newer ones replace, and what dead saves left behind; one process does it for a run, under the run's lock.

A folder that goes gets a name first that no reader takes for a checkpoint, so that a removal cut short leaves none that looks
damaged. Links are removed as links: nothing outside of the run's folder is touched.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from parallax.checkpoint.find import list_checkpoints
from parallax.checkpoint.manifest import read_manifest
from parallax.checkpoint.names import PARTIAL, step_name
from parallax.checkpoint.verify import check_files
from parallax.errors import ConfigError


def replaced_checkpoints(root: Path, keep: int, keep_every: int, newest_step: int) -> list[Path]:
    """Return which checkpoints under `root` need not stay, oldest first, now that `newest_step` is complete.

    keep: how many of the newest stay, that one included; 0: all. keep_every: steps that are multiples of it stay too.
    Only complete checkpoints count, and only they are returned: a damaged one is left for someone to look at.
    """
    if keep == 0:
        return []
    complete = [
        (step, path) for step, path in list_checkpoints(root) if step <= newest_step and _is_complete(step, path)
    ]
    return [path for step, path in reversed(complete[keep:]) if not keep_every or step % keep_every]


def _is_complete(step: int, path: Path) -> bool:
    try:
        manifest = read_manifest(path)
        return not path.is_symlink() and manifest.step == step and not check_files(path, manifest)
    except (ConfigError, OSError):
        return False


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; raises OSError."""
    leaving = path.with_name(f"{path.name}.removed{PARTIAL}")
    _remove(leaving)
    os.rename(path, leaving)
    _remove(leaving)


def remove_leftovers(root: Path) -> None:
    """Remove what saves and removals that were cut have left under `root`; raises OSError."""
    for leftover in root.glob(f"step-*{PARTIAL}"):
        digits = leftover.name.removeprefix("step-").partition(".")[0]
        if digits.isdecimal() and leftover.name.startswith(step_name(int(digits)) + "."):
            _remove(leftover)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
