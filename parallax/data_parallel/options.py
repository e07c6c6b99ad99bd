"""The optimizer's options, and a check of them that takes milliseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from parallax.flags import named

ZERO_STAGES = (0, 1, 2, 3)
_MOMENTUM = {"sgd": 0.9, "muon": 0.95}
_OF_ADAMW = ("beta1", "beta2", "eps")  # muon has them too, for what it leaves to adamw
_SMALLEST_EPS = 2.0**-126  # a smaller one is 0 or nearly so in fp32, in which updates are computed

# In bf16 a change of less than 1/512 is rounded away. A second moment v falls by (1 - beta2) v at most, so at 0.999 it never
# falls, and every spike of a gradient stays in it; at 0.99 it follows.
_LARGEST_BF16_BETA2 = 0.99


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer, the types of its states, and how they are shared among the processes."""

    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """What updates the weights; muon the matrices between hidden states, and adamw what it leaves."""

    zero: Annotated[int, named("zero", "use-distributed-optimizer", metavar="|".join(map(str, ZERO_STAGES)))] = 1
    """ZeRO stage: 0 keeps everything on every process that holds a copy; 1 shards the optimizer states over these, 2 the
    gradients too, 3 also the weights, which are gathered layer by layer for each use."""

    zero_group: Annotated[int | None, named("zero-group", metavar="INT", default="all of dp")] = None
    """Shard over so many neighbouring data-parallel ranks, as a node has, and replicate beyond: less to send between nodes."""

    overlap_param_gather: Literal["on", "off"] = "on"
    """With ZeRO 1 and 2, let the next step's forward wait for updated weights, each layer for its own, instead of the update."""

    main_grad_dtype: Annotated[Literal["fp32", "bf16"], named("main-grad-dtype", "main-grads-dtype")] = "fp32"
    """Type in which the gradients of a step's micro-batches are summed."""

    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are sent; their sum over the processes is made in fp32 whatever it is."""

    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the running means, or of the momentum, between updates."""

    offload: Literal["none", "optimizer"] = "none"
    """What is kept in the host's memory and comes to the GPU for each update: the optimizer's states and fp32 copies of weights."""

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

    momentum: Annotated[
        float | None, named("momentum", "sgd-momentum", metavar="FLOAT", default="sgd 0.9, muon 0.95")
    ] = None
    """Share of the last update's direction that goes into the next; of sgd and muon."""

    def check(self, dp: int) -> list[str]:
        """Return what is wrong with these options, a sentence each. dp: size of data parallelism."""
        problems = self._check_sharding(dp)
        if self.offload != "none" and self.optimizer == "muon":
            problems.append(
                "--offload optimizer works with --optimizer adamw or sgd; muon needs whole matrices at once"
            )
        for name, value in (("weight-decay", self.weight_decay), ("clip-grad", self.clip_grad)):
            if not 0 <= value < math.inf:
                problems.append(f"--{name} {value} must be 0, which turns it off, or a number above it")
        if not 0 <= used_momentum(self) < 1:
            problems.append(f"--momentum {used_momentum(self)} must be at least 0 and below 1")
        problems += self._check_adamw()
        if self.momentum is not None and self.optimizer not in _MOMENTUM:
            problems.append(
                f"--momentum {self.momentum} has no effect with --optimizer {self.optimizer}, whose mean of gradients has --beta1"
            )
        if self.moment_dtype == "bf16" and self.optimizer != "sgd" and _LARGEST_BF16_BETA2 < self.beta2 < 1:
            problems.append(
                f"--moment-dtype bf16 is too coarse for --beta2 {self.beta2}, whose small changes of the mean would be rounded "
                f"away; use --beta2 {_LARGEST_BF16_BETA2} or less, or --moment-dtype fp32"
            )
        return problems

    def _check_adamw(self) -> list[str]:
        if self.optimizer == "sgd":
            return [
                f"--{name} {getattr(self, name)} has no effect with --optimizer sgd, which divides by no mean of squares and has "
                "--momentum; leave it out"
                for name in _OF_ADAMW
                if getattr(self, name) != getattr(OptimizerOptions, name)
            ]
        problems = [
            f"--{name} {value} must be at least 0 and below 1"
            for name, value in (("beta1", self.beta1), ("beta2", self.beta2))
            if not 0 <= value < 1
        ]
        if not _SMALLEST_EPS <= self.eps < math.inf:
            problems.append(
                f"--eps {self.eps} must be a number of at least {_SMALLEST_EPS:.3g}, the smallest that fp32 has in full precision"
            )
        return problems

    def _check_sharding(self, dp: int) -> list[str]:
        problems = []
        if self.zero not in ZERO_STAGES:
            problems.append(f"--zero {self.zero} is unknown; use {_alternatives(ZERO_STAGES)}")
        if self.zero_group is None:
            return problems
        if self.zero == 0:
            problems.append(f"--zero-group {self.zero_group} has no effect with --zero 0; use --zero 1 or more")
        legal = [size for size in range(2, dp + 1) if dp % size == 0]
        if self.zero_group not in legal:
            use = f"use {_alternatives(legal)}" if legal else "leave it out"
            problems.append(f"--zero-group {self.zero_group} must be at least 2 and divide dp, which is {dp}; {use}")
        return problems


def used_momentum(options: OptimizerOptions) -> float:
    """Return --momentum, or what it is if not given."""
    return _MOMENTUM.get(options.optimizer, 0.0) if options.momentum is None else options.momentum


def num_moments(options: OptimizerOptions) -> dict[str, int]:
    """Return how many states each rule keeps of an element, beside its main parameter."""
    return {"adamw": 2, "sgd": 1 if used_momentum(options) else 0, "muon": 1}


def _alternatives(values: Sequence[int]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
