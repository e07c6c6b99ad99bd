"""Which checkpoints newer ones replace; one process asks for a run, under the run's lock, and removes them."""

from __future__ import annotations

from pathlib import Path

from parallax.checkpoint.find import list_checkpoints
from parallax.checkpoint.manifest import read_manifest
from parallax.checkpoint.verify import check_files
from parallax.errors import ConfigError
from parallax.storage import Location


def replaced_checkpoints(root: Location, keep: int, keep_every: int, newest_step: int) -> list[Location]:
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


def _is_complete(step: int, path: Location) -> bool:
    try:
        manifest = read_manifest(path)
        is_link = isinstance(path, Path) and path.is_symlink()
        return not is_link and manifest.step == step and not check_files(path, manifest)
    except (ConfigError, OSError):
        return False
