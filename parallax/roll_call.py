"""Before any other group is made than that of all ranks: they compare what they were asked for and with what code they came.

A rank with another layout would make other groups, and all would wait for each other.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from parallax.collectives import gather_json
from parallax.errors import ConfigError
from parallax.mesh import Group


def code_version() -> dict[str, str]:
    """Return what a rank's code is told by: a checksum of this package's source, and the versions it runs on."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return {"parallax": digest.hexdigest()[:16], "torch": torch.__version__, "Python": platform.python_version()}


def compare(values: Mapping[str, Any], world: Group, device: torch.device) -> None:
    """Return if all ranks have the same `values`, as JSON can carry them; called by all.

    Raises ConfigError, on all ranks, naming the rank and what differs.
    """
    digest = hashlib.sha256(json.dumps(dict(values)).encode()).hexdigest()
    if len(set(gather_json(digest, world, device))) == 1:
        return
    rows = gather_json(dict(values), world, device)
    for rank, row in enumerate(rows):
        for name, value in row.items():
            if value != rows[0][name]:
                raise ConfigError(
                    f"rank {rank} has {name} {value}, rank 0 has {rows[0][name]}; give all ranks the same command and code"
                )
