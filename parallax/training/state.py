"""How far a run is: all that the loop itself must remember, besides weights and optimizer states.

The data position, the learning rate and every random draw are functions of the step, so a step count is enough.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class TrainState:
    """Counters of a run; they grow as it goes on and are saved with each checkpoint."""

    step: int = 0  # steps done
    tokens: int = 0  # targets trained on so far

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> TrainState:
        """Return the state that `to_dict` gave."""
        return cls(step=int(stored["step"]), tokens=int(stored["tokens"]))
