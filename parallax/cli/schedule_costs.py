"""`--cost F=1,I=1,W=1,comm=0.1` and `--memory activations=1e9` of `parallax schedule`: text to `Costs` and `Memory`."""

from __future__ import annotations

import argparse
import math
from typing import Any

from parallax.errors import ConfigError
from parallax.pipeline.costs import Costs, Memory, PerStage
from parallax.pipeline.trace import read_trace

_COSTS = {
    "F": "forward",
    "I": "input_gradient",
    "W": "weight_gradient",
    "FB": "pair",
    "comm": "latency",
    "bytes": "message_bytes",
    "bandwidth": "bandwidth",
}
_MEMORY = {"activations": "activations", "kept": "kept_for_weights", "stage": "stage"}
_OF_MESSAGES = ("comm", "bytes", "bandwidth")
_LEAST, _MOST = 1e-30, 1e30  # sums and quotients of what lies between are finite

COST_HELP = (
    "durations, all in one unit: F forward, I backward of the input, W backward of the weights (a whole backward is I + W), FB "
    "a forward and a backward together (F + I + W unless given), comm a message; 1,1,1 and comm=0 if not given. "
    "bytes=... and bandwidth=... (bytes a unit of time): what a message occupies its link. F, I, W and FB may differ by "
    "stage: F=1:1:2. Or FILE.json, a recorded step, whose times on the average rank are taken and divided among its stages"
)
MEMORY_HELP = (
    "bytes: activations of one micro-batch in one stage, kept of these from I to W, stage for its weights, gradients and "
    "optimizer state; what a rank holds at most is then printed too"
)


class RecordedCosts(Costs):
    """Of a rank's whole share of the model, from a recorded step; where a schedule cuts that into stages, they are divided."""


def costs(text: str) -> Costs:
    """Return the costs that are written out, or `RecordedCosts` of a file; raises argparse.ArgumentTypeError."""
    if text.endswith(".json"):
        try:
            return RecordedCosts(**vars(read_trace(text).share_costs()))
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    found = _numbers(text, _COSTS, "cost")
    given = Costs(**{_COSTS[name]: value for name, value in found.items()})
    if given.bandwidth <= 0:
        raise argparse.ArgumentTypeError("bandwidth=0 lets no message through; leave it out for no limit")
    if ("bytes" in found) != ("bandwidth" in found):
        raise argparse.ArgumentTypeError("bytes and bandwidth of a message are given together")
    lengths = {len(value) for value in found.values() if isinstance(value, tuple)}
    if len(lengths) > 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} gives numbers for {' and for '.join(map(str, sorted(lengths)))} stages"
        )
    if isinstance(given.pair, float) and lengths:
        raise argparse.ArgumentTypeError("FB needs a number for each stage where F, I or W has; write FB=3:3:5")
    for stage in range(max(lengths, default=1)):
        _check_stage(given, stage, " of stage {stage}" if lengths else "")
    return given


def memory(text: str) -> Memory:
    """Return the bytes; raises argparse.ArgumentTypeError."""
    found = _numbers(text, _MEMORY, "number of bytes")
    if "activations" not in found:
        raise argparse.ArgumentTypeError("activations=... is needed, the bytes of one micro-batch in one stage")
    return Memory(**{_MEMORY[name]: value for name, value in found.items()})


def _numbers(text: str, names: dict[str, str], what: str) -> dict[str, Any]:
    found: dict[str, PerStage] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            numbers = tuple(float(number) for number in value.split(":"))
        except ValueError:
            numbers = (math.nan,)
        if name not in names or not all(0 <= number < math.inf for number in numbers):
            raise argparse.ArgumentTypeError(f"{part!r} is no {what}; write {', '.join(f'{key}=1' for key in names)}")
        if any(number and not _LEAST <= number <= _MOST for number in numbers):
            raise argparse.ArgumentTypeError(f"{part!r} must be 0 or from {_LEAST:g} to {_MOST:g}; use another unit")
        if name in found:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        if len(numbers) > 1 and name in _OF_MESSAGES:
            raise argparse.ArgumentTypeError(f"{part!r}: {name} is one number, the same on all links")
        found[name] = numbers if len(numbers) > 1 else numbers[0]
    return found


def _check_stage(given: Costs, stage: int, of_stage: str) -> None:
    def number(value: PerStage) -> float:
        return value[stage] if isinstance(value, tuple) else value

    forward, backward = number(given.forward), number(given.input_gradient) + number(given.weight_gradient)
    if forward + backward <= 0:
        raise argparse.ArgumentTypeError(f"F, I and W{of_stage.format(stage=stage)} cannot all be 0")
    if given.pair is not None and not max(forward, backward) <= number(given.pair) <= forward + backward:
        raise argparse.ArgumentTypeError(
            f"FB={number(given.pair):g}{of_stage.format(stage=stage)} must be from {max(forward, backward):g}, the longer "
            f"of its two, to {forward + backward:g}, one after the other"
        )
