"""How far a run is: all that the loop itself must remember, besides weights and optimizer states.

The learning rate and every random draw are functions of the step, and so is the data position but for what rollbacks passed
over; so a few counters are enough.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from parallax.errors import ConfigError


@dataclass
class TrainState:
    """Counters of a run; they grow as it goes on and are saved with each checkpoint."""

    step: int = 0  # steps done
    tokens: int = 0  # targets trained on so far
    skipped: int = 0  # steps, of those done, that did not change the weights
    data_shift: int = 0  # steps' worth of data that rollbacks have passed over
    mean_loss: float = 0.0  # running mean of the losses, by which a spike is told; 0: none yet

    @property
    def data_step(self) -> int:
        """The next step's place in the data order, in steps."""
        return self.step + self.data_shift

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> TrainState:
        """Return the state that `to_dict` gave; raises ConfigError if it cannot be that of a run."""
        for field in fields(cls):
            value: Any = stored.get(field.name) if isinstance(stored, dict) else None
            kinds = (int, float) if field.type == "float" else (int,)
            if type(value) not in kinds or not 0 <= value < 2**63 or not math.isfinite(value):
                raise ConfigError(f"the saved counter {field.name} is {value}, which no run counts")
        return cls(**{field.name: stored[field.name] for field in fields(cls)})
