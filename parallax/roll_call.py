"""Before any group is made: all ranks compare what they were asked for and with what code they came.

A rank with another layout would make other groups, and all would wait for each other; so this uses the launcher's store alone.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from parallax.errors import ConfigError, LostRank


def code_version() -> dict[str, str]:
    """Return what a rank's code is told by: a checksum of this package's source, and the versions it runs on."""
    import torch

    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\\0".encode() + path.read_bytes() + b"\\0")
    return {"parallax": digest.hexdigest()[:16], "torch": torch.__version__, "Python": platform.python_version()}


def compare(store: Any, rank: int, world_size: int, values: Mapping[str, Any], timeout_seconds: float) -> None:
    """Return if all ranks have the same `values`; called by all. store: torch's, which all ranks share.

    Raises ConfigError, on all ranks, naming the rank and what differs; LostRank if a rank does not come in time.
    """
    timeout = timedelta(seconds=timeout_seconds)
    try:
        if rank == 0:
            store.set("roll_call/first", json.dumps(dict(values)))
        store.wait(["roll_call/first"], timeout)
        first = json.loads(store.get("roll_call/first"))
        for name, value in values.items():
            if value != first[name]:
                store.set(
                    "roll_call/problem",
                    f"rank {rank} has {name} {value}, rank 0 has {first[name]}; give all ranks the same command and code",
                )
                break
        if store.add("roll_call/came", 1) == world_size:
            store.set("roll_call/all", "came")
        store.wait(["roll_call/all"], timeout)
    except RuntimeError as error:
        raise LostRank(f"not all {world_size} ranks came to the start within {timeout_seconds:g} s") from error
    if store.check(["roll_call/problem"]):
        raise ConfigError(store.get("roll_call/problem").decode())
