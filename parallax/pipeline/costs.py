"""What a schedule is simulated with: how long actions and messages take, and how many bytes they hold.

Where stages differ, a number is given for each, in a tuple. All are of one stage: of the part of the model that one chunk
holds, not of all that a rank holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from parallax.errors import ConfigError
from parallax.pipeline.actions import Entry, Pair

PerStage = float | tuple[float, ...]


def at_stage(value: PerStage, stage: int) -> float:
    """Return the number of a stage."""
    return value[stage] if isinstance(value, tuple) else value


def split(value: PerStage, parts: float) -> PerStage:
    """Return the number of one of `parts` equal parts."""
    return tuple(each / parts for each in value) if isinstance(value, tuple) else value / parts


@dataclass(frozen=True)
class Costs:
    """Durations in one unit, of one micro-batch in one stage: F, I and W, with B = I + W; of a pair, and of messages.

    pair: of a forward and a backward of this stage done together, FB; F + B, nothing gained, unless given.
    latency: from the moment a message has left to the moment its content can be used on the other rank.
    message_bytes: size of a message, an activation or the gradient of one.
    bandwidth: bytes that leave over a link in a unit of time. A link is one direction between two ranks: messages leave it
        one after the other, and those of other links do not delay them.
    """

    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    latency: float = 0.0
    pair: PerStage | None = None
    message_bytes: float = 0.0
    bandwidth: float = math.inf

    @property
    def transfer(self) -> float:
        """How long a message occupies its link."""
        return self.message_bytes / self.bandwidth

    def of(self, entry: Entry) -> float:
        """Return the duration of an action, or of a pair; one of unequal stages gains what the stage that gains less does."""
        if isinstance(entry, Pair):
            apart = sum(self._of(action.kind, action.stage) for action in entry.parts)
            return apart - min(self._gain(action.stage) for action in entry.parts)
        return self._of(entry.kind, entry.stage)

    def split(self, parts: float) -> Costs:
        """Return the costs where each stage is cut into `parts` equal ones; a message is as large as before."""
        return replace(
            self,
            forward=split(self.forward, parts),
            input_gradient=split(self.input_gradient, parts),
            weight_gradient=split(self.weight_gradient, parts),
            pair=None if self.pair is None else split(self.pair, parts),
        )

    def check(self, num_stages: int) -> None:
        """Raise ConfigError if numbers are given for another number of stages."""
        given = {"F": self.forward, "I": self.input_gradient, "W": self.weight_gradient, "FB": self.pair}
        for name, value in given.items():
            check_stages(name, value, num_stages)

    def _of(self, kind: str, stage: int) -> float:
        if kind == "F":
            return at_stage(self.forward, stage)
        input_gradient, weight_gradient = at_stage(self.input_gradient, stage), at_stage(self.weight_gradient, stage)
        return {"I": input_gradient, "W": weight_gradient, "B": input_gradient + weight_gradient}[kind]

    def _gain(self, stage: int) -> float:
        if self.pair is None:
            return 0.0
        return self._of("F", stage) + self._of("B", stage) - at_stage(self.pair, stage)


@dataclass(frozen=True)
class Memory:
    """Bytes of one stage.

    activations: of one micro-batch, from the beginning of its F to the end of its B or I.
    kept_for_weights: what of these a W still needs, held from the end of I to the end of W.
    stage: of the stage itself, held all the time: weights, gradients, optimizer state.
    """

    activations: PerStage
    kept_for_weights: PerStage = 0.0
    stage: PerStage = 0.0

    def split(self, parts: float) -> Memory:
        """Return the bytes where each stage is cut into `parts` equal ones."""
        return Memory(*(split(value, parts) for value in (self.activations, self.kept_for_weights, self.stage)))

    def check(self, num_stages: int) -> None:
        """Raise ConfigError if numbers are given for another number of stages."""
        for name in ("activations", "kept_for_weights", "stage"):
            check_stages(name, getattr(self, name), num_stages)


def check_stages(name: str, value: PerStage | None, num_stages: int) -> None:
    """Raise ConfigError if there is a number for each stage, and another number of stages."""
    if isinstance(value, tuple) and len(value) != num_stages:
        raise ConfigError(
            f"{name} is given for {len(value)} stages and there are {num_stages}; give one number, or one for each"
        )
