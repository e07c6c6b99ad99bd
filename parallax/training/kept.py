"""What a forward keeps on a rank, in the parts in which it comes and a backward lets it go, and how much a pair has at most.

The two of a pair take turns where tensor parallelism cuts their stages (parallax.models.blocks, parallax.pipeline.segments):
while the forward's activations come, the backward's go. Bytes are those of parallax.training.memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from parallax.training.memory import Shapes, layer_activation_bytes, logits_bytes


@dataclass(frozen=True)
class Part:
    """A part of a stage. bytes: kept. turn_after: whether its forward then waits; turn_before: whether its backward waits first."""

    bytes: int
    turn_after: bool = False
    turn_before: bool = False


def stage_parts(shapes: Shapes, num_layers: int, padded_vocab_size: int | None) -> list[Part]:
    """Return what a stage keeps of a micro-batch, in the order of its forward; padded_vocab_size: of the last stage."""
    parts = _layer_parts(shapes) * num_layers
    if padded_vocab_size is not None:
        # The final norm keeps its input; what is gathered, and the logits, come after it.
        logits = logits_bytes(shapes, padded_vocab_size)
        parts += [_into(shapes, shapes.hidden_bytes), Part(logits - shapes.hidden_bytes)]
    return parts


def _layer_parts(shapes: Shapes) -> list[Part]:
    """Norm, attention, norm, MLP."""
    whole = layer_activation_bytes(shapes)
    if shapes.tp == 1 or shapes.recompute == "full":
        return [Part(whole)]
    norm = shapes.hidden_bytes
    config = shapes.config
    features = (3 if config.activation == "swiglu" else 2) * config.intermediate_size // shapes.tp
    mlp = shapes.element * shapes.num_tokens * features + shapes.hidden_bytes
    return [
        _into(shapes, norm),
        _out_of(shapes, whole - mlp - 2 * norm),
        _into(shapes, norm),
        _out_of(shapes, mlp),
    ]


def _into(shapes: Shapes, kept: int) -> Part:
    """Return what comes before column-parallel weights, see parallax.tensor_parallel.segments."""
    return Part(kept, turn_after=shapes.sp and shapes.tp > 1, turn_before=shapes.tp > 1)


def _out_of(shapes: Shapes, kept: int) -> Part:
    return Part(kept, turn_after=True, turn_before=shapes.sp)


def most_in_pair(forward: Sequence[Part], backward: Sequence[Part]) -> int:
    """Return by how much more a pair holds at most than what was held before it, the backward's activations among it."""
    came = accumulate(_turns((part.bytes, part.turn_after) for part in forward))
    gone = [0, *accumulate(_turns(((part.bytes, part.turn_before) for part in reversed(backward)), before=True))]
    return max(bytes - gone[min(turn, len(gone) - 1)] for turn, bytes in enumerate(came))


def _turns(parts: Iterable[tuple[int, bool]], before: bool = False) -> list[int]:
    """Return the bytes of each turn; a part with a mark ends one, after it or before it."""
    result = [0]
    for size, mark in parts:
        if mark and before:
            result.append(0)
        result[-1] += size
        if mark and not before:
            result.append(0)
    return result
