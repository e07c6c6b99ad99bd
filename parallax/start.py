"""Ranks that start together find each other in a store that may hold what earlier starts of the same run have left.

torchrun keeps one store over its restarts (seen in torch 2.13), where a rank of the next start may read the address of a process
that is gone, and wait for it until its time is over. So each start agrees on a prefix for its keys:

    each rank    says hello with a number that no other process has
    rank 0       offers a token for the numbers that it finds; another one as soon as one of them changes
    each rank    takes the offer that has its own number
    all          go on when every rank has taken the same: so each number in the offer is that of a process that is there
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from parallax.errors import LostRank

_LOOK_SECONDS = 0.02


def agree_on_start(store: Any, rank: int, world_size: int, timeout_seconds: float) -> str:
    """Return a token that all ranks of this start, and no other, have; called by all. store: torch's.

    Raises LostRank if they do not all come in time.
    """
    mine, deadline = secrets.token_hex(8), time.monotonic() + timeout_seconds
    store.set(f"hello/{rank}", mine)
    names = [f"hello/{other}" for other in range(world_size)]
    offered: list[str] = []
    taken = ""
    while time.monotonic() < deadline:
        if rank == 0 and store.check(names):
            numbers = [store.get(name).decode() for name in names]
            if numbers != offered:
                offered = numbers
                store.set("offer", json.dumps([secrets.token_hex(8), numbers]))
        if store.check(["offer"]):
            token, numbers = json.loads(store.get("offer"))
            if len(numbers) == world_size and numbers[rank] == mine:
                count = store.add(f"taken/{token}", 0 if token == taken else 1)
                taken = token
                if count == world_size:
                    return token
        time.sleep(_LOOK_SECONDS)
    raise LostRank(f"not all {world_size} ranks came to the start within {timeout_seconds:g} s")
