"""The optimizer's options, and a check of them that takes milliseconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from parallax.flags import named

ZERO_STAGES = (0, 1, 2)


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW, and how its states are shared among the processes."""

    zero: Annotated[int, named("zero", "use-distributed-optimizer", metavar="|".join(map(str, ZERO_STAGES)))] = 1
    """ZeRO stage: 0 keeps everything on every process that holds a copy; 1 shards the optimizer states over these, 2 the
    gradients too."""

    zero_group: Annotated[int | None, named("zero-group", metavar="INT", default="all of dp")] = None
    """Shard over so many neighbouring data-parallel ranks, as a node has, and replicate beyond: less to send between nodes."""

    weight_decay: float = 0.1
    """Share of a matrix, times the learning rate, that each step takes away; norms and biases do not decay."""

    clip_grad: float = 1.0
    """Gradients are scaled down to this global norm; 0 turns it off."""

    beta1: Annotated[float, named("beta1", "adam-beta1")] = 0.9
    """Decay rate of the running mean of the gradient."""

    beta2: Annotated[float, named("beta2", "adam-beta2")] = 0.95
    """Decay rate of the running mean of its square."""

    eps: Annotated[float, named("eps", "adam-eps")] = 1e-8
    """Added to the root of that mean, against division by zero."""

    def check(self) -> list[str]:
        """Return what is wrong with these options, a sentence each."""
        problems = []
        if self.zero not in ZERO_STAGES:
            problems.append(
                f"--zero {self.zero} is unknown; use {', '.join(map(str, ZERO_STAGES[:-1]))} or {ZERO_STAGES[-1]}"
            )
        for name, value in (("weight-decay", self.weight_decay), ("clip-grad", self.clip_grad)):
            if not 0 <= value < math.inf:
                problems.append(f"--{name} {value} must be 0, which turns it off, or a number above it")
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= value < 1:
                problems.append(f"--{name} {value} must be at least 0 and below 1")
        if not 0 < self.eps < math.inf:
            problems.append(f"--eps {self.eps} must be a number above 0")
        return problems
