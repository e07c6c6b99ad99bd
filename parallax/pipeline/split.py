"""Which layers a stage holds: balanced by cost, or as a user's layout string says.

Both return one contiguous `range` of layer numbers per stage, in order, that together hold each layer exactly once.
The embedding belongs to the first stage and the head with the loss to the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate

from parallax.errors import ConfigError

_MAX_PARTS = 100_000  # of a layout string written out: more is a typing error in a repeat count
_ROUNDING = 1 + 1e-12  # costs that differ by less are equal: sums of floats round

_Cost = Callable[[int, int, int], float]  # of a stage that holds the layers first .. end - 1: (stage, first, end)


def balance(layer_costs: Sequence[float], first_extra: float, last_extra: float, num_stages: int) -> list[range]:
    """Split the layers so that the most costly stage costs as little as possible, exactly.

    layer_costs: of each layer, in any unit; first_extra, last_extra: of the embedding and of head and loss, in the same.
    Among equal splits the one whose costs differ least (smallest sum of squares) is taken, then the one with fewer
    layers in early stages, which hold the most activations. Every stage gets at least one layer; raises ConfigError if
    there are too few.
    """
    num_layers = len(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"{num_layers} layers (--layers) cannot be split over {num_stages} pipeline stages (--pp times the stages on "
            f"each rank), since each needs at least one layer; use 1 to {num_layers} stages"
        )
    assert min(layer_costs) >= 0, "a layer with a negative cost"
    sums = [0.0, *accumulate(layer_costs)]

    def cost(stage: int, first: int, end: int) -> float:
        extra = (first_extra if stage == 0 else 0.0) + (last_extra if stage == num_stages - 1 else 0.0)
        return sums[end] - sums[first] + extra

    bounds = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    even = max(cost(stage, bounds[stage], bounds[stage + 1]) for stage in range(num_stages))
    smallest, _ = _plan(cost, num_layers, num_stages, max, even)
    _, ends = _plan(cost, num_layers, num_stages, lambda mine, rest: mine * mine + rest, smallest)
    return [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]


def _plan(
    cost: _Cost, num_layers: int, num_stages: int, combine: Callable[[float, float], float], limit: float
) -> tuple[float, list[int]]:
    """Return the least combined cost in which no stage is above `limit`, and where each stage then ends.

    By dynamic programming from the last stage: `rest[first]` is the best for the stages from this one on if they hold
    the layers from `first` on.
    """
    rest = {num_layers: 0.0}
    choices: list[dict[int, int]] = []
    for stage in reversed(range(num_stages)):
        best: dict[int, float] = {}
        choice: dict[int, int] = {}
        for first in range(num_layers):
            for end in range(first + 1, num_layers + 1):
                mine = cost(stage, first, end)
                if mine > limit * _ROUNDING:
                    break
                value = combine(mine, rest[end]) if end in rest else None
                if value is not None and (first not in best or value * _ROUNDING < best[first]):
                    best[first], choice[first] = value, end
        rest = best
        choices.append(choice)
    ends, first = [], 0
    for choice in reversed(choices):
        first = choice[first]
        ends.append(first)
    return rest[0], ends


def parse_layout(text: str, num_layers: int, num_stages: int, num_ranks: int | None = None) -> list[range]:
    """Read Megatron's layout string (--pipeline-layout), such as `Et*3|t*3|(t|)*2t*2L` or `E|t*6|L`.

    It describes every stage, or, where a rank has several, `num_ranks` parts, each of which is then cut evenly.

    E is the embedding, t a decoder layer, L the head with the loss; `|` goes to the next stage; `x*3` and `(...)*3`
    repeat one letter or a group; commas and spaces mean nothing. A stage may hold no decoder layer if it holds E or L.
    Raises ConfigError.
    """

    def wrong(problem: str) -> ConfigError:
        return ConfigError(f"--pipeline-layout {text!r}: {problem}")

    stages = _write_out(text, wrong).split("|")
    flat = "".join(stages)
    num_ranks = num_ranks or num_stages
    if len(stages) not in (num_stages, num_ranks):
        asked = f"{num_stages} are asked for (--pp)"
        if num_ranks != num_stages:
            asked = f"the schedule has {num_stages} on {num_ranks} ranks (--pp); describe {num_stages}, or {num_ranks} parts"
        raise wrong(f"it describes {len(stages)} stages and {asked}; put {num_stages - 1} '|' in it")
    if flat.count("E") != 1 or flat[0] != "E":
        raise wrong("it must begin with E, the embedding, and have it only there")
    if flat.count("L") != 1 or flat[-1] != "L":
        raise wrong("it must end with L, the head with the loss, and have it only there")
    if flat.count("t") != num_layers:
        raise wrong(f"it places {flat.count('t')} decoder layers (t) and the model has {num_layers} (--layers)")
    if "" in stages:
        raise wrong(f"stage {stages.index('')} is empty; a stage needs a layer (t), or E or L in place of one")
    cuts = num_stages // len(stages)
    counts = [stage.count("t") for stage in stages]
    if cuts > 1 and min(counts) < cuts:
        raise wrong(f"each of its {num_ranks} parts is cut into {cuts} stages, so it needs {cuts} layers (t) or more")
    # Earlier stages get what is left over: the last one has the head.
    ends = list(accumulate(count // cuts + (cut < count % cuts) for count in counts for cut in range(cuts)))
    return [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]


def count_layers(text: str) -> int | None:
    """Return how many decoder layers a layout string places; None if it cannot be read."""
    try:
        return _write_out(text, ConfigError).count("t")
    except ConfigError:
        return None


def _write_out(text: str, wrong: Callable[[str], ConfigError]) -> str:
    """Return the layout without repeats: only the characters E, t, L and |."""
    groups = [""]  # the text of each open parenthesis, outermost first
    previous = ""
    for part in re.findall(r"\)?\*\d+|.", re.sub(r"[,\s]", "", text)):
        if part == "(":
            groups.append("")
        elif part.startswith(")"):
            if len(groups) == 1:
                raise wrong("a ')' has no '('")
            inner = groups.pop()
            groups[-1] += _repeat(inner, part[2:] or "1", wrong)
        elif part.startswith("*") and len(part) > 1:
            if not previous or previous not in "EtL|":
                raise wrong(f"{part} must follow a letter or a group")
            groups[-1] = groups[-1][:-1] + _repeat(previous, part[1:], wrong)
        elif part in "EtL|":
            groups[-1] += part
        elif part == "m":
            raise wrong("m, a layer that predicts several tokens, is not supported; use E, t and L")
        else:
            raise wrong(f"{part!r} is not known; use E, t, L, | and repeats such as t*3 or (t|)*3")
        previous = part
    if len(groups) > 1:
        raise wrong("a '(' has no ')'")
    return groups[0]


def _repeat(text: str, count: str, wrong: Callable[[str], ConfigError]) -> str:
    if len(count) > 6 or len(text) * int(count) > _MAX_PARTS:
        raise wrong(f"a repeat of {count} is too much")
    return text * int(count)
