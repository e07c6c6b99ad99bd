"""One outcome for all ranks: what goes wrong on one is raised by every one, so that none waits for another forever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from parallax.collectives import gather_json
from parallax.errors import ConfigError
from parallax.mesh import Group

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")


class Ranks(Protocol):
    """All ranks as a save or a load needs them: a Mesh, or a group of a save's own (parallax.checkpoint.background)."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> Group | None: ...

    @property
    def device(self) -> torch.device: ...


def exchange_or_raise(problems: Sequence[str], value: Any, mesh: Ranks) -> list[Any]:
    """Return every rank's `value`, as JSON can carry it; called by all ranks.

    Raises ConfigError on all ranks, with the first problem of the lowest rank that has one.
    """
    answers = gather_json([list(problems), value], mesh.world, mesh.device)
    for found, _ in answers:
        if found:
            raise ConfigError(found[0])
    return [answer for _, answer in answers]


def together(action: Callable[[], Result], mesh: Ranks, doing: str) -> Result:
    """Return what `action`, which does not communicate, returns on this rank; called by all ranks.

    Raises ConfigError on all ranks when `action` raises one, or an OSError, on any. doing: what it does, in words.
    """
    problems: list[str] = []
    results = []
    try:
        results.append(action())
    except ConfigError as error:
        problems = error.problems
    except OSError as error:
        problems = [f"rank {mesh.rank} failed in {doing}: {error}"]
    exchange_or_raise(problems, None, mesh)
    return results[0]
